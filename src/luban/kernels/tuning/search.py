"""The search for one workload's schedule.

From the derived schedule it looks at the neighbours, a batch at a time, in the order that a cost model gives and, soon,
the measurements themselves. A batch is measured in turns with the derived schedule, so that a clock that drifts favours
none, and its slower half leaves after each round of turns. Then come the neighbours of what is fastest now, and those of
the next ones when they are all known. In the end the fastest few meet the schedule that is in use once more: the one of
many that was lucky once must win again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from luban.errors import LubanError
from luban.kernels.tuning.learned import expected
from luban.kernels.tuning.measured import Log
from luban.runtime.schedules import Schedule

Run = Callable[[], float]  # runs a kernel for a moment; seconds a call

BATCH = 8
LEADERS = 3  # whose neighbours are looked at, and who meet the schedule in use in the end
TURNS = (3, 9)  # least and most turns of a round, which takes about ROUND seconds
ROUND = 0.5
MOMENT = 2e-3  # seconds that a run takes at least: far above the clock's grain and a call's own cost
LAST_TURNS = (11, 41)  # the same of the last meeting
LAST_ROUND = 2.0
SEARCHED = 0.85  # part of the time; the rest is for the last meeting
WORTH = 0.98  # of the time in use that a schedule must beat in the end: less is within what measurements scatter
DOUBT = 0.01  # chance that one of several schedules as fast as the one in use wins so many of the last turns
TIME, ALL, STOPPED = "time", "all", "stopped"


class Trial(Protocol):
    """A machine to try schedules on."""

    def prepare(self, schedule: Schedule) -> Run | None:
        """The kernel with a schedule, once its results are right; None where they are not."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a search found. `schedule` is the better one, None where the one in use stays; times in seconds a call.

    `measured` and `refused` count what this search tried and how many gave wrong results. It `ended` since the time was
    up (TIME), since nothing was left to try (ALL) or since a person stopped it (STOPPED).
    """

    schedule: Schedule | None
    before: float
    after: float
    measured: int
    refused: int
    ended: str


def search(
    trial: Trial,
    log: Log,
    derived: Schedule,
    in_use: Schedule,
    near: Callable[[Schedule], list[Schedule]],
    seconds: float,
    show: Callable[[int, float], None] = lambda tried, best: None,
    clock: Callable[[], float] = time.monotonic,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Looks for a faster schedule for so long, or until it is `stopped`; then the best meet once more, which takes seconds.

    `show` hears how many were tried and the best speed over the derived one.
    """
    end = clock() + seconds * SEARCHED
    base = sure(trial, derived)
    tried, refused, ended = 0, 0, TIME

    def over() -> bool:
        return clock() >= end or stopped()

    while not over():
        batch = _unknown(log, [*log.best(LEADERS), derived], near)
        if not batch:
            ended = ALL
            break
        for schedule, ratio in _batch(trial, base, batch, over):
            log.add(schedule, ratio)
            tried, refused = tried + 1, refused + (ratio is None)
        best = log.best(1)
        show(tried, 1 / log.ratio(best[0]) if best else 1.0)
    ended = STOPPED if stopped() else ended
    return _last(trial, log, derived, in_use, (tried, refused, ended))


def _unknown(log: Log, leaders: Sequence[Schedule], near: Callable[[Schedule], list[Schedule]]) -> list[Schedule]:
    """The next batch: neighbours of the first leader that has any that were not measured."""
    for leader in leaders:
        found = [s for s in near(leader) if not log.has(s)]
        if found:
            return _promising(found, log)
    return []


def _promising(schedules: list[Schedule], log: Log) -> list[Schedule]:
    """A batch: half of it what the measurements so far promise most of, and in the cost model's order what is left."""
    ratios = expected(schedules, log.known.values())
    if ratios is None:
        return schedules[:BATCH]
    best = sorted(range(len(schedules)), key=lambda i: ratios[i])[: BATCH // 2]
    rest = [i for i in range(len(schedules)) if i not in best]
    return [schedules[i] for i in (*best, *rest)][:BATCH]


def sure(trial: Trial, schedule: Schedule) -> Run:
    """The kernel with a schedule that is in use. Raises LubanError where its results are wrong."""
    run = trial.prepare(schedule)
    if run is None:
        raise LubanError(f"the schedule that is compiled today gives wrong results: {schedule}; please report this")
    return run


def _batch(
    trial: Trial, base: Run, batch: Sequence[Schedule], over: Callable[[], bool]
) -> list[tuple[Schedule, float | None]]:
    """The ratios of a batch, as far as the time goes."""
    done: list[tuple[Schedule, float | None]] = []
    alive: list[tuple[Schedule, Run, list[float]]] = []
    for schedule in batch:
        if over():
            break
        run = trial.prepare(schedule)
        if run is None:
            done.append((schedule, None))
        else:
            alive.append((schedule, run, []))
    while alive:
        for _ in range(_turns(base(), len(alive), ROUND, TURNS)):
            derived = base()
            for _, run, ratios in alive:
                ratios.append(run() / derived)
        alive.sort(key=lambda one: statistics.median(one[2]))
        stay = len(alive) // 2
        done += [(schedule, statistics.median(ratios)) for schedule, _, ratios in alive[stay:]]
        alive = alive[:stay]
    return done


def _turns(seconds: float, runs: int, wanted: float, bounds: tuple[int, int]) -> int:
    """Turns that take about so long, where a kernel takes so many seconds."""
    least, most = bounds
    return max(least, min(most, round(wanted / max(MOMENT, seconds) / (runs + 1))))


def _last(trial: Trial, log: Log, derived: Schedule, in_use: Schedule, counts: tuple[int, int, str]) -> Outcome:
    """The fastest few, and the derived schedule where another one is in use, against the one in use."""
    rivals = [s for s in log.best(LEADERS) if s != in_use]
    if derived != in_use:
        rivals.append(derived)
    current = sure(trial, in_use)
    running: list[tuple[Schedule, Run, list[float]]] = [
        (s, run, []) for s in rivals if (run := trial.prepare(s)) is not None
    ]
    before: list[float] = []
    for _ in range(_turns(current(), len(running), LAST_ROUND, LAST_TURNS)):
        before.append(current())
        for _, run, ratios in running:
            ratios.append(run() / before[-1])
    if in_use == derived:  # the more careful numbers stay: who was lucky once leads no further search
        for schedule, _, ratios in running:
            log.add(schedule, statistics.median(ratios))
    now = statistics.median(before)
    for schedule, _, ratios in sorted(running, key=lambda one: statistics.median(one[2]))[:1]:
        ratio, luck = statistics.median(ratios), _luck(sum(r < 1 for r in ratios), len(ratios)) * len(running)
        if ratio < WORTH and luck <= DOUBT:
            return Outcome(schedule, now, now * ratio, *counts)
    return Outcome(None, now, now, *counts)


def _luck(won: int, turns: int) -> float:
    """The chance to win at least so many turns against an equal."""
    return sum(math.comb(turns, n) for n in range(won, turns + 1)) / 2**turns
