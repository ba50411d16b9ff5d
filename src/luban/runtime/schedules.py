"""Tuned schedules: two tables, the one that ships with Luban and the user's own, keyed by chip, schedule space and workload.

A kernel's builder asks `lookup` while it compiles, and takes what it derives from the chip itself where the answer is
None; nothing is ever measured here. What was asked is noted (`recorded`) and kept with the compiled program, so that a
cached program is believed only while the tables would still give the same answers (`unchanged`).

The user's table wins over the shipped one. `LUBAN_TUNED=0` looks in neither.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luban.runtime import json_lines
from luban.targets.target import Target

Schedule = dict[str, Any]
USER, SHIPPED = "user", "shipped"
SHIPPED_FOLDER = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Key:
    """What an entry is kept under: the chip (`chip_of`), the name of a schedule space, and a workload's text."""

    chip: str
    space: str
    workload: str

    def __str__(self) -> str:
        return f"{self.chip} | {self.space} | {self.workload}"


@dataclass(frozen=True)
class Entry:
    """A kept schedule with what was measured when it was found: `facts` holds before_us, after_us and gain."""

    key: Key
    schedule: Schedule
    facts: dict[str, Any] = field(default_factory=dict)
    table: str = USER


_recorders: ContextVar[tuple[dict[str, str | None], ...]] = ContextVar("luban_schedules_asked", default=())
_forced: ContextVar[Mapping[Key, Schedule | None] | None] = ContextVar("luban_schedules_forced", default=None)


def chip_of(target: Target) -> str:
    """The chip in a key: what decides which code is fast on it, and neither its name nor its number of cores.

    The features are in it as eight digits of their hash: they take a line of text.
    """
    listed = f"{target.llvm_features} {target.function_attributes} {[u.name for u in target.dot_units]}"
    digits = hashlib.sha256(listed.encode()).hexdigest()[:8]
    caches = "/".join(f"L{level} {target.cache_bytes(level) >> 10}K" for level in (1, 2))
    return f"{target.family}/{target.llvm_cpu}/{target.vector_bits}/{target.matrix_unit or 'no unit'}/{caches}/{digits}"


def lookup(key: Key) -> Schedule | None:
    """The kept schedule, or None. Noted by every `recorded` block that is open."""
    found = _answer(key)
    for asked in _recorders.get():
        asked[str(key)] = None if found is None else digest(found)
    return found


def _answer(key: Key) -> Schedule | None:
    forced = _forced.get()
    if forced is not None:
        return forced.get(key)
    if os.environ.get("LUBAN_TUNED") == "0":
        return None
    entry = _user().get(key) or _shipped(key.chip.split("/")[0]).get(key)
    return entry.schedule if entry else None


def digest(schedule: Schedule) -> str:
    """A short hash of a schedule, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(schedule, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str | None]]:
    """What is asked inside the block: the text of a key -> the digest of the answer, None where there was none."""
    asked: dict[str, str | None] = {}
    token = _recorders.set((*_recorders.get(), asked))
    try:
        yield asked
    finally:
        _recorders.reset(token)


@contextlib.contextmanager
def forced(schedules: Mapping[Key, Schedule | None]) -> Iterator[None]:
    """Inside the block these are the only entries: how a tuner compiles a candidate, and `{}` what is derived."""
    token = _forced.set(schedules)
    try:
        yield
    finally:
        _forced.reset(token)


def unchanged(asked: Mapping[str, str | None]) -> bool:
    """Whether the tables would answer again what they answered when a program was compiled."""
    for text, before in asked.items():
        found = _answer(key_from(text))
        if (None if found is None else digest(found)) != before:
            return False
    return True


def key_from(text: str) -> Key:
    """The key whose text this is."""
    return Key(*text.split(" | ", 2))


# ---- the tables


def directory() -> Path:
    """Where the user's table is: LUBAN_TUNING_DIR, else `tuning` in the folder of the program cache."""
    from luban.runtime import cache

    chosen = os.environ.get("LUBAN_TUNING_DIR")
    return Path(chosen) if chosen else cache.directory() / "tuning"


def table_path() -> Path:
    """The file of the user's table, one JSON object a line; the last one of a key counts."""
    return directory() / "schedules.jsonl"


def entries() -> list[Entry]:
    """All entries that lookups can find, the user's first; what the user's table overrides is left out."""
    own = _user()
    shipped = [e for family in sorted(SHIPPED_FOLDER.glob("*.json")) for e in _shipped(family.stem).values()]
    return [*own.values(), *(e for e in shipped if e.key not in own)]


def store(entry: Entry) -> None:
    """Adds an entry to the user's table. Raises LubanError when the folder cannot be written."""
    json_lines.append(table_path(), line_of(entry))


def clear() -> int:
    """Empties the user's table; returns how many entries it had. Raises LubanError when it cannot be written."""
    count = len(_user())
    json_lines.rewrite(table_path(), lambda line: False)
    return count


def line_of(entry: Entry) -> dict[str, Any]:
    """An entry as the tables hold it."""
    key = entry.key
    return {
        "chip": key.chip, "space": key.space, "workload": key.workload, "schedule": entry.schedule, **entry.facts
    }  # fmt: skip


def _entry(line: dict[str, Any], table: str = USER) -> Entry | None:
    """The entry of a line, or None where something is missing or of the wrong type."""
    key = [line.get(name) for name in ("chip", "space", "workload")]
    schedule = line.get("schedule")
    if not all(isinstance(part, str) for part in key) or not isinstance(schedule, dict):
        return None
    facts = {k: v for k, v in line.items() if k not in ("chip", "space", "workload", "schedule")}
    return Entry(Key(*key), schedule, facts, table)  # type: ignore[arg-type]


@functools.cache
def _shipped(family: str) -> dict[Key, Entry]:
    path = SHIPPED_FOLDER / f"{family}.json"
    if not path.is_file():
        return {}
    found = [_entry(line, SHIPPED) for line in json.loads(path.read_text())["entries"]]
    return {entry.key: entry for entry in found if entry}


_kept: tuple[Any, dict[Key, Entry]] = (None, {})


def _user() -> dict[Key, Entry]:
    """The user's table, read again when its file has changed."""
    global _kept
    path = table_path()
    try:
        stat = path.stat()
    except OSError:
        return {}
    now = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if _kept[0] != now:
        table = {}
        for line in json_lines.read(path, lambda found: _entry(found) is not None):
            entry = _entry(line)
            assert entry is not None
            table[entry.key] = entry
        _kept = (now, table)
    return _kept[1]
