"""Losses and their gradients; reductions 0, 1 and 2 are none, mean and sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Operand, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.activations import stable_softplus
from luban.compiler.frontend.torch.views import View, expand, moved, unsqueeze

MEAN, SUM = 1, 2


def _classes_last(x: View) -> View:
    """(N, C, ...) with the classes as last dim; (C) as (1, C)."""
    if len(x.shape) == 1:
        return unsqueeze(x, 0)
    order = [0, *range(2, len(x.shape)), 1]
    return moved(x, [x.shape[d] for d in order], [x.strides[d] for d in order])


def _log_reader(cx: Builder, x: View, n: int, compute: torch.dtype) -> tuple[Callable[..., SSAValue], list[Any]]:
    """How to read the logarithm of a class's probability over the n dims of the labels, and the operands that takes.

    Where x is a log-softmax, only the wanted elements of it are computed: nobody else may ask for the rest.
    """
    known = cx.log_softmaxes.get(x)
    if known is None or known.dim != 1:
        logs = _classes_last(x)

        def read(b: Body, label: SSAValue, table: SSAValue) -> SSAValue:
            return b.cast(b.load(table, logs, [*b.indices(n), label], (n,)), x.dtype, compute)

        return read, [Whole(logs)]
    scores, kind = _classes_last(known.x), known.top.dtype
    rows = [moved(v, v.shape[:-1], v.strides[:-1]) for v in map(_classes_last, (known.top, known.powers))]

    def compute_one(b: Body, label: SSAValue, table: SSAValue, top: SSAValue, powers: SSAValue) -> SSAValue:
        score = b.cast(b.load(table, scores, [*b.indices(n), label], (n,)), known.x.dtype, kind)
        return b.cast(b.sub(b.sub(score, top), b.log(powers)), kind, compute)

    return compute_one, [Whole(scores), *rows]


class _Target:
    """Reads of a target's class and of its weight in a body."""

    def __init__(self, target: View, weight: View | None, ignore: int, compute: torch.dtype):
        self.target, self.weight, self.ignore, self.compute = target, weight, ignore, compute
        self.inputs: list[Any] = [target] if weight is None else [target, Whole(weight)]

    def read(self, b: Body, t: SSAValue, rest: Sequence[SSAValue]) -> tuple[SSAValue, SSAValue, SSAValue]:
        """(class, or 0 where it is ignored; whether it counts; its weight, 0 where it is ignored)."""
        t = b.cast(t, self.target.dtype, torch.int64)
        counts = b.cmp("ne", t, b.index_constant(self.ignore))
        safe = b.select(counts, t, b.index_constant(0))
        weight = b.constant(1.0, self.compute)
        if self.weight is not None:
            weight = b.cast(b.load(rest[0], self.weight, [safe], (0,)), self.weight.dtype, self.compute)
        return safe, counts, b.select(counts, weight, b.constant(0.0, self.compute))


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    cx: Builder, node: Node, x: View, target: View, weight: View | None, reduction: int, ignore: int
) -> tuple[View, View]:
    metas = cx.metas(node)
    compute, dtype = COMPUTE[x.dtype], metas[0].dtype  # type: ignore[union-attr]
    labels = target if target.shape else unsqueeze(target, 0)
    reader = _Target(labels, weight, ignore, compute)
    read_log, logs = _log_reader(cx, x, len(labels.shape), compute)

    def parts(b: Body, *scalars: SSAValue) -> tuple[SSAValue, SSAValue]:
        t, *rest = scalars[len(logs) :]
        label, counts, w = reader.read(b, t, rest)
        log = read_log(b, label, *scalars[: len(logs)])
        return b.select(counts, b.mul(b.neg(log), w), b.constant(0.0, compute)), w

    inputs = [*logs, *reader.inputs]
    if reduction not in (MEAN, SUM):
        each = cx.map(labels.shape, inputs, lambda b, *s: b.store_cast(parts(b, *s)[0], compute, dtype), dtype)
        return cx.reshape(each, metas[0].shape), cx.fill(0, (), metas[1].dtype)  # type: ignore[union-attr]
    loss, total = cx.reduce((), labels.shape, inputs, parts, ["add", "add"], [compute, compute])
    if reduction == MEAN:
        loss = cx.elementwise(Body.div, [loss, total], compute, None, (), dtype)
    return cx.cast(loss, dtype), cx.cast(total, metas[1].dtype)  # type: ignore[union-attr]


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    cx: Builder,
    node: Node,
    grad: View,
    x: View,
    target: View,
    weight: View | None,
    reduction: int,
    ignore: int,
    total: View,
) -> View:
    meta = cx.meta(node)
    compute = COMPUTE[meta.dtype]
    label_dim = 1 if len(x.shape) > 1 else 0
    labels = unsqueeze(target, label_dim) if len(target.shape) < len(x.shape) else target
    labels = expand(labels, x.shape)
    reader = _Target(labels, weight, ignore, compute)
    if reduction in (MEAN, SUM):
        grads = expand(grad, x.shape)
    else:
        grads = expand(unsqueeze(grad, label_dim) if len(grad.shape) < len(x.shape) else grad, x.shape)

    def body(b: Body, g: SSAValue, count: SSAValue, t: SSAValue, *rest: SSAValue) -> SSAValue:
        label, counts, w = reader.read(b, t, rest)
        value = b.mul(b.neg(b.cast(g, grad.dtype, compute)), w)
        if reduction == MEAN:
            value = b.div(value, b.cast(count, total.dtype, compute))
        hit = b.and_(counts, b.cmp("eq", label, b.index(label_dim)))
        return b.store_cast(b.select(hit, value, b.constant(0.0, compute)), compute, meta.dtype)

    return cx.map(x.shape, [grads, expand(total, x.shape), *reader.inputs], body, meta.dtype, meta.order)


Elementwise = Callable[..., SSAValue]


def reduced_loss(cx: Builder, node: Node, operands: Sequence[Operand], body: Elementwise, reduction: int) -> View:
    """A pointwise loss of operands that broadcast, reduced."""
    meta = cx.meta(node)
    compute = COMPUTE[meta.dtype]
    if reduction not in (MEAN, SUM):
        return cx.pointwise(node, body, operands)
    tensors = [o for o in operands if isinstance(o, View)]
    shape = tuple(torch.broadcast_shapes(*[v.shape for v in tensors])) if _plain(tensors) else tensors[0].shape

    def summed(b: Body, *scalars: SSAValue) -> SSAValue:
        rest = iter(scalars)
        values = [
            b.cast(next(rest), o.dtype, compute) if isinstance(o, View) else b.constant(o, compute) for o in operands
        ]
        return body(b, *values)

    total = cx.reduce((), shape, [expand(v, shape) for v in tensors], summed, ["add"], [compute])[0]
    if reduction == SUM:
        return cx.cast(total, meta.dtype)
    n = moved(total, shape, (0,) * len(shape)).numel
    return cx.pointwise(node, Body.div, (total, n))


def _plain(views: Sequence[View]) -> bool:
    return all(isinstance(n, int) for v in views for n in v.shape)


def loss_gradient(
    cx: Builder, node: Node, grad: View, operands: Sequence[Operand], body: Elementwise, reduction: int
) -> View:
    """grad * slope, divided by the number of elements for a mean; body(b, *operands) gives the slope."""
    n = cx.meta(node)
    scale: Any = moved(grad, n.shape, (0,) * len(n.shape)).numel if reduction == MEAN else 1

    def whole(b: Body, g: SSAValue, k: SSAValue, *rest: SSAValue) -> SSAValue:
        slope = body(b, *rest)
        return b.mul(slope, b.div(g, k) if reduction == MEAN else g)

    return cx.pointwise(node, whole, (grad, scale, *operands))


def _squared(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    d = b.sub(x, y)
    return b.mul(d, d)


@rule("aten.mse_loss.default")
def mse_loss(cx: Builder, node: Node, x: View, y: View, reduction: int = MEAN) -> View:
    return reduced_loss(cx, node, (x, y), _squared, reduction)


@rule("aten.mse_loss_backward.default")
def mse_loss_backward(cx: Builder, node: Node, grad: View, x: View, y: View, reduction: int) -> View:
    return loss_gradient(cx, node, grad, (x, y), lambda b, p, q: b.mul(b.sub(p, q), b.like(p, 2.0)), reduction)


@rule("aten.l1_loss.default")
def l1_loss(cx: Builder, node: Node, x: View, y: View, reduction: int = MEAN) -> View:
    return reduced_loss(cx, node, (x, y), lambda b, p, q: b.abs(b.sub(p, q)), reduction)


def _smooth(b: Body, x: SSAValue, y: SSAValue, beta: SSAValue) -> SSAValue:
    d, half = b.abs(b.sub(x, y)), b.like(x, 0.5)
    near = b.div(b.mul(half, b.mul(d, d)), beta)
    return b.select(b.cmp("lt", d, beta), near, b.sub(d, b.mul(half, beta)))


def _smooth_slope(b: Body, x: SSAValue, y: SSAValue, beta: SSAValue) -> SSAValue:
    d = b.sub(x, y)
    return b.select(b.cmp("lt", b.abs(d), beta), b.div(d, beta), b.copysign(b.like(d, 1.0), d))


@rule("aten.smooth_l1_loss.default")
def smooth_l1_loss(cx: Builder, node: Node, x: View, y: View, reduction: int = MEAN, beta: float = 1.0) -> View:
    if beta == 0:
        return l1_loss(cx, node, x, y, reduction)
    return reduced_loss(cx, node, (x, y, float(beta)), _smooth, reduction)


@rule("aten.smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(cx: Builder, node: Node, grad: View, x: View, y: View, reduction: int, beta: float) -> View:
    def l1_slope(b: Body, p: SSAValue, q: SSAValue, _: SSAValue) -> SSAValue:
        d, zero = b.sub(p, q), b.like(p, 0.0)
        return b.select(b.cmp("eq", d, zero), zero, b.copysign(b.like(d, 1.0), d))

    slope = _smooth_slope if beta else l1_slope
    return loss_gradient(cx, node, grad, (x, y, float(beta)), slope, reduction)


def _huber(b: Body, x: SSAValue, y: SSAValue, delta: SSAValue) -> SSAValue:
    d, half = b.abs(b.sub(x, y)), b.like(x, 0.5)
    far = b.mul(delta, b.sub(d, b.mul(half, delta)))
    return b.select(b.cmp("le", d, delta), b.mul(half, b.mul(d, d)), far)


@rule("aten.huber_loss.default")
def huber_loss(cx: Builder, node: Node, x: View, y: View, reduction: int = MEAN, delta: float = 1.0) -> View:
    return reduced_loss(cx, node, (x, y, float(delta)), _huber, reduction)


@rule("aten.huber_loss_backward.default")
def huber_loss_backward(cx: Builder, node: Node, grad: View, x: View, y: View, reduction: int, delta: float) -> View:
    def slope(b: Body, p: SSAValue, q: SSAValue, limit: SSAValue) -> SSAValue:
        d = b.sub(p, q)
        return b.maximum(b.neg(limit), b.minimum(d, limit))

    return loss_gradient(cx, node, grad, (x, y, float(delta)), slope, reduction)


@rule("aten.binary_cross_entropy_with_logits.default")
def bce_with_logits(
    cx: Builder, node: Node, x: View, target: View, weight: View | None = None, pos_weight: View | None = None,
    reduction: int = MEAN,
) -> View:  # fmt: skip
    operands = [v for v in (x, target, weight, pos_weight) if v is not None]

    def body(b: Body, v: SSAValue, t: SSAValue, *rest: SSAValue) -> SSAValue:
        one = b.like(v, 1.0)
        log_term = stable_softplus(b, b.neg(v))
        if pos_weight is not None:
            log_term = b.mul(log_term, b.add(one, b.mul(b.sub(rest[-1], one), t)))
        loss = b.add(b.mul(b.sub(one, t), v), log_term)
        return loss if weight is None else b.mul(loss, rest[0])

    return reduced_loss(cx, node, operands, body, reduction)


@rule("aten.binary_cross_entropy.default")
def bce(cx: Builder, node: Node, x: View, target: View, weight: View | None = None, reduction: int = MEAN) -> View:
    operands = [v for v in (x, target, weight) if v is not None]

    def body(b: Body, v: SSAValue, t: SSAValue, *rest: SSAValue) -> SSAValue:
        one, floor = b.like(v, 1.0), b.like(v, -100.0)
        hit, miss = b.maximum(b.log(v), floor), b.maximum(b.log1p(b.neg(v)), floor)
        loss = b.sub(b.mul(b.sub(t, one), miss), b.mul(t, hit))
        return loss if weight is None else b.mul(loss, rest[0])

    return reduced_loss(cx, node, operands, body, reduction)


@rule("aten.binary_cross_entropy_backward.default")
def bce_backward(
    cx: Builder, node: Node, grad: View, x: View, target: View, weight: View | None = None, reduction: int = MEAN
) -> View:
    operands = [v for v in (x, target, weight) if v is not None]

    def slope(b: Body, v: SSAValue, t: SSAValue, *rest: SSAValue) -> SSAValue:
        spread = b.maximum(b.mul(b.sub(b.like(v, 1.0), v), v), b.like(v, 1e-12))
        value = b.div(b.sub(v, t), spread)
        return value if weight is None else b.mul(value, rest[0])

    return loss_gradient(cx, node, grad, operands, slope, reduction)
