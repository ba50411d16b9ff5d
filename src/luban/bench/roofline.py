"""The chip's measured peaks, and where kernels stand below them: a table, and a picture with --svg.

Points come from results of other benches (--from FILE.json), or from a small selection measured now.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Iterable
from typing import Any

from luban.bench.common import Progress, comma_list, machine, number
from luban.bench.roofline_svg import Point, Roof, draw
from luban.errors import ConfigError

SELECTION = (
    ("gemm", "--shapes 256x256x256,1024x1024x1024,4096x768x768,1x4096x4096 --layouts nn"),
    ("attention", "--lengths 1024"),
    ("ops", "--ops softmax,layer_norm,gelu_tanh,cross_entropy,adamw --dtypes float32"),
)
QUICK_SELECTION = (
    ("gemm", "--quick --shapes 64x64x64,1x512x512 --dtypes float32 --layouts nn"),
    ("ops", "--quick --ops softmax --dtypes float32 --passes forward"),
)
ROUNDS, QUICK_ROUNDS, QUICK_LARGE = 9, 3, 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the points come from and where the picture goes."""
    parser.add_argument(
        "--from", dest="results", type=comma_list, metavar="FILES", help="results of other benches, kept with --json"
    )
    parser.add_argument("--svg", metavar="PATH", help="where the picture goes (default: it is not drawn)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")


def run(args: argparse.Namespace, progress: Any) -> dict[str, Any]:
    """{"peaks", "rows"}: the table of `peaks.measure`, and the rows of the benches with "bench" added."""
    check_path(args.svg)
    import torch  # noqa: F401  (its OpenMP pool is the one that kernels run on)

    from luban.bench.peaks import Loops

    kept = [_kept(path) for path in args.results or ()]
    chosen = () if kept else QUICK_SELECTION if args.quick else SELECTION
    shown: Progress = progress(1 + len(chosen))
    table = measured(Loops(), args.quick)
    for done, (name, options) in enumerate(chosen):
        shown.update(1 + done, f"{name} {options}")
        kept.append(_measured(name, options))
    shown.update(1 + len(chosen))
    rows = [{"bench": result["bench"], **row} for result in kept for row in result["rows"]]
    result = {"bench": "roofline", "machine": machine(), "peaks": table, "rows": rows, "summary": summary(table)}
    return picture(args.svg, result)


def measured(loops: Any, quick: bool) -> dict[str, Any]:
    """The peaks of this machine, on less memory when `quick`."""
    from luban.bench import peaks

    return peaks.measure(loops, QUICK_ROUNDS, QUICK_LARGE) if quick else peaks.measure(loops, ROUNDS)


def check_path(path: str | None) -> None:
    """Raises ConfigError before anything is measured where a picture could not be written."""
    folder = os.path.dirname(os.path.abspath(path)) if path else os.curdir
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or (path and os.path.isdir(path)):
        raise ConfigError(
            f"the picture cannot be written to {path}; give --svg a file in a folder that you may write to"
        )


def picture(path: str | None, result: dict[str, Any]) -> dict[str, Any]:
    """The result, drawn into a file where there is a path; "svg" names it."""
    if not path:
        return result
    text = draw(_title(result), *roofs(result["peaks"]), points(result["rows"], result["bench"]))
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return {**result, "svg": path}


def with_picture(args: argparse.Namespace, loops: Any, result: dict[str, Any]) -> dict[str, Any]:
    """For a bench's --svg: the machine's peaks, and its rows below them."""
    return picture(args.svg, {**result, "peaks": measured(loops, args.quick)}) if args.svg else result


def roofs(peaks: dict[str, Any]) -> tuple[list[Roof], list[Roof]]:
    """The units, and the levels by the rate of reading."""
    units = [Roof(f"{u['unit']} {u['dtype']}", u["gflops"]) for u in peaks["compute"]]
    return units, [Roof(m["level"], m["gbs"]) for m in peaks["memory"] if m["does"] == "read"]


def points(rows: Iterable[dict[str, Any]], bench: str) -> list[Point]:
    """A point for every row that counts operations."""
    found = []
    for row in rows:
        if row.get("gflops") and row.get("intensity"):
            label = row["case"] + (" with backward" if row.get("pass") == "backward" else "")
            details = f", {row['share']:.0%} of what the {row['bound']} roof beside it allowed"
            found.append(Point(row.get("bench", bench), row["dtype"], label, row["intensity"], row["gflops"], details))
    return found


def _title(result: dict[str, Any]) -> str:
    chip, count = result["machine"]["cpu"], result["peaks"]["threads"]
    return f"{chip}, {count} thread{'s' if count > 1 else ''}: measured roofs, and Luban's kernels"


def _kept(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result of a bench: {error}; keep one with --json") from None
    if not isinstance(result, dict) or result.get("bench") not in ("gemm", "attention", "ops"):
        raise ConfigError(f"{path} holds no result of gemm, attention or ops; keep one with `luban bench gemm --json`")
    return result


def _measured(name: str, options: str) -> dict[str, Any]:
    module = importlib.import_module(f"luban.bench.{name}")
    parser = argparse.ArgumentParser()
    module.configure(parser)
    return module.run(parser.parse_args(options.split()), _Silent)


class _Silent:
    """The progress of a bench within this one, which shows its own."""

    def __init__(self, _total: int):
        pass

    def update(self, _done: int, *_facts: str) -> None:
        """Says nothing."""


def summary(peaks: dict[str, Any]) -> dict[str, Any]:
    """The best of each kind: operations and bytes."""
    best = {f"gflops_{u['unit']}_{u['dtype']}": u["gflops"] for u in peaks["compute"]}
    return {**best, **{f"gbs_{m['level']}_{m['does']}": m["gbs"] for m in peaks["memory"]}}


def table(result: dict[str, Any]) -> list[list[str]]:
    """The kernels below the roofs; the roofs are the summary."""
    lines = [["bench", "dtype", "case", "pass", "operations a byte", "GFLOP/s", "GB/s", "bound by", "share"]]
    for row in result["rows"]:
        cells = [row["bench"], row["dtype"], row["case"], row.get("pass", "-"), number(row.get("intensity"), 2)]
        cells += [
            number(row.get("gflops"), 1),
            number(row.get("gbs"), 1),
            row.get("bound", "-"),
            number(row.get("share"), 2),
        ]
        lines.append(cells)
    return lines
