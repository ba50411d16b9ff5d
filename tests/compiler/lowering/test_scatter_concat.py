"""Scatters and concatenations, and the gradients that are made of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concatenation(machine, axis):
    shapes = [[4, 5, 6] for _ in range(3)]
    for n, s in zip((1, 3, 20), shapes, strict=True):
        s[axis] = n
    a, b, c = (torch.randn(s) for s in shapes)
    machine.check(lambda a, b, c: (torch.cat([a, b.exp(), c, a], axis), torch.cat([c, c.flip(0)], axis)), a, b, c)


def test_concatenation_of_windows_and_nothing(machine):
    x = torch.randn(6, 8)
    machine.check(
        lambda x: (torch.cat([x.t()[:3], x.t()[5:]], 0), torch.cat([x[:0], x, x[2:3]]), torch.stack([x, x])), x
    )


@pytest.mark.parametrize("rows,width", [(1, 1), (5, 3), (50, 64), (50, 65), (300, 384)])
def test_embedding_gradients(machine, rows, width):
    index = torch.randint(0, rows, (4, 33))

    def f(w, index, g):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.embedding(index, w, padding_idx=0), w, g)

    machine.check(f, torch.randn(rows, width), index, torch.randn(4, 33, width))


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float64, 1e-14)])
@pytest.mark.parametrize("rows,width", [(5, 3), (40, 16), (77, 33), (64, 200)])
def test_embedding_gradients_of_other_types(machine, rows, width, dtype, tolerance):
    """Sums are made in float32 and rounded once, by rows or not."""
    index = torch.randint(0, rows, (7, 33))

    def f(w, index, g):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.embedding(index, w), w, g)

    w, g = torch.randn(rows, width).to(dtype), torch.randn(7, 33, width).to(dtype)
    machine.check(f, w, index, g, tolerance=tolerance)


def test_a_row_that_thousands_of_updates_hit_stays_accurate(machine):
    """Equal values round alike: one by one 20,000 of them would be off by 1e-4."""
    index, g = torch.full((20000,), 3), torch.full((20000, 16), 14.951)
    run = machine.compile(lambda i, g: torch.zeros(40, 16).index_add(0, i, g), (index, g))
    got = run(index, g)[0]
    assert machine.error(got[3], g.double().sum(0)) < 6e-6
    assert (got[:3] == 0).all() and (got[4:] == 0).all()


def views_of_updates():
    """Updates and indices whose memory does not follow the order of the updates."""
    g, index = torch.randn(6, 40, 24), torch.randint(0, 50, (6, 40))
    yield "in order", g, index
    yield "another order", torch.randn(40, 6, 24).transpose(0, 1), index
    yield "indices in another order", g, torch.randint(0, 50, (40, 6)).t()
    yield "every second", torch.randn(6, 80, 48)[:, ::2, ::2], torch.randint(0, 50, (6, 80))[:, ::2]
    yield "one index for all", g, torch.randint(0, 50, (1, 40)).expand(6, 40)
    yield "lanes across", torch.randn(24, 6, 40).permute(1, 2, 0), index
    yield "none", g[:0], index[:0]


@pytest.mark.parametrize("name,g,index", list(views_of_updates()), ids=lambda v: v if isinstance(v, str) else "")
def test_rows_gather_their_updates_wherever_these_lie(machine, name, g, index):
    machine.check(lambda x, i, g: x.index_put((i,), g, accumulate=True), torch.randn(50, 24), index, g)


def test_rows_without_updates_keep_what_they_hold(machine):
    x = torch.randn(50, 24)
    x[7, 3], x[8, 4], x[9] = float("nan"), float("inf"), -0.0
    machine.check(lambda x, i, g: x.index_add(0, i, g), x, torch.tensor([1, 8, 8, 49]), torch.randn(4, 24))


@pytest.mark.parametrize("reduce", ["amax", "amin", "prod", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32])
def test_every_way_to_combine_by_rows(machine, reduce, dtype):
    x, g = (torch.randn(60, 32) * 3).to(dtype), (torch.randn(30, 32) * 3).to(dtype)
    index = torch.randint(0, 60, (30, 1)).expand(30, 32)
    f = lambda x, i, g: (x.scatter_reduce(0, i, g, reduce), x.scatter_reduce(0, i, g, reduce, include_self=False))  # noqa: E731
    machine.check(f, x, index, g)


def test_rows_into_the_memory_of_an_argument():
    """The table that takes the updates is the result's own memory."""
    table, index, g = torch.randn(60, 32), torch.randint(0, 60, (100,)), torch.randn(100, 32)
    want = table.clone().index_add_(0, index, g)

    def f(t, i, g):
        t.index_add_(0, i, g)
        return t.sum()

    total = torch.compile(f, backend="luban", options={"fallback": "error"})(table, index, g)
    assert torch.allclose(table, want, atol=1e-5) and torch.allclose(total, want.sum(), atol=1e-2)


def test_rows_for_any_number_of_updates():
    def f(w, i):
        return (F.embedding(i, w) ** 2).sum()

    compiled = torch.compile(f, backend="luban", dynamic=True, options={"fallback": "error"})
    for shape in ((4, 33), (2, 50), (7, 5)):
        w, index = torch.randn(60, 20), torch.randint(0, 60, shape)
        (got,) = torch.autograd.grad(compiled(w.requires_grad_(), index), w)
        (want,) = torch.autograd.grad(f(w, index), w)
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("bad", [50, -1, 2**40])
def test_a_row_that_does_not_exist_is_an_error_and_is_not_written(machine, bad):
    from luban.errors import LubanError

    def f(x, i, g):
        return torch.ops.aten.embedding_dense_backward(g, i, 50, -1, False)

    x, index, g = torch.randn(50, 24), torch.tensor([1, 2, 3]), torch.randn(3, 24)
    run = machine.compile(f, (x, index, g))
    with pytest.raises(LubanError, match="out of range"):
        run(x, torch.tensor([1, bad, 3]), g)
    run(x, index, g)


def test_index_put_gather_and_scatter(machine):
    x, index = torch.randn(6, 9), torch.randint(0, 6, (4, 9))
    machine.check(
        lambda x, i: (
            x.gather(0, i),
            torch.zeros_like(x).scatter_add(0, i, x[:4]),
            x.scatter(0, i[:1], 5.0),
            x.index_add(0, i[:, 0], x[:4]),
            x[i[:, 0], i[:, 1]],
            x.index_put((i[:, 0],), x[:4], accumulate=True),
        ),
        x,
        index,
    )


def test_an_index_out_of_range_is_an_error_and_reads_nothing(machine):
    from luban.errors import LubanError

    run = machine.compile(lambda x, i: x[i] * 2, (torch.randn(5, 3), torch.tensor([1, 2])))
    with pytest.raises(LubanError, match="out of range"):
        run(torch.randn(5, 3), torch.tensor([1, 10**12]))
    run(torch.randn(5, 3), torch.tensor([1, -5]))  # and the next run starts clean
