"""Anonymous memory from the system, aligned to huge pages and marked for them."""

from __future__ import annotations

import ctypes
import mmap

from luban.errors import OutOfMemoryError

HUGE_PAGE = 2 << 20


def reserve(size: int) -> tuple[mmap.mmap, int]:
    """A zeroed private mapping with room for `size` bytes from a 2 MiB boundary on: (mapping, offset of the boundary).

    Pages appear when touched, huge ones where the system allows. The memory goes back when the mapping object dies.
    Raises OutOfMemoryError when the system has no memory left.
    """
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise OutOfMemoryError(
            f"no memory for {size >> 20} MiB of temporaries or results; use a smaller batch or model"
        ) from None
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # a kernel without huge pages: slower, not wrong
    address = address_of(memory)
    return memory, -address % HUGE_PAGE


def address_of(memory: mmap.mmap) -> int:
    """The address of a mapping's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def trim_heap() -> None:
    """Gives what malloc keeps free back to the system, where the C library can do that (glibc: milliseconds)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
