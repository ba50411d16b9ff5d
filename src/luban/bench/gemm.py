"""Matrix products beside torch (MKL, oneDNN) in one process: speed, error against float64, share of the chip's peak.

Luban's product is built by the step-by-step pipeline and called directly, so that no guard of Dynamo is timed; a dtype that
the pipeline does not take goes through `luban.compile`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from luban.bench.beside import Work, add_rounds, compare, relative_error, rounds_of, unit_for
from luban.bench.common import Progress, comma_list, geomean, least, machine, number, one_of
from luban.bench.roofline import check_path, with_picture
from luban.errors import ConfigError, LubanError

SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "squares": tuple((n, n, n) for n in (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)),
    "transformer": (
        (1024, 384, 384), (1024, 1152, 384), (1024, 1536, 384), (1024, 384, 1536), (1024, 8192, 384),
        (4096, 768, 768), (4096, 3072, 768), (384, 1536, 1024),
    ),
    "skinny": ((1, 4096, 4096), (8, 4096, 4096), (32, 4096, 4096), (4096, 64, 64)),
    "odd": ((17, 33, 65), (127, 129, 131), (1000, 1001, 999), (513, 255, 2047)),
}  # fmt: skip
QUICK = {
    "squares": ((64, 64, 64), (256, 256, 256)),
    "transformer": ((128, 384, 128),),
    "skinny": ((1, 512, 512),),
    "odd": ((17, 33, 65),),
}
DTYPES = ("float32", "bfloat16", "float16", "int8")
LAYOUTS = ("nn", "nt", "tn")
PRECISIONS = ("highest", "high", "medium")
HEADING = (
    "dtype", "shape", "luban ms", "torch ms", "over torch", "GFLOP/s", "peak", "GB/s", "bound by", "share", "error", "torch's",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """C (m, n) = A (m, k) @ B (k, n); a "t" in the layout: that operand's columns lie one after the other."""

    group: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.m}x{self.n}x{self.k} {self.layout}"


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured, how often, and how."""
    parser.add_argument(
        "--shapes",
        type=comma_list,
        metavar="LIST",
        help=f"some of {','.join(SHAPES)}, or sizes such as 512x384x64 (m, n, k)",
    )
    parser.add_argument("--dtypes", type=comma_list, metavar="LIST", help=f"some of {','.join(DTYPES)} (default: all)")
    parser.add_argument(
        "--layouts", type=comma_list, metavar="LIST",
        help="some of nn,nt,tn: t for an operand that lies transposed (default: all for transformer shapes, else nn)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="what float32 products may cost in precision"
    )
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to see that it works")
    add_rounds(parser)


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """One row a shape, dtype and layout. `progress(total)` gives a Progress."""
    problems = list(chosen(args))
    check_path(args.svg)
    import torch

    from luban.bench.peaks import Loops

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(args.precision)
    torch.manual_seed(0)
    loops, rows = Loops(), []
    shown: Progress = progress(len(problems))
    try:
        for done, problem in enumerate(problems):
            shown.update(done, f"{problem.dtype} {problem.name}")
            rows.append(_row(loops, problem, args.precision, rounds_of(args)))
    finally:
        torch.set_float32_matmul_precision(before)
    shown.update(len(problems))
    extra = {"threads": loops.threads, "precision": args.precision, "rounds": rounds_of(args)}
    return with_picture(
        args, loops, {"bench": "gemm", "machine": machine(), **extra, "rows": rows, "summary": summary(rows)}
    )


def chosen(args: argparse.Namespace) -> Iterator[Problem]:
    """The problems of a command line. Raises ConfigError for unknown names."""
    groups, dtypes = QUICK if args.quick else SHAPES, args.dtypes or list(DTYPES)
    one_of("dtype", dtypes, DTYPES)
    one_of("layout", args.layouts or [], LAYOUTS)
    sizes = [(name, _sizes(name, groups)) for name in args.shapes or groups]
    for dtype in dtypes:
        for group, shapes in sizes:
            for m, n, k in shapes:
                for layout in args.layouts or (LAYOUTS if group == "transformer" else LAYOUTS[:1]):
                    yield Problem(group, m, n, k, dtype, layout)


def _sizes(name: str, groups: dict[str, tuple[tuple[int, int, int], ...]]) -> tuple[tuple[int, int, int], ...]:
    if name in groups:
        return groups[name]
    parts = name.split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(
            f"there are no shapes {name!r} to measure; choose among {', '.join(groups)}, or write 512x384x64"
        )
    m, n, k = map(int, parts)
    return ((m, n, k),)


def _row(loops: Any, problem: Problem, precision: str, rounds: int) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = {
        "case": problem.name,
        **{f: getattr(problem, f) for f in ("group", "dtype", "layout", "m", "n", "k")},
    }
    a, b = _operands(problem)
    theirs: Callable = torch._int_mm if problem.dtype == "int8" else torch.mm
    try:
        ours = product(a, b)
        out = ours(a, b)
    except LubanError as error:
        return {**row, "failed": str(error)}
    reference = a.double() @ b.double()
    row["error"], row["torch_error"] = relative_error(out, reference), relative_error(theirs(a, b), reference)
    peers = {"luban": lambda: ours(a, b), "torch": lambda: theirs(a, b)}
    return {**row, **compare(loops, peers, work_of(loops.target, problem, precision), rounds)}


def product(a: Any, b: Any) -> Callable:
    """Luban's kernel for A @ B of these operands. Raises LubanError where there is none."""
    import torch

    import luban
    from luban.compiler import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir
    from luban.compiler.matmul import DTYPES as OF_PIPELINE

    if str(a.dtype).removeprefix("torch.") not in OF_PIPELINE:
        return luban.compile(torch._int_mm, fallback="error")
    return compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), target="native"))


def _operands(problem: Problem) -> list[Any]:
    """Random A and B as the layout says; small whole numbers for integers."""
    import torch

    made = []
    for shape, lies in zip(((problem.m, problem.k), (problem.k, problem.n)), problem.layout, strict=True):
        sizes = shape if lies == "n" else shape[::-1]
        whole = problem.dtype == "int8"
        values = torch.randint(-128, 128, sizes) if whole else torch.randn(sizes)
        values = values.to(getattr(torch, problem.dtype))
        made.append(values if lies == "n" else values.t())
    return made


def work_of(target: Any, problem: Problem, precision: str) -> Work:
    """Each operand is read once, the result written once."""
    item = {"float32": 4, "int8": 1}.get(problem.dtype, 2)
    reads = (problem.m * problem.k + problem.k * problem.n) * item
    writes = problem.m * problem.n * (4 if problem.dtype == "int8" else item)
    unit, terms = unit_for(target, problem.dtype, precision) or (None, 1)
    return Work(2 * problem.m * problem.n * problem.k, reads, writes, unit, terms)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per dtype: means over torch, the best shares of what bounds a shape, and the worst error beside torch's."""
    found: dict[str, Any] = {}
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        good = [r for r in rows if r["dtype"] == dtype and "share" in r]
        ratios = [r["over_torch"] for r in good]
        found[f"geomean_over_torch_{dtype}"], found[f"min_over_torch_{dtype}"] = geomean(ratios), least(ratios)
        for bound in ("compute", "memory"):
            found[f"best_{bound}_share_{dtype}"] = max((r["share"] for r in good if r["bound"] == bound), default=None)
        errors = [r["error"] / max(r["torch_error"], 1e-9) for r in good if dtype != "int8"]
        found[f"worst_error_over_torch_{dtype}"] = max(errors, default=None)
    return found


def table(result: dict[str, Any]) -> list[list[str]]:
    """A heading, then one line a row."""
    lines = [list(HEADING)]
    for row in result["rows"]:
        ms = row.get("ms", {})
        cells = [row["dtype"], row["case"], number(ms.get("luban"), 3), number(ms.get("torch"), 3)]
        cells += [number(row.get("over_torch"), 2), number(row.get("gflops"), 0), number(row.get("peak_gflops"), 0)]
        cells += [number(row.get("gbs"), 1), row.get("bound", "-"), number(row.get("share"), 2)]
        lines.append([*cells, number(row.get("error"), "1e"), number(row.get("torch_error"), "1e")])
    return lines
