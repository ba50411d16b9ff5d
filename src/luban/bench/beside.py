"""Kernels, their peers and the loops of the machine's peaks, taking turns: how much of the chip a kernel uses.

What a kernel must do at the least is its `Work`: arithmetic, and bytes read and written once. The loops of `peaks` do that
much arithmetic, and that much reading and writing, in the same round; the slower of the two is what the chip allows for
that work, and a kernel's share is that time over its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from luban.bench.common import TURN_SECONDS, positive
from luban.targets.target import Target

if TYPE_CHECKING:
    from luban.bench.peaks import Loops  # imports the code generator, which --help does without

WARM_UP, MOST_CALLS = 3, 200
ROW_SECONDS, LEAST_ROUNDS = 30.0, 3
LOOP_TRIES = 3  # turns of a peak's loop a round: one that another process held up says nothing of the chip
ROUNDS, QUICK_ROUNDS = 12, 3
SPLIT_TERMS = 3  # bfloat16 products that stand for one of wider floats


@dataclass(frozen=True)
class Work:
    """Operations, bytes read and bytes written; `unit` (name, dtype) does `terms` operations for each, None: no arithmetic."""

    flops: float
    reads: int
    writes: int
    unit: tuple[str, str] | None = None
    terms: int = 1

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / max(1, self.reads + self.writes)


def unit_for(target: Target, dtype: str, precision: str = "highest") -> tuple[tuple[str, str], int] | None:
    """The unit that multiplies a dtype fastest on a chip, and how many of its products stand for one; None for none.

    float16, and float32 of "high" precision, may be three products of bfloat16 and float32 of "medium" precision one.
    """
    names: dict[str, tuple[str, ...]] = {"int8": ("int8", "uint8")}
    offers = [((u.name, u.input), u.rate, 1) for name in names.get(dtype, (dtype,)) for u in target.units(name)]
    split = {("float16", "highest"): SPLIT_TERMS, ("float32", "high"): SPLIT_TERMS, ("float32", "medium"): 1}
    terms = split.get((dtype, "highest" if dtype == "float16" else precision))
    if terms:
        offers += [((u.name, u.input), u.rate / terms, terms) for u in target.units("bfloat16")]
    if dtype in ("float32", "bfloat16", "float16"):
        offers.append((("fma", "float32"), 1.0, 1))  # what is converted in registers
    elif dtype == "float64":
        offers.append((("fma", "float64"), 0.5, 1))
    best = max(offers, key=lambda o: o[1], default=None)
    return None if best is None else (best[0], best[2])


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """--rounds and --svg."""
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help=f"turns that everyone gets (default: {ROUNDS}, {QUICK_ROUNDS} quick)",
    )
    parser.add_argument("--svg", metavar="PATH", help="draw the results as a roofline")


def rounds_of(args: argparse.Namespace) -> int:
    """How many rounds a command line asks for."""
    return args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)


def alternate(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, tries: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of one call, a value a round. A turn makes as many calls as fill a millisecond; who begins moves on.

    `tries` gives some more than one turn a round, of which the best counts. Where a round takes seconds there are fewer of
    them, `LEAST_ROUNDS` at the least.
    """
    turns = tries or {}
    least = {name: _warm(run) for name, run in candidates.items()}
    calls = {name: max(1, min(MOST_CALLS, round(TURN_SECONDS / seconds))) for name, seconds in least.items()}
    names = list(candidates)
    rounds = min(rounds, max(LEAST_ROUNDS, round(ROW_SECONDS / sum(least[n] * calls[n] for n in names))))
    times: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(min(_turn(candidates[name], calls[name]) for _ in range(turns.get(name, 1))))
    return times


def _warm(run: Callable[[], Any]) -> float:
    """Warms up; seconds of the fastest call."""
    took = [_turn(run, 1)]
    while len(took) < WARM_UP and sum(took) < ROW_SECONDS / 10:
        took.append(_turn(run, 1))
    return min(took)


def _turn(run: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def compare(
    loops: Loops, peers: Mapping[str, Callable[[], Any]], work: Work, rounds: int, ours: str = "luban"
) -> dict[str, Any]:
    """What a row says of speed.

    "ms" of each peer, "over_PEER" (the median of a round's ratios), of ours "gflops", "gbs" (bytes of the work), "share" of
    what the chip allows, which is "bound" by "compute" or "memory"; "peak_gflops" and "peak_gbs" as measured beside.
    """
    beside = {}
    if work.unit:
        beside["compute"] = loops.compute(*work.unit)
    if work.reads + work.writes:
        beside["memory"] = loops.traffic(work.reads, work.writes)
    loops_first = {**{n: r.run for n, r in beside.items()}, **peers}
    times = alternate(loops_first, rounds, dict.fromkeys(beside, LOOP_TRIES))
    amounts = {"compute": work.flops * work.terms, "memory": work.reads + work.writes}
    allowed = {n: [amounts[n] * t / r.amount for t in times[n]] for n, r in beside.items()}
    return {**_speeds(times, ours, [*peers]), **_shares(times[ours], allowed, work)}


def _speeds(times: Mapping[str, list[float]], ours: str, peers: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"ms": {name: statistics.median(times[name]) * 1e3 for name in peers}}
    for name in peers:
        if name != ours:
            row[f"over_{name}"] = statistics.median(t / o for t, o in zip(times[name], times[ours], strict=True))
    return row


def _shares(ours: list[float], allowed: Mapping[str, list[float]], work: Work) -> dict[str, Any]:
    """`allowed`: seconds that the loops of a round give the work."""
    middle = {name: statistics.median(seconds) for name, seconds in allowed.items()}
    bound = max(middle, key=lambda name: middle[name])
    share = statistics.median(a / t for a, t in zip(allowed[bound], ours, strict=True))
    took = statistics.median(ours)
    row: dict[str, Any] = {"gflops": work.flops / took / 1e9, "gbs": (work.reads + work.writes) / took / 1e9}
    if work.flops == 0:
        row.pop("gflops")
    row |= {"intensity": work.intensity, "share": share, "bound": bound}
    if "compute" in middle:
        row["peak_gflops"] = work.flops / middle["compute"] / 1e9
    if "memory" in middle:
        row["peak_gbs"] = (work.reads + work.writes) / middle["memory"] / 1e9
    return row


def relative_error(out: Any, reference: Any) -> float:
    """The largest difference over the scale of a float64 reference; infinite where shapes, NaN or infinities differ."""
    import torch

    out, reference = out.detach().double(), reference.detach().double()
    if out.shape != reference.shape:
        return float("inf")
    finite = torch.isfinite(reference) & torch.isfinite(out)
    if not torch.allclose(out[~finite], reference[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = reference[finite].abs().max().clamp_min(1e-300)
    return ((out - reference)[finite].abs().max() / scale).item()
