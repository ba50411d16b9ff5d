"""Sorting along a dim, and what is read off sorted rows: topk, kthvalue, medians, mode.

Elements find their places by counting: among all of a short row, within blocks of a long one; blocks are then merged in
pairs, each element finding its rank in the sibling by binary search. Equal elements keep their order; NaN is greatest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE, FLOATS
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.reductions import fold, keep_dims
from luban.compiler.frontend.torch.rules.searching import places
from luban.compiler.frontend.torch.views import View, moved, permute
from luban.symbolic import Dim, product

SHORT = 256  # rows up to here are ranked by comparing all pairs
BLOCK = 64  # longer ones within blocks of this size, a power of two, before they are merged
OPEN = 4096  # the longest row that tracing saw for which an open size is ranked by all pairs

Before = Callable[[Body, SSAValue, SSAValue], SSAValue]


@rule("aten.sort.default")
def sort(cx: Builder, node: Node, x: View, dim: int = -1, descending: bool = False) -> tuple[View, View]:
    return sorted_along(cx, node, x, dim, descending)


@rule("aten.sort.stable")
def sort_stable(
    cx: Builder, node: Node, x: View, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[View, View]:
    return sorted_along(cx, node, x, dim, descending)


@rule("aten.topk.default")
def topk(
    cx: Builder, node: Node, x: View, k: Dim, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[View, View]:
    values, order = sorted_along(cx, node, x, dim, largest, k)
    if not x.shape:
        return values, order
    d = dim % len(x.shape)
    return views.slice_dim(values, d, 0, k), views.slice_dim(order, d, 0, k)


@rule("aten.kthvalue.default")
def kthvalue(cx: Builder, node: Node, x: View, k: Dim, dim: int = -1, keepdim: bool = False) -> tuple[View, View]:
    values, order = sorted_along(cx, node, x, dim, False)
    return _picked(values, dim, k - 1, keepdim), _picked(order, dim, k - 1, keepdim)


@rule("aten.median.dim")
def median(cx: Builder, node: Node, x: View, dim: int, keepdim: bool = False) -> tuple[View, View]:
    """The lower of two middle elements; NaN, and where the first one stands, if there is any."""
    if not x.shape:
        return x, cx.fill(0, (), torch.int64)
    d, compute = dim % len(x.shape), COMPUTE[x.dtype]
    values, order = sorted_along(cx, node, x, d, False)
    middle = (x.shape[d] - 1) // 2
    value, place = _picked(values, d, middle, keepdim), _picked(order, d, middle, keepdim)
    if x.dtype not in FLOATS:
        return value, place
    last = _picked(values, d, x.shape[d] - 1, keepdim)
    first = fold(cx, [x], [d], lambda b, v: b.cast(v, x.dtype, compute), ["argmax"], [torch.int64], keepdim)[0]

    def either(b: Body, end: SSAValue, at_nan: SSAValue, found: SSAValue) -> SSAValue:
        return b.select(b.isnan(end), at_nan, found)

    kinds, shape = (compute, torch.int64, torch.int64), value.shape
    return (
        cx.elementwise(either, [last, last, value], compute, None, shape, x.dtype),
        cx.elementwise(either, [last, first, place], kinds, torch.int64, shape, torch.int64),
    )


@rule("aten.median.default")
def median_of_all(cx: Builder, node: Node, x: View) -> View:
    return median(cx, node, cx.reshape(x, (product(x.shape),)), 0)[0] if x.shape else x


@rule("aten.nanmedian.dim")
def nanmedian(cx: Builder, node: Node, x: View, dim: int, keepdim: bool = False) -> tuple[View, View]:
    """The lower of two middle elements among those that are numbers, which sorting puts first."""
    if not x.shape or x.dtype not in FLOATS:
        return median(cx, node, x, dim, keepdim)
    d, compute = dim % len(x.shape), COMPUTE[x.dtype]
    values, order = sorted_along(cx, node, x, d, False)

    def number(b: Body, v: SSAValue) -> SSAValue:
        return b.cast(b.not_(b.isnan(b.cast(v, x.dtype, compute))), torch.bool, torch.int64)

    counted = fold(cx, [x], [d], number, ["add"], [torch.int64], True)[0]

    def middle(b: Body, n: SSAValue) -> SSAValue:
        return b.maximum(b.shr(b.sub(n, b.like(n, 1)), b.like(n, 1)), b.like(n, 0))

    at = cx.elementwise(middle, [counted], torch.int64, None, counted.shape, torch.int64)
    return _read(cx, values, at, d, keepdim), _read(cx, order, at, d, keepdim)


@rule("aten.nanmedian.default")
def nanmedian_of_all(cx: Builder, node: Node, x: View) -> View:
    return nanmedian(cx, node, cx.reshape(x, (product(x.shape),)), 0)[0] if x.shape else x


@rule("aten.mode.default")
def mode(cx: Builder, node: Node, x: View, dim: int = -1, keepdim: bool = False) -> tuple[View, View]:
    """The smallest of the most frequent elements, and the last place where it stands."""
    if not x.shape:
        return x, cx.fill(0, (), torch.int64)
    d = dim % len(x.shape)
    found, order = sorted_along(cx, node, x, d, False)
    values, rows = _rows(cx, found, d), _rows(cx, order, d)
    ends = places(cx, values, values, right=True)
    starts = places(cx, values, values, right=False)
    longest = fold(cx, [ends, starts], [1], lambda b, e, s: b.sub(e, s), ["argmax"], [torch.int64], True)[0]
    end = _read(cx, ends, longest, 1, True)
    last = cx.elementwise(lambda b, e: b.sub(e, b.like(e, 1)), [end], torch.int64, None, end.shape, torch.int64)
    shape = tuple(n for i, n in enumerate(x.shape) if i != d)
    results = [cx.reshape(_read(cx, v, at, 1, False), shape) for v, at in ((values, longest), (rows, last))]
    return tuple(keep_dims(v, x.shape, [d]) if keepdim else v for v in results)  # type: ignore[return-value]


def sorted_along(
    cx: Builder, node: Node, x: View, dim: int, descending: bool, wanted: Dim | None = None
) -> tuple[View, View]:
    """The values in order along a dim and the places that they come from; at least the first `wanted` where it is given."""
    if not x.shape:
        return x, cx.fill(0, (), torch.int64)
    d = dim % len(x.shape)
    if 0 in x.shape:
        return x, cx.fill(0, x.shape, torch.int64)
    compute = torch.int32 if x.dtype is torch.bool else COMPUTE[x.dtype]
    rows = _rows(cx, cx.cast(x, compute), d)
    before = _ascending if not descending else _descending
    n = rows.shape[1]
    if isinstance(n, int) and n > SHORT:
        values, order = _merged(cx, rows, before, descending, wanted if isinstance(wanted, int) else n)
    else:
        _check_open(node, d, n)
        values, order = _ranked(cx, moved(rows, (rows.shape[0], 1, n), (rows.strides[0], 0, rows.strides[1])), before)
    across = [*(i for i in range(len(x.shape)) if i != d), d]
    shape, back = [*(x.shape[i] for i in across[:-1]), values.shape[1]], [across.index(i) for i in range(len(across))]
    results = [permute(cx.reshape(v, shape), back) for v in (values, order)]
    return cx.cast(results[0], x.dtype), results[1]


def _check_open(node: Node, d: int, n: Dim) -> None:
    if not isinstance(n, int) and torch_dims.hint(node.args[0].meta["val"].shape[d]) > OPEN:  # type: ignore[union-attr]
        raise Unsupported(f"a row of an open size above {OPEN}")


def _rows(cx: Builder, x: View, d: int) -> View:
    """The tensor as a matrix whose rows run along dim d."""
    across = [*(i for i in range(len(x.shape)) if i != d), d]
    return cx.reshape(permute(x, across), (product(n for i, n in enumerate(x.shape) if i != d), x.shape[d]))


def _picked(x: View, dim: int, at: Dim, keepdim: bool) -> View:
    """The elements at one place along a dim."""
    if not x.shape:
        return x
    d = dim % len(x.shape)
    return views.slice_dim(x, d, at, 1) if keepdim else views.select(x, d, at)


def _read(cx: Builder, x: View, at: View, d: int, keepdim: bool) -> View:
    """The elements at places from data along dim d; `at` has size 1 there."""

    def body(b: Body, place: SSAValue, table: SSAValue) -> SSAValue:
        where = b.indices(len(x.shape))
        where[d] = place
        return b.load(table, x, where)

    found = cx.map(at.shape, [at, Whole(x)], body, x.dtype)
    return found if keepdim else views.select(found, d, 0)


def _ascending(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    less = b.cmp("lt", x, y)
    return b.or_(less, b.and_(b.isnan(y), b.not_(b.isnan(x)))) if _is_float(x) else less


def _descending(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    more = b.cmp("gt", x, y)
    return b.or_(more, b.and_(b.isnan(x), b.not_(b.isnan(y)))) if _is_float(x) else more


def _is_float(x: SSAValue) -> bool:
    return not hasattr(x.type, "width")


def _ranked(cx: Builder, x: View, before: Before) -> tuple[View, View]:
    """Values and their places of (rows, blocks, n) as (rows, blocks * n), sorted within each block by comparing all pairs."""
    rows, blocks, n = x.shape
    shape = (rows, blocks, n, n)
    mine, other = (moved(x, shape, (*x.strides[:2], *s)) for s in ((x.strides[2], 0), (0, x.strides[2])))

    def ahead(b: Body, v: SSAValue, w: SSAValue) -> SSAValue:
        earlier = b.and_(b.cmp("lt", b.index(3), b.index(2)), b.not_(before(b, v, w)))
        return b.cast(b.or_(before(b, w, v), earlier), torch.bool, torch.int32)

    rank = cx.reduce(shape[:3], (n,), [mine, other], ahead, ["add"], [torch.int32])[0]
    length = blocks * n

    def target(b: Body, r: SSAValue) -> SSAValue:
        return b.add(b.cast(r, torch.int32, torch.int64), b.mul(b.index(1), b.dim(n)))

    def place(b: Body) -> SSAValue:
        return b.add(b.index(2), b.mul(b.index(1), b.dim(n)))

    to = cx.reshape(cx.map(rank.shape, [rank], target, torch.int64), (rows, length))
    start = cx.reshape(cx.map((1, blocks, n), [], place, torch.int64), (1, length))
    values, order = cx.reshape(x, (rows, length)), views.expand(start, (rows, length))
    return _moved_to(cx, to, values, length), _moved_to(cx, to, order, length)


def _moved_to(cx: Builder, to: View, values: View, length: Dim, rest: Any = 0) -> View:
    """Each element of a matrix at its place in a row of `length`, all different; `rest` where none goes."""

    def body(b: Body, place: SSAValue, value: SSAValue) -> list[SSAValue]:
        return [b.linear(0, (length, 1), [b.index(0), place]), value]

    return cx.scatter(cx.fill(rest, (to.shape[0], length), values.dtype), to.shape, [to, values], body, "set")


def _merged(cx: Builder, x: View, before: Before, descending: bool, wanted: int) -> tuple[View, View]:
    """Rows of a known length in order: blocks by rank, then merged in pairs.

    From where a run holds the `wanted` first elements, the second half of each merged pair is dropped.
    """
    rows, n = x.shape
    assert isinstance(n, int)
    extra = -n % BLOCK
    length, width, last = n + extra, BLOCK, _last(x.dtype, descending)
    if extra:  # with what comes last anyway, after its equals since it stands behind them
        x = cx.concat([x, cx.fill(last, (rows, extra), x.dtype)], 1)
    values, order = _ranked(cx, cx.reshape(x, (rows, length // BLOCK, BLOCK)), before)
    while width < length:
        pairs = -(-length // (2 * width))
        to = cx.map((rows, length), [values, Whole(values)], _merge(values, width, before), torch.int64)
        if wanted <= width:
            both = (_moved_to(cx, to, v, pairs * 2 * width, r) for v, r in ((values, last), (order, 0)))
            values, order = (_first_halves(cx, v, pairs, width) for v in both)
            length = pairs * width
        else:
            values, order = (_moved_to(cx, to, v, length) for v in (values, order))
            width *= 2
    kept = min(n, length)
    return views.slice_dim(values, 1, 0, kept), views.slice_dim(order, 1, 0, kept)


def _first_halves(cx: Builder, x: View, pairs: int, width: int) -> View:
    """The first `width` elements of each pair of runs."""
    rows = x.shape[0]
    each = moved(x, (rows, pairs, width), (x.strides[0], 2 * width, 1))
    return cx.reshape(each, (rows, pairs * width))


def _last(dtype: torch.dtype, descending: bool) -> Any:
    if dtype in FLOATS:
        return float("-inf") if descending else float("nan")
    limits = torch.iinfo(dtype)
    return limits.min if descending else limits.max


def _merge(values: View, width: int, before: Before) -> Callable[[Body, SSAValue, SSAValue], SSAValue]:
    """Where an element of a run of `width` goes when runs are merged in pairs; equals of the left run come first."""
    length = values.shape[1]

    def body(b: Body, x: SSAValue, table: SSAValue) -> SSAValue:
        number, row, i = b.index_constant, b.index(0), b.index(1)
        right = b.cmp("ne", b.and_(i, number(width)), number(0))
        base = b.and_(i, number(-2 * width))
        sibling = b.minimum(b.add(base, b.select(right, number(0), number(width))), b.dim(length))
        low, high = sibling, b.minimum(b.add(sibling, number(width)), b.dim(length))
        for _ in range(width.bit_length()):
            open_, middle = b.cmp("lt", low, high), b.shr(b.add(low, high), number(1))
            other = b.load(table, values, [row, b.minimum(middle, b.sub(b.dim(length), number(1)))])
            ahead = b.select(right, b.not_(before(b, x, other)), before(b, other, x))
            low = b.select(b.and_(open_, ahead), b.add(middle, number(1)), low)
            high = b.select(b.and_(open_, b.not_(ahead)), middle, high)
        own = b.and_(i, number(width - 1))
        return b.add(b.add(base, own), b.sub(low, sibling))

    return body
