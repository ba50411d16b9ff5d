"""Outputs that nobody differentiates: gradients as without the shortcut, and no step writes the shared zeros."""

from __future__ import annotations

import pytest
import torch

from luban.compiler.frontend import no_tangents


class Heads(torch.nn.Module):
    """Three outputs from one layer: one itself, one reduced, one scaled."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 16)

    def forward(self, x):
        y = self.layer(x)
        return y, y.square().mean(), 3 * y.t()


def gradients(model, call, x, which):
    model.zero_grad()
    torch.autograd.backward([call(x)[i].sum() for i in which])
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2), (1,)])
def test_gradients_of_some_outputs(which):
    torch.manual_seed(0)
    model = Heads()
    x = torch.randn(4, 8)
    fast = torch.compile(model, backend="luban", options={"fallback": "error"})
    for now in ((0,), which, (1,), which):  # the second call takes another way than the first
        ours, eager = gradients(model, fast, x, now), gradients(model, model, x, now)
        torch.testing.assert_close(ours, eager)
    assert all(not pages.any() for pages in no_tangents._pages)


def test_no_zeros_are_made(monkeypatch):
    asked = []
    made = no_tangents.zeros
    monkeypatch.setattr(no_tangents, "zeros", lambda *args: asked.append(args) or made(*args))
    model = Heads()
    fast = torch.compile(model, backend="luban", options={"fallback": "error"})
    for _ in range(3):
        fast(torch.ones(4, 8))[1].backward()
    assert [((4, 16), (16, 1), torch.float32)] == asked[:1] and len(asked) >= 2


def test_a_gradient_that_is_a_tangent_may_be_written():
    """The gradient of x is the tangent of x + 0 * y itself: zeros of its own, as sums of gradients go into it."""
    fast = torch.compile(lambda x, y: (x + y, x * y), backend="luban", options={"fallback": "error"})
    x, y = torch.randn(64, 1024, requires_grad=True), torch.randn(64, 1024)
    for _ in range(3):
        fast(x, y)[1].sum().backward()
        fast(x, y)[0].sum().backward()
    torch.testing.assert_close(x.grad, 3 * y + 3)
    z = torch.randn(64, 1024, requires_grad=True)
    through = torch.compile(lambda z: (z.view(-1) + 1, z.sum()), backend="luban", options={"fallback": "error"})
    for _ in range(3):
        through(z)[1].backward()
        z.grad.add_(1)
    torch.testing.assert_close(z.grad, torch.full_like(z, 6.0))
    assert all(not pages.any() for pages in no_tangents._pages)


def test_open_sizes_and_operators_in_eager():
    model = Heads()
    for options, dynamic in (({"fallback": "error"}, True), ({"fallback": "allow"}, False)):
        fast = torch.compile(model, backend="luban", options=options, dynamic=dynamic)
        for n in (4, 7, 4):
            x = torch.randn(n, 8)
            torch.testing.assert_close(gradients(model, fast, x, (1,)), gradients(model, model, x, (1,)))
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zeros_of_any_layout(dtype):
    for sizes, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((), ()), ((0, 4), (4, 1)), ((5,), (0,))):
        found = no_tangents.zeros(sizes, strides, dtype)
        assert (tuple(found.shape), found.stride(), found.dtype) == (sizes, strides, dtype) and not found.any()


class Watched(torch.autograd.Function):
    """Notes whether its gradients came as tensors."""

    seen: list[bool] = []

    @staticmethod
    def forward(ctx, x):
        return x * 1, x * 2

    @staticmethod
    def backward(ctx, a, b):
        Watched.seen.append(a is not None and b is not None)
        return a + 2 * b


def test_functions_of_others_keep_their_zeros():
    """An output that is an input belongs to another node; so does one of a graph with open sizes, which needs its zeros."""
    fast = torch.compile(lambda a: (a, a * 2, a + 1), backend="luban", options={"fallback": "error"})
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        a, _ = Watched.apply(x)
        fast(a)[1].sum().backward()
    assert Watched.seen == [True] * 3
    torch.testing.assert_close(x.grad, torch.full((4,), 6.0))
    first = torch.compile(lambda v: (v * 2, v * 3), backend="luban", options={"fallback": "error"}, dynamic=True)
    y = torch.randn(6, requires_grad=True)
    for _ in range(3):
        fast(first(y)[0])[1].sum().backward()
    torch.testing.assert_close(y.grad, torch.full((6,), 12.0))
