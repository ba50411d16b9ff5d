"""The search, on a machine that is a formula: what it finds, how it goes on after a stop, and whom it believes."""

from __future__ import annotations

import itertools
import random

import pytest

from luban.errors import LubanError
from luban.kernels.tuning import measured
from luban.kernels.tuning.measured import Log
from luban.kernels.tuning.search import BATCH, search
from luban.runtime import schedules
from luban.runtime.schedules import Key

KEY = Key("chip", "space 1", "gemm 1x2x3x4")
DERIVED = {"x": 0, "y": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path))
    return tmp_path


class Formula:
    """Seconds of a schedule are those of a formula, times noise; schedules in `wrong` give wrong results."""

    def __init__(self, seconds, noise=0.0, wrong=(), seed=0):
        self.seconds, self.noise, self.wrong = seconds, noise, wrong
        self.prepared, self.time, self.random = [], 0.0, random.Random(seed)

    def prepare(self, schedule):
        self.prepared.append(schedule)
        self.time += 1
        if schedule in self.wrong:
            return None
        return lambda: self.seconds(**schedule) * (1 + self.noise * self.random.random())

    def clock(self):
        return self.time


def near(schedule):
    steps = itertools.product((-1, 0, 1), (-1, 0, 1))
    return [{"x": schedule["x"] + a, "y": schedule["y"] + b} for a, b in steps if (a, b) != (0, 0)]


def bowl(x, y):
    """Best at (5, 3)."""
    return 1 + 0.1 * ((x - 5) ** 2 + (y - 3) ** 2)


def tuned(machine, seconds=1000.0, in_use=None, **more):
    log = Log(KEY, DERIVED)
    return search(machine, log, DERIVED, in_use or DERIVED, near, seconds, clock=machine.clock, **more)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_it_walks_to_the_best(noise):
    found = tuned(Formula(bowl, noise))
    assert found.schedule == {"x": 5, "y": 3} and found.ended == "all" and found.refused == 0
    assert found.after / found.before == pytest.approx(1 / bowl(0, 0), rel=0.05)


def test_it_keeps_what_is_when_nothing_is_faster():
    found = tuned(Formula(lambda x, y: 1 + abs(x) + abs(y)))
    assert found.schedule is None and found.after == found.before and found.ended == "all"
    assert found.measured == 8, "the neighbours, and nothing beyond them"


def test_what_scatters_is_not_believed():
    """All are equally fast; the luckiest of many measurements is not kept."""
    for seed in range(20):
        assert tuned(Formula(lambda x, y: 1.0, noise=0.2, seed=seed), seconds=60).schedule is None
        measured.clear()


def test_a_wrong_result_is_refused_however_fast():
    wrong = [{"x": x, "y": y} for x in range(3, 9) for y in range(0, 7)]
    found = tuned(Formula(bowl, wrong=wrong))
    assert found.schedule not in wrong and found.schedule is not None and found.refused > 0
    assert all(Log(KEY, DERIVED).ratio(s) == float("inf") for s in wrong if Log(KEY, DERIVED).has(s))


def test_it_ends_in_time_and_goes_on_where_it_was():
    first = Formula(bowl)
    one = tuned(first, seconds=12)
    assert one.ended == "time" and one.measured <= 12 and first.time <= 12 + BATCH
    second = Formula(bowl)
    two = tuned(second)
    assert two.ended == "all" and two.schedule == {"x": 5, "y": 3}
    again = Formula(bowl)
    three = tuned(again, in_use=two.schedule)
    assert three.measured == 0 and three.ended == "all" and three.schedule is None
    once = [s for s in second.prepared if Log(KEY, DERIVED).has(s)]
    assert all(once.count(s) <= 2 for s in once), "measured once, and once more in the last meeting"
    assert one.measured + two.measured == len(Log(KEY, DERIVED).known)


def test_a_stop_keeps_what_was_found():
    machine = Formula(bowl)
    found = tuned(machine, stopped=lambda: len(machine.prepared) >= 20)
    assert found.ended == "stopped" and found.measured == 19
    assert found.schedule is not None and found.after < found.before


def test_another_derived_schedule_is_measured_anew():
    tuned(Formula(bowl))
    assert Log(KEY, DERIVED).known and not Log(KEY, {"x": 9, "y": 9}).known
    assert not Log(Key("chip", "space 2", KEY.workload), DERIVED).known


def test_the_schedule_in_use_must_be_beaten():
    """One in use that lost its advantage gives way to the derived one."""
    found = tuned(Formula(lambda x, y: 2.0 if (x, y) == (7, 7) else 1 + abs(x) + abs(y)), in_use={"x": 7, "y": 7})
    assert found.schedule == DERIVED and found.before == 2.0 and found.after == 1.0
    found = tuned(Formula(lambda x, y: 0.5 if (x, y) == (7, 7) else 1 + abs(x) + abs(y)), in_use={"x": 7, "y": 7})
    assert found.schedule is None and found.before == 0.5


def test_a_schedule_in_use_that_is_wrong_is_an_error():
    with pytest.raises(LubanError, match="gives wrong results"):
        tuned(Formula(bowl, wrong=[DERIVED]))


def test_it_tells_how_it_goes():
    told = []
    tuned(Formula(bowl), show=lambda tried, best: told.append((tried, best)))
    assert [t for t, _ in told] == sorted(t for t, _ in told)
    assert told[-1][1] == pytest.approx(bowl(0, 0))


def test_damaged_lines_of_the_log_are_measured_again(folder):
    tuned(Formula(bowl))
    path = folder / "measured.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], '{"key": 3}', '{"ratio": "fast"}', *lines[2:]]))
    with pytest.warns(RuntimeWarning, match="3 damaged lines"):
        found = tuned(Formula(bowl))
    assert found.measured == 1 and found.schedule == {"x": 5, "y": 3}


def test_nothing_is_written_to_the_table_by_a_search():
    tuned(Formula(bowl))
    assert not schedules.table_path().exists()
