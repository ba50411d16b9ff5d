"""Ctrl-C that waits for the step in hand."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """A context in which the first SIGINT or SIGTERM sets `asked` and the second one ends the program as usual.

    `when` tells the person when the program will stop.
    """

    def __init__(self, when: str = "after this step and saving") -> None:
        self.asked, self.when = False, when
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()
        print(f"\nstopping {self.when}; once more to stop at once", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
