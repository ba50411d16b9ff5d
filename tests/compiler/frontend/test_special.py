"""lgamma, digamma, its derivatives and erfinv over their ranges, at poles and zeros, beside torch in float64."""

from __future__ import annotations

import math

import pytest
import torch

import luban

ENDS = [0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, 0.5, -0.5, -1.5, 7.99, 8.0, 171.0]


def arguments():
    made = torch.Generator().manual_seed(0)
    draw = lambda n: torch.rand(n, generator=made, dtype=torch.float64)  # noqa: E731
    poles = torch.tensor([-1.0, -2.0, -30.0], dtype=torch.float64)
    near = torch.cat([1 + draw(500) * 1e-3, 2 + draw(500) * 1e-3, -2 + draw(500) * 1e-3])
    return torch.cat([torch.tensor(ENDS, dtype=torch.float64), poles, draw(5000) * 40 - 10, draw(500) * 1e4, near])


CASES = {
    "lgamma": (torch.lgamma, 2e-14),
    "digamma": (torch.digamma, 1e-9),  # next to poles torch loses digits
    "trigamma": (lambda x: torch.polygamma(1, x), 2e-9),
    "mvlgamma": (lambda x: torch.mvlgamma(x.abs() + 1.1, 2), 1e-13),
}


@pytest.mark.parametrize("name", CASES)
def test_gamma_functions(name):
    torch._dynamo.reset()
    function, tolerance = CASES[name]
    compiled, x = luban.compile(function), arguments()
    if name == "trigamma":
        x = x[~((x < 0) & (x.floor() == x))]  # at poles torch gives a large number, Luban infinity
    with luban.report() as report:
        torch.testing.assert_close(compiled(x), function(x), rtol=tolerance, atol=tolerance, equal_nan=True)
        single = x.float()
        want = function(single.double()).float()
        torch.testing.assert_close(compiled(single), want, rtol=3e-7, atol=3e-7, equal_nan=True)
    assert report.fallbacks == []


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-7), (torch.float64, 1e-11), (torch.bfloat16, 8e-3)])
def test_erfinv(dtype, tolerance):
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(0)
    ends = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -2.0, math.nan, 0.7, -0.7, 1e-20, 1 - 1e-6])
    y = torch.cat([ends, torch.rand(5000, generator=made) * 2 - 1]).to(dtype)
    ours, want = luban.compile(torch.erfinv)(y), torch.erfinv(y.double())
    torch.testing.assert_close(ours.double(), want.to(dtype).double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(ours.signbit()[:2], y.signbit()[:2])


def test_gradients():
    torch._dynamo.reset()
    f = lambda x: (torch.lgamma(x) + torch.digamma(x) + torch.erfinv(x / 10)).sum()  # noqa: E731
    ours, want = (torch.linspace(0.3, 9, 50, dtype=torch.float64).requires_grad_() for _ in range(2))
    with luban.report() as report:
        luban.compile(f)(ours).backward()
    f(want).backward()
    torch.testing.assert_close(ours.grad, want.grad, rtol=1e-9, atol=1e-9)
    assert report.fallbacks == []


@pytest.mark.parametrize("n", [2, 3, 4])
def test_higher_derivatives_of_digamma(n):
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(n)
    x = torch.rand(3000, generator=made, dtype=torch.float64) * 30 - 8
    x = torch.cat([x[(x - x.round()).abs() > 1e-2], torch.tensor([math.nan, 1e-3, 40.0, 1e4], dtype=torch.float64)])
    f = lambda x: torch.polygamma(n, x)  # noqa: E731
    torch.testing.assert_close(luban.compile(f)(x), f(x), rtol=1e-9, atol=1e-9, equal_nan=True)
    ours, want = (torch.linspace(0.3, 9, 50, dtype=torch.float64).requires_grad_() for _ in range(2))
    luban.compile(f)(ours).sum().backward()
    f(want).sum().backward()
    torch.testing.assert_close(ours.grad, want.grad, rtol=1e-9, atol=1e-9)


def test_adam_in_a_compiled_step_has_its_fused_multiply_add():
    torch._dynamo.reset()
    f = lambda x, y, z: torch.ops.prims.fma(x, y, z)  # noqa: E731
    x, y, z = (torch.randn(9, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(luban.compile(f)(x, y, z), x * y + z)
