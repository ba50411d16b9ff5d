"""The event stream: what is written is read back, whole lines only, and nothing is written when it is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from luban import events
from luban.errors import ConfigError, LubanError


@pytest.fixture
def stream(tmp_path):
    yield tmp_path / "events.jsonl"
    events.stop()


def test_spans_and_counters_come_back_in_order(stream):
    with events.record(stream):
        events.span("gemm", "kernel", 10, 35, flops=128, shape=[2, 3])
        events.counter("arena", "memory", 4096, unit="bytes")
    span, counter = events.read(stream)
    assert span == {"name": "gemm", "cat": "kernel", "start": 10, "end": 35, "args": {"flops": 128, "shape": [2, 3]}}
    assert (counter["name"], counter["cat"], counter["value"], counter["args"]) == (
        "arena",
        "memory",
        4096,
        {"unit": "bytes"},
    )
    assert counter["at"] > 0


def test_a_timed_block_is_a_span_even_when_it_fails(stream):
    with events.record(stream), pytest.raises(ValueError), events.timed("work", "test", n=1):
        raise ValueError
    (span,) = events.read(stream)
    assert span["end"] >= span["start"] and span["args"] == {"n": 1}


def test_nothing_is_kept_while_recording_is_off(stream):
    assert not events.enabled
    events.span("lost", "test", 1, 2)
    events.counter("lost", "test", 1)
    with events.timed("lost", "test"):
        pass
    with events.record(stream):
        assert events.enabled
    assert events.read(stream) == []


def test_a_growing_stream_can_be_read(stream):
    with events.record(stream):
        events.span("a", "test", 1, 2)
        events.flush()
        assert [e["name"] for e in events.read(stream)] == ["a"]
        with open(stream, "ab") as f:
            f.write(b'{"name": "half')
        assert [e["name"] for e in events.read(stream)] == ["a"]


def test_recording_again_appends(stream):
    for name in ("first", "second"):
        with events.record(stream):
            events.span(name, "test", 1, 2)
    assert [e["name"] for e in events.read(stream)] == ["first", "second"]
    headers = [line for line in stream.read_text().splitlines() if "luban_events" in json.loads(line)]
    assert len(headers) == 2


def test_threads_lose_no_event(stream):
    def work(k):
        for i in range(3000):
            events.span(f"{k}-{i}", "test", i, i + 1)

    with events.record(stream):
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    names = [e["name"] for e in events.read(stream)]
    assert len(names) == 12000 and len(set(names)) == 12000


def test_a_forked_child_does_not_write_the_parents_events(stream):
    with events.record(stream):
        events.span("parent", "test", 1, 2)
        child = os.fork()
        if child == 0:
            events.span("child", "test", 1, 2)
            events.stop()
            os._exit(0)
        os.waitpid(child, 0)
    assert [e["name"] for e in events.read(stream)] == ["parent"]


def test_one_recording_at_a_time(stream, tmp_path):
    with events.record(stream), pytest.raises(ConfigError, match="already"):
        events.start(tmp_path / "other")


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        events.start(tmp_path / "nowhere" / "events.jsonl")
    with pytest.raises(ConfigError, match="absent"):
        events.read(tmp_path / "absent")
    assert not events.enabled


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x").write_text('{"name": "a", "cat": "b", "start": 1, "end": 2}\nhello\n')
    with pytest.raises(LubanError, match="line 2"):
        events.read(tmp_path / "x")


def test_a_full_disk_ends_the_recording_but_not_the_work(stream, monkeypatch):
    events.start(stream)

    def refuse(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(events.os, "write", refuse)
    events.span("a", "test", 1, 2)
    with pytest.warns(RuntimeWarning, match="No space left"):
        events.flush()
    assert not events.enabled
    events.span("b", "test", 1, 2)


def test_events_import_no_torch():
    code = "import luban.events, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
