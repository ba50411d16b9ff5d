"""masked_scatter, forward and backward, beside torch."""

from __future__ import annotations

import pytest
import torch

import luban


@pytest.mark.parametrize("dynamic", [False, True], ids=["known sizes", "open sizes"])
@pytest.mark.parametrize("shape", [(5,), (3, 4, 7), (40, 30)], ids=str)
def test_masked_scatter(shape, dynamic):
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(0)
    mask = torch.rand(shape[-1:] if len(shape) == 2 else shape, generator=made) > 0.5
    pair = []
    for _ in range(2):
        made.manual_seed(1)
        pair.append([torch.randn(n, generator=made).requires_grad_() for n in (shape, (41, 33))])
    f = lambda x, s: (x * 2).masked_scatter(mask, s * 3)  # noqa: E731
    with luban.report() as report:
        ours, want = luban.compile(f, dynamic=dynamic)(*pair[0]), f(*pair[1])
        torch.testing.assert_close(ours, want)
        ours.square().sum().backward()
    want.square().sum().backward()
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert report.fallbacks == []


def test_edges():
    torch._dynamo.reset()
    x, s = torch.zeros(3, 2, dtype=torch.int64), torch.arange(9)
    f = lambda x, s: (x.masked_scatter(x == 0, s), x.masked_scatter(x != 0, s), x[:0].masked_scatter(x[:0] == 0, s))  # noqa: E731
    for a, b in zip(luban.compile(f)(x, s), f(x, s), strict=True):
        assert torch.equal(a, b)


def test_a_source_that_is_too_short_is_an_error():
    torch._dynamo.reset()
    with pytest.raises(luban.LubanError, match="out of range"):
        luban.compile(lambda x, m, s: x.masked_scatter(m, s))(
            torch.zeros(5), torch.ones(5, dtype=torch.bool), torch.ones(3)
        )
