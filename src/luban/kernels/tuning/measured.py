"""The log of measured candidates: a tuning that was stopped goes on where it was, and none is measured twice.

A line holds how long a schedule took over the derived one, both timed in turns. It counts as long as the derived
schedule is the same: a version that derives another one measures anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from luban.runtime import json_lines, schedules
from luban.runtime.schedules import Key, Schedule


class Log:
    """What is known of one workload: the digest of a schedule -> the schedule and its ratio, None where it was refused."""

    def __init__(self, key: Key, derived: Schedule):
        self.key, self.base = key, schedules.digest(derived)
        self.known: dict[str, tuple[Schedule, float | None]] = {}
        for line in json_lines.read(path(), _is_whole):
            if (line["key"], line["base"]) == (str(key), self.base):
                self.known[schedules.digest(line["schedule"])] = (line["schedule"], line["ratio"])

    def add(self, schedule: Schedule, ratio: float | None) -> None:
        """Notes a schedule's ratio. Raises LubanError when the log cannot be written."""
        self.known[schedules.digest(schedule)] = (schedule, ratio)
        line = {"key": str(self.key), "base": self.base, "schedule": schedule, "ratio": ratio}
        json_lines.append(path(), line)

    def has(self, schedule: Schedule) -> bool:
        """Whether a schedule was measured."""
        return schedules.digest(schedule) in self.known

    def best(self, count: int) -> list[Schedule]:
        """The fastest schedules, those that took less time than the derived one."""
        faster = [(ratio, digest) for digest, (_, ratio) in self.known.items() if ratio is not None and ratio < 1]
        return [self.known[digest][0] for _, digest in sorted(faster)[:count]]

    def ratio(self, schedule: Schedule) -> float:
        """A measured schedule's time over that of the derived one."""
        found = self.known[schedules.digest(schedule)][1]
        return float("inf") if found is None else found


def path() -> Path:
    """The file of the log, beside the user's table."""
    return schedules.directory() / "measured.jsonl"


def clear() -> None:
    """Forgets what was measured."""
    json_lines.rewrite(path(), lambda line: False)


def _is_whole(line: dict[str, Any]) -> bool:
    ratio = line.get("ratio")
    named = isinstance(line.get("key"), str) and line["key"].count(" | ") >= 2 and isinstance(line.get("base"), str)
    return named and isinstance(line.get("schedule"), dict) and (ratio is None or isinstance(ratio, float))
