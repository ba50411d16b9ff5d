"""A model that cannot run on what it is given: one sentence with the operation, the place and torch's reason."""

from __future__ import annotations

import logging
import traceback

import pytest
import torch
import torch.nn as nn

import luban
from luban.errors import ConfigError


class Mismatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        y = self.second(self.first(x))
        return y + torch.zeros(7)


LINE = Mismatched.forward.__code__.co_firstlineno + 2


def view(x):
    return x.view(5, 5)


def index(x):
    return x[3]


def after_a_break(x):
    y = x + 1
    print("a graph break")
    return y @ y


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


CASES = [
    (Mismatched(), RuntimeError, rf"cannot run add on \[2, 3\], \[7\] at .*test_model_errors\.py:{LINE}: .*7.*; check"),
    (view, RuntimeError, r"cannot run view on \[2, 4\] at .*test_model_errors\.py:\d+: shape '\[5, 5\]' is invalid"),
    (index, IndexError, r"fails at .*test_model_errors\.py:\d+: index 3 is out of bounds"),
    (after_a_break, RuntimeError, r"cannot run matmul on \[2, 4\], \[2, 4\] at .*test_model_errors\.py:\d+"),
    (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(6, 3)),
        RuntimeError,
        r"cannot run linear on \[2, 5\], \[3, 6\], \[3\] in the call at .*test_model_errors\.py:\d+: .*check shapes",
    ),
]


@pytest.mark.parametrize("fallback", ["error", "allow"])
@pytest.mark.parametrize("model, kind, said", CASES)
def test_one_sentence(model, kind, said, fallback, caplog, capfd):
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match=said) as caught:
        luban.compile(model, fallback=fallback)(torch.zeros(2, 4))
    error = caught.value
    assert isinstance(error, kind), "code that waits for torch's error gets one"
    assert "\n" not in str(error) and isinstance(error.__cause__, kind) and error.__cause__.__traceback__ is None
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR] and capfd.readouterr().err == ""


def test_everything_with_luban_debug(monkeypatch):
    monkeypatch.setenv("LUBAN_DEBUG", "1")
    with pytest.raises(ConfigError) as caught:
        luban.compile(view)(torch.zeros(2, 4))
    shown = "".join(traceback.format_exception(caught.value))
    assert "symbolic_convert.py" in shown and "The above exception was the direct cause" in shown


def test_a_later_call_with_sizes_that_fit():
    compiled = luban.compile(Mismatched().first)
    with pytest.raises(ConfigError, match=r"linear on \[2, 9\], \[5, 4\]"):
        compiled(torch.zeros(2, 9))
    assert compiled(torch.zeros(2, 4)).shape == (2, 5)
