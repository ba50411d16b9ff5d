"""Reads and writes at computed indices, assembly of tensors from pieces, pooling and resampling."""

import pytest
import torch
import torch.nn.functional as F

from luban.errors import LubanError, VerificationError


def real(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


NEAR = {"rtol": 1e-9, "atol": 1e-10}


def test_embedding(check):
    i = torch.randint(0, 7, (3, 4))
    check(lambda w, i: (F.embedding(i, w), F.embedding(i[:, :1], w, padding_idx=2)), real(7, 5), i, **NEAR)
    check(lambda w, i: F.embedding(i, w), real(7, 5, dtype=torch.bfloat16), i.int(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags(check, mode):
    w = real(9, 4)
    check(lambda w, i: F.embedding_bag(i, w, mode=mode), w, torch.randint(0, 9, (3, 5)), **NEAR)
    i, o = torch.randint(0, 9, (11,)), torch.tensor([0, 2, 2, 7])
    check(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, padding_idx=3), w, i, o, **NEAR)
    if mode == "sum":
        check(lambda w, i, o, p: F.embedding_bag(i, w, o, mode=mode, per_sample_weights=p), w, i, o, real(11), **NEAR)
        last = torch.tensor([0, 2, 2, 7, 11])
        check(lambda w, i, o: F.embedding_bag(i, w, o, mode=mode, include_last_offset=True), w, i, last, **NEAR)


def test_advanced_indexing(check):
    i, j = torch.tensor([[0, -1, 2], [1, 1, -3]]), torch.tensor([1, 0, -2])

    def f(x, i, j):
        return (
            x[i],
            x[:, i],
            x[i, j],
            x[:, j, i],
            x[i, :, j],
            x[1, j, ..., None],
            x[..., i],
            x[i[:, :1], j.int()],
            x.index_select(1, i[0] % 3),
        )

    check(f, real(3, 4, 5), i, j, **NEAR)


def test_gather_scatter(check):
    i = torch.randint(0, 3, (2, 4, 5))

    def f(x, y, i):
        return (
            x.gather(0, i),
            x.scatter_add(0, i, y),
            x.scatter(0, i[:1], y),
            x.scatter(0, i[:1, :2], 1.5),
            torch.take(x, i[0]),
            x.scatter_reduce(0, i, y, "amax"),
            x.index_add(0, i[0, 0, :3], y.repeat(2, 1, 1)[:3], alpha=2),
            x.scatter(0, i[:1], y, reduce="multiply"),
        )

    check(f, real(3, 4, 5).detach(), real(2, 4, 5).detach(), i, **NEAR)
    check(lambda x, y, i: (x.gather(0, i), x.scatter_add(0, i, y)), real(3, 4, 5), real(2, 4, 5), i, **NEAR)


def test_index_put(check):
    i, m = torch.tensor([0, 2, -1]), torch.rand(4, 5) > 0.5

    def f(x, y, i, m):
        a, c = x.clone(), x.clone()
        a[i] = y
        c[m[:3]] = 0.0
        return a, c, x.index_put((i, i), y[:, 0], accumulate=True), x.masked_fill(m[:3, :, None], 2.0)

    check(f, real(3, 5, 2).detach(), real(3, 5, 2).detach(), i, m, **NEAR)


def test_indices_outside_their_dim_are_refused(interpreted):
    from torch.fx.experimental.proxy_tensor import make_fx

    x, i = torch.randn(3, 4), torch.tensor([[0], [3]])
    for f, kind in (
        (lambda x, i: x[:, i], LubanError),
        (lambda x, i: x.gather(0, i), LubanError),
        (lambda x, i: F.embedding(i, x), LubanError),
        (lambda x, i: x.scatter(0, i, 1.0), VerificationError),
    ):
        program = interpreted(make_fx(f, tracing_mode="fake")(x, torch.zeros_like(i)))
        program(x, torch.zeros_like(i))
        with pytest.raises(kind):
            program(x, i + 1)


def test_joins_padding_and_rolls(check):
    def f(x, y):
        return (
            torch.cat([x, y], 1),
            torch.cat([y, y[:, :0], x], -1),
            torch.stack([x, y[:, :4]], 1),
            F.pad(x, (1, 2)),
            F.pad(x, (1, 0, 2, 1), value=3.0),
            F.pad(x, (-1, 2)),
            F.pad(x, (-1, -1, 1, 0)),
            x.roll(1, 0),
            x.roll((2, -1), (0, 1)),
            x.roll(3),
            x.repeat(2, 1),
            x.repeat(2, 2, 3),
            F.pad(x[None], (1, 1), mode="reflect"),
            torch.slice_scatter(x, y[:, :2], 1, 0, 4, 2),
            torch.select_scatter(x, y[0, :4], 0, -1),
            torch.diagonal_scatter(x, y[:, 0], 1),
            x[1:].sum() + x[:, ::2].sum() + x[-1].exp().sum() + x.diagonal(1).sum(),
            x.tril() + x.triu(1),
        )

    check(f, real(3, 4), real(3, 5), **NEAR)


POOLS = [
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, 3, 2, 1),
    lambda x: F.max_pool2d(x, (3, 2), 1, (1, 0), 2),
    lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 3, divisor_override=5),
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    lambda x: F.max_pool1d(x[0], 3, 2),
    lambda x: F.avg_pool1d(x[0], 2),
    lambda x: F.interpolate(x, scale_factor=2.0),
    lambda x: F.interpolate(x, size=(5, 11)),
    lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    lambda x: F.interpolate(x, size=(4, 9), mode="bilinear"),
    lambda x: F.pixel_shuffle(x.reshape(1, 8, 7, 6), 2),
]


@pytest.mark.parametrize("f", POOLS)
def test_pooling_and_resampling(check, f):
    check(f, real(2, 4, 7, 6), strides=False, **NEAR)
