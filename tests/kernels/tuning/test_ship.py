"""From the user's table to the one that ships."""

from __future__ import annotations

import json

import pytest

from luban.kernels.tuning.family import spaces
from luban.kernels.tuning.ship import ship
from luban.runtime import schedules
from luban.runtime.schedules import SHIPPED, USER, Entry, Key

SPACE = min(spaces())


def entry(workload, gain, table=USER, space=SPACE, chip="x86-64/v4", value=1):
    return Entry(Key(chip, space, workload), {"mc": value}, {"gain": gain}, table)


def test_gains_of_this_version_are_taken_over(tmp_path, monkeypatch):
    given = [
        entry("a", 1.5, value=2),
        entry("b", 1.01),
        entry("c", 1.2, space="gemm 0"),
        entry("a", 1.2, SHIPPED, value=3),
        entry("d", 1.1, SHIPPED),
        entry("e", 1.1, SHIPPED, space="gemm 0"),
        entry("f", 1.3, chip="aarch64/neon"),
    ]
    written = ship(given, tmp_path)
    assert written == {tmp_path / "x86-64.json": 2, tmp_path / "aarch64.json": 1}
    lines = json.loads((tmp_path / "x86-64.json").read_text())["entries"]
    assert [(line["workload"], line["schedule"]["mc"]) for line in lines] == [("a", 2), ("d", 1)]
    monkeypatch.setattr(schedules, "SHIPPED_FOLDER", tmp_path)
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path / "none"))
    monkeypatch.delenv("LUBAN_TUNED", raising=False)
    schedules._shipped.cache_clear()
    try:
        assert schedules.lookup(Key("x86-64/v4", SPACE, "a")) == {"mc": 2}
        assert {e.table for e in schedules.entries()} == {SHIPPED} and len(schedules.entries()) == 3
    finally:
        schedules._shipped.cache_clear()


@pytest.mark.parametrize("given", [[], [entry("b", 1.0)]])
def test_nothing_worth_shipping_leaves_an_empty_table_or_none(given, tmp_path):
    for path in ship(given, tmp_path):
        assert json.loads(path.read_text()) == {"entries": []}
