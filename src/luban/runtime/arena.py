"""Temporary memory that stays between steps: one growing region a thread, shared by all programs.

Two programs never run at the same time on one thread, so they may use the same bytes; because the region stays, its
pages are faulted in once and not at every step.
"""

from __future__ import annotations

import mmap
import threading

from luban.runtime import memory


class _Region(threading.local):
    def __init__(self) -> None:
        self.size = 0
        self.address = 0
        self.mapping: mmap.mmap | None = None


_region = _Region()


def address(size: int) -> int:
    """The base of this thread's arena of at least `size` bytes, 2 MiB aligned; growing loses what was in it."""
    if size > _region.size:
        _grow(size)
    return _region.address


def size() -> int:
    """Bytes of this thread's arena."""
    return _region.size


def release() -> None:
    """Gives this thread's arena back to the system; the next program takes a new one."""
    _region.mapping, _region.size, _region.address = None, 0, 0


def _grow(size: int) -> None:
    release()  # the old pages go first, so that the peak is one arena and not two
    size = -(-size // memory.HUGE_PAGE) * memory.HUGE_PAGE
    mapping, offset = memory.reserve(size)
    _region.mapping, _region.size, _region.address = mapping, size, memory.address_of(mapping) + offset
