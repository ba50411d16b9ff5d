"""Products of integers, compiled: they wrap modulo the dtype as torch's do, at every size of tile and with open sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import luban

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def products(a, b, c, v):
    return (
        a @ b,
        a[None] @ b[None],
        a @ v,
        v @ v,
        F.linear(a, b.t()),
        F.linear(a, b.t(), c),
        torch.addmm(c, a, b, beta=3, alpha=5),
        torch.einsum("ij,jk,k->i", a, b, c),
        torch.addmv(a[:, 0], a, v, alpha=7),
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["known sizes", "open sizes"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_wrap(dtype, dynamic):
    torch._dynamo.reset()
    compiled = luban.compile(products, dynamic=dynamic)
    with luban.report() as report:
        for seed, (m, k, n) in enumerate([(3, 40, 5), (33, 130, 17)]):
            inputs = drawn(dtype, seed, (m, k), (k, n), (n,), (k,))
            for ours, want in zip(compiled(*inputs), products(*inputs), strict=True):
                assert ours.dtype is dtype and torch.equal(ours, want)
    assert report.fallbacks == []


def test_int8_products_as_int32():
    torch._dynamo.reset()
    a, b = drawn(torch.int8, 0, (18, 40), (40, 8))
    assert torch.equal(luban.compile(torch._int_mm)(a, b), torch._int_mm(a, b))


def drawn(dtype, seed, *shapes):
    """Integers over the whole range of the dtype."""
    made, info = torch.Generator().manual_seed(seed), torch.iinfo(dtype)
    return [torch.randint(info.min, info.max, s, dtype=dtype, generator=made) for s in shapes]
