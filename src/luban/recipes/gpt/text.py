"""The text to train on: the Python library's own sources, or a file or folder of the user's."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from luban.errors import ConfigError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_HELD_OUT_EVERY = 10  # one document in so many is held out


def documents(path: str | None) -> list[bytes]:
    """The texts below `path`, or the Python library's sources for None, in the order of their names.

    Raises ConfigError when nothing there can be read as UTF-8 text.
    """
    if path is None:
        return _library()
    root = Path(path)
    if root.is_dir():
        found = _readable(sorted(p for p in root.rglob("*") if p.is_file() and not _hidden(p.relative_to(root))))
        if not found:
            raise ConfigError(f"the folder {path} holds no UTF-8 text; give a folder or a file that does")
        return found
    return [_one_file(root)]


def split(found: list[bytes]) -> tuple[bytes, bytes]:
    """(training text, held-out text). Whole documents are held out where there are enough, else the end of the text."""
    if len(found) >= 2 * _HELD_OUT_EVERY:
        held = found[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
        kept = [d for i, d in enumerate(found) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1]
        return b"\n".join(kept), b"\n".join(held)
    whole = b"\n".join(found)
    cut = len(whole) - len(whole) // _HELD_OUT_EVERY
    return whole[:cut], whole[cut:]


def _library() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    found = _readable(sorted(p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(p.parts)))
    if not found:
        raise ConfigError(f"this Python has no library sources in {root}; give a text with --text PATH")
    return found


def _readable(paths: list[Path]) -> list[bytes]:
    texts = []
    for path in paths:
        try:
            data = path.read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue  # a folder may hold pictures and the like; a file named by the user is an error instead
        if data and b"\0" not in data:
            texts.append(data)
    return texts


def _one_file(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read the text {path}: {e.strerror}; give a UTF-8 text file or a folder") from e
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text: byte {e.start} is not UTF-8; give a UTF-8 text file or a folder") from e
    return data


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)
