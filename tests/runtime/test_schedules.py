"""The two tables of tuned schedules: which one answers, and what damage, other processes and other versions do to them."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest

from luban import targets
from luban.errors import LubanError
from luban.runtime import json_lines, schedules
from luban.runtime.schedules import Entry, Key

KEY = Key("x86-64/some chip", "gemm 1.abc", "gemm 1x2x3x4")
OTHER = Key("x86-64/some chip", "gemm 2.abc", "gemm 1x2x3x4")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.delenv("LUBAN_TUNED", raising=False)
    monkeypatch.setattr(json_lines, "_warned", set())
    return tmp_path / "tuning"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A shipped table for one family that knows KEY."""
    line = {"chip": KEY.chip, "space": KEY.space, "workload": KEY.workload, "schedule": {"mc": 1}, "gain": 1.5}
    (tmp_path / "x86-64.json").write_text(json.dumps({"entries": [line]}))
    monkeypatch.setattr(schedules, "SHIPPED_FOLDER", tmp_path)
    schedules._shipped.cache_clear()
    yield
    schedules._shipped.cache_clear()


def test_the_last_entry_of_a_key_answers(folder):
    assert schedules.lookup(KEY) is None
    schedules.store(Entry(KEY, {"mc": 8}, {"gain": 1.1}))
    schedules.store(Entry(OTHER, {"mc": 4}))
    schedules.store(Entry(KEY, {"mc": 16}, {"gain": 1.2}))
    assert schedules.lookup(KEY) == {"mc": 16} and schedules.lookup(OTHER) == {"mc": 4}
    assert {(str(e.key), e.facts.get("gain")) for e in schedules.entries() if e.table == "user"} == {
        (str(KEY), 1.2),
        (str(OTHER), None),
    }
    assert schedules.clear() == 2 and schedules.lookup(KEY) is None


def test_the_users_table_wins_over_the_shipped_one(shipped, monkeypatch):
    assert schedules.lookup(KEY) == {"mc": 1} and schedules.lookup(OTHER) is None
    (entry,) = schedules.entries()
    assert (entry.table, entry.facts) == ("shipped", {"gain": 1.5})
    schedules.store(Entry(KEY, {"mc": 2}))
    assert schedules.lookup(KEY) == {"mc": 2} and [e.table for e in schedules.entries()] == ["user"]
    monkeypatch.setenv("LUBAN_TUNED", "0")
    assert schedules.lookup(KEY) is None


def test_what_ships_can_be_read():
    for path in schedules.SHIPPED_FOLDER.glob("*.json"):
        lines = json.loads(path.read_text())["entries"]
        assert all(schedules._entry(line) for line in lines), f"{path.name} has an entry that is none"
        assert all(line["chip"].startswith(path.stem + "/") for line in lines)


def test_what_was_asked_is_noted_and_compared():
    schedules.store(Entry(KEY, {"mc": 8, "nc": 4}))
    with schedules.recorded() as outer, schedules.recorded() as asked:
        schedules.lookup(KEY)
        schedules.lookup(OTHER)
    assert asked == outer == {str(KEY): schedules.digest({"nc": 4, "mc": 8}), str(OTHER): None}
    assert schedules.key_from(str(KEY)) == KEY
    assert schedules.unchanged(asked)
    schedules.store(Entry(OTHER, {"mc": 8}))
    assert not schedules.unchanged(asked)
    schedules.clear()
    assert not schedules.unchanged(asked)


def test_forced_schedules_are_the_only_ones():
    schedules.store(Entry(KEY, {"mc": 8}))
    with schedules.forced({}):
        assert schedules.lookup(KEY) is None
    with schedules.forced({KEY: {"mc": 1}}):
        assert schedules.lookup(KEY) == {"mc": 1}
    assert schedules.lookup(KEY) == {"mc": 8}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"chip": "x', b"\xff\xfe\x00", b"[1, 2]", b"null", b'{"chip": 1, "space": "s", "workload": "w", "schedule": {}}',
        b'{"chip": "c", "space": "s", "workload": "w", "schedule": 3}', b'{"chip": "c"}',
    ],
)  # fmt: skip
def test_a_damaged_line_is_left_out_with_one_warning(folder, damage):
    schedules.store(Entry(KEY, {"mc": 8}))
    with schedules.table_path().open("ab") as file:
        file.write(damage)  # and no end of line, as of a process that died
    with pytest.warns(RuntimeWarning, match="1 damaged line, which is left out"):
        assert schedules.lookup(KEY) == {"mc": 8}
    schedules.store(Entry(OTHER, {"mc": 4}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedules.lookup(OTHER) == {"mc": 4} and schedules.lookup(KEY) == {"mc": 8}
    schedules.clear()
    assert schedules.table_path().read_bytes() == b""


def test_an_unreadable_table_is_one_warning_and_an_unwritable_one_an_error(folder):
    schedules.table_path().mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert schedules.lookup(KEY) is None
    with pytest.raises(LubanError, match="cannot be written .*; set LUBAN_TUNING_DIR to a folder that can be"):
        schedules.store(Entry(KEY, {}))


WRITER = """
import sys
from luban.runtime import schedules
from luban.runtime.schedules import Entry, Key
for i in range(50):
    schedules.store(Entry(Key("c", "s", f"{sys.argv[1]} {i}"), {"value": "x" * 300, "i": i}))
"""


def test_several_processes_write_at_once(folder):
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(n)]) for n in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            for i in range(50):
                assert schedules.lookup(Key("c", "s", f"{n} {i}"))["i"] == i


def test_a_chip_is_what_decides_about_code():
    chip = targets.get("x86-64-avx512")
    here = schedules.chip_of(chip)
    assert schedules.chip_of(replace(chip, name="other", cores=64, clock_ghz=1.0)) == here
    for change in ({"vector_bits": 256}, {"llvm_features": chip.llvm_features + ",+x"}, {"caches": chip.caches[:1]}):
        assert schedules.chip_of(replace(chip, **change)) != here
    assert " | " not in here and here.split("/")[0] == chip.family
    assert len({schedules.chip_of(targets.get(n)) for n in targets.names() if targets.get(n).is_cpu}) > 5
