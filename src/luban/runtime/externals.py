"""Addresses of the functions outside an object that its kernels may call."""

from __future__ import annotations

import ctypes
import functools

from luban.runtime import threads

# Searched in this order; libgcc holds the conversions of small float types.
_LIBRARIES = ("libm.so.6", None, "libgcc_s.so.1")


def resolve(name: str) -> int | None:
    """The address of an external symbol: OpenMP from the process's pool, else libm, libc or libgcc; None if unknown."""
    pool = threads.pool().symbols
    return pool[name] if name in pool else _library_symbol(name)


@functools.cache
def _library_symbol(name: str) -> int | None:
    for library in _opened():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


@functools.cache
def _opened() -> tuple[ctypes.CDLL, ...]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(ctypes.CDLL(name))
        except OSError:
            continue
    return tuple(found)
