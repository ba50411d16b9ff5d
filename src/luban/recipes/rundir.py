"""A run directory: who may write it, and the small files in it.

config.json      the options of the run            metrics.jsonl    one line a step
report.json      how it went                       events.jsonl     the event stream
checkpoints/     see luban.recipes.checkpoint      lock             held while a training runs
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luban.errors import ConfigError, LubanError


def fresh(recipe: str) -> Path:
    """A name under runs/ that nothing has yet."""
    stem = Path("runs") / f"{recipe}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = stem, 2
    while path.exists():
        path, number = Path(f"{stem}-{number}"), number + 1
    return path


def find(out: str | None, recipe: str) -> Path:
    """The run to resume: `out`, or the newest of the recipe under runs/. Raises ConfigError when there is none."""
    if out is None:
        found = sorted(Path("runs").glob(f"{recipe}-*/config.json"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise ConfigError(f"there is no {recipe} run under runs/ to resume; name one with --out")
        return found[-1].parent
    if not (Path(out) / "config.json").is_file():
        raise ConfigError(f"{out} holds no run to resume; leave --resume out to start one there")
    return Path(out)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. Raises ConfigError when it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {path}: {e}; put it right or start a new run with another --out") from e
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; put it right or start a new run with another --out")
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes an object whole or not at all. Raises LubanError when the disk refuses."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise LubanError(f"cannot write {path}: {e.strerror}; free some space or choose another --out") from e


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Makes the directory and holds its lock; the kernel lets go of it even when the process dies.

    Raises ConfigError when the directory cannot be written or another training is at work in it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = open(path / "lock", "a+")
    except OSError as e:
        raise ConfigError(f"cannot write into {path}: {e.strerror}; choose another --out") from e
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            raise ConfigError(
                f"another training (process {owner}) is at work in {path}; wait for it or choose another --out"
            ) from e
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, it only names nobody
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), str(os.getpid()).encode())
        yield


class Metrics:
    """metrics.jsonl: one object a line, each written at once so that a reader sees it."""

    def __init__(self, path: Path, keep_until: int):
        """Opens the file, keeping lines of steps up to `keep_until`: what a resumed run will do again is dropped.

        Raises LubanError when the disk refuses.
        """
        self._path = path
        temporary = path.with_name(path.name + ".tmp")
        try:
            kept = [line for line in _lines(path) if _step(line) <= keep_until]
            temporary.write_text("".join(kept))
            os.replace(temporary, path)
            self._file = open(path, "a", buffering=1)
        except OSError as e:
            raise self._refused(e) from e

    def write(self, **values: Any) -> None:
        """Appends one line. Raises LubanError when the disk refuses."""
        try:
            self._file.write(json.dumps(values) + "\n")
        except OSError as e:
            raise self._refused(e) from e

    def _refused(self, error: OSError) -> LubanError:
        return LubanError(f"cannot write {self._path}: {error.strerror}; free some space and continue with --resume")

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def _lines(path: Path) -> list[str]:
    """The whole lines of a file that may not exist or end in the middle of one."""
    if not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a line; infinity for one that a crash left unreadable, so that it is dropped like a torn one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
