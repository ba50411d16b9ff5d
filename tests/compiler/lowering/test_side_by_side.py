"""Reductions whose axes lie apart in memory: rows side by side as lanes, against float64 over shapes, strides and dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import luban
from luban.compiler.driver import GRAPH_PIPELINE
from luban.compiler.frontend.torch import import_graph
from luban.compiler.lowering.lanes import block_of
from luban.compiler.lowering.schedule import place_group, schedule
from luban.compiler.passes.pipeline import run
from luban.symbolic import symbol

NAN, INF = float("nan"), float("inf")


def passes_of(machine, f, *args):
    """The schedules of a function's kernels."""
    module = import_graph(machine.traced(f, args), "main").module
    run(module, GRAPH_PIPELINE)
    groups = [op for op in module.walk() if op.name == "graph.group" and op.label.data == "loop"]
    return [schedule(place_group(op), set(op.body.block.last_op.operands)) for op in groups]


def lanes_of(machine, f, *args):
    """The sizes of the row axes that become lanes; None where a row's own elements do."""
    return [None if p.lanes is None else p.lanes.size for p in passes_of(machine, f, *args)]


CHOICES = {
    "the middle": ((6, 20, 48), 1, [48]),
    "the middle, narrow": ((300, 20, 4), 1, [4]),
    "too narrow": ((300, 20, 3), 1, [None]),
    "the last": ((6, 20, 48), 2, [None]),
    "the first": ((64, 48), 0, [None]),
    "the first of very wide rows": ((8, 20000), 0, [20000]),
    "two apart": ((5, 6, 7, 48), (0, 2), [48]),
    "batch norm's": ((16, 64, 9, 9), (0, 2, 3), [None]),
    "few long rows": ((2, 4000, 16), 1, [None]),
    "long and narrow rows": ((20, 1500, 2), 1, [None]),
    "long rows": ((20, 1500, 16), 1, [16]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_lanes_are_neighbours_in_memory(machine, name):
    shape, dims, wanted = CHOICES[name]
    x = torch.randn(shape)
    f = lambda x: (x * 2).sum(dims)  # noqa: E731
    assert lanes_of(machine, f, x) == wanted
    machine.check(f, x)


def test_the_lanes_follow_the_memory_and_not_the_shape(machine):
    x = torch.randn(6, 48, 20)
    assert lanes_of(machine, lambda x: x.transpose(1, 2).sum(1), x) == [None]
    assert lanes_of(machine, lambda x: x.transpose(1, 2).sum(2), x) == lanes_of(machine, lambda x: x.sum(1), x) == [20]


def test_a_table_is_read_along_its_rows(machine):
    table, index = torch.randn(50, 32), torch.randint(50, (40, 5))
    for mode in ("sum", "mean"):
        f = lambda i, t: F.embedding_bag(i, t, mode=mode)  # noqa: E731, B023
        assert 32 in lanes_of(machine, f, index, table)
        machine.check(f, index, table)
    machine.check(lambda i, t: t[i].amax(1), index, table)
    machine.check(lambda i, t: t[:, i].sum(2), index, table.t().contiguous())


@pytest.mark.parametrize("shape", [(130, 2100, 8), (70, 8300, 20), (300, 257, 4), (1030, 130, 16)], ids=str)
def test_the_last_run_of_a_long_narrow_sum_ends_where_its_row_ends(machine, shape):
    """Runs behind the last one have no elements, not a negative number of them."""
    f = lambda x: (x.sum(1), x.amax(1), (x * x).sum(1))  # noqa: E731
    x = torch.randn(shape)
    assert lanes_of(machine, f, x) == [shape[-1]]
    machine.check(f, x)


NARROW = [(1, 8), (33, 2), (1000, 3), (9000, 16), (100003, 8), (4100, 64), (70, 130, 20), (300, 7, 5, 33), (5000, 65)]


@pytest.mark.parametrize("shape", NARROW, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.int64, 0)])
def test_columns_of_short_rows(machine, shape, dtype, tolerance):
    """Their sums stay in registers; other values of the rows and of each element are stored beside them."""
    x, dims = (torch.randn(shape) * 9).to(dtype), tuple(range(len(shape) - 1))
    s = (torch.randn(*shape[:-1], 1) * 9).to(dtype)
    machine.check(lambda x: (x.sum(dims), x.amax(dims), x.amin(dims)), x, tolerance=tolerance)
    machine.check(lambda x, s: ((x * s).sum(dims), x * s, (x + s).amax(dims), s * 2), x, s, tolerance=tolerance)
    machine.check(lambda x: (x[..., 1:].sum(dims), x.flip(0).amax(dims), x.sum()), x, tolerance=max(tolerance, 1e-5))


def test_nan_in_columns_of_short_rows(machine):
    x = torch.randn(3000, 9)
    x[5, 1], x[7, 2], x[2999, 3], x[0, 4], x[1, 4] = NAN, INF, -INF, INF, -INF
    machine.check(lambda x: (x.sum(0), x.amax(0), x.amin(0), x.isnan().any(0), x.square().sum(0)), x)


def test_sums_of_columns_stay_together(machine):
    x, y = torch.randn(300, 96), torch.randn(300, 96)
    f = lambda x, y: ((x * y).sum(0), x.sum(0), (x + y).square().sum(0))  # noqa: E731
    assert lanes_of(machine, f, x, y) == [None]
    machine.check(f, x, y)


def test_all_passes_of_a_group_share_the_lanes(machine):
    x = torch.randn(5, 12, 40)
    assert lanes_of(machine, lambda x: x.softmax(1), x) == [40]
    assert lanes_of(machine, lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), x) == [40]


SHAPES = [
    (3, 5, 4),
    (2, 1, 48),
    (3, 33, 49),
    (2, 65, 17),
    (1, 70, 300),
    (5, 2, 64),
    (2, 3, 784),
    (40, 4, 32),
    (2, 2100, 33),
]


def everything(x):
    return (
        *(x.sum(1), x.mean(1), x.amax(1), x.amin(1), x.var(1), x.logsumexp(1), x.softmax(1), x.log_softmax(1)),
        *(F.normalize(x, dim=1), x.norm(dim=1), *x.max(1), x.argmin(1), (x - x.mean(1, keepdim=True)).abs().sum(1)),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_reduction_over_the_middle(machine, shape):
    machine.check(everything, torch.randn(shape))


MEMORY = {
    "every second lane": lambda: torch.randn(4, 9, 60)[:, :, ::2],
    "cut": lambda: torch.randn(4, 9, 60)[1:, 2:, 7:],
    "permuted": lambda: torch.randn(9, 4, 33).permute(1, 0, 2),
    "permuted, lanes first": lambda: torch.randn(33, 4, 9).permute(1, 2, 0),
    "expanded rows": lambda: torch.randn(1, 9, 33).expand(4, 9, 33),
    "expanded lanes": lambda: torch.randn(4, 9, 1).expand(4, 9, 33),
    "no rows": lambda: torch.randn(0, 9, 33),
    "no lanes": lambda: torch.randn(4, 9, 0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_windows_on_memory(machine, name):
    machine.check(everything, MEMORY[name]())
    machine.check(lambda x: (x.flip(2).sum(1), x.flip(1).softmax(1)), MEMORY[name]())


def test_equal_elements(machine):
    x = torch.randn(4, 1, 33).expand(4, 9, 33)
    machine.check(lambda x: (x.sum(1), x.amax(1), x.softmax(1), *x.max(1), x.logsumexp(1)), x)


@pytest.mark.parametrize("dims", [d for n in (1, 2, 3) for d in itertools.combinations(range(4), n)], ids=str)
def test_any_set_of_dims(machine, dims):
    x = torch.randn(3, 6, 5, 40)
    f = lambda x: (x.sum(dims), x.amax(dims), (x - x.mean(dims, keepdim=True)).square().sum(dims))  # noqa: E731
    machine.check(f, x)
    machine.check(f, x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8])
def test_dtypes(machine, dtype):
    x = (torch.randn(6, 37, 50) * 9).to(dtype)
    machine.check(
        lambda x: (x.amax(1), x.amin(1), *x.max(1), x.argmin(1), (x > 3).any(1), (x < 99).all(1)), x, tolerance=0
    )
    if dtype.is_floating_point:
        machine.check(lambda x: (x.sum(1), x.mean(1), x.softmax(1), x.float().var(1)), x, tolerance=1e-2)
    else:
        machine.check(lambda x: (x.sum(1), x.prod(1)), x, tolerance=0)


def test_booleans(machine):
    x = torch.rand(6, 37, 50) > 0.9
    machine.check(lambda x: (x.any(1), x.all(1), x.sum(1), *x.max(1), x.amin(1)), x, tolerance=0)


@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF,), (INF, -INF), (NAN, INF)], ids=str)
def test_nan_and_infinity_stay_in_their_rows(machine, values):
    x = torch.randn(3, 20, 49)
    for n, value in enumerate(values):
        x[1, 3 + n, 16] = x[2, 7, 48] = value
    x[0, :, 5] = values[0]
    machine.check(everything, x)


@pytest.mark.parametrize(
    "shape, dims", [((2, 5000, 600), 1), ((70, 5, 90, 300), (0, 2)), ((3, 70, 400), 1), ((2500, 20000), 0)]
)
def test_long_sums_of_equal_values_stay_accurate(machine, shape, dims):
    """Added one by one, 5,000 equal values are off by 1e-5 and more."""
    x = torch.full((1,), 14.951).expand(shape).contiguous()
    f = lambda x: (x * 1.0).sum(dims)  # noqa: E731
    assert None not in lanes_of(machine, f, x)
    assert machine.error(machine.compile(f, (x,))(x)[0], x.double().sum(dims)) < 2e-6


@pytest.mark.parametrize("shape", [(4, 1031, 257), (8, 200, 96), (2, 20000, 64)])
def test_errors_of_sums_beside_torch(shape):
    """torch's sum goes in steps of 16, its variance in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    f = lambda x: (x.sum(1), x.softmax(1), x.var(1))  # noqa: E731
    results = zip(luban.compile(f, dynamic=False)(x), f(x), f(x.double()), strict=True)
    errors = [[(v - w).square().mean().sqrt() / w.abs().max() for v in (ours, own)] for ours, own, w in results]
    assert all(ours <= 1.75 * own for ours, own in errors[:2])
    assert errors[2][0] <= 1e-7


def gradients(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), x)


@pytest.mark.parametrize(
    "f", [lambda x: x.softmax(1), lambda x: F.normalize(x, dim=1), lambda x: x.var(1), lambda x: x.amax(1)]
)
def test_gradients(machine, f):
    machine.check(lambda x: gradients(f, x), torch.randn(4, 30, 50))


def channel_norm(x, w, b):
    mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    return (x - mean) * torch.rsqrt(var + 1e-5) * w[:, None, None] + b[:, None, None]


def test_a_norm_over_channels_and_the_gradients_of_its_weights(machine):
    """The weights' gradients add up over all rows: column reductions, which run in kernels of their own."""

    def step(x, w, b):
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        out = channel_norm(x, w, b)
        return [out, *torch.autograd.grad(out.square().sum(), (x, w, b))]

    machine.check(step, torch.randn(4, 24, 9, 7), torch.randn(24), torch.randn(24))


def test_values_that_later_passes_read_again_are_kept(machine):
    """exp of a softmax is kept for a strip of rows where it is not too long, and computed again elsewhere."""
    f = lambda x: x.exp().softmax(1).exp()  # noqa: E731
    g = lambda x: ((x.exp() - x.exp().mean(1, keepdim=True)).square().sum(1), x.exp().sum(1))  # noqa: E731
    for shape in ((3, 40, 200), (2, 1500, 70)):
        x = torch.randn(shape)
        machine.check(f, x)
        machine.check(g, x)


@pytest.mark.parametrize("sizes", [[(3, 5, 40), (2, 700, 9), (1, 1, 1), (7, 33, 256), (2, 2100, 300)]])
def test_one_kernel_for_all_sizes(machine, sizes):
    f = lambda x: (x.sum(1), x.softmax(1), x.amax(1), *x.max(1), (x - x.mean(1, keepdim=True)).exp())  # noqa: E731
    compiled = luban.compile(f, dynamic=True)
    for size in sizes:
        x = torch.randn(size)
        for got, want in zip(compiled(x), f(x.double()), strict=True):
            assert machine.error(got, want) < 1e-5


@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 200, 256, 257, 320, 768, 784, 20000])
@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_are_whole_strips_or_everything(size, keeps):
    block = block_of(size, keeps)
    assert block <= (64 if keeps else 256)
    assert block == size or (block % 64 == 0 and (size % block == 0 or size % 64 != 0))
    assert block_of(symbol("s0"), keeps) == (64 if keeps else 256)


def test_results_do_not_depend_on_the_number_of_threads():
    x, f = torch.randn(8, 300, 333), luban.compile(lambda x: (x.sum(1), x.softmax(1)), dynamic=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = f(x)
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(one, f(x), strict=True))
    finally:
        torch.set_num_threads(before)
