"""Layer, RMS and group normalisation and their gradients: statistics in two passes, then one map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Meta
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.reductions import count, fold, moments
from luban.compiler.frontend.torch.views import View, expand, moved
from luban.symbolic import Dim, product


def seen_as(view: View, shape: Sequence[Dim]) -> View:
    """A statistic with kept dims of size 1, broadcast to the whole shape."""
    return moved(view, shape, [0 if n == 1 and m != 1 else s for n, m, s in zip(view.shape, shape, view.strides)])


def inverse_deviation(cx: Builder, squares: View, n: Dim, eps: float, compute: torch.dtype) -> View:
    """1 / sqrt(squares / n + eps)."""

    def body(b: Body, s: SSAValue, k: SSAValue) -> SSAValue:
        return b.rsqrt(b.add(b.div(s, k), b.like(s, eps)))

    return cx.elementwise(body, [squares, n], compute, None, squares.shape, compute)


def normalised(
    cx: Builder, x: View, mean: View | None, rstd: View, weight: View | None, bias: View | None, meta: Meta
) -> View:
    """(x - mean) * rstd * weight + bias; statistics and parameters broadcast to x."""
    parts = {"mean": mean, "weight": weight, "bias": bias}
    present = [k for k, v in parts.items() if v is not None]

    def body(b: Body, v: SSAValue, r: SSAValue, *rest: SSAValue) -> SSAValue:
        given = dict(zip(present, rest))
        if "mean" in given:
            v = b.sub(v, given["mean"])
        v = b.mul(v, r)
        if "weight" in given:
            v = b.mul(v, given["weight"])
        return b.add(v, given["bias"]) if "bias" in given else v

    operands = [x, rstd, *(parts[k] for k in present)]
    return cx.elementwise(body, operands, COMPUTE[x.dtype], None, x.shape, meta.dtype, meta.order)  # type: ignore[arg-type]


@rule("aten.native_layer_norm.default")
def layer_norm(
    cx: Builder, node: Node, x: View, normalized: Sequence[Dim], weight: View | None, bias: View | None, eps: float
) -> tuple[View, View, View]:
    metas = cx.metas(node)
    compute = COMPUTE[x.dtype]
    dims = list(range(len(x.shape) - len(normalized), len(x.shape)))
    mean, squares = moments(cx, x, dims, compute)
    rstd = inverse_deviation(cx, squares, count(x, dims), eps, compute)
    out = normalised(cx, x, seen_as(mean, x.shape), seen_as(rstd, x.shape), weight, bias, metas[0])  # type: ignore[arg-type]
    return out, cx.cast(mean, metas[1].dtype), cx.cast(rstd, metas[2].dtype)  # type: ignore[union-attr]


@rule("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    cx: Builder, node: Node, grad: View, x: View, normalized: Sequence[Dim], mean: View, rstd: View,
    weight: View | None, bias: View | None, wanted: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    metas = cx.metas(node)
    outer = len(x.shape) - len(normalized)
    inner = list(range(outer, len(x.shape)))
    mean, rstd = seen_as(mean, x.shape), seen_as(rstd, x.shape)
    given = input_gradient(cx, grad, x, inner, mean, rstd, weight, metas[0]) if wanted[0] else None
    sums = parameter_gradients(cx, grad, x, list(range(outer)), mean, rstd, wanted[1], wanted[2], metas[1:])
    return given, *sums


def input_gradient(
    cx: Builder, grad: View, x: View, dims: Sequence[int], mean: View | None, rstd: View, weight: View | None, meta: Any
) -> View:
    """The gradient of normalisation over `dims`: rstd * (g - mean(g) - xhat * mean(g * xhat)), g = grad * weight."""
    compute, n = COMPUTE[x.dtype], count(x, dims)
    shape = x.shape
    weight = None if weight is None else expand(weight, shape)
    operands = [v for v in (grad, x, rstd, mean, weight) if v is not None]

    def parts(b: Body, scalars: Sequence[SSAValue]) -> tuple[SSAValue, SSAValue, SSAValue]:
        g, v, r, *rest = (b.cast(s, o.dtype, compute) for s, o in zip(scalars, operands))
        centred = v if mean is None else b.sub(v, rest[0])
        return (g if weight is None else b.mul(g, rest[-1])), b.mul(centred, r), r

    def sums(b: Body, *scalars: SSAValue) -> list[SSAValue]:
        g, xhat, _ = parts(b, scalars)
        return [b.mul(g, xhat)] if mean is None else [b.mul(g, xhat), g]

    kinds = ["add"] if mean is None else ["add", "add"]
    found = [seen_as(v, shape) for v in fold(cx, operands, dims, sums, kinds, [compute] * len(kinds), True)]

    def body(b: Body, *scalars: SSAValue) -> SSAValue:
        g, xhat, r = parts(b, scalars[: len(operands)])
        size = b.dim_as(n, compute)
        means = [b.div(s, size) for s in scalars[len(operands) :]]
        if mean is not None:
            g = b.sub(g, means[1])
        return b.store_cast(b.mul(r, b.sub(g, b.mul(xhat, means[0]))), compute, meta.dtype)

    return cx.map(shape, [*operands, *found], body, meta.dtype, meta.order)


def parameter_gradients(
    cx: Builder, grad: View, x: View, dims: Sequence[int], mean: View | None, rstd: View, weight: bool, bias: bool,
    metas: Sequence[Meta | None],
) -> tuple[View | None, ...]:  # fmt: skip
    """Sums over `dims` of grad * xhat and of grad, in one pass over memory; None for what is not wanted."""
    compute = COMPUTE[x.dtype]
    if not (weight or bias):
        return (None, None)
    operands = [v for v in (grad, x, rstd, mean) if v is not None] if weight else [grad]

    def body(b: Body, *scalars: SSAValue) -> list[SSAValue]:
        g, *rest = (b.cast(s, o.dtype, compute) for s, o in zip(scalars, operands))
        results = []
        if weight:
            results.append(b.mul(g, b.mul(rest[0] if mean is None else b.sub(rest[0], rest[2]), rest[1])))
        return [*results, g] if bias else results

    amount = int(weight) + int(bias)
    found = iter(fold(cx, operands, dims, body, ["add"] * amount, [compute] * amount))
    return tuple(
        cx.cast(next(found), meta.dtype) if want else None  # type: ignore[union-attr]
        for want, meta in zip((weight, bias), (*metas, None, None))
    )


@rule("aten._fused_rms_norm.default")
def rms_norm(
    cx: Builder, node: Node, x: View, normalized: Sequence[Dim], weight: View | None, eps: float | None
) -> tuple[View, View]:
    metas = cx.metas(node)
    compute = COMPUTE[x.dtype]
    dims = list(range(len(x.shape) - len(normalized), len(x.shape)))
    eps = torch.finfo(compute).eps if eps is None else eps

    def square(b: Body, v: SSAValue) -> SSAValue:
        v = b.cast(v, x.dtype, compute)
        return b.mul(v, v)

    squares = fold(cx, [x], dims, square, ["add"], [compute], True)[0]
    rstd = inverse_deviation(cx, squares, count(x, dims), eps, compute)
    out = normalised(cx, x, None, seen_as(rstd, x.shape), weight, None, metas[0])  # type: ignore[arg-type]
    return out, cx.cast(rstd, metas[1].dtype)  # type: ignore[union-attr]


@rule("aten._fused_rms_norm_backward.default")
def rms_norm_backward(
    cx: Builder, node: Node, grad: View, x: View, normalized: Sequence[Dim], rstd: View, weight: View | None,
    wanted: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    metas = cx.metas(node)
    outer = len(x.shape) - len(normalized)
    rstd = seen_as(rstd, x.shape)
    inner = list(range(outer, len(x.shape)))
    given = input_gradient(cx, grad, x, inner, None, rstd, weight, metas[0]) if wanted[0] else None
    sums = parameter_gradients(cx, grad, x, list(range(outer)), None, rstd, wanted[1], False, metas[1:])
    return given, sums[0]


def _grouped(cx: Builder, x: View, groups: int, channels: int) -> View:
    """(N, C, ...) as (N, groups, C / groups, rest)."""
    return cx.reshape(x, (x.shape[0], groups, channels // groups, product(x.shape[2:])))


def _channel(view: View | None, groups: int, channels: int) -> View | None:
    """A parameter of C entries as (1, groups, C / groups, 1)."""
    if view is None:
        return None
    s = view.strides[0]
    return moved(view, (1, groups, channels // groups, 1), (0, s * (channels // groups), s, 0))


@rule("aten.native_group_norm.default")
def group_norm(
    cx: Builder, node: Node, x: View, weight: View | None, bias: View | None, n: Dim, channels: int, space: Dim,
    groups: int, eps: float,
) -> tuple[View, View, View]:  # fmt: skip
    metas = cx.metas(node)
    compute = COMPUTE[x.dtype]
    wide = _grouped(cx, x, groups, channels)
    mean, squares = moments(cx, wide, [2, 3], compute)
    rstd = inverse_deviation(cx, squares, count(wide, [2, 3]), eps, compute)
    flat = Meta(wide.shape, metas[0].dtype, (), None)  # type: ignore[union-attr]
    out = normalised(
        cx, wide, seen_as(mean, wide.shape), seen_as(rstd, wide.shape), _channel(weight, groups, channels),
        _channel(bias, groups, channels), flat,
    )  # fmt: skip
    statistics = [cx.reshape(cx.cast(v, m.dtype), (x.shape[0], groups)) for v, m in zip((mean, rstd), metas[1:])]  # type: ignore[union-attr]
    return cx.reshape(out, x.shape), statistics[0], statistics[1]


@rule("aten.native_group_norm_backward.default")
def group_norm_backward(
    cx: Builder, node: Node, grad: View, x: View, mean: View, rstd: View, weight: View | None, n: Dim, channels: int,
    space: Dim, groups: int, wanted: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    metas = cx.metas(node)
    wide, g = _grouped(cx, x, groups, channels), _grouped(cx, grad, groups, channels)
    mean, rstd = (
        moved(v, wide.shape, (v.strides[0], v.strides[1], 0, 0))
        for v in (cx.reshape(s, (x.shape[0], groups)) for s in (mean, rstd))
    )
    given = None
    if wanted[0]:
        flat = Meta(wide.shape, metas[0].dtype, (), None)  # type: ignore[union-attr]
        given = input_gradient(cx, g, wide, [2, 3], mean, rstd, _channel(weight, groups, channels), flat)
        given = cx.reshape(given, x.shape)
    sums = parameter_gradients(cx, g, wide, [0, 3], mean, rstd, wanted[1], wanted[2], metas[1:])
    return given, *(None if s is None else cx.reshape(s, (channels,)) for s in sums)
