"""Joins as maps: rotary embeddings, stacks, slices of joins and their gradients, against float64."""

from __future__ import annotations

import pytest
import torch

from luban.compiler.frontend.torch.importer import import_graph
from luban.compiler.passes.pipeline import bisect, run

torch.manual_seed(0)
PASSES = "simplify,arg_reductions,cse,joins,inline_casts,dce,contract_layout,recompute,fuse"


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate_pairs(x):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


def graph_of(machine, f, *args):
    return import_graph(machine.traced(f, args), "main").module


def names(module):
    return [op.name for op in module.walk()]


@pytest.mark.parametrize("rotate", [rotate_half, rotate_pairs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2, 7, 64), (3, 34)], ids=str)
def test_a_rotary_embedding_is_one_kernel(machine, rotate, dtype, shape):
    x, cos, sin = torch.randn(shape).to(dtype), torch.randn(shape[-2:]), torch.randn(shape[-2:])
    f = lambda x, cos, sin: (x * cos + rotate(x) * sin).to(x.dtype)  # noqa: E731
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    assert len(machine.check(f, x, cos, sin, tolerance=tolerance).kernels) == 1


def test_the_gradient_of_a_rotary_embedding_is_one_kernel(machine):
    def f(x, cos, sin, g):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x * cos + rotate_half(x) * sin), x, g)[0]

    x, g = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    assert len(machine.check(f, x, torch.randn(5, 8), torch.randn(5, 8), g).kernels) == 1


@pytest.mark.parametrize("kind", ["product", "transposed product"])
def test_a_rotary_embedding_of_a_product(machine, kind):
    """The product is stored once; its rotation and what is added to it run in one kernel, in whatever order of dims."""

    def f(a, w, cos, sin):
        x = (a @ w).view(2, 6, 3, 8)
        x = x.transpose(1, 2) if kind == "transposed product" else x
        return x * cos + rotate_half(x) * sin

    a, w = torch.randn(2, 6, 5), torch.randn(5, 24)
    rows = 6 if kind == "transposed product" else 3
    compiled = machine.check(f, a, w, torch.randn(rows, 8), torch.randn(rows, 8))
    assert len(compiled.kernels) == 2


@pytest.mark.parametrize("d", [0, 1, 2, -1])
def test_stacks_and_their_slices(machine, d):
    x, y = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    machine.check(lambda x, y: torch.stack((x.exp(), y - x), d).sum(-1), x, y)
    machine.check(lambda x, y: torch.cat((x, y * 2), d).narrow(d, 1, 2) + 1, x, y)
    machine.check(lambda x, y: torch.cat((x, y), d).flip(d) * 2, x, y)
    machine.check(lambda x: torch.stack([x, x + 1, x * 2, -x], d).tanh(), x)


def test_a_slice_of_a_join_reads_the_piece(machine):
    def f(x, y):
        joined = torch.cat((x, y), 1)
        return joined[:, 1:3] * 2, joined[:, 4:].sum(1), joined[:, 3:5] + 1  # of x, of y, of both

    x, y = torch.randn(3, 4), torch.randn(3, 5)
    module = graph_of(machine, f, x, y)
    run(module, "cse,joins,dce")
    concat = next(op for op in module.walk() if op.name == "graph.concat")
    assert len(list(concat.results[0].uses)) == 1
    machine.check(f, x, y)


def test_equal_pieces_are_one_access(machine):
    """cat(x, x) reads x through a stride of 0; the halves of a join in another order through a negative one."""
    module = graph_of(machine, lambda x: torch.cat((x, x), 1).exp(), torch.randn(3, 4))
    run(module, "cse,joins,dce")
    assert "graph.concat" not in names(module)
    assert "arith.select" not in names(module)
    swap = lambda x: torch.cat((x[:, 2:], x[:, :2]), 1).exp()  # noqa: E731
    module = graph_of(machine, swap, torch.randn(3, 4))
    run(module, "cse,joins,dce")
    assert "arith.select" not in names(module)
    machine.check(swap, torch.randn(3, 4))


def test_values_that_are_not_chosen_do_no_harm(machine):
    """Both sides are computed everywhere: not-a-numbers and infinities of one must not reach the other."""
    x, y = torch.tensor([[0.0, -1.0, 2.0]]), torch.tensor([[torch.nan, torch.inf, -torch.inf]])
    machine.check(lambda x, y: torch.cat((x.sqrt(), y), 1) + 0, x, y)
    machine.check(lambda x, y: torch.cat((1 / x, -y), 1).abs(), x, y)
    a, b = torch.tensor([[6, 7]]), torch.tensor([[0, 3]])
    machine.check(lambda a, b: torch.cat((a // 2, b), 1) * 2, a, b)
    machine.check(lambda a, b: torch.cat((a // (b + 1), a // 3), 1) * 2, a, b)


def test_joins_that_nobody_fuses_stay(machine):
    """Two buffers joined for a product or the caller: one load an element is less than a choice between two."""
    module = graph_of(machine, lambda x, y: torch.cat((x, y), 1), torch.randn(3, 4), torch.randn(3, 4))
    run(module, "cse,joins,dce")
    assert "graph.concat" in names(module)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    machine.check(lambda x, y: torch.cat((x, y), 1) @ torch.cat((x, y), 1).mT, x, y)


@pytest.mark.parametrize("rotate", [rotate_half, rotate_pairs])
def test_no_pass_changes_a_rotation(machine, rotate):
    def f(x, cos, sin, g):
        x = x.detach().requires_grad_()
        y = x * cos + rotate(x) * sin
        return y.detach(), torch.autograd.grad(y, x, g)[0]

    args = [torch.randn(2, 3, 8) for _ in range(4)]
    assert bisect(graph_of(machine, f, *args), PASSES, args) is None


def test_a_join_that_waits_for_maps(machine):
    """What a map's reader is, a join here, says nothing about dims that it does not have."""

    def f(x, y):
        z = (x.sum(-1, keepdim=True) + y).tanh()
        return torch.cat((z, y * 2, z[:, :1].exp()), 1), z.sum(0)

    machine.check(f, torch.randn(4, 6), torch.randn(4, 5))
