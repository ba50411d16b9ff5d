"""What is learned from measured schedules."""

from __future__ import annotations

import itertools
import math

from luban.kernels.tuning.learned import ENOUGH, SLOW, expected

CHOICES = list(itertools.product((1, 2, 3, 4), ("rows", "columns"), (True, False)))
EFFECT = {1: 1.0, 2: 0.8, 3: 0.9, 4: 1.3}


def schedule(blocks, order, packs):
    return {"blocks": blocks, "order": order, "packs": packs, "same": 7}


def seconds(blocks, order, packs):
    return EFFECT[blocks] * (1.2 if order == "columns" else 1.0) * (1.0 if packs else 1.5)


def test_effects_of_choices_add_up():
    """Half of all combinations tell the order of the others."""
    known, asked = CHOICES[::2] + CHOICES[1:8:2], CHOICES[9::2]
    found = expected([schedule(*c) for c in asked], [(schedule(*c), seconds(*c)) for c in known])
    assert found is not None
    right = sorted(range(len(asked)), key=lambda i: seconds(*asked[i]))
    assert sorted(range(len(asked)), key=lambda i: found[i]) == right


def test_little_is_nothing():
    known = [(schedule(*c), seconds(*c)) for c in CHOICES[: ENOUGH - 1]]
    assert expected([schedule(*CHOICES[-1])], known) is None
    assert expected([], [*known, (schedule(*CHOICES[9]), 1.0)]) == []


def test_what_was_refused_or_crawled_counts_as_slow_and_what_is_new_as_usual():
    known = [(schedule(1, "rows", True), None), (schedule(1, "columns", True), 1e9)]
    known += [(schedule(2, "rows", bool(i % 2)), 1.0) for i in range(8)]
    slow, fast, new = expected([schedule(1, "rows", True), schedule(2, "rows", True), {"other": 1}], known)
    assert fast < new < slow <= math.log(SLOW)
