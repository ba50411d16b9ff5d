"""Kernels of fused maps and reductions: rows, columns, everything; accuracy of long sums; odd memory; other kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from luban import targets
from luban.compiler.driver import GRAPH_PIPELINE, lower_groups
from luban.compiler.frontend.torch import import_graph
from luban.compiler.lowering import streams
from luban.compiler.lowering.schedule import place_group, schedule
from luban.compiler.passes.pipeline import run

SHAPES = [(1, 1), (1, 33), (33, 1), (7, 5), (64, 65), (300, 3), (3, 300), (130, 1000), (2000, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_columns_and_everything(machine, shape):
    f = lambda x: (x.sum(0), x.sum(1), x.sum(), x.amax(0), x.amin(1), (x * 2).mean(), x.softmax(0), x.softmax(1))  # noqa: E731
    machine.check(f, torch.randn(shape))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2), (1, 3), (0, 2, 3)], ids=str)
def test_any_set_of_dims(machine, dims):
    x = torch.randn(6, 5, 17, 9)
    machine.check(lambda x: (x.sum(dims), x.amax(dims), (x - x.mean(dims, keepdim=True)).square().sum(dims)), x)
    machine.check(lambda x: (x.sum(dims), x.argmax(dims[0])), x.permute(2, 0, 3, 1)[:, :, ::2])


LONG = {
    "a column": ((100003,), 0),
    "narrow rows": ((40000, 3), 0),
    "all of narrow rows": ((2805, 3), (0, 1)),
    "short inner loops": ((2, 30000, 4), (1, 2)),
    "wide rows": ((3, 30000), 1),
    "gaps": ((30000, 20), 0),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sums_of_equal_values_stay_accurate(machine, name):
    """Equal values round the same way each time: adding them one by one would be off by 1e-4."""
    shape, dims = LONG[name]
    x = torch.full(shape, 14.951)
    x = x[..., :3] if name in ("short inner loops", "gaps") else x
    got = machine.compile(lambda x: (x * 1.0).sum(dims), (x,))(x)[0]
    assert machine.error(got, x.double().sum(dims)) < 6e-6


WINDOWS = {
    "transposed": lambda: torch.randn(9, 50).t(),
    "every second": lambda: torch.randn(9, 50)[:, ::2],
    "expanded column": lambda: torch.randn(9, 1).expand(9, 33),
    "expanded row": lambda: torch.randn(1, 33).expand(9, 33),
    "shifted": lambda: torch.randn(500)[7:307].view(10, 30),
    "permuted and cut": lambda: torch.randn(4, 6, 8).permute(2, 0, 1)[1:, :, ::3],
    "one number": lambda: torch.randn(()).expand(3, 4),
    "no rows": lambda: torch.randn(0, 5),
    "no columns": lambda: torch.randn(5, 0),
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_on_memory(machine, name):
    f = lambda x: (x * 2 + 1, x.flip(list(range(x.dim()))), x.exp().sum(), x.exp().sum(-1), x.contiguous())  # noqa: E731
    machine.check(f, WINDOWS[name]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8])
def test_argmax_argmin_and_extremes(machine, dtype):
    x = (torch.randn(9, 7, 33) * 30).to(dtype)
    f = lambda x: (x.argmax(1), x.argmin(2, keepdim=True), *x.max(0), *x.min(1), x.argmax())  # noqa: E731
    machine.check(f, x, tolerance=0)


def test_ties_and_nan_in_argmax(machine):
    x = torch.randn(5, 7, 33)
    x[0, 0, 3] = x[0, 0, 9] = float("nan")
    x[1], x[2], x[3, 1], x[4] = float("inf"), -float("inf"), 2.0, 0.0
    x[4, 3] = -0.0
    machine.check(lambda x: (x.argmax(1), x.argmin(2), *x.max(1), *x.min(0), x[3:].argmax()), x, tolerance=0)


def test_extremes_of_booleans(machine):
    x = torch.rand(9, 11) > 0.5
    machine.check(lambda x: (*x.max(1), *x.min(0), x.amax(0), x.any(), x.all(1)), x, tolerance=0)


def test_max_pooling_keeps_positions(machine):
    x = torch.randn(2, 3, 9, 8)
    machine.check(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x)

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.max_pool2d(x, 3, 2, 1).square().sum(), x)

    machine.check(gradient, x)


def test_products_and_scans(machine):
    x = torch.rand(6, 19) + 0.5
    machine.check(lambda x: (x.prod(1), x.prod(), x.cumsum(1), x.cumprod(0), torch.logsumexp(x, 0)), x)


def test_numbers_from_memory_are_read_once(machine):
    """A scalar operand that the loop cannot change: the result must not depend on where it is read."""
    x, s = torch.randn(64, 129), torch.randn(3, dtype=torch.float64)
    machine.check(lambda x, s: (x * s[0] + s[2], (x * s[1]).sum(1)), x, s)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_sums_of_small_floats_accumulate_in_float32(machine, dtype, tolerance, dims):
    x = torch.full((3000, 7), 1.5).to(dtype)
    machine.check(lambda x: (x.sum(dims), x.mean(dims)), x, tolerance=tolerance)


def columns_of(machine, f, args):
    """The sizes of the axes that run innermost in each kernel of a function."""
    module = import_graph(machine.traced(f, args), "main").module
    run(module, GRAPH_PIPELINE)
    groups = [place_group(op) for op in module.walk() if op.name == "graph.group"]
    return [[axis.size for axis in schedule(g, set()).columns] for g in groups]


def test_small_operands_do_not_turn_the_loops(machine):
    """Whatever is computed a row or a column beside it, the lanes run along the big operand's neighbours."""
    x, row, column = torch.randn(48, 64), torch.randn(48), torch.randn(64)
    by_row = lambda x, r: x * ((r * r * 2 + r).tanh() * r)[:, None]  # noqa: E731
    by_column = lambda x, c: x.bfloat16().float() * ((c * c * 2 + c).tanh() * c)  # noqa: E731
    assert columns_of(machine, by_row, (x, row)) == [[64]]
    assert columns_of(machine, by_column, (x, column)) == [[64]]
    assert columns_of(machine, lambda x, c: (x.bfloat16().float() * (c * 2)).sum(1), (x, column)) == [[64]]
    machine.check(by_row, x, row)
    machine.check(by_column, x, column, tolerance=5e-3)


def kernels_of(machine, f, args):
    """The tile kernels of a function."""
    module = import_graph(machine.traced(f, args), "main").module
    run(module, GRAPH_PIPELINE)
    (func,) = (op for op in module.body.block.ops if op.name == "graph.func")
    return [lowered.kernel for lowered in lower_groups(func, (), targets.get("native")).unique.values()]


def streaming_stores(machine, f, args) -> list[bool]:
    """Whether each kernel of a function has stores that go past the caches."""
    kernels = kernels_of(machine, f, args)
    return [any(o.name == "tile.store" and o.streams is not None for o in kernel.walk()) for kernel in kernels]


def test_only_large_results_go_past_the_caches(machine, monkeypatch):
    """A result that a later pass of the kernel reads back, or that stays in a cache for its reader, does not."""
    x = torch.randn(64, 1024)
    assert streaming_stores(machine, lambda x: x * 2, (x,)) == [False]
    monkeypatch.setattr(streams, "is_large", lambda value, target: True)
    assert streaming_stores(machine, lambda x: x * 2, (x,)) == [True]
    assert streaming_stores(machine, lambda x: x.softmax(-1), (x,)) == [True]
    assert streaming_stores(machine, lambda x: x.sum(0), (x,)) == [False]
    twice = lambda x: (x.exp(), x.exp() / x.exp().sum(1, keepdim=True))  # noqa: E731
    machine.check(twice, x)
    machine.check(lambda x: (x.softmax(-1), (x * 2).t(), x[:, 1:] + 1), x)


def test_only_big_operands_are_fetched_ahead_and_once(machine):
    """A row that a later pass reads again, and a small operand, are near already."""

    def fetched(f, *args) -> list[int]:
        return [
            sum(o.name == "tile.load" and o.ahead is not None for o in k.walk()) for k in kernels_of(machine, f, args)
        ]

    big, small = torch.randn(512, 1024), torch.randn(1024)
    assert fetched(lambda x, w: x * w, big, small) == [1]
    assert fetched(lambda x, w: (x * w).softmax(-1), big, small) == [1]
    assert fetched(lambda x, w: (x + x) * w, big[:64], small) == [0]
    assert fetched(lambda x: x.sum(0), big) == [1]
