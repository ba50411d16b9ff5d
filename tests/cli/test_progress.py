"""The progress line on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from luban.cli import progress
from luban.cli.progress import Progress, clock


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves."""
    hand = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: hand[0])
    monkeypatch.setenv("TERM", "xterm")
    return hand


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (65.4, "1:05"), (3599.6, "1:00:00"), (7265, "2:01:05"), (-3, "0:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_elsewhere_a_line_now_and_then(now):
    out = io.StringIO()
    bar = Progress("job", 100, stream=out)
    for i in range(1, 101):
        now[0] += 1.0
        bar.update(i, f"loss {1 / i:.2f}")
    bar.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 7, "one in 15 seconds and the last"
    assert lines[0] == "job 15/100  loss 0.07  1:25 left"
    assert lines[-1] == "job 100/100  loss 0.01  1:40 in all"


def test_on_a_terminal_a_bar_that_is_redrawn(now):
    out = Terminal()
    bar = Progress("job", 4, stream=out)
    for i in range(1, 5):
        now[0] += 1.0
        bar.update(i, "loss 0.5")
    bar.note("saved")
    bar.close()
    shown = out.getvalue()
    assert "█" in shown and "░" in shown and "0:02 left" in shown and shown.count("\r") == 8
    assert shown.endswith("saved\n")


def test_time_left_counts_from_where_a_resumed_run_began(now):
    out = io.StringIO()
    bar = Progress("job", 100, done=80, stream=out)
    now[0] += 20.0
    bar.update(90)
    assert "0:20 left" in out.getvalue()
