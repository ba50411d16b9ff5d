"""Sorting and what is read off sorted rows, running extremes, searches and bins: compiled, as torch has them."""

from __future__ import annotations

import pytest
import torch

import luban

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def agree(f, *args, tolerance=0.0, **options):
    """The compiled function gives what torch gives, and nothing is left to eager."""
    torch._dynamo.reset()
    with luban.report() as report:
        ours = luban.compile(f, **options)(*args)
    assert report.fallbacks == []
    for got, want in zip(listed(ours), listed(f(*args)), strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def listed(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def rows(n, dtype=torch.float32):
    """Three rows: with many equals, with NaN and infinities where they exist, falling."""
    torch.manual_seed(n)
    if dtype not in FLOATS:
        return torch.stack([torch.randint(0, 5, (n,)), torch.randint(0, 120, (n,)), 100 - torch.arange(n) % 100]).to(
            dtype
        )
    x = torch.stack([torch.randint(0, 5, (n,)).float(), torch.randn(n), -torch.arange(n).float()]).to(dtype)
    if n > 5:
        x[1, 3], x[1, 5], x[1, 1], x[1, 2] = float("nan"), float("nan"), float("inf"), -float("inf")
    return x


@pytest.mark.parametrize("descending", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("n", [1, 2, 64, 256, 257, 320, 1000])
def test_sort(n, descending):
    agree(lambda x: x.sort(dim=1, descending=descending, stable=True), rows(n))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_sort_of_every_dtype_along_another_dim(dtype):
    for descending in (False, True):
        agree(lambda x, d=descending: x.t().sort(dim=0, descending=d, stable=True), rows(300, dtype))


def test_sort_of_edges():
    f = lambda x: (*x.sort(), *x.sort(0, True), x.argsort(), x.msort() if x.dim() else x)  # noqa: E731
    for x in (torch.tensor(3.0), torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(1, 1), torch.randn(2, 3, 4)):
        agree(f, x)


@pytest.mark.parametrize("k", [1, 5, 64, 65, 200, 300])
@pytest.mark.parametrize("largest", [True, False])
def test_topk(k, largest):
    torch.manual_seed(k)
    x = torch.randn(3, 300)
    x[1], x[2, 5], x[2, 9] = torch.arange(300), float("nan"), float("inf")
    agree(lambda x: x.topk(k, largest=largest), x)
    agree(lambda x: x.t().topk(k, dim=0, largest=largest)[0], x.bfloat16())


def test_topk_of_a_scalar_and_of_short_rows():
    agree(lambda x: (*x.topk(1), *torch.randn(()).mul(0).topk(1)), torch.randn(4, 8))
    agree(lambda x: x.softmax(-1).topk(2), torch.randn(16, 8), tolerance=1e-6)


@pytest.mark.parametrize("n", [7, 300])
def test_order_statistics(n):
    x = torch.randn(4, 3, n, generator=torch.Generator().manual_seed(n))
    agree(lambda x: (*x.kthvalue(3), *x.kthvalue(2, 0, True), *x.median(2), *x.median(1, True), x.median()), x)
    agree(lambda x: (x.quantile(0.3, dim=2), x.flatten().quantile(0.9)), x, tolerance=1e-6)
    x[0, 0, 5], x[1] = float("nan"), float("nan")
    agree(lambda x: (*x.median(2), x.median(), x.nanmedian(2)[0], x.nanmedian(1, True)[0], x.nanmedian()), x)
    agree(lambda x: (*x.median(1), x.median(), *x.nanmedian(1)), rows(n, torch.int32))


def test_mode():
    x = torch.randint(0, 9, (5, 40), generator=torch.Generator().manual_seed(0))
    values, at = luban.compile(lambda x: x.mode(1))(x)
    assert torch.equal(values, x.mode(1)[0]) and torch.equal(x.gather(1, at[:, None])[:, 0], values)
    agree(lambda x: (x.mode(0, True)[0], x.mode(1)[0]), x)


def test_open_sizes():
    compiled = luban.compile(lambda x: (*x.sort(dim=1, stable=True), x.topk(2)[0]), dynamic=True)
    with luban.report() as report:
        for m, n in ((3, 9), (5, 30), (2, 400)):
            x = torch.randn(m, n)
            want = (*x.sort(dim=1, stable=True), x.topk(2)[0])
            assert all(torch.equal(a, b) for a, b in zip(compiled(x), want, strict=True))
    assert report.graphs == 1 and report.fallbacks == []


@pytest.mark.parametrize("n", [20, 300])
def test_gradients(n):
    torch.manual_seed(0)
    f = lambda x: (x.sort(1)[0] * w).sum() + x.topk(3)[0].square().sum() + x.median(0)[0].sum() + x.cummax(1)[0].sum()  # noqa: E731
    w = torch.randn(n)
    ours, want = (torch.randn(4, n, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    torch._dynamo.reset()
    with luban.report() as report:
        luban.compile(f)(ours).backward()
    f(want).backward()
    torch.testing.assert_close(ours.grad, want.grad)
    assert report.fallbacks == []


@pytest.mark.parametrize("n", [1, 7, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_running_extremes(n, dtype):
    agree(lambda x: (*x.cummax(1), *x.cummin(1), *x.cummax(0)), rows(n, dtype))


def test_running_log_sums():
    x = torch.cat([torch.full((3, 2), -float("inf")), torch.randn(3, 600) * 5], 1)
    agree(lambda x: (x.logcumsumexp(1), x.logcumsumexp(0)), x, tolerance=1e-5)
    agree(lambda x: x.logcumsumexp(1), x.double(), tolerance=1e-12)


@pytest.mark.parametrize("right", [False, True])
def test_searches(right):
    torch.manual_seed(0)
    row, values = torch.randint(0, 9, (3, 20)).float().sort(1)[0], torch.randint(-1, 11, (3, 7)).float()
    values[1, 2], row[2, -2:] = float("nan"), float("nan")

    def f(row, values):
        return (
            torch.searchsorted(row, values, right=right),
            torch.searchsorted(row[0], values, right=right, out_int32=True),
            torch.searchsorted(row[0], 3.5, right=right),
            torch.searchsorted(row[:, :0], values, right=right),
            torch.bucketize(values, row[1], right=right),
        )

    agree(f, row, values)
    agree(f, row[:, :18].long(), values.nan_to_num().long())
    order = torch.stack([torch.randperm(20) for _ in range(3)])
    shuffled = torch.empty_like(row).scatter_(1, order, row)
    agree(lambda s, v, o: torch.searchsorted(s, v, sorter=o, right=right), shuffled, values, order)
    agree(lambda s, v: torch.searchsorted(s, v, right=right), row, values, dynamic=True)


def test_bins():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    agree(lambda x: (x.histc(7), x.histc(5, -1, 1), torch.ones(4).histc(3), x.double().histc(11, -2, 3)), x)
    agree(lambda x: (x.histc(4), x[:0].histc(3)), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
