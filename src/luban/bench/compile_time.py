"""The first training step in a fresh process: cold with empty caches, warm with those that the cold one left.

What a backend adds is its first step minus that of "aot_eager", which traces the same graphs and compiles nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from luban.bench.common import Progress, add_choices, chosen, comma_list, geomean, least, machine, one_of, positive
from luban.bench.peers import cache_folders, peer
from luban.errors import LubanError

PEERS = ("luban", "inductor", "aot_eager")
STATES = ("cold", "warm")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is measured and how often."""
    add_choices(parser)
    parser.add_argument("--peers", type=comma_list, metavar="LIST", help=f"some of {','.join(PEERS)} (default: all)")
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="cold and warm starts of every peer")
    parser.add_argument("--whole-step", action="store_true", help="Luban runs through luban.train_step")


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """One row a model and dtype; float32 alone unless dtypes are given. `progress(total)` gives a Progress."""
    args.dtypes = args.dtypes or ["float32"]
    models, dtypes = chosen(args)
    peers = args.peers or list((PEERS[0], PEERS[2]) if args.quick else PEERS)
    one_of("peer", peers, PEERS)
    shown: Progress = progress(len(models) * len(dtypes) * args.rounds * len(peers) * 2)
    rows, done = [], 0
    for name in models:
        for dtype in dtypes:
            asked = {"model": name, "dtype": dtype, "quick": args.quick, "whole_step": args.whole_step}
            found: dict[str, dict[str, list]] = {p: {state: [] for state in STATES} for p in peers}
            row: dict[str, Any] = {"model": name, "dtype": dtype}
            for _ in range(args.rounds):
                for p in peers:
                    _starts({**asked, "peer": p}, found[p], row)
                    done += 2
                    shown.update(done, f"{name} {dtype} {p}")
            rows.append(_compared(row, found))
    return {"bench": "compile", "machine": machine(), "rounds": args.rounds, "rows": rows, "summary": _summary(rows)}


def _starts(asked: dict[str, Any], found: dict[str, list], row: dict[str, Any]) -> None:
    """One cold and one warm start of a peer; what it says about its first steps joins `found`."""
    with tempfile.TemporaryDirectory(prefix="luban-bench-") as folder:
        for state in STATES:
            try:
                with peer(asked, cache_folders(folder)) as worker:
                    found[state].append(worker.wait_for_first())
            except LubanError as error:
                row[asked["peer"]] = {"error": str(error)}
                return


def _compared(row: dict[str, Any], found: dict[str, dict[str, list]]) -> dict[str, Any]:
    for name, states in found.items():
        if name not in row:
            row[name] = {s: _middle(answers) for s, answers in states.items()}
    for state in STATES:
        base = _seconds(row, "aot_eager", state)
        for name in PEERS[:2]:
            seconds = _seconds(row, name, state)
            if seconds is not None and base is not None:
                row[name][state]["added_seconds"] = seconds - base
        ours, theirs = _seconds(row, "luban", state), _seconds(row, "inductor", state)
        if ours and theirs:
            row[f"{state}_over_inductor"] = theirs / ours
    row["backend_over_inductor"] = _backend_ratio(row)
    return row


def _middle(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer with the median time."""
    middle = statistics.median_low(a["first_seconds"] for a in answers)
    return next(a for a in answers if a["first_seconds"] == middle)


def _seconds(row: dict[str, Any], name: str, state: str) -> float | None:
    return row.get(name, {}).get(state, {}).get("first_seconds")


def _backend_ratio(row: dict[str, Any]) -> float | None:
    """Inductor's added time over ours, cold. Ours is what Luban counts itself, or the difference if that is more."""
    theirs = row.get("inductor", {}).get("cold", {}).get("added_seconds")
    ours = row.get("luban", {}).get("cold", {})
    if theirs is None or "backend_seconds" not in ours:
        return None
    return theirs / max(ours["backend_seconds"]["total"], ours.get("added_seconds", 0.0))


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for key in ("cold_over_inductor", "warm_over_inductor", "backend_over_inductor"):
        ratios = [r.get(key) for r in rows]
        summary[f"geomean_{key}"], summary[f"min_{key}"] = geomean(ratios), least(ratios)
    warm = [r["luban"]["warm"]["backend_seconds"]["total"] for r in rows if "warm" in r.get("luban", {})]
    summary["max_warm_backend_seconds"] = max(warm, default=None)
    return summary


def table(result: dict[str, Any]) -> list[list[str]]:
    """A heading, then two lines a row: cold and warm."""
    lines = [
        [
            "model",
            "dtype",
            "start",
            "luban s",
            "of it backend",
            "inductor s",
            "aot_eager s",
            "over inductor",
            "backend over",
        ]
    ]
    for row in result["rows"]:
        for state in STATES:
            times = [_seconds(row, name, state) for name in PEERS]
            backend = row.get("luban", {}).get(state, {}).get("backend_seconds", {}).get("total")
            ratios = [row.get(f"{state}_over_inductor"), row.get("backend_over_inductor") if state == "cold" else None]
            cells = [times[0], backend, times[1], times[2], *ratios]
            lines.append([row["model"], row["dtype"], state, *("-" if c is None else f"{c:.2f}" for c in cells)])
    return lines
