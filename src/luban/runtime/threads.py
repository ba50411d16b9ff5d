"""The process's one OpenMP pool, and how many threads a kernel may use.

Kernels call `GOMP_parallel`. When torch is loaded, its own copy of libgomp provides it, so that torch and Luban share
one pool and never oversubscribe the cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field

from luban.errors import ConfigError

_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_FALLBACK_LIBRARIES = ("libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so")


@dataclass(frozen=True)
class Pool:
    """Absolute addresses of the three OpenMP entry points; `library` is a path, or "serial"."""

    library: str
    symbols: dict[str, int]
    keep_alive: tuple = field(default=(), repr=False)


_pools: dict[bool, Pool] = {}
_UNREAD = -1  # the environment is read at the first question, not at import, so that a bad value is a plain error
_chosen: int | None = _UNREAD


def pool() -> Pool:
    """The pool that kernels run on; found once with torch and once without."""
    with_torch = "torch" in sys.modules
    if with_torch not in _pools:
        _pools[with_torch] = _find()
    return _pools[with_torch]


def num_threads() -> int:
    """Threads a kernel may use: `set_num_threads`, LUBAN_NUM_THREADS, torch's number, else the cores we may run on."""
    global _chosen
    if _chosen == _UNREAD:
        _chosen = _from_environment()
    if _chosen is not None:
        return _chosen
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return torch.get_num_threads()
    return len(os.sched_getaffinity(0))


def set_num_threads(count: int | None) -> None:
    """Fixes the number of threads for this process; None goes back to the default."""
    global _chosen
    if count is not None and count < 1:
        raise ConfigError(f"the number of threads must be at least 1, not {count}")
    _chosen = count


def _from_environment() -> int | None:
    text = os.environ.get("LUBAN_NUM_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"LUBAN_NUM_THREADS must be a whole number of at least 1, not {text!r}")
    return int(text)


def _find() -> Pool:
    for path in (*_loaded_libraries(), *_FALLBACK_LIBRARIES):
        found = _open(path)
        if found is not None:
            return found
    return _serial()


def _loaded_libraries() -> list[str]:
    """Paths of OpenMP libraries already in this process, torch's own first."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return []
    ours = [p for p in paths if os.path.basename(p).startswith(("libgomp", "libomp", "libiomp"))]
    return sorted(ours, key=lambda p: ("libgomp" not in os.path.basename(p), "/torch" not in p, p))


def _open(path: str) -> Pool | None:
    try:
        library = ctypes.CDLL(path)
        symbols = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES}
    except (OSError, AttributeError):
        return None
    return Pool(path, symbols, (library,))


def _serial() -> Pool:
    """One thread, for machines with no OpenMP library at all."""
    body_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
        lambda body, data, _threads, _flags: body_type(body)(data)
    )
    number = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    count = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    functions = dict(zip(_NAMES, (parallel, number, count), strict=True))
    symbols = {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in functions.items()}
    return Pool("serial", symbols, (parallel, number, count))
