"""Pooling over windows: strided views of a padded input, reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.assembly import pad, shifted
from luban.compiler.frontend.torch.views import View, moved
from luban.compiler.ir.attributes import contiguous
from luban.symbolic import Dim


class Windows:
    """Kernel, stride, padding and dilation over the last dims of an input, and how many windows there are."""

    def __init__(self, x: View, space: Sequence[Dim], kernel: Any, stride: Any, padding: Any, dilation: Any = 1):
        self.rank = n = len(space)
        self.kernel, self.padding, self.dilation = (_each(v, n) for v in (kernel, padding, dilation))
        self.stride = _each(stride, n) if stride else self.kernel
        self.lead = x.shape[:-n]
        self.inside = x.shape[-n:]
        self.space = tuple(space)

    def after(self) -> list[Dim]:
        """How far the last window reaches beyond the input."""
        reach = []
        for n, o, k, s, p, d in zip(self.inside, self.space, self.kernel, self.stride, self.padding, self.dilation):
            over = (o - 1) * s + (k - 1) * d + 1 - n - p
            reach.append(max(over, 0) if isinstance(over, int) else p)
        return reach

    def view(self, cx: Builder, x: View, value: Any) -> View:
        """(lead, windows, kernel) over the input padded with a value."""
        none = [0] * len(self.lead)
        padded = pad(cx, x, [*none, *self.padding], [*none, *self.after()], value)
        tail = padded.strides[len(none) :]
        strides = [
            *padded.strides[: len(none)],
            *[a * s for a, s in zip(tail, self.stride)],
            *[a * d for a, d in zip(tail, self.dilation)],
        ]
        return moved(padded, (*self.lead, *self.space, *self.kernel), strides)


def _each(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return [int(v) for v in (values * rank if len(values) == 1 else values)]


def _lowest(dtype: torch.dtype) -> Any:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


@rule("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    cx: Builder,
    node: Node,
    x: View,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[View, View]:
    metas = cx.metas(node)
    rank = 3 if "3d" in str(node.target) else 2
    shape = metas[0].shape  # type: ignore[union-attr]
    w = Windows(x, shape[-rank:], kernel, stride, padding, dilation)
    seen = w.view(cx, x, _lowest(x.dtype))
    compute = COMPUTE[x.dtype]
    value, place = cx.reduce(
        shape,
        w.kernel,
        [seen],
        lambda b, v: [b.cast(v, x.dtype, compute)] * 2,
        ["max", "argmax"],
        [compute, torch.int64],
    )
    lead = len(w.lead)

    def flat(b: Body, p: SSAValue) -> SSAValue:
        """The position in the input's space of position p in the window; never one in the padding."""
        parts = []
        for d in reversed(range(rank)):
            k = b.index_constant(w.kernel[d])
            tap = b.rem_int(p, k) if d else p
            p = b.div(p, k) if d else p
            start = b.mul(b.index(lead + d), b.index_constant(w.stride[d]))
            at = b.add(start, b.mul(tap, b.index_constant(w.dilation[d])))
            parts.append(shifted(b, at, w.padding[d], w.inside[d])[0])
        return b.linear(0, contiguous(w.inside), parts[::-1])

    return cx.cast(value, x.dtype), cx.map(shape, [place], flat, torch.int64)


@rule("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def max_pool_backward(cx: Builder, node: Node, grad: View, x: View, *rest: Any) -> View:
    indices: View = rest[-1]
    rank = 3 if "3d" in str(node.target) else 2
    compute = COMPUTE[x.dtype]
    lead = len(x.shape) - rank
    strides = contiguous(x.shape)[:lead]

    def body(b: Body, g: SSAValue, i: SSAValue) -> list[SSAValue]:
        return [b.add(b.linear(0, strides, b.indices(lead)), i), b.cast(g, grad.dtype, compute)]

    made = cx.scatter(cx.fill(0, x.shape, compute), grad.shape, [grad, indices], body, "add")
    return cx.cast(made, x.dtype)


def _divisor(b: Body, w: Windows, first: int, include_pad: bool, at: Sequence[SSAValue] | None = None) -> SSAValue:
    """The size of the window at the indices of dims `first`..., cut at the input or at its padding, i64."""
    result = None
    for d in range(w.rank):
        index = b.index(first + d) if at is None else at[d]
        start = b.sub(b.mul(index, b.index_constant(w.stride[d])), b.index_constant(w.padding[d]))
        limit = w.inside[d] + (w.padding[d] if include_pad else 0)
        end = b.minimum(b.add(start, b.index_constant(w.kernel[d])), b.dim(limit))
        if not include_pad:
            start = b.maximum(start, b.index_constant(0))
        size = b.sub(end, start)
        result = size if result is None else b.mul(result, size)
    assert result is not None
    return result


def _window_size(w: Windows, include_pad: bool, override: int | None) -> int | None:
    """The divisor where it is the same for all windows."""
    if override:
        return override
    whole = all(p == 0 for p in w.padding) or include_pad
    cut = [isinstance(a, int) and a <= p for a, p in zip(w.after(), w.padding)]
    if whole and all(cut):
        size = 1
        for k in w.kernel:
            size *= k
        return size
    return None


@rule("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    cx: Builder, node: Node, x: View, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> View:  # fmt: skip
    meta = cx.meta(node)
    rank = 3 if "3d" in str(node.target) else 2
    w = Windows(x, meta.shape[-rank:], kernel, stride, padding)
    compute = COMPUTE[x.dtype]
    seen = w.view(cx, x, 0)
    total = cx.reduce(meta.shape, w.kernel, [seen], lambda b, v: b.cast(v, x.dtype, compute), ["add"], [compute])[0]
    size = _window_size(w, count_include_pad, divisor_override)
    lead = len(w.lead)

    def body(b: Body, v: SSAValue) -> SSAValue:
        if size is not None:
            n = b.like(v, size)
        else:
            n = b.cast(_divisor(b, w, lead, count_include_pad), torch.int64, compute)
        return b.store_cast(b.div(v, n), compute, meta.dtype)

    return cx.map(meta.shape, [total], body, meta.dtype)


@rule("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def avg_pool_backward(
    cx: Builder, node: Node, grad: View, x: View, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> View:  # fmt: skip
    """Each input gathers from the windows that hold it, so that no two threads add to one place."""
    rank = 3 if "3d" in str(node.target) else 2
    w = Windows(x, grad.shape[-rank:], kernel, stride, padding)
    compute, lead = COMPUTE[x.dtype], len(w.lead)
    size = _window_size(w, count_include_pad, divisor_override)
    if any(not isinstance(n, int) for n in (*w.inside, *w.space)):
        raise Unsupported("a symbolic height or width")

    def body(b: Body, table: SSAValue) -> SSAValue:
        where, inside = b.indices(lead), None
        for d in range(rank):
            tap = b.index(lead + rank + d)
            at = b.sub(b.add(b.index(lead + d), b.index_constant(w.padding[d])), tap)
            step = b.index_constant(w.stride[d])
            window, fits = shifted(b, b.floordiv_int(at, step), 0, w.space[d])
            fits = b.and_(fits, b.cmp("eq", b.mul(window, step), at))
            where.append(window)
            inside = fits if inside is None else b.and_(inside, fits)
        g = b.cast(b.load(table, grad, where), grad.dtype, compute)
        if size is not None:
            n = b.like(g, size)
        else:
            n = b.cast(_divisor(b, w, lead, count_include_pad, where[lead:]), torch.int64, compute)
        return b.select(inside, b.div(g, n), b.constant(0, compute))  # type: ignore[arg-type]

    found = cx.reduce(x.shape, w.kernel, [Whole(grad)], body, ["add"], [compute])[0]
    return cx.cast(found, x.dtype)


def _bounds(b: Body, o: SSAValue, inside: int, outside: int) -> tuple[SSAValue, SSAValue]:
    """First and end of the input range that adaptive pooling averages into output o."""
    n, m = b.index_constant(inside), b.index_constant(outside)
    start = b.div(b.mul(o, n), m)
    end = b.mul(b.add(o, b.index_constant(1)), n)
    return start, b.div(b.add(end, b.index_constant(outside - 1)), m)


def _numbers(*sizes: Dim) -> list[int]:
    if not all(isinstance(s, int) for s in sizes):
        raise Unsupported("a symbolic height or width")
    return [int(s) for s in sizes]  # type: ignore[arg-type]


@rule("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(cx: Builder, node: Node, x: View, output_size: Any) -> View:
    meta = cx.meta(node)
    rank = 3 if "3d" in str(node.target) else 2
    inside, outside = _numbers(*x.shape[-rank:]), _numbers(*meta.shape[-rank:])
    lead, compute = len(x.shape) - rank, COMPUTE[x.dtype]
    reach = [n // o if n % o == 0 else n // o + 2 for n, o in zip(inside, outside)]

    def body(b: Body, table: SSAValue) -> SSAValue:
        where, held, size = b.indices(lead), None, None
        for d in range(rank):
            start, end = _bounds(b, b.index(lead + d), inside[d], outside[d])
            at = b.add(start, b.index(lead + rank + d))
            fits = b.cmp("lt", at, end)
            where.append(b.minimum(at, b.index_constant(inside[d] - 1)))
            held = fits if held is None else b.and_(held, fits)
            length = b.sub(end, start)
            size = length if size is None else b.mul(size, length)
        value = b.cast(b.load(table, x, where), x.dtype, compute)
        share = b.div(value, b.cast(size, torch.int64, compute))  # type: ignore[arg-type]
        return b.select(held, share, b.constant(0, compute))  # type: ignore[arg-type]

    found = cx.reduce(meta.shape, reach, [Whole(x)], body, ["add"], [compute])[0]
    return cx.cast(found, x.dtype)


@rule("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def adaptive_avg_pool_backward(cx: Builder, node: Node, grad: View, x: View) -> View:
    rank = 3 if "3d" in str(node.target) else 2
    inside, outside = _numbers(*x.shape[-rank:]), _numbers(*grad.shape[-rank:])
    lead, compute = len(x.shape) - rank, COMPUTE[x.dtype]
    reach = [1 if n % o == 0 else -(-o // n) + 1 for n, o in zip(inside, outside)]

    def body(b: Body, table: SSAValue) -> SSAValue:
        where, held, size = b.indices(lead), None, None
        for d in range(rank):
            i, n, m = b.index(lead + d), b.index_constant(inside[d]), b.index_constant(outside[d])
            o = b.add(b.div(b.mul(i, m), n), b.index(lead + rank + d))
            o, fits = shifted(b, o, 0, outside[d])
            start, end = _bounds(b, o, inside[d], outside[d])
            fits = b.and_(fits, b.and_(b.cmp("le", start, i), b.cmp("lt", i, end)))
            where.append(o)
            held = fits if held is None else b.and_(held, fits)
            length = b.sub(end, start)
            size = length if size is None else b.mul(size, length)
        value = b.cast(b.load(table, grad, where), grad.dtype, compute)
        share = b.div(value, b.cast(size, torch.int64, compute))  # type: ignore[arg-type]
        return b.select(held, share, b.constant(0, compute))  # type: ignore[arg-type]

    found = cx.reduce(x.shape, reach, [Whole(grad)], body, ["add"], [compute])[0]
    return cx.cast(found, x.dtype)
