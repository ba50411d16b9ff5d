"""Operators without kernels: one error that lists them all, or eager between compiled parts, counted and right."""

from __future__ import annotations

import pytest
import torch

import luban
from luban.errors import UnsupportedOperatorError


def several(x):
    """Operators with several results, with effects, and with none of ours between them."""
    a = torch.linalg.inv(x.relu() + 3 * torch.eye(x.shape[-1])) * 2 + 1
    values, places = torch.linalg.qr(a)
    return (values.sum(0) * 0.5).exp(), places + 1, torch.linalg.svdvals(a + 1) * 2


def test_the_error_lists_every_operator_with_its_place():
    with pytest.raises(UnsupportedOperatorError) as caught:
        luban.compile(several)(torch.randn(3, 3))
    listed = " ".join(caught.value.operators)
    for operator in ("aten.linalg_inv_ex", "aten.linalg_qr", "aten._linalg_svd"):
        assert operator in listed
    assert "test_fallback.py" in listed and 'fallback="allow"' in str(caught.value)


def test_allowed_operators_run_in_eager_and_are_counted():
    compiled, x = luban.compile(several, fallback="allow"), torch.randn(3, 3)
    with luban.report() as report, pytest.warns(UserWarning, match="aten.linalg_qr"):
        ours = compiled(x)
    for got, want in zip(ours, several(x), strict=True):
        torch.testing.assert_close(got, want)
    assert {"aten.linalg_qr.default", "aten.linalg_inv_ex.default"} <= set(report.fallbacks)
    assert report.graphs >= 2 and len(report.kernels) >= 2


@pytest.mark.filterwarnings("ignore:Luban runs these")
def test_gradients_through_fallbacks():
    e = 5 * torch.eye(4)
    compiled = luban.compile(lambda x: torch.linalg.inv(x.relu() * 2 + e).cumsum(0).square() * 3, fallback="allow")
    f = lambda x: torch.linalg.inv(x.relu() * 2 + e).cumsum(0).square() * 3  # noqa: E731
    x = torch.randn(4, 4)
    ours, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(ours).sum().backward()
    f(want).sum().backward()
    torch.testing.assert_close(ours.grad, want.grad)


@pytest.mark.filterwarnings("ignore:Luban runs these")
def test_fallbacks_with_dynamic_sizes():
    f = lambda x: torch.linalg.qr(x.relu() * 2 + x)[1].sum(0) * x.shape[0]  # noqa: E731
    compiled = luban.compile(f, fallback="allow", dynamic=True)
    with luban.report() as report:
        for n in (4, 5, 9):
            x = torch.randn(n, 3)
            torch.testing.assert_close(compiled(x), f(x))
    assert report.graphs == 2 and report.fallbacks == ["aten.linalg_qr.default"]


def test_without_unsupported_operators_nothing_falls_back():
    with luban.report() as report:
        torch.compile(lambda x: x.tanh().sum(), backend="luban")(torch.randn(9))
    assert report.fallbacks == [] and report.graphs == 1


def test_a_training_step_refuses_what_it_cannot_compile():
    model = torch.nn.Linear(3, 3)
    step = luban.train_step(
        model, lambda o, t: torch.linalg.qr(o)[1].mean(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(UnsupportedOperatorError, match="aten.linalg_qr"):
        step(torch.randn(4, 3), torch.randn(4, 3))


def test_an_operator_with_effects_is_listed_by_its_own_name():
    def prints(x):
        torch.ops.aten._print("hello")
        return x + 1

    with pytest.raises(UnsupportedOperatorError, match=r"aten\._print\.default \(.*test_fallback\.py") as caught:
        luban.compile(prints)(torch.randn(3))
    assert "with_effects" not in str(caught.value)
