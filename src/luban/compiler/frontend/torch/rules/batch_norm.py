"""Batch normalisation in all of ATen's spellings; statistics are over every dim but the channels'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Meta
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.norms import (
    input_gradient,
    inverse_deviation,
    normalised,
    parameter_gradients,
    seen_as,
)
from luban.compiler.frontend.torch.rules.reductions import count, moments
from luban.compiler.frontend.torch.views import View, moved
from luban.symbolic import Dim


def _dims(x: View) -> list[int]:
    return [0, *range(2, len(x.shape))]


def _channels(view: View | None, x: View) -> View | None:
    """A vector of channels seen with the shape of x."""
    if view is None:
        return None
    strides: list[Dim] = [0] * len(x.shape)
    strides[1] = view.strides[0]
    return moved(view, x.shape, strides)


def _vector(cx: Builder, view: View, x: View, meta: Meta | None) -> View:
    """A statistic with kept dims as a vector, in the dtype that tracing promises."""
    assert meta is not None
    if meta.shape == (0,):
        return cx.fill(0, (0,), meta.dtype)
    return cx.cast(moved(view, (x.shape[1],), (view.strides[1],)), meta.dtype)


class Trained:
    """Statistics of a batch: mean and 1 / deviation with kept dims, and the variance that running statistics take."""

    def __init__(self, cx: Builder, x: View, eps: float):
        compute = COMPUTE[x.dtype]
        self.mean, self.squares = moments(cx, x, _dims(x), compute)
        self.n = count(x, _dims(x))
        self.rstd = inverse_deviation(cx, self.squares, self.n, eps, compute)
        self.compute = compute

    def updated(self, cx: Builder, x: View, old: View, momentum: float, variance: bool) -> View:
        """(1 - momentum) * old + momentum * new; the new variance divides by n - 1."""
        new = self.squares if variance else self.mean
        divisor: Any = (max(self.n - 1, 0) if isinstance(self.n, int) else self.n - 1) if variance else 1

        def body(b: Body, v: SSAValue, o: SSAValue, n: SSAValue) -> SSAValue:
            fresh = b.div(v, n) if variance else v
            return b.add(b.mul(o, b.like(o, 1 - momentum)), b.mul(fresh, b.like(v, momentum)))

        vector = moved(new, old.shape, (new.strides[1],))
        return cx.elementwise(body, [vector, old, divisor], self.compute, None, old.shape, old.dtype)


def _apply(cx: Builder, x: View, mean: View, rstd: View, w: View | None, b: View | None, meta: Meta | None) -> View:
    return normalised(
        cx,
        x,
        seen_as(mean, x.shape),
        seen_as(rstd, x.shape),
        _channels(w, x),
        _channels(b, x),
        meta,  # type: ignore[arg-type]
    )


def _running(cx: Builder, x: View, mean: View, var: View, eps: float) -> tuple[View, View]:
    """Mean and 1 / deviation from running statistics, with kept dims."""
    compute = COMPUTE[x.dtype]
    rstd = cx.elementwise(lambda b, v: b.rsqrt(b.add(v, b.like(v, eps))), [var], compute, None, var.shape, compute)
    shape = [n if d == 1 else 1 for d, n in enumerate(x.shape)]
    strides = [[v.strides[0] if d == 1 else 0 for d in range(len(shape))] for v in (mean, rstd)]
    return moved(mean, shape, strides[0]), moved(rstd, shape, strides[1])


@rule("aten._native_batch_norm_legit_functional.default")
def functional(
    cx: Builder, node: Node, x: View, w: View | None, b: View | None, mean: View, var: View, training: bool,
    momentum: float, eps: float,
) -> tuple[View, ...]:  # fmt: skip
    metas = cx.metas(node)
    if not training:
        m, r = _running(cx, x, mean, var, eps)
        return _apply(cx, x, m, r, w, b, metas[0]), _vector(cx, m, x, metas[1]), _vector(cx, r, x, metas[2]), mean, var
    t = Trained(cx, x, eps)
    out = _apply(cx, x, t.mean, t.rstd, w, b, metas[0])
    running = t.updated(cx, x, mean, momentum, False), t.updated(cx, x, var, momentum, True)
    return out, _vector(cx, t.mean, x, metas[1]), _vector(cx, t.rstd, x, metas[2]), *running


@rule("aten._native_batch_norm_legit.no_stats")
def no_stats(
    cx: Builder, node: Node, x: View, w: View | None, b: View | None, training: bool, momentum: float, eps: float
) -> tuple[View, ...]:
    metas = cx.metas(node)
    t = Trained(cx, x, eps)
    return (
        _apply(cx, x, t.mean, t.rstd, w, b, metas[0]),
        _vector(cx, t.mean, x, metas[1]),
        _vector(cx, t.rstd, x, metas[2]),
    )


@rule("aten._native_batch_norm_legit_no_training.default")
def no_training(
    cx: Builder, node: Node, x: View, w: View | None, b: View | None, mean: View, var: View, momentum: float, eps: float
) -> tuple[View, ...]:
    metas = cx.metas(node)
    m, r = _running(cx, x, mean, var, eps)
    return _apply(cx, x, m, r, w, b, metas[0]), _vector(cx, m, x, metas[1]), _vector(cx, r, x, metas[2])


@rule("aten._batch_norm_with_update_functional.default")
def with_update(
    cx: Builder, node: Node, x: View, w: View | None, b: View | None, mean: View, var: View, momentum: float, eps: float
) -> tuple[View, ...]:
    metas = cx.metas(node)
    t = Trained(cx, x, eps)
    out = _apply(cx, x, t.mean, t.rstd, w, b, metas[0])
    reserve = cx.fill(0, metas[3].shape, metas[3].dtype)  # type: ignore[union-attr]
    running = t.updated(cx, x, mean, momentum, False), t.updated(cx, x, var, momentum, True)
    return out, _vector(cx, t.mean, x, metas[1]), _vector(cx, t.rstd, x, metas[2]), reserve, *running


@rule("aten._batch_norm_no_update.default")
def no_update(
    cx: Builder, node: Node, x: View, w: View | None, b: View | None, mean: View, var: View, momentum: float, eps: float
) -> tuple[View, ...]:
    metas = cx.metas(node)
    m, r = _running(cx, x, mean, var, eps)
    reserve = cx.fill(0, metas[3].shape, metas[3].dtype)  # type: ignore[union-attr]
    return _apply(cx, x, m, r, w, b, metas[0]), _vector(cx, m, x, metas[1]), _vector(cx, r, x, metas[2]), reserve


@rule("aten.native_batch_norm_backward.default")
def backward(
    cx: Builder, node: Node, grad: View, x: View, w: View | None, running_mean: View | None, running_var: View | None,
    mean: View | None, rstd: View | None, train: bool, eps: float, wanted: Sequence[bool],
) -> tuple[View | None, ...]:  # fmt: skip
    metas = cx.metas(node)
    dims = _dims(x)
    if train:
        m, r = _channels(mean, x), _channels(rstd, x)
    else:
        m, r = (seen_as(v, x.shape) for v in _running(cx, x, running_mean, running_var, eps))  # type: ignore[arg-type]
    assert m is not None and r is not None
    weight = _channels(w, x)
    dx = None
    if wanted[0] and train:
        dx = input_gradient(cx, grad, x, dims, m, r, weight, metas[0])
    elif wanted[0]:
        parts = [grad, r] if weight is None else [grad, r, weight]
        dx = cx.elementwise(_product, parts, COMPUTE[x.dtype], None, x.shape, x.dtype, metas[0].order)  # type: ignore[union-attr]
    sums = parameter_gradients(cx, grad, x, dims, m, r, wanted[1], wanted[2], metas[1:])
    return dx, *sums


def _product(b: Body, first: SSAValue, *rest: SSAValue) -> SSAValue:
    for other in rest:
        first = b.mul(first, other)
    return first


@rule("aten.batch_norm_backward.default")
def backward_new(
    cx: Builder, node: Node, grad: View, x: View, w: View | None, running_mean: View | None, running_var: View | None,
    mean: View | None, var: View | None, update: bool, eps: float, wanted: Sequence[bool], reserve: View,
) -> tuple[View | None, ...]:  # fmt: skip
    return backward(cx, node, grad, x, w, running_mean, running_var, mean, var, update, eps, wanted)
