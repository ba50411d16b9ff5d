"""How commands print: aligned columns, marks, colour only where a person reads it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

_CODES = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}


def interactive(stream: TextIO) -> bool:
    """Whether a person is likely to watch this stream."""
    return hasattr(stream, "isatty") and stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text` in a colour of `_CODES` when the stream is a terminal and NO_COLOR is unset, else unchanged."""
    if os.environ.get("NO_COLOR") or not interactive(stream or sys.stdout):
        return text
    return f"\033[{_CODES[colour]}m{text}\033[0m"


def columns(rows: Iterable[Sequence[object]]) -> str:
    """Rows of cells as left-aligned columns, two spaces apart."""
    cells = [[str(c) for c in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells)


def size(count: float) -> str:
    """A number of bytes for people, e.g. '3.4 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
