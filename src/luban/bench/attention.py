"""Attention beside torch's scaled_dot_product_attention in one process: forward, and forward with backward."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from luban.bench.beside import Work, add_rounds, compare, rounds_of, unit_for
from luban.bench.common import DTYPES, Progress, comma_list, geomean, least, machine, number, one_of, positive
from luban.bench.gradients import errors, forward, leaves, wide, with_backward
from luban.bench.roofline import check_path, with_picture
from luban.errors import ConfigError, LubanError

LENGTHS, QUICK_LENGTHS = (256, 1024, 2048), (64,)
MASKS = ("causal", "full", "mask")
PASSES = ("forward", "backward")
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # the backward makes the scores again, then four gradients


@dataclass(frozen=True)
class Problem:
    """q, k and v of (batch, heads, length, size); k and v of `kv_heads`; `mask` is one of MASKS."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    dtype: str
    mask: str

    @property
    def name(self) -> str:
        """As people write it."""
        shared = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"{self.batch}x{self.heads}{shared} T={self.length} d={self.size} {self.mask}"


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured, how often, and how."""
    parser.add_argument(
        "--lengths", type=_numbers, metavar="LIST", help=f"of the sequences (default: {','.join(map(str, LENGTHS))})"
    )
    parser.add_argument("--batch", type=positive, default=2, metavar="N", help="sequences (default: 2)")
    parser.add_argument("--heads", type=positive, default=6, metavar="N", help="query heads (default: 6)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="key and value heads (default: as many)")
    parser.add_argument("--head-size", type=positive, default=64, metavar="N", help="values a head (default: 64)")
    parser.add_argument("--dtypes", type=comma_list, metavar="LIST", help=f"some of {','.join(DTYPES)} (default: both)")
    parser.add_argument("--masks", type=comma_list, metavar="LIST", help=f"some of {','.join(MASKS)} (default: causal)")
    parser.add_argument("--passes", type=comma_list, metavar="LIST", help=f"some of {','.join(PASSES)} (default: both)")
    parser.add_argument("--quick", action="store_true", help="short sequences and few rounds, to see that it works")
    add_rounds(parser)


def _numbers(text: str) -> list[int]:
    return [positive(item) for item in comma_list(text)]


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """One row a problem and pass. `progress(total)` gives a Progress."""
    problems, passes = list(chosen(args)), args.passes or list(PASSES)
    one_of("pass", passes, PASSES)
    check_path(args.svg)
    import torch

    from luban.bench.peaks import Loops

    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    loops = Loops()
    shown: Progress = progress(len(problems))
    for done, problem in enumerate(problems):
        shown.update(done, f"{problem.dtype} {problem.name}")
        rows += _rows(loops, problem, passes, rounds_of(args))
    shown.update(len(problems))
    extra = {"threads": loops.threads, "rounds": rounds_of(args)}
    return with_picture(
        args, loops, {"bench": "attention", "machine": machine(), **extra, "rows": rows, "summary": summary(rows)}
    )


def chosen(args: argparse.Namespace) -> Iterator[Problem]:
    """The problems of a command line. Raises ConfigError for what cannot be."""
    dtypes, masks = args.dtypes or list(DTYPES), args.masks or list(MASKS[:1])
    one_of("dtype", dtypes, DTYPES)
    one_of("mask", masks, MASKS)
    kv = args.kv_heads or args.heads
    if args.heads % kv:
        raise ConfigError(
            f"{args.heads} query heads cannot share {kv} key and value heads; choose a divisor for --kv-heads"
        )
    for dtype in dtypes:
        for mask in masks:
            for length in args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS):
                yield Problem(args.batch, args.heads, kv, length, args.head_size, dtype, mask)


def _rows(loops: Any, problem: Problem, passes: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    import torch

    import luban

    torch._dynamo.reset()
    theirs, inputs = _function(problem), _operands(problem)
    facts = {"case": problem.name, "dtype": problem.dtype, "length": problem.length, "mask": problem.mask}
    peers = {"luban": luban.compile(theirs, fallback="error"), "torch": theirs}
    held = {name: leaves(inputs) for name in peers}
    weights = torch.randn_like(inputs[0])
    for which in passes:
        calls: dict[str, Callable] = {}
        for name, function in (*peers.items(), ("reference", theirs)):
            given = held.get(name) or wide(inputs)
            calls[name] = forward(function, given) if which == "forward" else _gradients(function, given, weights)
        row: dict[str, Any] = {**facts, "pass": which}
        try:
            found = [_listed(calls[name]()) for name in ("luban", "torch", "reference")]
        except LubanError as error:
            yield {**row, "failed": str(error)}
            continue
        row["error"], row["torch_error"] = errors(*found)
        del found
        yield {**row, **compare(loops, {n: calls[n] for n in peers}, work_of(loops.target, problem, which), rounds)}


def _gradients(function: Callable, inputs: Sequence[Any], weights: Any) -> Callable:
    """Forward with backward; a mask wants no gradient."""
    for mask in inputs[3:]:
        mask.requires_grad_(False)
    return with_backward(function, inputs, weights.to(inputs[0].dtype))


def _listed(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _function(problem: Problem) -> Callable:
    import torch.nn.functional as F

    causal, shared = problem.mask == "causal", problem.kv_heads != problem.heads

    def attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)

    return attention


def _operands(problem: Problem) -> list[Any]:
    """q, k and v, and an additive mask where the problem has one."""
    import torch

    p, dtype = problem, getattr(torch, problem.dtype)
    made = [torch.randn(p.batch, heads, p.length, p.size).to(dtype) for heads in (p.heads, p.kv_heads, p.kv_heads)]
    return [*made, torch.randn(p.length, p.length).to(dtype)] if p.mask == "mask" else made


def work_of(target: Any, problem: Problem, which: str) -> Work:
    """Products of the scores that count (half and the diagonal of a causal problem); inputs, output and gradients once each.

    A backward reads the inputs, the output and its gradient and writes three gradients.
    """
    p, item = problem, 4 if problem.dtype == "float32" else 2
    scores = p.length * (p.length + 1) // 2 if p.mask == "causal" else p.length**2
    products = FORWARD_PRODUCTS + (BACKWARD_PRODUCTS if which == "backward" else 0)
    q, kv = (p.batch * heads * p.length * p.size * item for heads in (p.heads, p.kv_heads))
    reads, writes = q + 2 * kv, q
    if p.mask == "mask":
        reads += p.length**2 * item
    if which == "backward":
        reads, writes = 2 * reads + 2 * q, writes + q + 2 * kv
    unit, terms = unit_for(target, p.dtype) or (None, 1)
    return Work(2 * products * p.batch * p.heads * scores * p.size, reads, writes, unit, terms)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per dtype and pass: means over torch and the best share of the peak."""
    found: dict[str, Any] = {}
    for dtype, which in dict.fromkeys((r["dtype"], r["pass"]) for r in rows):
        good = [r for r in rows if (r["dtype"], r["pass"]) == (dtype, which) and "share" in r]
        ratios, name = [r["over_torch"] for r in good], f"{which}_{dtype}"
        found[f"geomean_over_torch_{name}"], found[f"min_over_torch_{name}"] = geomean(ratios), least(ratios)
        found[f"best_share_{name}"] = max((r["share"] for r in good), default=None)
        found[f"worst_error_over_torch_{name}"] = max(
            (r["error"] / max(r["torch_error"], 1e-9) for r in good), default=None
        )
    return found


def table(result: dict[str, Any]) -> list[list[str]]:
    """A heading, then one line a row."""
    lines = [
        [
            "dtype",
            "problem",
            "pass",
            "luban ms",
            "torch ms",
            "over torch",
            "GFLOP/s",
            "peak",
            "share",
            "error",
            "torch's",
        ]
    ]
    for row in result["rows"]:
        ms = row.get("ms", {})
        cells = [row["dtype"], row["case"], row["pass"], number(ms.get("luban"), 2), number(ms.get("torch"), 2)]
        cells += [number(row.get("over_torch"), 2), number(row.get("gflops"), 0), number(row.get("peak_gflops"), 0)]
        cells += [number(row.get("share"), 2), number(row.get("error"), "1e"), number(row.get("torch_error"), "1e")]
        lines.append(cells)
    return lines
