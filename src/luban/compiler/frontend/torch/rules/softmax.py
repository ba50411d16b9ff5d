"""The softmax family: reductions over one dim and the map that follows them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, LogSoftmax
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.reductions import fold, normal_dims
from luban.compiler.frontend.torch.views import View, moved


def stabilised(cx: Builder, x: View, dim: int, compute: torch.dtype) -> tuple[View, View]:
    """The maximum and the sum of exp(x - maximum) along a dim, both seen with the shape of x."""
    dims = normal_dims(dim, len(x.shape))
    top = fold(cx, [x], dims, lambda b, v: b.cast(v, x.dtype, compute), ["max"], [compute], True)[0]
    top = moved(top, x.shape, top.strides)
    powers = fold(
        cx, [x, top], dims, lambda b, v, m: b.exp(b.sub(b.cast(v, x.dtype, compute), m)), ["add"], [compute], True
    )[0]
    return top, moved(powers, x.shape, powers.strides)


def softmax_of(cx: Builder, x: View, dim: int, dtype: torch.dtype, order: Any = None) -> View:
    """softmax along a dim, computed in float32 or wider."""
    compute = COMPUTE[dtype] if x.dtype is not torch.float64 else torch.float64
    if x.shape and x.strides[dim] == 1:
        return _of_rows(cx, x, dim, compute, dtype, order)
    top, powers = stabilised(cx, x, dim, compute)
    return cx.elementwise(
        lambda b, v, m, s: b.div(b.exp(b.sub(v, m)), s), [x, top, powers], compute, None, x.shape, dtype, order
    )


def _of_rows(cx: Builder, x: View, dim: int, compute: torch.dtype, dtype: torch.dtype, order: Any) -> View:
    """softmax along neighbours: the powers are named, so that one kernel keeps those of a row at hand and has each once."""
    dims = normal_dims(dim, len(x.shape))
    top = fold(cx, [x], dims, lambda b, v: b.cast(v, x.dtype, compute), ["max"], [compute], True)[0]
    top = moved(top, x.shape, top.strides)
    powers = cx.elementwise(lambda b, v, m: b.exp(b.sub(v, m)), [x, top], compute, None, x.shape, compute)
    total = fold(cx, [powers], dims, lambda b, v: v, ["add"], [compute], True)[0]
    total = moved(total, x.shape, total.strides)
    return cx.elementwise(lambda b, v, s: b.div(v, s), [powers, total], compute, None, x.shape, dtype, order)


@rule("aten._softmax.default", "aten.softmax.int")
def softmax(cx: Builder, node: Node, x: View, dim: int, *_: Any, **__: Any) -> View:
    meta = cx.meta(node)
    return softmax_of(cx, x, dim, meta.dtype, meta.order)


@rule("aten._safe_softmax.default")
def safe_softmax(cx: Builder, node: Node, x: View, dim: int, dtype: Any = None) -> View:
    """softmax whose rows of only -inf are 0."""
    compute = COMPUTE[cx.meta(node).dtype]
    top, powers = stabilised(cx, x, dim, compute)

    def body(b: Body, v: SSAValue, m: SSAValue, s: SSAValue) -> SSAValue:
        masked = b.cmp("eq", m, b.like(m, -math.inf))
        return b.select(masked, b.like(v, 0.0), b.div(b.exp(b.sub(v, m)), s))

    return cx.pointwise(node, body, (x, top, powers), compute)


@rule("aten._log_softmax.default", "aten.log_softmax.int")
def log_softmax(cx: Builder, node: Node, x: View, dim: int, *_: Any, **__: Any) -> View:
    compute = COMPUTE[cx.meta(node).dtype]
    top, powers = stabilised(cx, x, dim, compute)
    made = cx.pointwise(node, lambda b, v, m, s: b.sub(b.sub(v, m), b.log(s)), (x, top, powers), compute)
    cx.log_softmaxes[made] = LogSoftmax(x, dim % max(1, len(x.shape)), top, powers)
    return made


@rule("aten._softmax_backward_data.default")
def softmax_backward(cx: Builder, node: Node, grad: View, output: View, dim: int, input_dtype: Any) -> View:
    compute = COMPUTE[grad.dtype]

    def weighted(b: Body, g: SSAValue, y: SSAValue) -> SSAValue:
        return b.mul(b.cast(g, grad.dtype, compute), b.cast(y, output.dtype, compute))

    mean = fold(cx, [grad, output], normal_dims(dim, len(grad.shape)), weighted, ["add"], [compute], True)[0]
    wide = moved(mean, grad.shape, mean.strides)
    return cx.pointwise(node, lambda b, g, y, m: b.mul(y, b.sub(g, m)), (grad, output, wide), compute)


@rule("aten._log_softmax_backward_data.default")
def log_softmax_backward(cx: Builder, node: Node, grad: View, output: View, dim: int, input_dtype: Any) -> View:
    compute = COMPUTE[grad.dtype]
    dims = normal_dims(dim, len(grad.shape))
    sums = fold(cx, [grad], dims, lambda b, g: b.cast(g, grad.dtype, compute), ["add"], [compute], True)[0]
    wide = moved(sums, grad.shape, sums.strides)
    known = cx.log_softmaxes.get(output)
    if known is None:
        return cx.pointwise(node, lambda b, g, y, s: b.sub(g, b.mul(b.exp(y), s)), (grad, output, wide), compute)

    def from_input(b: Body, g: SSAValue, x: SSAValue, top: SSAValue, powers: SSAValue, s: SSAValue) -> SSAValue:
        return b.sub(g, b.mul(b.div(b.exp(b.sub(x, top)), powers), s))

    return cx.pointwise(
        node, from_input, (grad, known.x, known.top, known.powers, wide), compute
    )  # spares the logarithms
