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
