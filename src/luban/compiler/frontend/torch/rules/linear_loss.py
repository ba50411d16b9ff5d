"""A linear layer and its cross entropy together: the logits exist only for a part of the rows at a time.

The parts are unrolled into plain graph operations: a product gives a part's logits, reductions its log-sum-exp, one map
the gradient of its logits, which two products use up at once. Parts of equal size share their kernels, and scratch for the
next part takes the memory of the last one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.contractions import matrix_product, product_type
from luban.compiler.frontend.torch.rules.reductions import fold, total
from luban.compiler.frontend.torch.views import View, moved, permute, slice_dim
from luban.symbolic import Dim, floordiv

SCRATCH = 64 << 20  # bytes of logits that exist at a time
FEWEST = 256  # rows of a part where there are as many: every part reads and writes the weight's gradient once


@dataclass(frozen=True)
class _Loss:
    """What the rules share: matrices in the dtype in which they are multiplied, and the loss's options."""

    hidden: View
    weight: View
    bias: View | None
    target: View
    ignore: int
    smoothing: float
    softcap: float | None
    compute: torch.dtype

    @property
    def classes(self) -> Dim:
        return self.weight.shape[0]


@dataclass(frozen=True)
class _Part:
    """Some rows: their inputs, logits, largest logit and sum of the powers exp(logit - largest)."""

    hidden: View
    target: View
    logits: View
    top: View
    powers: View


def part_sizes(rows: Dim, hint: int, row_bytes: int) -> list[tuple[Dim, Dim]]:
    """(first row, how many) of each part. An open number of rows is cut into as many parts as its hint needs."""
    at_a_time = max(FEWEST, SCRATCH // max(row_bytes, 1))
    if isinstance(rows, int):
        return [(at, min(at_a_time, rows - at)) for at in range(0, rows, at_a_time)]
    count = -(-hint // at_a_time) or 1
    bounds = [floordiv(rows * i, count) for i in range(count + 1)]
    return [(a, b - a) for a, b in zip(bounds, bounds[1:])]


def _loss_of(
    cx: Builder, hidden: View, weight: View, bias: View | None, target: View, ignore: int, smoothing: float,
    softcap: float | None, multiplied: torch.dtype | None,
) -> _Loss:  # fmt: skip
    kind = multiplied or hidden.dtype
    parts = cx.cast(hidden, kind), cx.cast(weight, kind)
    return _Loss(*parts, bias, target, ignore, smoothing, softcap, COMPUTE[kind])


def _rows(cx: Builder, view: View, start: Dim, count: Dim) -> View:
    """Rows in memory of their own: kernels of parts are equal where they read from the same offset."""
    return view if count == view.shape[0] else cx.dense(slice_dim(view, 0, start, count))


def _part(cx: Builder, loss: _Loss, start: Dim, count: Dim) -> _Part:
    cx.next_turn()
    hidden, target = _rows(cx, loss.hidden, start, count), _rows(cx, loss.target, start, count)
    logits = _logits(cx, loss, hidden)
    top = fold(cx, [logits], [1], lambda b, x: x, ["max"], [loss.compute], True)[0]
    wide = moved(top, logits.shape, top.strides)
    powers = fold(cx, [logits, wide], [1], lambda b, x, m: b.exp(b.sub(x, m)), ["add"], [loss.compute], True)[0]
    return _Part(hidden, target, logits, top, powers)


def _logits(cx: Builder, loss: _Loss, hidden: View) -> View:
    compute, cap = loss.compute, loss.softcap
    made = matrix_product(cx, hidden, permute(loss.weight, (1, 0)), product_type(hidden.dtype))
    if loss.bias is None and cap is None:
        return made

    def body(b: Body, x: SSAValue, *bias: SSAValue) -> SSAValue:
        x = b.add(x, bias[0]) if bias else x
        return x if cap is None else b.mul(b.tanh(b.div(x, b.like(x, cap))), b.like(x, cap))

    operands = [made] if loss.bias is None else [made, loss.bias]
    return cx.elementwise(body, operands, compute, None, made.shape, compute)


def _row_losses(cx: Builder, loss: _Loss, part: _Part) -> tuple[list[Any], Callable[..., SSAValue]]:
    """Inputs over the rows and a body that gives -log of the target's probability, or 0 where that is ignored.

    For smoothing it is mixed with the mean over all classes.
    """
    compute, eps, logits = loss.compute, loss.smoothing, part.logits
    top, powers = (moved(v, v.shape[:1], v.strides[:1]) for v in (part.top, part.powers))
    inputs: list[Any] = [part.target, top, powers, Whole(logits)]
    if eps:
        wide = moved(part.top, logits.shape, part.top.strides)
        inputs.append(fold(cx, [logits, wide], [1], lambda b, x, m: b.sub(x, m), ["add"], [compute])[0])

    def body(b: Body, t: SSAValue, m: SSAValue, s: SSAValue, table: SSAValue, *below: SSAValue) -> SSAValue:
        label, counts = _label(b, loss, t)
        log = b.log(s)
        value = b.sub(log, b.sub(b.load(table, logits, [b.index(0), label], (1,)), m))
        if eps:
            even = b.sub(log, b.div(below[0], b.dim_as(loss.classes, compute)))
            value = b.add(b.mul(value, b.like(value, 1 - eps)), b.mul(even, b.like(value, eps)))
        return b.select(counts, value, b.constant(0.0, compute))

    return inputs, body


def _label(b: Body, loss: _Loss, t: SSAValue) -> tuple[SSAValue, SSAValue]:
    """(class, or 0 where it is ignored; whether it counts)."""
    t = b.cast(t, loss.target.dtype, torch.int64)
    counts = b.cmp("ne", t, b.index_constant(loss.ignore))
    return b.select(counts, t, b.index_constant(0)), counts


def _logit_gradients(cx: Builder, loss: _Loss, part: _Part, scale: View | None) -> View:
    """softmax - the target's distribution, times a scale for each row, in the dtype in which it is multiplied."""
    compute, eps, shape = loss.compute, loss.smoothing, part.logits.shape
    top, powers = (moved(v, shape, v.strides) for v in (part.top, part.powers))
    inputs = [part.logits, top, powers, moved(part.target, shape, (part.target.strides[0], 0))]
    if scale is not None:
        inputs.append(moved(scale, shape, (scale.strides[0], 0)))

    def body(b: Body, x: SSAValue, m: SSAValue, s: SSAValue, t: SSAValue, *scales: SSAValue) -> SSAValue:
        label, counts = _label(b, loss, t)
        one, zero = b.constant(1.0, compute), b.constant(0.0, compute)
        value = b.mul(b.exp(b.sub(x, m)), b.div(one, s))
        value = b.sub(value, b.select(b.cmp("eq", label, b.index(1)), b.like(value, 1 - eps), zero))
        if eps:
            value = b.sub(value, b.div(b.like(value, eps), b.dim_as(loss.classes, compute)))
        if loss.softcap is not None:
            bent = b.div(x, b.like(x, loss.softcap))
            value = b.mul(value, b.sub(one, b.mul(bent, bent)))
        factor = b.cast(scales[0], scale.dtype, compute) if scale is not None else one
        value = b.mul(value, b.select(counts, factor, zero))  # an ignored row's NaN stays NaN, as in torch
        return b.store_cast(value, compute, loss.hidden.dtype)

    return cx.map(shape, inputs, body, loss.hidden.dtype)


class _Gradients:
    """Gradients of hidden, weight and bias as parts come: rows put side by side, the others summed in `compute`."""

    def __init__(self, cx: Builder, loss: _Loss, wanted: Sequence[bool], dtypes: Sequence[torch.dtype]):
        self.cx, self.loss, self.wanted, self.dtypes = cx, loss, wanted, dtypes
        self.hidden: list[View] = []
        self.weight: View | None = None
        self.bias: View | None = None

    def add(self, part: _Part, logits: View) -> None:
        """Takes in a part with the gradients of its logits."""
        cx, loss = self.cx, self.loss
        wide = product_type(logits.dtype)
        if self.wanted[0]:
            self.hidden.append(cx.cast(matrix_product(cx, logits, loss.weight, wide), self.dtypes[0]))
        if self.wanted[1]:
            self.weight = self._sum(self.weight, matrix_product(cx, permute(logits, (1, 0)), part.hidden, wide))
        if self.wanted[2]:
            self.bias = self._sum(self.bias, total(cx, logits, [0], loss.compute))

    def _sum(self, before: View | None, value: View) -> View:
        kind = self.loss.compute
        return (
            value if before is None else self.cx.elementwise(Body.add, [before, value], kind, None, value.shape, kind)
        )

    def results(self) -> list[View]:
        """The three gradients; empty ones where they are not wanted."""
        cx, loss = self.cx, self.loss
        sizes = [loss.hidden.shape, loss.weight.shape, (loss.classes,)]
        found = [cx.concat(self.hidden, 0) if self.hidden else None, self.weight, self.bias]
        none = [cx.fill(0, size if want else (0,), kind) for size, want, kind in zip(sizes, self.wanted, self.dtypes)]
        return [n if v is None else cx.cast(v, kind) for v, n, kind in zip(found, none, self.dtypes)]


def _parts_of(loss: _Loss, node: Node) -> list[tuple[Dim, Dim]]:
    rows, classes = (torch_dims.hint(a.meta["val"].shape[0]) for a in node.args[:2])  # type: ignore[union-attr]
    return part_sizes(loss.hidden.shape[0], rows, classes * loss.compute.itemsize)


@rule("luban.linear_cross_entropy_sum.default")
def linear_cross_entropy_sum(
    cx: Builder, node: Node, hidden: View, weight: View, bias: View | None, target: View, ignore: int, smoothing: float,
    softcap: float | None, multiplied: torch.dtype | None, wanted: Sequence[bool],
) -> tuple[View, ...]:  # fmt: skip
    """The sum of the rows' losses and its gradients, of which each part's are made while its logits are at hand."""
    loss = _loss_of(cx, hidden, weight, bias, target, ignore, smoothing, softcap, multiplied)
    kinds = [m.dtype for m in cx.metas(node)[1:]]  # type: ignore[union-attr]
    gradients, sums = _Gradients(cx, loss, wanted, kinds), []
    for start, count in _parts_of(loss, node):
        part = _part(cx, loss, start, count)
        sums.append(cx.reduce((), (count,), *_row_losses(cx, loss, part), ["add"], [loss.compute])[0])
        if any(wanted):
            gradients.add(part, _logit_gradients(cx, loss, part, None))
    cx.turn = None
    value = cx.fill(0, (), loss.compute)
    for part_sum in sums:
        value = cx.elementwise(Body.add, [value, part_sum], loss.compute, None, (), loss.compute)
    return value, *gradients.results()


@rule("luban.linear_cross_entropy_rows.default")
def linear_cross_entropy_rows(
    cx: Builder, node: Node, hidden: View, weight: View, bias: View | None, target: View, ignore: int, smoothing: float,
    softcap: float | None, multiplied: torch.dtype | None,
) -> View:  # fmt: skip
    """The loss of each row."""
    loss = _loss_of(cx, hidden, weight, bias, target, ignore, smoothing, softcap, multiplied)
    rows = []
    for start, count in _parts_of(loss, node):
        inputs, body = _row_losses(cx, loss, _part(cx, loss, start, count))
        rows.append(cx.map((count,), inputs, body, loss.compute))
    cx.turn = None
    return cx.concat(rows, 0) if rows else cx.fill(0, hidden.shape[:1], loss.compute)


@rule("luban.linear_cross_entropy_rows_backward.default")
def linear_cross_entropy_rows_backward(
    cx: Builder, node: Node, hidden: View, weight: View, bias: View | None, target: View, ignore: int, smoothing: float,
    softcap: float | None, multiplied: torch.dtype | None, wanted: Sequence[bool], grad: View,
) -> tuple[View, ...]:  # fmt: skip
    """Gradients for rows that count differently: their logits are computed again."""
    loss = _loss_of(cx, hidden, weight, bias, target, ignore, smoothing, softcap, multiplied)
    gradients = _Gradients(cx, loss, wanted, [m.dtype for m in cx.metas(node)])  # type: ignore[union-attr]
    for start, count in _parts_of(loss, node):
        part = _part(cx, loss, start, count)
        gradients.add(part, _logit_gradients(cx, loss, part, _rows(cx, grad, start, count)))
    cx.turn = None
    return tuple(gradients.results())
