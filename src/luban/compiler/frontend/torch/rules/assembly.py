"""Tensors put together from pieces: joins, padding, rolls, repeats, and pieces written into a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole, convert
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.views import bounded
from luban.compiler.frontend.torch.views import View, moved, slice_dim
from luban.symbolic import Dim


@rule("aten.cat.default", "prims.cat.default")
def cat(cx: Builder, node: Node, tensors: Sequence[View], dim: int = 0) -> View:
    meta = cx.meta(node)
    d = dim % max(len(meta.shape), 1)
    pieces = [cx.cast(t, meta.dtype) for t in tensors if t.shape != (0,) and (len(t.shape) <= d or t.shape[d] != 0)]
    return cx.concat(pieces, d) if pieces else cx.fill(0, meta.shape, meta.dtype)


@rule("aten.stack.default")
def stack(cx: Builder, node: Node, tensors: Sequence[View], dim: int = 0) -> View:
    meta = cx.meta(node)
    d = dim % len(meta.shape)
    return cx.concat([views.unsqueeze(cx.cast(t, meta.dtype), d) for t in tensors], d)


def pad(cx: Builder, x: View, before: Sequence[Dim], after: Sequence[Dim], value: Any) -> View:
    """x with `value` around it. One padded dim is a join; several are one map that reads inside and chooses outside."""
    dims = [d for d in range(len(x.shape)) if before[d] != 0 or after[d] != 0]
    if not dims:
        return x
    if len(dims) == 1:
        d = dims[0]
        ends = [cx.fill(value, (*x.shape[:d], n, *x.shape[d + 1 :]), x.dtype) for n in (before[d], after[d])]
        return cx.concat([p for p in (ends[0], x, ends[1]) if p.shape[d] != 0], d)
    shape = [a + n + z for a, n, z in zip(before, x.shape, after)]

    def body(b: Body, table: SSAValue) -> SSAValue:
        where, inside = b.indices(len(shape)), None
        for d in dims:
            where[d], fits = shifted(b, where[d], before[d], x.shape[d])
            inside = fits if inside is None else b.and_(inside, fits)
        return b.select(inside, b.load(table, x, where), b.constant(convert(value, x.dtype), x.dtype))  # type: ignore[arg-type]

    return cx.map(shape, [Whole(x)], body, x.dtype)


def shifted(b: Body, index: SSAValue, start: Dim, size: Dim) -> tuple[SSAValue, SSAValue]:
    """(index - start kept inside 0..size-1, whether it was inside)."""
    at = b.sub(index, b.dim(start)) if start != 0 else index
    zero, last = b.index_constant(0), b.dim(size - 1)
    fits = b.and_(b.cmp("ge", at, zero), b.cmp("le", at, last))
    return b.maximum(b.minimum(at, last), zero), fits


@rule("aten.constant_pad_nd.default")
def constant_pad(cx: Builder, node: Node, x: View, amounts: Sequence[Any], value: Any = 0) -> View:
    n = len(x.shape)
    before: list[Dim] = [0] * n
    after: list[Dim] = [0] * n
    for k in range(len(amounts) // 2):
        d = n - 1 - k
        low, high = amounts[2 * k], amounts[2 * k + 1]
        if isinstance(low, int) and low < 0:
            x, low = slice_dim(x, d, -low, x.shape[d] + low), 0
        if isinstance(high, int) and high < 0:
            x, high = slice_dim(x, d, 0, x.shape[d] + high), 0
        before[d], after[d] = low, high
    if 0 in x.shape:
        return cx.fill(value, cx.meta(node).shape, x.dtype)
    return pad(cx, x, before, after, value)


@rule("aten.roll.default")
def roll(cx: Builder, node: Node, x: View, shifts: Any, dims: Any = ()) -> View:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        flat = cx.reshape(x, (x.numel,))
        return cx.reshape(_rolled(cx, flat, shifts[0], 0), x.shape)
    for shift, d in zip(shifts, dims):
        x = _rolled(cx, x, shift, d % len(x.shape))
    return x


def _rolled(cx: Builder, x: View, shift: Any, d: int) -> View:
    n = x.shape[d]
    if isinstance(n, int):
        if n == 0 or shift % n == 0:
            return x
        shift = shift % n
    elif not isinstance(shift, int) or shift == 0:
        raise Unsupported("a shift that is not a number")
    cut = n - shift if not isinstance(shift, int) or shift > 0 else -shift
    return cx.concat([slice_dim(x, d, cut, n - cut), slice_dim(x, d, 0, cut)], d)


@rule("aten.repeat.default", "aten.tile.default")
def repeat(cx: Builder, node: Node, x: View, repeats: Sequence[Dim]) -> View:
    """Every dim split into (times, size), the times with stride 0."""
    shape = cx.meta(node).shape
    missing = len(shape) - len(x.shape)
    times = [*[1] * (len(shape) - len(repeats)), *repeats]
    sizes, strides = [1] * missing + list(x.shape), [0] * missing + list(x.strides)
    wide = [v for pair in zip(times, sizes) for v in pair]
    steps = [v for s in strides for v in (0, s)]
    return cx.reshape(moved(x, wide, steps), shape)


@rule("aten.slice_backward.default")
def slice_backward(
    cx: Builder, node: Node, grad: View, sizes: Sequence[Dim], dim: int, start: Any, end: Any, step: int
) -> View:
    shape = cx.meta(node).shape
    return _written(cx, cx.fill(0, shape, grad.dtype), grad, dim % len(shape), bounded(start, shape[dim], 0), step)


@rule("aten.select_backward.default")
def select_backward(cx: Builder, node: Node, grad: View, sizes: Sequence[Dim], dim: int, index: Any) -> View:
    shape = cx.meta(node).shape
    d = dim % len(shape)
    start = shape[d] + index if isinstance(index, int) and index < 0 else index
    return _written(cx, cx.fill(0, shape, grad.dtype), views.unsqueeze(grad, d), d, start, 1)


@rule("aten.slice_scatter.default")
def slice_scatter(
    cx: Builder, node: Node, x: View, source: View, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> View:
    d = dim % len(x.shape)
    source = cx.cast(source, x.dtype)
    source = views.expand(source, (*x.shape[:d], source.shape[d], *x.shape[d + 1 :]))
    return _written(cx, x, source, d, bounded(start, x.shape[d], 0), step)


@rule("aten.select_scatter.default")
def select_scatter(cx: Builder, node: Node, x: View, source: View, dim: int, index: Any) -> View:
    d = dim % len(x.shape)
    start = x.shape[d] + index if isinstance(index, int) and index < 0 else index
    piece = views.expand(cx.cast(source, x.dtype), (*x.shape[:d], *x.shape[d + 1 :]))
    return _written(cx, x, views.unsqueeze(piece, d), d, start, 1)


def _written(cx: Builder, whole: View, piece: View, d: int, start: Dim, step: int) -> View:
    """`whole` with `piece` at start, start + step, ... along dim d."""
    n, length = whole.shape[d], piece.shape[d]
    if length == 0:
        return whole
    if step == 1:
        end = start + length
        parts = [slice_dim(whole, d, 0, start), piece, slice_dim(whole, d, end, n - end)]
        return cx.concat([p for p in parts if p.shape[d] != 0], d)

    def body(b: Body, old: SSAValue, table: SSAValue) -> SSAValue:
        where = b.indices(len(whole.shape))
        offset = b.sub(where[d], b.dim(start))
        at = b.floordiv_int(offset, b.index_constant(step))
        where[d], fits = shifted(b, at, 0, length)
        hit = b.and_(fits, b.cmp("eq", b.mul(at, b.index_constant(step)), offset))
        return b.select(hit, b.load(table, piece, where), old)

    return cx.map(whole.shape, [whole, Whole(piece)], body, whole.dtype)


@rule("aten.diagonal_scatter.default")
def diagonal_scatter(
    cx: Builder, node: Node, x: View, source: View, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> View:
    return _on_diagonal(cx, x, cx.cast(source, x.dtype), offset, dim1 % len(x.shape), dim2 % len(x.shape))


@rule("aten.diagonal_backward.default")
def diagonal_backward(
    cx: Builder, node: Node, grad: View, sizes: Sequence[Dim], offset: int, dim1: int, dim2: int
) -> View:
    shape = cx.meta(node).shape
    n = len(shape)
    return _on_diagonal(cx, cx.fill(0, shape, grad.dtype), grad, offset, dim1 % n, dim2 % n)


def _on_diagonal(cx: Builder, whole: View, values: View, offset: int, d1: int, d2: int) -> View:
    rest = [d for d in range(len(whole.shape)) if d not in (d1, d2)]
    if 0 in values.shape:
        return whole

    def body(b: Body, old: SSAValue, table: SSAValue) -> SSAValue:
        i, j = b.index(d1), b.index(d2)
        hit = b.cmp("eq", b.add(i, b.index_constant(offset)), j)
        at, _ = shifted(b, i if offset >= 0 else j, 0, values.shape[-1])
        return b.select(hit, b.load(table, values, [*(b.index(d) for d in rest), at]), old)

    return cx.map(whole.shape, [whole, Whole(values)], body, whole.dtype)
