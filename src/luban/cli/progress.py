"""The progress line of long work, on stderr: a bar where a person watches, a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from luban.cli.output import interactive

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 15.0


def clock(seconds: float) -> str:
    """Seconds as '1:05' or '2:01:05'."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Progress:
    """Shows how far a counted piece of work is. `update` may be called as often as one likes."""

    def __init__(self, label: str, total: int, done: int = 0, stream: TextIO | None = None):
        self.label, self.total, self.first = label, total, done
        self.stream = stream or sys.stderr
        self.live = interactive(self.stream)
        self.began = self.shown = time.monotonic()
        self.width = 0

    def update(self, done: int, *facts: str) -> None:
        """`done` of the total are finished; the facts are shown in order, e.g. 'loss 2.31'."""
        now = time.monotonic()
        finished = done >= self.total
        if not finished and now - self.shown < (_REDRAW_SECONDS if self.live else _LINE_SECONDS):
            return
        self.shown = now
        rate = (now - self.began) / max(1, done - self.first)
        left = f"{clock(rate * (self.total - done))} left" if not finished else f"{clock(now - self.began)} in all"
        self._show("  ".join([f"{done}/{self.total}", *facts, left]), done / max(1, self.total))

    def note(self, message: str) -> None:
        """A line of its own, without spoiling the bar."""
        self._clear()
        print(message, file=self.stream, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands and goes to the next line."""
        if self.live and self.width:
            print(file=self.stream, flush=True)
        self.width = 0

    def _show(self, text: str, part: float) -> None:
        if not self.live:
            print(f"{self.label} {text}", file=self.stream, flush=True)
            return
        room = shutil.get_terminal_size().columns - len(self.label) - len(text) - 5
        line = f"{self.label} {self._bar(part, min(30, room))}{text}"
        self._clear()
        self.stream.write(line)
        self.stream.flush()
        self.width = len(line)

    def _bar(self, part: float, width: int) -> str:
        if width < 5:
            return ""
        filled = round(part * width)
        full, empty = "█░" if "utf" in (getattr(self.stream, "encoding", "") or "").lower() else "#."
        return full * filled + empty * (width - filled) + "  "

    def _clear(self) -> None:
        if self.live and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.width = 0
