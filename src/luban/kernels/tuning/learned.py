"""What the measurements so far say of schedules that were not measured: each choice has its own effect on the time.

The cost model knows the chip, the measurements know the workload: on logged searches for nine workloads they put two of
three pairs in the right order, and the cost model alone every other one. Effects of choices (a field with a value) are fitted to
the logarithms of the measured ratios, and drawn towards none, by ridge regression. A choice that was never measured has no
effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from luban.runtime.schedules import Schedule

ENOUGH = 8  # measurements below which nothing is learned
STIFF = 0.5  # weight that draws effects towards none, in measurements
SLOW = 3.0  # a schedule that took longer than this, or was refused, counts as this


def expected(schedules: Sequence[Schedule], known: Iterable[tuple[Schedule, float | None]]) -> list[float] | None:
    """The expected ratios, as logarithms, of some schedules; None where too little is known."""
    measured = [(s, SLOW if ratio is None else min(SLOW, ratio)) for s, ratio in known]
    if len(measured) < ENOUGH:
        return None
    choices = {choice: i for i, choice in enumerate(dict.fromkeys(c for s, _ in measured for c in _choices(s)))}
    made = _matrix([s for s, _ in measured], choices)
    logs = np.array([math.log(ratio) for _, ratio in measured])
    mean = logs.mean()
    effects = np.linalg.solve(made.T @ made + STIFF * np.eye(len(choices)), made.T @ (logs - mean))
    return [float(x) for x in mean + _matrix(schedules, choices) @ effects]


def _matrix(schedules: Sequence[Schedule], choices: dict[str, int]) -> np.ndarray:
    """A row a schedule: 1 for each choice that it makes."""
    made = np.zeros((len(schedules), len(choices)))
    for row, schedule in zip(made, schedules, strict=True):
        row[[choices[c] for c in _choices(schedule) if c in choices]] = 1
    return made


def _choices(schedule: Schedule) -> list[str]:
    return [f"{field}={value}" for field, value in schedule.items()]
