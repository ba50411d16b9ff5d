"""Training steps of real models: forward, backward and update, Luban beside eager and Inductor, taking turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from luban.bench.common import Progress, add_choices, chosen, comma_list, geomean, least, machine, one_of, positive
from luban.bench.peers import TUNED_MALLOC, Peer, peer
from luban.errors import LubanError

PEERS = ("luban", "eager", "inductor")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured, how often, and how."""
    add_choices(parser)
    parser.add_argument("--peers", type=comma_list, metavar="LIST", help=f"some of {','.join(PEERS)} (default: all)")
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="turns that every peer gets, after one for warming up"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="steps a turn")
    parser.add_argument("--whole-step", action="store_true", help="Luban runs through luban.train_step")
    parser.add_argument("--tuned-malloc", action="store_true", help="the peers keep their memory (glibc tunables)")


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """One row a model and dtype. `progress(total)` gives a Progress."""
    models, dtypes = chosen(args)
    peers = args.peers or list(PEERS[:2] if args.quick else PEERS)
    one_of("peer", peers, PEERS)
    rounds, steps = args.rounds or (1 if args.quick else 5), args.steps or (2 if args.quick else 4)
    shown: Progress = progress(len(models) * len(dtypes) * (rounds + 2))
    rows: list[dict[str, Any]] = []
    for name in models:
        for dtype in dtypes:
            asked = {"model": name, "dtype": dtype, "quick": args.quick, "whole_step": args.whole_step}
            show = partial(_show, shown, len(rows) * (rounds + 2), f"{name} {dtype}")
            rows.append(_row(asked, peers, rounds, steps, args.tuned_malloc, show))
    extra = {"whole_step": args.whole_step, "tuned_malloc": args.tuned_malloc, "rounds": rounds, "steps": steps}
    return {"bench": "models", "machine": machine(), **extra, "rows": rows, "summary": _summary(rows, dtypes, peers)}


def _show(progress: Progress, before: int, what: str, done: int) -> None:
    progress.update(before + done, what)


def _row(
    asked: dict[str, Any], peers: Sequence[str], rounds: int, steps: int, tuned: bool, show: Callable[[int], None]
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": asked["model"], "dtype": asked["dtype"]}
    running: dict[str, Peer] = {}
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name in peers:
            environment = {"GLIBC_TUNABLES": TUNED_MALLOC} if tuned and name != "luban" else {}
            running[name] = stack.enter_context(peer({**asked, "peer": name}, environment))
            _attempt(row, running, name, partial(_begin, row, running[name], name))
        show(1)
        for k in range(rounds + 1):
            for name in list(running):
                kept = times.setdefault(name, []) if k else []  # the first turn warms up
                _attempt(row, running, name, partial(_turn, row[name], running[name], steps, kept))
            show(2 + k)
    for name in running:
        row[name]["step_ms"] = statistics.median(times[name]) * 1e3
    return _compared(row)


def _attempt(row: dict[str, Any], running: dict[str, Peer], name: str, action: Any) -> None:
    """Does something with a peer; one that fails leaves, and the row says why."""
    try:
        action()
    except LubanError as error:
        row[name] = {"error": str(error)}
        running.pop(name).close()


def _begin(row: dict[str, Any], worker: Peer, name: str) -> None:
    row[name] = worker.wait_for_first()


def _turn(found: dict[str, Any], worker: Peer, steps: int, times: list[float]) -> None:
    got = worker.steps(steps)
    times += got["times"]
    found.update(loss_last=got["loss_last"], peak_mib=got["peak_mib"])


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    ours = row.get("luban", {})
    for name in PEERS[1:]:
        theirs = row.get(name, {})
        if "step_ms" in ours and "step_ms" in theirs:
            row[f"over_{name}"] = theirs["step_ms"] / ours["step_ms"]
            row[f"memory_over_{name}"] = theirs["peak_mib"] / ours["peak_mib"]
    if "loss_first" in ours and "loss_first" in row.get("eager", {}):
        row["loss_difference"] = abs(ours["loss_first"] - row["eager"]["loss_first"])
    return row


def _summary(rows: Sequence[dict[str, Any]], dtypes: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for dtype in dtypes:
        for name in PEERS[1:]:
            if name in peers:
                ratios = [r.get(f"over_{name}") for r in rows if r["dtype"] == dtype]
                summary[f"geomean_over_{name}_{dtype}"] = geomean(ratios)
                summary[f"min_over_{name}_{dtype}"] = least(ratios)
    return summary


def table(result: dict[str, Any]) -> list[list[str]]:
    """A heading, then one line a row."""
    heading = ["model", "dtype", *(f"{name} ms" for name in PEERS), *(f"over {name}" for name in PEERS[1:])]
    lines = [[*heading, *(f"{name} MiB" for name in PEERS)]]
    for row in result["rows"]:
        found = [row.get(name, {}) for name in PEERS]
        cells = [row["model"], row["dtype"], *(_number(f.get("step_ms"), 1) for f in found)]
        cells += [_number(row.get(f"over_{name}"), 2) for name in PEERS[1:]]
        lines.append([*cells, *(_number(f.get("peak_mib"), 0) for f in found)])
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
