"""Attention as two products and a softmax between them: for what the attention kernels do not take.

Those accumulate in float32 and want the head size as a number; float64 and symbolic head sizes come here. The backward
computes the weights anew from queries and keys: the log-sum-exp that torch keeps between the two is float32 at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.rules.contractions import matrix_product
from luban.compiler.frontend.torch.rules.reductions import fold
from luban.compiler.frontend.torch.rules.softmax import stabilised
from luban.compiler.frontend.torch.views import View, expand, moved, permute
from luban.symbolic import Dim

TURNED = (0, 1, 3, 2)


def attention_of(
    cx: Builder, q: View, k: View, v: View, mask: View | None, scale: float | None, causal: bool
) -> tuple[View, View]:
    """The output and the log-sum-exp of each query; a query that sees no key gives 0 for both, as torch's kernel does."""
    scores, top, powers = _scores(cx, q, k, mask, scale, causal)
    compute = scores.dtype
    weights = cx.cast(_weights(cx, scores, top, powers), q.dtype)
    row = scores.shape[:3]
    top, powers = (moved(x, row, x.strides[:3]) for x in (top, powers))

    def lse(b: Body, m: SSAValue, s: SSAValue) -> SSAValue:
        return b.select(_hidden(b, m), b.like(m, 0.0), b.add(m, b.log(s)))

    return matrix_product(cx, weights, v, q.dtype), cx.elementwise(lse, [top, powers], compute, None, row, compute)


def attention_gradients(
    cx: Builder, grad: View, q: View, k: View, v: View, out: View, mask: View | None, scale: float | None, causal: bool
) -> list[View]:
    """The gradients of queries, keys and values."""
    scores, top, powers = _scores(cx, q, k, mask, scale, causal)
    compute, dtype = scores.dtype, q.dtype
    weights = _weights(cx, scores, top, powers)
    value = matrix_product(cx, permute(cx.cast(weights, dtype), TURNED), grad, dtype)
    inner = matrix_product(cx, grad, permute(v, TURNED), compute)

    def weighted(b: Body, g: SSAValue, o: SSAValue) -> SSAValue:
        return b.mul(b.cast(g, dtype, compute), b.cast(o, dtype, compute))

    mean = fold(cx, [grad, out], [3], weighted, ["add"], [compute], True)[0]

    def slope(b: Body, w: SSAValue, g: SSAValue, m: SSAValue, s: SSAValue) -> SSAValue:
        return b.mul(b.mul(w, b.sub(g, m)), s)

    operands = [weights, inner, moved(mean, scores.shape, mean.strides), _scale(cx, q.shape[3], scale, compute)]
    slopes = cx.elementwise(slope, operands, compute, None, scores.shape, dtype)
    return [matrix_product(cx, slopes, k, dtype), matrix_product(cx, permute(slopes, TURNED), q, dtype), value]


def _scores(
    cx: Builder, q: View, k: View, mask: View | None, scale: float | None, causal: bool
) -> tuple[View, View, View]:
    """Scaled, masked scores (batch, heads, queries, keys) with their row maxima and sums of exponentials, seen as wide."""
    compute = COMPUTE[q.dtype]
    made = matrix_product(cx, q, permute(k, TURNED), compute)
    operands = [made, _scale(cx, q.shape[3], scale, compute), *([expand(mask, made.shape)] if mask is not None else [])]

    def body(b: Body, x: SSAValue, s: SSAValue, *bias: SSAValue) -> SSAValue:
        value = b.mul(x, s)
        if bias:
            value = b.add(value, bias[0])
        if causal:
            value = b.select(b.cmp("gt", b.index(3), b.index(2)), b.like(value, -math.inf), value)
        return value

    if causal:  # the positions count, so that dims along which no operand varies are computed all the same
        types = [x.dtype for x in operands]
        scores = cx.map(
            made.shape,
            [expand(x, made.shape) for x in operands],
            lambda b, *xs: body(b, *(b.cast(x, t, compute) for x, t in zip(xs, types))),
            compute,
        )
    else:
        scores = cx.elementwise(body, operands, compute, None, made.shape, compute)
    return scores, *stabilised(cx, scores, 3, compute)


def _weights(cx: Builder, scores: View, top: View, powers: View) -> View:
    """softmax of the scores; 0 in a row of nothing but -inf."""

    def body(b: Body, x: SSAValue, m: SSAValue, s: SSAValue) -> SSAValue:
        return b.select(_hidden(b, m), b.like(x, 0.0), b.div(b.exp(b.sub(x, m)), s))

    return cx.elementwise(body, [scores, top, powers], scores.dtype, None, scores.shape, scores.dtype)


def _hidden(b: Body, top: SSAValue) -> SSAValue:
    """Whether a row sees no key, by its maximum."""
    return b.cmp("eq", top, b.like(top, -math.inf))


def _scale(cx: Builder, size: Dim, scale: float | None, compute: torch.dtype) -> View:
    """The factor of the scores as a scalar tensor: 1 / sqrt(head size) unless given."""
    if scale is not None or isinstance(size, int):
        return cx.fill(1 / math.sqrt(size) if scale is None else float(scale), (), compute)  # type: ignore[arg-type]
    length: Sequence[View | Dim] = [size]  # type: ignore[list-item]
    return cx.elementwise(lambda b, n: b.reciprocal(b.sqrt(n)), length, compute, None, (), compute)  # type: ignore[arg-type]
