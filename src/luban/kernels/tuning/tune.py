"""Workloads in, entries of the user's table out: the heaviest first, in a given time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from luban import targets
from luban.errors import TargetError
from luban.kernels.tuning import codec
from luban.kernels.tuning.family import family
from luban.kernels.tuning.measured import Log
from luban.kernels.tuning.search import Outcome, search
from luban.kernels.tuning.trial import Machine
from luban.kernels.tuning.workload import Workload
from luban.runtime import json_lines, schedules, threads
from luban.runtime.schedules import Entry
from luban.targets.target import Target

LEAST = 1.0  # seconds without which a workload is not begun
MANY = 16  # candidates after which half as much is expected of a workload
LOOKS = 3  # timings that decide how heavy a workload is

Show = Callable[[float, str], None]  # seconds gone, and what is going on


@dataclass(frozen=True)
class Item:
    """A workload and how often it runs; `seconds` a call as it is compiled today; candidates `tried` so far."""

    workload: Workload
    calls: int
    seconds: float
    tried: int

    @property
    def weight(self) -> float:
        """Seconds of all calls."""
        return self.calls * self.seconds

    @property
    def promise(self) -> float:
        """What decides who comes first and gets how much time: the weight, less where much was tried before."""
        return self.weight / (1 + self.tried / MANY)


def tune(
    workloads: Mapping[Workload, int],
    seconds: float,
    target: str = "native",
    show: Show = lambda gone, what: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Tunes workloads, given with how often each runs, and keeps what is faster in the user's table.

    Returns {"chip", "table", "rows", "summary"}. Raises TargetError for a chip that is not this machine's and LubanError
    where the table cannot be written. What was measured before is not measured again. Once `stopped` says so, the workload
    in hand is the last one, and the result has "interrupted".
    """
    chip = this_machine(target)
    json_lines.ensure(schedules.table_path())  # said before anything is measured
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    interrupted = False
    with _all_cores(chip):
        try:
            items = _weighed(workloads, chip, lambda what: show(time.monotonic() - began, what))
            for row in _tuned(items, chip, began, seconds, show, stopped):
                rows.append(row)
                if stopped():
                    interrupted = True
                    break
        except KeyboardInterrupt:
            interrupted = True
    result = {"chip": schedules.chip_of(chip), "table": str(schedules.table_path()), "rows": rows}
    return {**result, "summary": _summary(rows), **({"interrupted": True} if interrupted else {})}


def this_machine(name: str) -> Target:
    """The target to measure on. Raises TargetError for any but this machine's."""
    native = targets.get("native")
    asked = targets.get(name)
    if schedules.chip_of(asked) != schedules.chip_of(native):
        raise TargetError(
            f"schedules are measured on the chip that they are for, and this machine is no {asked.name}; "
            "run `luban tune` there and copy the table that it names"
        )
    return native


@contextmanager
def _all_cores(target: Target) -> Iterator[None]:
    """As many threads as schedules are made for, whatever the environment says of this process."""
    before = threads.num_threads()
    threads.set_num_threads(target.cores)
    try:
        yield
    finally:
        threads.set_num_threads(before)


def _weighed(workloads: Mapping[Workload, int], target: Target, show: Callable[[str], None]) -> list[Item]:
    """The workloads by the time that they take, the heaviest first."""
    found = []
    for workload, calls in workloads.items():
        seconds, own = 1.0, family(workload, target)
        if len(workloads) > 1:
            show(f"timing {workload}")
            run = Machine(workload, target, own).unchecked(own.in_use)
            seconds = statistics.median(run() for _ in range(LOOKS))
        tried = len(Log(own.key, codec.encode(own.derived)).known)
        found.append(Item(workload, calls, seconds, tried))
    return sorted(found, key=lambda item: (-item.promise, str(item.workload)))


def _tuned(
    items: list[Item], target: Target, began: float, seconds: float, show: Show, stopped: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """One row a workload. What is left of the time is dealt out by what they promise."""
    total = sum(item.weight for item in items)
    for i, item in enumerate(items):
        left = seconds - (time.monotonic() - began)
        row = {"workload": str(item.workload), "calls": item.calls, "share": item.weight / total}
        if left < LEAST and i > 0:
            yield {**row, "reached": False}
            continue
        own = max(LEAST, left * item.promise / sum(other.promise for other in items[i:]))
        yield {**row, "reached": True, **_one(item.workload, target, own, began, show, stopped)}


def _one(
    workload: Workload, target: Target, seconds: float, began: float, show: Show, stopped: Callable[[], bool]
) -> dict[str, Any]:
    own = family(workload, target)
    derived, in_use = codec.encode(own.derived), own.in_use
    log = Log(own.key, derived)

    def shown(tried: int, best: float) -> None:
        show(time.monotonic() - began, f"{workload}  {tried} measured  best {best:.2f}x")

    shown(0, 1.0)
    machine = Machine(workload, target, own)
    found = search(machine, log, derived, in_use, own.near, seconds, shown, stopped=stopped)
    if found.schedule is not None:
        schedules.store(Entry(own.key, found.schedule, _facts(found)))
    return {
        **_facts(found),
        **_counts(found),
        "schedule": found.schedule or in_use,
        "changed": found.schedule is not None,
    }


def _facts(found: Outcome) -> dict[str, float]:
    return {
        "before_us": round(found.before * 1e6, 2),
        "after_us": round(found.after * 1e6, 2),
        "gain": round(found.before / found.after, 4),
    }


def _counts(found: Outcome) -> dict[str, Any]:
    return {"measured": found.measured, "refused": found.refused, "ended": found.ended}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The time of all workloads together over what it is now."""
    reached = [row for row in rows if row["reached"]]
    after = sum(row["share"] / row.get("gain", 1.0) for row in rows)
    return {
        "workloads": len(rows),
        "reached": len(reached),
        "changed": sum(row["changed"] for row in reached),
        "gain": round(sum(row["share"] for row in rows) / after, 4) if rows else None,
    }
