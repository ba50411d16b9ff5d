"""Files of JSON objects, one a line, that several processes read and add to at once.

Lines are added in one write each, under a lock that only writers take: a reader sees whole lines but for the last one.
A line that is not what it should be - half written by a process that died, or damaged - is left out, with one warning
a file and process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from luban.errors import LubanError

Line = dict[str, Any]
_warned: set[str] = set()


def read(path: Path, accepts: Callable[[Line], bool] = lambda line: True) -> list[Line]:
    """The objects that are accepted, in order; none where there is no file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        _warn(path, f"cannot be read ({error.strerror})")
        return []
    found, damaged = [], 0
    for raw in text.splitlines():
        line = _parsed(raw)
        if line is not None and accepts(line):
            found.append(line)
        elif raw.strip():
            damaged += 1
    if damaged:
        _warn(path, f"has {damaged} damaged line{'s' * (damaged > 1)}, which {'are' if damaged > 1 else 'is'} left out")
    return found


def ensure(path: Path) -> None:
    """Makes the file where there is none. Raises LubanError when it cannot be written."""
    with _locked(path), path.open("ab"):
        pass


def append(path: Path, line: Line) -> None:
    """Adds an object. Raises LubanError when the file cannot be written."""
    raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    with _locked(path), path.open("ab") as file:
        if file.tell() and not _ends_whole(path):  # a process died while it wrote: its line stays a line of its own
            raw = b"\n" + raw
        file.write(raw)


def rewrite(path: Path, keeps: Callable[[Line], bool]) -> None:
    """Leaves the lines that are kept, and no damaged one. Raises LubanError when the file cannot be written."""
    if not path.exists():
        return
    with _locked(path):
        lines = [raw for raw in path.read_bytes().splitlines() if (line := _parsed(raw)) is not None and keeps(line)]
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(b"".join(raw + b"\n" for raw in lines))
        os.replace(temporary, path)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among writers of the file; its folder is made where it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(path.name + ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise LubanError(
            f"{path} cannot be written ({error.strerror or error}); set LUBAN_TUNING_DIR to a folder that can be"
        ) from error


def _warn(path: Path, what: str) -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(f"{path} {what}", RuntimeWarning, stacklevel=3)
