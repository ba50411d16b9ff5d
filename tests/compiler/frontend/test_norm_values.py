"""A layer norm's result as a pointwise function: the same values, and not kept for the backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func

import luban
from luban.compiler.frontend.dynamo import _partition


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "inner"), [((7, 300), 1), ((2, 3, 33), 2), ((1, 5), 1), ((0, 5), 1)])
def test_values_and_gradients(weight, bias, dtype, shape, inner):
    gen = torch.Generator().manual_seed(sum(shape))
    make = lambda *s: torch.randn(*s, generator=gen).to(dtype)  # noqa: E731
    size = shape[-inner:]
    given = [make(*shape), make(*size) if weight else None, make(*size) if bias else None, make(shape[-1], 4)]

    def function(x, w, b, v):
        return F.layer_norm(x.exp(), size, w, b) @ v

    def run(f, cast):
        leaves = [None if x is None else cast(x).requires_grad_() for x in given]
        out = f(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x is not None)]

    want = run(function, lambda x: x.detach().double())
    eager = run(function, lambda x: x.detach().clone())
    found = run(luban.compile(function, fallback="error"), lambda x: x.detach().clone())
    for f, e, w in zip(found, eager, want, strict=True):
        assert f.dtype == e.dtype and f.shape == e.shape
        error = lambda x: float((x.double() - w).abs().max()) if w.numel() else 0.0  # noqa: B023, E731
        scale = float(w.abs().max()) if w.numel() else 0.0
        slack = (
            64 if dtype is torch.float64 else 8
        )  # eager is the reference there, with the rounding of sums of its own
        assert error(f) <= 2 * error(e) + slack * torch.finfo(dtype).eps * scale


def test_not_a_number_and_infinity_pass_through():
    x = torch.randn(5, 64)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    function = lambda x, v: F.layer_norm(x, (64,)) @ v  # noqa: E731
    leaves = [[x.clone().requires_grad_(), torch.ones(64, 2, requires_grad=True)] for _ in range(2)]
    for f, pair in zip((function, luban.compile(function, fallback="error")), leaves, strict=True):
        f(*pair).sum().backward()
    for a, b in zip(*leaves, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_result_is_not_kept():
    x, w, v = torch.randn(64, 32, requires_grad=True), torch.ones(32, requires_grad=True), torch.randn(32, 32)
    v.requires_grad_()
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    function = lambda x, w, v: F.layer_norm(x, (32,), w) @ v  # noqa: E731
    aot_function(function, fw_compiler=keep, bw_compiler=keep, partition_fn=_partition)(x, w, v).sum().backward()
    kept = [n for n in graphs[0].graph.output_node().args[0][1:] if n.op != "placeholder"]
    sizes = sorted(n.meta["val"].numel() for n in kept)
    assert sizes[:2] == [64, 64] and x.numel() not in sizes  # mean and reciprocal deviation of each row


def test_with_any_number_of_rows():
    net = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    compiled = luban.compile(net, dynamic=True, fallback="error")
    for rows in (3, 8, 33):
        x = torch.randn(rows, 16)
        net.zero_grad()
        net(x).square().sum().backward()
        want = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        compiled(x).square().sum().backward()
        for a, p in zip(want, net.parameters(), strict=True):
            assert torch.allclose(a, p.grad, rtol=1e-4, atol=1e-4)
