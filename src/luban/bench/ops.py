"""Memory-bound operators beside eager and, where asked, Inductor in one process: speed, and share of the bandwidth.

The bandwidth is that of a loop that reads and writes as many bytes as the operator must, on memory as large, in the same
round. What peers lose by fresh memory for every result (page faults) counts as theirs.
"""

from __future__ import annotations

import argparse
import shutil
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from luban.bench.beside import Work, add_rounds, compare, rounds_of
from luban.bench.common import DTYPES, Progress, comma_list, geomean, least, machine, number, one_of
from luban.bench.gradients import errors, forward, leaves, wide, with_backward
from luban.bench.op_cases import CASES, Case, make
from luban.bench.roofline import check_path, with_picture
from luban.errors import ConfigError, LubanError

PASSES = ("forward", "backward")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured, how often, and beside whom."""
    parser.add_argument("--ops", type=comma_list, metavar="LIST", help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--dtypes", type=comma_list, metavar="LIST", help=f"some of {','.join(DTYPES)} (default: both)")
    parser.add_argument("--passes", type=comma_list, metavar="LIST", help=f"some of {','.join(PASSES)} (default: both)")
    parser.add_argument("--inductor", action="store_true", help="beside torch.compile's Inductor too (needs g++)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")
    add_rounds(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """One row an operator, dtype and pass. `progress(total)` gives a Progress."""
    names, dtypes, passes = args.ops or list(CASES), args.dtypes or list(DTYPES), args.passes or list(PASSES)
    one_of("operator", names, list(CASES))
    one_of("dtype", dtypes, DTYPES)
    one_of("pass", passes, PASSES)
    if args.inductor and not shutil.which("g++"):
        raise ConfigError(
            "Inductor needs g++, which is not installed; run `apt-get install g++`, or leave --inductor out"
        )
    check_path(args.svg)
    import torch

    from luban.bench.peaks import Loops

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    loops, done = Loops(), 0
    shown: Progress = progress(len(names) * len(dtypes))
    for dtype in dtypes:
        for name in names:
            shown.update(done, f"{dtype} {name}")
            rows += _rows(loops, make(name, dtype, args.quick), dtype, passes, args.inductor, rounds_of(args))
            done += 1
    shown.update(done)
    extra = {"threads": loops.threads, "rounds": rounds_of(args)}
    return with_picture(
        args, loops, {"bench": "ops", "machine": machine(), **extra, "rows": rows, "summary": summary(rows)}
    )


def _rows(
    loops: Any, case: Case, dtype: str, passes: Sequence[str], inductor: bool, rounds: int
) -> Iterator[dict[str, Any]]:
    peers = _peers(case, inductor)
    for which in passes:
        if which == "forward" or case.differentiable:
            row = {"case": case.name, "dtype": dtype, "pass": which}
            try:
                yield {**row, **_measured(loops, case, peers, which, rounds)}
            except LubanError as error:
                yield {**row, "failed": str(error)}


def _peers(case: Case, inductor: bool) -> dict[str, Callable]:
    import torch

    import luban

    torch._dynamo.reset()
    peers = {"luban": luban.compile(case.function, fallback="error"), "torch": case.eager or case.function}
    return {**peers, "inductor": torch.compile(_copy(case.function))} if inductor else peers


def _copy(function: Callable) -> Callable:
    """The same with a code object of its own: Dynamo keeps compiled code there, and looks through all of it at each call."""
    f: Any = function
    code = f.__code__.replace(co_name=f"{f.__name__}_again")
    return types.FunctionType(code, f.__globals__, code.co_name, f.__defaults__, f.__closure__)


def _measured(loops: Any, case: Case, peers: dict[str, Callable], which: str, rounds: int) -> dict[str, Any]:
    import luban

    with luban.report() as report:
        ours = _call(peers["luban"], case, leaves(case.inputs), which)()
    theirs = _call(peers["torch"], case, leaves(case.inputs), which)()
    row: dict[str, Any] = {}
    if not case.random:
        row["error"], row["torch_error"] = errors(ours, theirs, _call(case.function, case, wide(case.inputs), which)())
    reads, writes = case.traffic(ours[:1], which == "backward")
    calls = {name: _call(function, case, leaves(case.inputs), which) for name, function in peers.items()}
    return {**row, **compare(loops, calls, Work(sum(k.flops for k in report.kernels), reads, writes), rounds)}


def _call(function: Callable, case: Case, inputs: Sequence[Any], which: str) -> Callable[[], tuple[Any, ...]]:
    """A call that gives outputs, and gradients for the same random gradient of the output every time."""
    import torch

    plain = forward(function, inputs)

    def listed() -> tuple[Any, ...]:
        out = plain()
        return out if isinstance(out, tuple) else (out,)

    if which == "forward":
        return listed
    with torch.no_grad():
        out = case.function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return with_backward(function, inputs, weights.to(out.dtype))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per dtype and pass: means over each peer, and the shares of the bandwidth."""
    found: dict[str, Any] = {}
    for dtype, which in dict.fromkeys((r["dtype"], r["pass"]) for r in rows):
        good = [r for r in rows if (r["dtype"], r["pass"]) == (dtype, which) and "share" in r]
        name = f"{which}_{dtype}"
        for peer in ("torch", "inductor"):
            ratios = [r.get(f"over_{peer}") for r in good]
            found[f"geomean_over_{peer}_{name}"], found[f"min_over_{peer}_{name}"] = geomean(ratios), least(ratios)
        found[f"geomean_share_{name}"] = geomean(r["share"] for r in good)
    return found


def table(result: dict[str, Any]) -> list[list[str]]:
    """A heading, then one line a row."""
    peers = [p for p in ("torch", "inductor") if any(p in r.get("ms", {}) for r in result["rows"])]
    heading = ["dtype", "operator", "pass", "luban ms", *(f"{p} ms" for p in peers), *(f"over {p}" for p in peers)]
    lines = [[*heading, "GB/s", "bandwidth", "share", "error", "torch's"]]
    for row in result["rows"]:
        ms = row.get("ms", {})
        cells = [row["dtype"], row["case"], row["pass"], *(number(ms.get(p), 3) for p in ("luban", *peers))]
        cells += [
            *(number(row.get(f"over_{p}"), 2) for p in peers),
            number(row.get("gbs"), 1),
            number(row.get("peak_gbs"), 1),
        ]
        lines.append(
            [*cells, number(row.get("share"), 2), number(row.get("error"), "1e"), number(row.get("torch_error"), "1e")]
        )
    return lines
