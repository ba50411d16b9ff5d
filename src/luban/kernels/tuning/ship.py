"""Takes the user's tuned schedules over into the tables that ship: `python -m luban.kernels.tuning.ship`, for maintainers.

Only what was measured here, for schedules of this version, and faster by at least WORTH: what a quiet machine gained in two
runs. Entries of an older version leave the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from luban.kernels.tuning.family import spaces
from luban.runtime import schedules
from luban.runtime.schedules import Entry

WORTH = 1.03


def main() -> None:
    """Writes the tables of the families that the user's entries are for, and says what they hold."""
    for path, count in ship(schedules.entries(), schedules.SHIPPED_FOLDER).items():
        print(f"{path}: {count} entries")


def ship(entries: Iterable[Entry], folder: Path) -> dict[Path, int]:
    """Merges entries into the tables in a folder; the user's replace what is there. Returns how many each table holds."""
    current = spaces()
    families: dict[str, dict[str, Entry]] = {}
    for entry in sorted(entries, key=lambda e: e.table != schedules.SHIPPED):  # the user's last
        table = families.setdefault(entry.key.chip.split("/")[0], {})
        if entry.key.space in current and (entry.table == schedules.SHIPPED or entry.facts.get("gain", 0) >= WORTH):
            table[str(entry.key)] = entry
    written = {}
    for family, table in families.items():
        lines = [json.dumps(schedules.line_of(table[key]), separators=(", ", ": ")) for key in sorted(table)]
        path = folder / f"{family}.json"
        path.write_text('{"entries": [\n' + ",\n".join(lines) + "\n]}\n")
        written[path] = len(lines)
    return written


if __name__ == "__main__":
    main()
