"""Compiled programs on disk, by the hash of what they were compiled from.

Safe among processes: an entry is written beside its place and renamed into it. An entry is believed only when its
magic, version, key, lengths and checksum are right; anything else counts as missing and is compiled again. A folder
that cannot be used costs one warning and never a compilation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from luban.errors import ConfigError
from luban.runtime.program import Program

MAGIC = b"LUBANPRG"
FORMAT = 1
# magic, format, header bytes, key, sha256 of the body, bytes of metadata, bytes of object code
_HEADER = struct.Struct("<8sII32s32sQQ")
_SUFFIX = ".prog"
_DEFAULT_BYTES = 2 << 30
_STALE_SECONDS = 3600


@dataclass
class _State:
    """What this process remembers: whether it warned, and the bytes it wrote since it last listed the folder."""

    warned: bool = False
    written: int = 0
    counted: tuple[str, int] | None = None


_state = _State()


@dataclass(frozen=True)
class Entry:
    """One file of the cache: key (hex), path, bytes, when it was last used (seconds since 1970).

    `valid` is False for a damaged or foreign file, whose `target` is then "".
    """

    key: str
    path: Path
    bytes: int
    modified: float
    target: str = ""
    valid: bool = True


def directory() -> Path:
    """Where the cache is: LUBAN_CACHE_DIR, else XDG_CACHE_HOME/luban, else ~/.cache/luban."""
    chosen = os.environ.get("LUBAN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~/.cache"))) / "luban"


def max_bytes() -> int:
    """The size bound: LUBAN_CACHE_MAX_BYTES, else 2 GiB. Raises ConfigError when the variable is not a whole number."""
    text = os.environ.get("LUBAN_CACHE_MAX_BYTES")
    if not text:
        return _DEFAULT_BYTES
    if not text.isdigit():
        raise ConfigError(f"LUBAN_CACHE_MAX_BYTES must be a whole number of bytes, not {text!r}")
    return int(text)


def key(*parts: bytes | str) -> str:
    """The hex key of what a program is made from; parts are kept apart, so ("ab", "c") differs from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(struct.pack("<?Q", isinstance(part, str), len(raw)))
        digest.update(raw)
    return digest.hexdigest()


def encode(key: str, program: Program) -> bytes:
    """A program as one entry's bytes."""
    meta = json.dumps(program.metadata, separators=(",", ":")).encode()
    body = hashlib.sha256(meta + program.object).digest()
    header = _HEADER.pack(MAGIC, FORMAT, _HEADER.size, bytes.fromhex(key), body, len(meta), len(program.object))
    return header + meta + program.object


def decode(key: str, data: bytes) -> Program | None:
    """The program of an entry, or None when the bytes are not exactly what `encode` wrote for this key."""
    if len(data) < _HEADER.size:
        return None
    magic, version, size, owner, digest, meta_size, object_size = _HEADER.unpack_from(data)
    if (magic, version, size) != (MAGIC, FORMAT, _HEADER.size) or owner.hex() != key:
        return None
    if len(data) != size + meta_size + object_size or hashlib.sha256(memoryview(data)[size:]).digest() != digest:
        return None
    try:
        return Program(json.loads(data[size : size + meta_size]), data[size + meta_size :])
    except ValueError:
        return None


def get(key: str) -> Program | None:
    """The program of a key, marked as just used; None when there is none that can be believed."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(error)
        return None
    program = decode(key, data)
    with contextlib.suppress(OSError):  # a folder one may only read still gives hits
        if program is None:
            path.unlink()
        else:
            os.utime(path)
    return program


def put(key: str, program: Program) -> bool:
    """Stores a program; False (after one warning in the process) when the folder or the disk does not allow it."""
    path = _path(key)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    data = encode(key, program)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _warn(error)
        return False
    _bound(len(data))
    return True


def entries() -> list[Entry]:
    """All entries, least recently used first, each read and checked."""
    found = []
    for entry in _listing():
        try:
            program = decode(entry.key, entry.path.read_bytes())
        except OSError:  # another process may remove it just now
            continue
        target = program.metadata.get("target", "") if program else ""
        found.append(replace(entry, target=target, valid=program is not None))
    return found


def _listing() -> list[Entry]:
    found = []
    with contextlib.suppress(OSError), os.scandir(directory()) as files:
        for file in files:
            if file.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    stat = file.stat()
                    found.append(Entry(file.name[: -len(_SUFFIX)], Path(file.path), stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda e: (e.modified, e.key))


def clear() -> int:
    """Removes all entries and left-over temporary files; returns the number of entries removed."""
    removed = 0
    for entry in _listing():
        with contextlib.suppress(OSError):
            entry.path.unlink()
            removed += 1
    _remove_temporaries(older_than=0)
    return removed


def _path(key: str) -> Path:
    return directory() / (key + _SUFFIX)


def _bound(written: int) -> None:
    """Keeps the folder below its bound. It is listed only when this process's own writes may have passed the bound."""
    limit = max_bytes()
    folder = str(directory())
    _state.written += written
    if _state.counted == (folder, limit) and _state.written <= limit // 16:
        return
    _remove_temporaries(_STALE_SECONDS)
    kept = _listing()
    total = sum(e.bytes for e in kept)
    for entry in kept:
        if total <= limit:
            break
        with contextlib.suppress(OSError):
            entry.path.unlink()
        total -= entry.bytes
    # Near the bound every write looks again; far from it, one in many.
    _state.written, _state.counted = 0, (folder, limit) if total <= limit * 7 // 8 else None


def _remove_temporaries(older_than: float) -> None:
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(directory()) as files:
        for file in files:
            if file.name.endswith(".tmp") and _SUFFIX in file.name:
                with contextlib.suppress(OSError):
                    if now - file.stat().st_mtime >= older_than:
                        os.unlink(file.path)


def _warn(error: OSError) -> None:
    if not _state.warned:
        _state.warned = True
        warnings.warn(
            f"Luban goes on without its program cache: {directory()} cannot be used ({error.strerror or error}); "
            "set LUBAN_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
