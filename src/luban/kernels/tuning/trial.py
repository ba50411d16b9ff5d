"""A workload on this machine: schedules become kernels that are checked and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from luban.errors import LubanError
from luban.kernels.tuning.family import Family
from luban.kernels.tuning.programs import bench
from luban.kernels.tuning.search import MOMENT, Run
from luban.kernels.tuning.workload import Workload
from luban.runtime.schedules import Schedule
from luban.targets.target import Target


class Machine:
    """See `search.Trial`. The kernels of one core are timed by that thread's own clock, which other programs do not move."""

    def __init__(self, workload: Workload, target: Target, family: Family):
        self.family = family
        self._bench = bench(workload, target)
        self._clock: Callable[[], float] = time.thread_time if target.cores == 1 else time.perf_counter

    def prepare(self, schedule: Schedule) -> Run | None:
        """The kernel with a schedule, once its results are right."""
        if self.family.read(schedule) is None:
            return None
        try:
            run = self._bench.compiled(self.family.key, schedule)
        except LubanError:
            return None
        return self._timed(run) if self._bench.right(run) else None

    def unchecked(self, schedule: Schedule) -> Run:
        """The kernel with a schedule that is in use, to see how heavy it is."""
        return self._timed(self._bench.compiled(self.family.key, schedule))

    def _timed(self, run: Callable[[int], Any]) -> Run:
        calls = 1
        while (spent := self._seconds(run, calls)) < MOMENT:
            calls = max(calls + 1, round(calls * min(8.0, 1.2 * MOMENT / max(spent, 1e-9))))
        return lambda: self._seconds(run, calls) / calls

    def _seconds(self, run: Callable[[int], Any], calls: int) -> float:
        began = self._clock()
        for turn in range(calls):
            run(turn)
        return self._clock() - began
