"""Nothing runs outside Luban unseen: an error with fallback="error", else a warning and an entry in the report."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn

import luban
from luban.errors import ConfigError, LubanError, UnsupportedOperatorError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@torch._dynamo.disable
def disabled(x):
    return x.sin() * 2


@torch.compiler.disable(recursive=False)
def disabled_alone(x):
    return x.sin() * 2


def calls_disabled(x):
    return disabled(x + 1) + 1


def only_calls_disabled(x):
    return disabled(x)


def calls_disabled_alone(x):
    return disabled_alone(x + 1) + 1


def breaks_in_a_loop(x):
    for _ in range(3):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def breaks_in_a_try(x):
    try:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2
    finally:
        pass


class Manager:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def breaks_in_a_manager(x):
    with Manager():
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2


def takes_what_is_positive(x):
    return x[x > 0] + 1


def asks_whether_equal(x):
    return x + 1 if torch.equal(x, x) else x


LEFT = {
    calls_disabled: "disabled (",
    only_calls_disabled: "disabled (",
    calls_disabled_alone: "disabled_alone (",
    breaks_in_a_loop: "breaks_in_a_loop (",
    breaks_in_a_try: "breaks_in_a_try (",
    breaks_in_a_manager: "breaks_in_a_manager (",
    takes_what_is_positive: "aten.nonzero.default",
    asks_whether_equal: "aten.equal.default",
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_what_dynamo_leaves_to_eager_is_an_error(function):
    with pytest.raises(LubanError) as caught:
        luban.compile(function)(X)
    text = str(caught.value)
    assert LEFT[function] in text and "test_outside.py:" in text and 'fallback="allow"' in text and "\n" not in text
    assert isinstance(caught.value, UnsupportedOperatorError) == LEFT[function].startswith("aten")
    with pytest.raises(LubanError):  # and is one at every call
        luban.compile(function)(X)


@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_or_is_warned_of_and_counted(function):
    with luban.report() as report, pytest.warns(UserWarning, match="Luban leaves to eager"):
        ours = torch.compile(function, backend="luban")(X)
    assert torch.allclose(ours, function(X))
    assert len(report.fallbacks) == 1 and report.fallbacks[0].startswith(LEFT[function])


def breaks_at_print(x):
    y = x * 2
    print("a graph break")
    return y + 1


def breaks_at_item(x):
    y = x * 2
    return y + y.sum().item()


def breaks_in_a_callee(x):
    return breaks_at_print(x) * 3


def logs(x):
    y = x * 2
    logging.getLogger(__name__).info("seen")
    return y + 1


def trains(x):
    w = torch.ones(4, requires_grad=True)
    (w * x).sum().backward()
    return w.grad + 1


@pytest.mark.filterwarnings("error:Luban")
@pytest.mark.parametrize("function", [breaks_at_print, breaks_at_item, breaks_in_a_callee, logs, trains])
@pytest.mark.parametrize("fallback", ["error", "allow"])
def test_graph_breaks_are_not_outside(function, fallback):
    with luban.report() as report:
        assert torch.allclose(luban.compile(function, fallback=fallback)(X), function(X))
    assert report.fallbacks == [] and report.graphs >= 1


def scaled():
    return lambda x: x * 2 + 1


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_the_recompile_limit_is_an_error(limit):
    compiled = luban.compile(scaled(), dynamic=False)
    with torch._dynamo.config.patch({limit: 2}):
        for n in (2, 3):
            compiled(torch.zeros(n))
        for _ in range(2):
            with pytest.raises(LubanError, match=rf"compiled 2 times, .*config\.{limit}.*mark_dynamic"):
                compiled(torch.zeros(4))
        assert torch.equal(compiled(torch.zeros(3)), torch.ones(3)), "what was compiled stays"


def test_the_recompile_limit_is_warned_of_and_counted():
    compiled = luban.compile(scaled(), dynamic=False, fallback="allow")
    with torch._dynamo.config.patch(recompile_limit=2), luban.report() as report:
        for n in (2, 3):
            compiled(torch.zeros(n))
        with pytest.warns(UserWarning, match="compiled 2 times"):
            assert torch.equal(compiled(torch.zeros(4)), torch.ones(4))
        assert torch.equal(compiled(torch.zeros(5)), torch.ones(5))
    assert report.graphs == 2 and len(report.fallbacks) == 1 and "test_outside.py" in report.fallbacks[0]


def test_the_users_own_exception_is_not_hidden():
    def refuses(x):
        y = x + 1
        raise ValueError(f"no {y.shape[0]}")

    with pytest.raises(ValueError, match="no 3") as caught:
        luban.compile(refuses)(X)
    assert not isinstance(caught.value, LubanError)


def test_recurrent_layers_that_dynamo_skips():
    layer = nn.LSTM(4, 5)
    with torch._dynamo.config.patch(allow_rnn=False):
        with luban.report() as report, pytest.warns(UserWarning, match="does not support RNN"):
            torch.compile(layer, backend="luban")(X)
        assert len(report.fallbacks) == 1
        torch._dynamo.reset()
        with pytest.raises(LubanError, match="RNN"):
            torch.compile(layer, backend="luban", options={"fallback": "error"})(X)


def test_a_torch_compile_that_is_turned_off(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ConfigError, match="TORCHDYNAMO_DISABLE"):
        luban.compile(scaled())
    assert torch.equal(luban.compile(scaled(), fallback="allow")(torch.zeros(2)), torch.ones(2))


@pytest.mark.filterwarnings("error:Luban")
def test_other_backends_are_left_alone():
    luban.compile(scaled())(X)
    with luban.report() as report:
        for function in (calls_disabled, breaks_in_a_loop, takes_what_is_positive):
            assert torch.equal(torch.compile(function, backend="eager")(X), function(X))
    assert report.fallbacks == []
