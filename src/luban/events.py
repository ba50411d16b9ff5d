"""The one event stream: spans and counters that every layer writes and every tool reads.

A stream is a file of JSON lines. The first line of a recording says which clock it uses; each further one is a span
    {"name", "cat", "start", "end", "args"}     nanoseconds of the monotonic clock (`time.perf_counter_ns`)
or a counter
    {"name", "cat", "at", "value", "args"}
`args` is left out when empty. Only whole lines are written, in one append each, so a stream can be read while it grows.

Nothing is recorded until `start` or `record`. A hot path asks the flag `enabled` first:

    if events.enabled:
        events.span("kernel_3", "kernel", begin, end, flops=n)
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from luban.errors import ConfigError, LubanError

VERSION = 1
enabled = False  # True while a recording is on; the only thing that code pays for when it is off

_FLUSH_EVENTS = 512
_FLUSH_NS = 500_000_000

_lock = threading.Lock()
_buffer: list[tuple] = []
_descriptor = -1
_path = ""
_flushed_at = 0


def start(path: str | os.PathLike) -> None:
    """Starts recording into `path`; lines are appended when it exists.

    Raises ConfigError when a recording is already on or the file cannot be opened.
    """
    global enabled, _descriptor, _path, _flushed_at
    with _lock:
        if enabled:
            raise ConfigError(f"events are already being recorded into {_path}; stop that recording first")
        try:
            _descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise ConfigError(
                f"cannot record events into {os.fspath(path)}: {e.strerror}; choose a writable file"
            ) from e
        _path, _flushed_at = os.fspath(path), time.perf_counter_ns()
        _buffer.clear()
        header = {"luban_events": VERSION, "pid": os.getpid(), "monotonic_ns": _flushed_at, "unix_ns": time.time_ns()}
        enabled = True
        _write(json.dumps(header) + "\n")


def stop() -> None:
    """Ends the recording, writing what is buffered. Does nothing when none is on."""
    global enabled, _descriptor
    with _lock:
        if enabled:
            _flush()
        if _descriptor >= 0:
            os.close(_descriptor)
        enabled, _descriptor = False, -1


@contextlib.contextmanager
def record(path: str | os.PathLike) -> Iterator[None]:
    """Records everything inside the block into `path`. See `start` for the errors."""
    start(path)
    try:
        yield
    finally:
        stop()


def span(name: str, category: str, start_ns: int, end_ns: int, **args: Any) -> None:
    """Something that took from start_ns to end_ns on the monotonic clock. `args` are JSON values of your own."""
    if enabled:
        _append((name, category, start_ns, end_ns, args))


def counter(name: str, category: str, value: float, **args: Any) -> None:
    """A number that changes over time, measured now."""
    if enabled:
        _append((name, category, time.perf_counter_ns(), None, args, value))


@contextlib.contextmanager
def timed(name: str, category: str, **args: Any) -> Iterator[None]:
    """A span around a block."""
    if not enabled:
        yield
        return
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        span(name, category, begin, time.perf_counter_ns(), **args)


def flush() -> None:
    """Writes what is buffered, so that a reader sees it."""
    with _lock:
        _flush()


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The spans and counters of a stream, in the order written; headers are dropped.

    A last line that is still being written is left out. Raises ConfigError when the file cannot be opened and
    LubanError when a whole line of it is not an event.
    """
    try:
        with open(path, "rb") as f:
            lines = f.read().split(b"\n")[:-1]
    except OSError as e:
        raise ConfigError(f"cannot read events from {os.fspath(path)}: {e.strerror}") from e
    found = []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            is_header = "luban_events" in event
            if not is_header and not {"name", "cat"} <= event.keys():
                raise ValueError
        except (ValueError, TypeError, AttributeError) as e:
            raise LubanError(f"line {number} of {os.fspath(path)} is not an event; is this an events file?") from e
        if not is_header:
            found.append(event)
    return found


def _append(event: tuple) -> None:
    _buffer.append(event)
    if len(_buffer) >= _FLUSH_EVENTS or time.perf_counter_ns() - _flushed_at > _FLUSH_NS:
        flush()


def _flush() -> None:
    global _flushed_at
    if not enabled:
        return
    taken = _buffer[: len(_buffer)]
    del _buffer[: len(taken)]  # by count: other threads append meanwhile without the lock
    _flushed_at = time.perf_counter_ns()
    if taken:
        _write("".join(_line(event) for event in taken))


def _line(event: tuple) -> str:
    name, category, begin, end, args = event[:5]
    out: dict[str, Any] = {"name": name, "cat": category}
    out.update({"at": begin, "value": event[5]} if end is None else {"start": begin, "end": end})
    if args:
        out["args"] = args
    return json.dumps(out, default=str) + "\n"


def _write(text: str) -> None:
    """Appends whole lines. A full disk ends the recording with a warning: it must not end the work that is recorded."""
    global enabled
    data = text.encode()
    try:
        while data:
            data = data[os.write(_descriptor, data) :]
    except OSError as e:
        enabled = False
        warnings.warn(f"recording of events into {_path} ended: {e.strerror}", RuntimeWarning, stacklevel=2)


def _forget_in_child() -> None:
    """After a fork the stream belongs to the parent; the child must not write the parent's buffer again."""
    global enabled, _lock
    enabled, _lock = False, threading.Lock()
    _buffer.clear()


os.register_at_fork(after_in_child=_forget_in_child)
