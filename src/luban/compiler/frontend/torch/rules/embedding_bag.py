"""Sums and means of bags of embedding rows; bag b holds the indices from offsets[b] up to the next offset."""

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
from luban.compiler.frontend.torch.rules.scans import running_sums
from luban.compiler.frontend.torch.views import View, moved, slice_dim
from luban.symbolic import Dim

SUM, MEAN = 0, 1
I64 = torch.int64


class Bags:
    """Which bag an index belongs to: a number of indices a bag where the offsets are a plain range, else a tensor."""

    def __init__(self, cx: Builder, offsets_node: Any, offsets: View, indices: View, bags: Dim):
        self.n, self.bags = indices.shape[0], bags
        self.width = _range_step(offsets_node)
        if self.width is not None and bags * self.width != self.n:
            self.width = None
        self.ids = self._ids(cx, offsets) if self.width is None else None

    def _ids(self, cx: Builder, offsets: View) -> View:
        """How many offsets lie at or before each index, less one."""
        marks = cx.fill(0, (self.n + 1,), I64)
        marks = cx.scatter(
            marks, offsets.shape, [offsets], lambda b, o: [b.cast(o, offsets.dtype, I64), b.index_constant(1)], "add"
        )
        before = running_sums(cx, slice_dim(marks, 0, 0, self.n), 0, I64)
        found = cx.elementwise(Body.sub, [before, 1], I64, None, (self.n,), I64)
        return cx.elementwise(
            Body.minimum, [found, self.bags - 1], I64, None, (self.n,), I64
        )  # a last offset opens none

    def inputs(self, shape: Sequence[Dim], along: int) -> list[View]:
        """What a body over `shape` needs, indices counted by dim `along`."""
        if self.ids is None:
            return []
        strides = [self.ids.strides[0] if d == along else 0 for d in range(len(shape))]
        return [moved(self.ids, shape, strides)]

    def bag(self, b: Body, along: int, given: Sequence[SSAValue]) -> SSAValue:
        """The bag of the index at dim `along`."""
        return given[0] if self.ids is not None else b.div(b.index(along), b.index_constant(self.width or 1))


def _range_step(node: Any) -> int | None:
    """The step of offsets that are arange(0, n, step)."""
    if not isinstance(node, Node) or not all(isinstance(a, int) for a in node.args):
        return None
    if str(node.target) == "aten.arange.start_step" and node.args[0] == 0:
        return node.args[2]  # type: ignore[return-value]
    return 1 if str(node.target) == "aten.arange.default" else None


class Rows:
    """The rows that indices name, scaled by their weights; a padding index counts for nothing."""

    def __init__(self, table: View, indices: View, weights: View | None, padding: Any):
        self.table, self.indices, self.weights, self.padding = table, indices, weights, padding
        self.compute = COMPUTE[table.dtype]

    def counts(self, b: Body, row: SSAValue) -> SSAValue:
        return b.cmp("ne", row, b.index_constant(self.padding))

    def value(self, b: Body, table: SSAValue, row: SSAValue, column: SSAValue, weight: Sequence[SSAValue]) -> SSAValue:
        found = b.cast(b.load(table, self.table, [row, column], (0,)), self.table.dtype, self.compute)
        if weight and self.weights is not None:
            found = b.mul(found, b.cast(weight[0], self.weights.dtype, self.compute))
        if isinstance(self.padding, int) and self.padding < 0:
            return found
        return b.select(self.counts(b, row), found, b.constant(0.0, self.compute))


def _seen(view: View, shape: Sequence[Dim], along: Sequence[int], scale: Sequence[Dim] = (1,)) -> View:
    """A vector read at sum(scale * index of a dim)."""
    strides: list[Dim] = [0] * len(shape)
    for d, s in zip(along, scale):
        strides[d] = view.strides[0] * s
    return moved(view, shape, strides)


def _totals(cx: Builder, bags: Bags, rows: Rows, width: Dim) -> View:
    """The sum of each bag's rows, (bags, width) in the compute dtype."""
    vectors = [rows.indices] if rows.weights is None else [rows.indices, rows.weights]
    if bags.width is not None:
        shape = (bags.bags, width, bags.width)
        seen = [_seen(v, shape, (0, 2), (bags.width, 1)) for v in vectors]

        def gathered(b: Body, table: SSAValue, i: SSAValue, *weight: SSAValue) -> SSAValue:
            return rows.value(b, table, b.cast(i, rows.indices.dtype, I64), b.index(1), weight)

        return cx.reduce(shape[:2], shape[2:], [Whole(rows.table), *seen], gathered, ["add"], [rows.compute])[0]
    flat = (bags.n, width)
    seen = [_seen(v, flat, (0,)) for v in vectors]

    def added(b: Body, bag: SSAValue, table: SSAValue, i: SSAValue, *weight: SSAValue) -> list[SSAValue]:
        value = rows.value(b, table, b.cast(i, rows.indices.dtype, I64), b.index(1), weight)
        return [b.linear(0, (width, 1), (bag, b.index(1))), value]

    zeros = cx.fill(0, (bags.bags, width), rows.compute)
    return cx.scatter(zeros, flat, [*bags.inputs(flat, 0), Whole(rows.table), *seen], added, "add")


def _sizes(cx: Builder, bags: Bags, rows: Rows) -> View:
    """How many indices of each bag count, int64."""
    shape = (bags.n,)

    def one(b: Body, i: SSAValue, *given: SSAValue) -> list[SSAValue]:
        counts = rows.counts(b, b.cast(i, rows.indices.dtype, I64))
        return [bags.bag(b, 0, given), b.cast(counts, torch.bool, I64)]

    return cx.scatter(cx.fill(0, (bags.bags,), I64), shape, [rows.indices, *bags.inputs(shape, 0)], one, "add")


def _per_bag(cx: Builder, value: View, sizes: View, dtype: torch.dtype, compute: torch.dtype) -> View:
    """Rows of (bags, width) divided by their bags' sizes; an empty bag stays 0."""

    def body(b: Body, v: SSAValue, n: SSAValue) -> SSAValue:
        return b.div(v, b.maximum(n, b.like(n, 1)))

    wide = moved(sizes, value.shape, (sizes.strides[0], 0))
    return cx.elementwise(body, [value, wide], compute, None, value.shape, dtype)


@rule("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    cx: Builder, node: Node, table: View, indices: View, offsets: View, scale_grad_by_freq: bool = False,
    mode: int = SUM, sparse: bool = False, weights: View | None = None, include_last_offset: bool = False,
    padding: Any = -1,
) -> tuple[View, ...]:  # fmt: skip
    if mode not in (SUM, MEAN):
        raise Unsupported("mode='max'")
    metas = cx.metas(node)
    bags = Bags(cx, node.args[2], offsets, indices, metas[0].shape[0])  # type: ignore[union-attr]
    rows = Rows(table, indices, weights, padding)
    out = _totals(cx, bags, rows, table.shape[1])
    sizes = _sizes(cx, bags, rows) if mode == MEAN else None
    if sizes is not None:
        out = _per_bag(cx, out, sizes, rows.compute, rows.compute)
    rest = [cx.fill(0, m.shape, m.dtype) for m in metas[1:]]  # type: ignore[union-attr]  # the backward rule reads none
    return cx.cast(out, table.dtype), *rest


@rule("aten._embedding_bag_backward.default")
def embedding_bag_backward(cx: Builder, node: Node, grad: View, indices: View, *rest: Any) -> View:
    """`rest`: offsets, offset2bag, bag_size, maximum_indices, rows, by_freq, mode, sparse, weights, padding."""
    offsets, _, _, _, count, by_freq, mode, sparse, weights, *last = rest
    if by_freq or sparse or mode not in (SUM, MEAN):
        raise Unsupported("scale_grad_by_freq, sparse gradients or mode='max'")
    meta = cx.meta(node)
    bags = Bags(cx, node.args[2], offsets, indices, grad.shape[0])
    rows = Rows(grad, indices, weights, last[0] if last else -1)
    compute, width = COMPUTE[meta.dtype], grad.shape[1]
    if mode == MEAN:
        grad = _per_bag(cx, grad, _sizes(cx, bags, rows), grad.dtype, compute)
    shape = (bags.n, width)
    vectors = [_seen(v, shape, (0,)) for v in ((indices,) if weights is None else (indices, weights))]

    def body(b: Body, table: SSAValue, i: SSAValue, *scalars: SSAValue) -> list[SSAValue]:
        row = b.cast(i, indices.dtype, I64)
        bag = bags.bag(b, 0, scalars[-1:])
        value = b.cast(b.load(table, grad, [bag, b.index(1)]), grad.dtype, compute)
        if weights is not None:
            value = b.mul(value, b.cast(scalars[0], weights.dtype, compute))
        value = b.select(rows.counts(b, row), value, b.constant(0.0, compute))
        return [b.linear(0, (width, 1), (row, b.index(1))), value]

    inputs: list[View | Whole] = [Whole(grad), *vectors, *bags.inputs(shape, 0)]
    return cx.cast(cx.scatter(cx.fill(0, meta.shape, compute), shape, inputs, body, "add"), meta.dtype)


@rule("aten._embedding_bag_per_sample_weights_backward.default")
def weights_backward(
    cx: Builder, node: Node, grad: View, table: View, indices: View, offsets: View, offset2bag: View, mode: int,
    padding: Any = -1,
) -> View:  # fmt: skip
    """The product of each index's row with its bag's gradient."""
    bags = Bags(cx, node.args[3], offsets, indices, grad.shape[0])
    rows = Rows(table, indices, None, padding)
    shape = (bags.n, table.shape[1])

    def body(b: Body, t: SSAValue, g: SSAValue, i: SSAValue, *bag: SSAValue) -> SSAValue:
        value = rows.value(b, t, b.cast(i, indices.dtype, I64), b.index(1), ())
        slope = b.load(g, grad, [bags.bag(b, 0, bag), b.index(1)])
        return b.mul(value, b.cast(slope, grad.dtype, rows.compute))

    inputs: list[View | Whole] = [Whole(table), Whole(grad), _seen(indices, shape, (0,)), *bags.inputs(shape, 0)]
    found = cx.reduce(shape[:1], shape[1:], inputs, body, ["add"], [rows.compute])[0]
    return cx.cast(found, cx.meta(node).dtype)
