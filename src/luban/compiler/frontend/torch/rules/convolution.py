"""Convolutions of any number of spatial dims as contractions over strided reads of a padded input.

Padding is part of a contraction's window where the compute library knows how to read it; else it is copied.
"""

from __future__ import annotations

import itertools
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
from luban.compiler.frontend.torch.rules.contractions import product_type, scaled_sum
from luban.compiler.frontend.torch.rules.reductions import total
from luban.compiler.frontend.torch.views import View, moved
from luban.compiler.ir.window import Window
from luban.symbolic import Dim

Numbers = Sequence[int]


class Geometry:
    """Stride, padding and dilation along each spatial dim, and the number of groups."""

    def __init__(self, rank: int, stride: Numbers, padding: Numbers, dilation: Numbers, groups: int):
        self.stride, self.padding, self.dilation = (_each(v, rank) for v in (stride, padding, dilation))
        self.groups, self.rank = groups, rank


def _each(values: Numbers, rank: int) -> list[int]:
    return [int(v) for v in values] if len(values) == rank else [int(values[0])] * rank


def forward(cx: Builder, x: View, w: View, g: Geometry, space: Sequence[Dim], dtype: torch.dtype) -> View:
    """(N, C, ...) by (O, C / groups, ...): batch (N, groups), m (O / groups), n space, k (C / groups, kernel)."""
    outer, inner = w.shape[0] // g.groups, w.shape[1]
    kernel, window = w.shape[2:], None
    if _windowed(x, w, space, (outer, inner) == (1, 1)):
        x = cx.dense(x)
        window = Window(tuple(x.shape[2:]), tuple(g.stride), tuple(g.dilation), tuple(g.padding))  # type: ignore[arg-type]
    padded = _padded(cx, x, g, window)
    xs, ws = padded.strides, w.strides
    none = [0] * g.rank
    left = (0, ws[0] * outer, ws[0], *none, ws[1], *ws[2:])
    steps = [s * t for s, t in zip(xs[2:], g.stride)]
    right = (xs[0], xs[1] * inner, 0, *steps, xs[1], *[s * t for s, t in zip(xs[2:], g.dilation)])
    domain = (x.shape[0], g.groups, outer, *space, inner, *kernel)
    made = cx.contract(w, padded, (2, 1, g.rank, 1 + g.rank), domain, (left, right), dtype, window)
    return cx.reshape(made, (x.shape[0], w.shape[0], *space))


def _windowed(x: View, w: View, space: Sequence[Dim], depthwise: bool) -> bool:
    """Whether the contraction itself reads the padding: all sizes are numbers, and the matrices hold float32 or float64 in
    full precision or, where a channel has but one of them, any float.
    """
    sizes = (*x.shape[1:], *w.shape, *space)
    known = all(isinstance(n, int) and n > 0 for n in sizes)
    return known and (depthwise or _exact(x.dtype))


def _exact(dtype: torch.dtype) -> bool:
    """Whether products of this type need all of its digits."""
    highest = torch.get_float32_matmul_precision() == "highest"
    return dtype is torch.float64 or (dtype is torch.float32 and highest)


def _padded(cx: Builder, x: View, g: Geometry, window: Window | None) -> View:
    """The input with zeros around it; where there is a window they are not copied: element 0 then lies before the input."""
    if window is None:
        return pad(cx, x, [0, 0, *g.padding], [0, 0, *g.padding], 0)
    offset = x.offset
    for p, s in zip(g.padding, x.strides[2:]):
        offset = offset - p * s
    return moved(x, x.shape, x.strides, offset)


def backward_input(cx: Builder, grad: View, w: View, g: Geometry, space: Sequence[Dim], dtype: torch.dtype) -> View:
    """The gradient of the input (also a transposed convolution): the spread gradient met by the turned kernel."""
    outer, inner = w.shape[0] // g.groups, w.shape[1]
    kernel = w.shape[2:]
    reach = [(k - 1) * d for k, d in zip(kernel, g.dilation)]  # type: ignore[operator]
    if _windowed(grad, w, space, (outer, inner) == (1, 1)) and all(
        s == 1 or d == 1 for s, d in zip(g.stride, g.dilation)
    ):
        return _interleaved(cx, grad, w, g, space, dtype)
    spread = _spread(cx, grad, g, space, reach)
    gs, ws = spread.strides, w.strides
    none = [0] * g.rank
    left = (0, ws[0] * outer, ws[1], *none, ws[0], *ws[2:])
    right = (gs[0], gs[1] * outer, 0, *gs[2:], gs[1], *[s * -d for s, d in zip(gs[2:], g.dilation)])
    offset = spread.offset
    for s, r in zip(gs[2:], reach):
        offset = offset + s * r
    domain = (grad.shape[0], g.groups, inner, *space, outer, *kernel)
    turned = moved(spread, spread.shape, spread.strides, offset)
    made = cx.contract(w, turned, (2, 1, g.rank, 1 + g.rank), domain, (left, right), dtype)
    return cx.reshape(made, (grad.shape[0], inner * g.groups, *space))


def _interleaved(cx: Builder, grad: View, w: View, g: Geometry, space: Sequence[Dim], dtype: torch.dtype) -> View:
    """The gradient of the input, one convolution for each position modulo the stride: no zeros are multiplied."""
    image = cx.dense(grad)
    phases = list(itertools.product(*map(range, g.stride)))
    pieces = {phase: _phase(cx, image, w, g, phase, space, dtype) for phase in phases}
    if len(phases) == 1:
        return pieces[phases[0]]
    held = {phase: piece for phase, piece in pieces.items() if piece is not None}
    shape = (grad.shape[0], w.shape[1] * g.groups, *space)

    def body(b: Body, *tables: SSAValue) -> SSAValue:
        where = b.indices(2 + g.rank)
        entry, rest = list(where), []
        for d, s in enumerate(g.stride):
            if s != 1:
                entry[2 + d] = b.floordiv_int(where[2 + d], b.index_constant(s))
            rest.append(b.sub(where[2 + d], b.mul(entry[2 + d], b.index_constant(s))))
        value = b.constant(0, dtype)
        for (phase, piece), table in zip(held.items(), tables):
            chosen, at = None, list(entry)
            for d, r in enumerate(phase):
                fits = b.cmp("eq", rest[d], b.index_constant(r))
                chosen = fits if chosen is None else b.and_(chosen, fits)
                at[2 + d] = b.minimum(at[2 + d], b.dim(piece.shape[2 + d] - 1))
            value = b.select(chosen, b.load(table, piece, at), value)  # type: ignore[arg-type]
        return value

    return cx.map(shape, [Whole(piece) for piece in held.values()], body, dtype)


def _phase(
    cx: Builder, image: View, w: View, g: Geometry, phase: Sequence[int], space: Sequence[Any], dtype: torch.dtype
) -> Any:
    """The positions stride * q + phase of the input's gradient, None where there are none or no tap reaches them.

    A tap t meets them where t = (phase + padding) modulo the stride; along q those taps, turned, are a convolution that
    moves in single steps.
    """
    outer, inner = w.shape[0] // g.groups, w.shape[1]
    first = [(r + p) % s for r, p, s in zip(phase, g.padding, g.stride)]
    kernel = [len(range(t, k, s)) for t, k, s in zip(first, w.shape[2:], g.stride)]  # type: ignore[arg-type]
    count = [len(range(r, n, s)) for r, n, s in zip(phase, space, g.stride)]
    if 0 in kernel or 0 in count:
        return None
    reach = [(k - 1) * d for k, d in zip(kernel, g.dilation)]
    around = [k - (r + p - t) // s for k, r, p, t, s in zip(reach, phase, g.padding, first, g.stride)]
    once = [1] * g.rank
    moving = Geometry(g.rank, once, around, g.dilation, g.groups)
    window = Window(tuple(image.shape[2:]), tuple(once), tuple(g.dilation), tuple(around))  # type: ignore[arg-type]
    gs, ws = image.strides, w.strides
    last = w.offset
    for t, s, k, step in zip(first, g.stride, kernel, ws[2:]):
        last = last + (t + s * (k - 1)) * step
    none = [0] * g.rank
    left = (0, ws[0] * outer, ws[1], *none, ws[0], *[-s * step for s, step in zip(g.stride, ws[2:])])
    right = (gs[0], gs[1] * outer, 0, *gs[2:], gs[1], *[s * d for s, d in zip(gs[2:], g.dilation)])
    domain = (image.shape[0], g.groups, inner, *count, outer, *kernel)
    turned = moved(w, w.shape, w.strides, last)
    made = cx.contract(
        turned, _padded(cx, image, moving, window), (2, 1, g.rank, 1 + g.rank), domain, (left, right), dtype, window
    )
    return cx.reshape(made, (image.shape[0], inner * g.groups, *count))


def _spread(cx: Builder, grad: View, g: Geometry, space: Sequence[Dim], reach: Sequence[Dim]) -> View:
    """The gradient with stride - 1 zeros between entries and as many around as the kernel reaches."""
    before = [r - p for r, p in zip(reach, g.padding)]
    size = [n + r for n, r in zip(space, reach)]
    after = [n - z - a for n, z, a in zip(size, grad.shape[2:], before)]
    if all(s == 1 for s in g.stride) and all(isinstance(v, int) and v >= 0 for v in (*before, *after)):
        return pad(cx, grad, [0, 0, *before], [0, 0, *after], 0)

    def body(b: Body, table: SSAValue) -> SSAValue:
        where, inside = b.indices(2 + g.rank), None
        for d in range(g.rank):
            at = b.sub(where[2 + d], b.dim(before[d]))
            step = b.index_constant(g.stride[d])
            entry = b.floordiv_int(at, step) if g.stride[d] != 1 else at
            where[2 + d], fits = shifted(b, entry, 0, grad.shape[2 + d])
            if g.stride[d] != 1:
                fits = b.and_(fits, b.cmp("eq", b.mul(entry, step), at))
            inside = fits if inside is None else b.and_(inside, fits)
        return b.select(inside, b.load(table, grad, where), b.constant(0, grad.dtype))  # type: ignore[arg-type]

    return cx.map((*grad.shape[:2], *size), [Whole(grad)], body, grad.dtype)


def backward_weight(cx: Builder, grad: View, x: View, shape: Sequence[Dim], g: Geometry, dtype: torch.dtype) -> View:
    """The gradient of weights of a shape: batch (groups), m (O / groups), n (C / groups, kernel), k (N, space)."""
    outer, inner = shape[0] // g.groups, shape[1]  # type: ignore[operator]
    window = None
    if _windowed(x, grad, shape, (outer, inner) == (1, 1)):
        x = cx.dense(x)
        window = Window(tuple(x.shape[2:]), tuple(g.dilation), tuple(g.stride), tuple(g.padding))  # type: ignore[arg-type]
    padded = _padded(cx, x, g, window)
    xs, gs = padded.strides, grad.strides
    none = [0] * (1 + g.rank)
    left = (gs[1] * outer, gs[1], *none, gs[0], *gs[2:])
    taps = [s * t for s, t in zip(xs[2:], g.dilation)]
    right = (xs[1] * inner, 0, xs[1], *taps, xs[0], *[s * t for s, t in zip(xs[2:], g.stride)])
    domain = (g.groups, outer, inner, *shape[2:], grad.shape[0], *grad.shape[2:])
    made = cx.contract(grad, padded, (1, 1, 1 + g.rank, 1 + g.rank), domain, (left, right), dtype, window)
    return cx.reshape(made, shape)


@rule("aten.convolution.default")
def convolution(
    cx: Builder, node: Node, x: View, w: View, bias: View | None, stride: Numbers, padding: Numbers, dilation: Numbers,
    transposed: bool, output_padding: Numbers, groups: int,
) -> View:  # fmt: skip
    _same_dtype(x, w)
    meta = cx.meta(node)
    g = Geometry(len(x.shape) - 2, stride, padding, dilation, groups)
    dtype = meta.dtype if bias is None else product_type(meta.dtype)
    made = (backward_input if transposed else forward)(cx, x, w, g, meta.shape[2:], dtype)
    if bias is None:
        return made
    wide = moved(bias, (bias.shape[0], *[1] * g.rank), (bias.strides[0], *[0] * g.rank))
    return scaled_sum(cx, node, made, wide, 1, 1)


def _same_dtype(x: View, w: View) -> None:
    if x.dtype is not w.dtype or not x.dtype.is_floating_point:
        raise Unsupported(f"dtypes {str(x.dtype)[6:]} and {str(w.dtype)[6:]}")


@rule("aten.convolution_backward.default")
def convolution_backward(
    cx: Builder, node: Node, grad: View, x: View, w: View, bias_sizes: Any, stride: Numbers, padding: Numbers,
    dilation: Numbers, transposed: bool, output_padding: Numbers, groups: int, wanted: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    _same_dtype(x, w)
    g = Geometry(len(x.shape) - 2, stride, padding, dilation, groups)
    dx = dw = db = None
    if wanted[0]:
        dx = (forward if transposed else backward_input)(cx, grad, w, g, x.shape[2:], x.dtype)
    if wanted[1] and transposed:
        dw = backward_weight(cx, x, grad, w.shape, g, w.dtype)
    elif wanted[1]:
        dw = backward_weight(cx, grad, x, w.shape, g, w.dtype)
    if wanted[2]:
        dims = [0, *range(2, len(x.shape))]
        db = cx.cast(total(cx, grad, dims, COMPUTE[grad.dtype]), grad.dtype)
    return dx, dw, db
