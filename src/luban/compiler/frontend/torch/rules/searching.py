"""Places in sorted rows, by binary search, and counts of bins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE, result_type
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.reductions import fold
from luban.compiler.frontend.torch.views import View
from luban.symbolic import product

OPEN_STEPS = 40  # halvings for a row of an open size: enough for 2^40 elements


@rule("aten.searchsorted.Tensor")
def searchsorted(
    cx: Builder, node: Node, row: View, values: View, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: View | None = None,
) -> View:  # fmt: skip
    found = places(cx, row, values, right or side == "right", sorter)
    return cx.cast(found, cx.meta(node).dtype)


@rule("aten.searchsorted.Scalar")
def searchsorted_scalar(cx: Builder, node: Node, row: View, value: Any, **options: Any) -> View:
    return searchsorted(cx, node, row, cx.fill(value, (), result_type([(row.dtype, 1)], [value])), **options)


@rule("aten.bucketize.Tensor")
def bucketize(
    cx: Builder, node: Node, values: View, row: View, *, out_int32: bool = False, right: bool = False
) -> View:
    return cx.cast(places(cx, row, values, right), cx.meta(node).dtype)


@rule("aten.bucketize.Scalar")
def bucketize_scalar(cx: Builder, node: Node, value: Any, row: View, **options: Any) -> View:
    return bucketize(cx, node, cx.fill(value, (), result_type([(row.dtype, 1)], [value])), row, **options)


def places(cx: Builder, row: View, values: View, right: bool, sorter: View | None = None) -> View:
    """Where each value would go in its sorted row (the only one, or that with its leading indices), int64.

    Before its equals, or behind them if `right`. sorter: the places of the row's elements in order.
    """
    length, rank = row.shape[-1], len(values.shape)
    if length == 0:
        return cx.fill(0, values.shape, torch.int64)
    compute = COMPUTE[torch.promote_types(row.dtype, values.dtype)]
    steps = length.bit_length() if isinstance(length, int) else OPEN_STEPS
    tables = [Whole(row)] if sorter is None else [Whole(row), Whole(sorter)]

    def body(b: Body, value: SSAValue, *loaded: SSAValue) -> SSAValue:
        value = b.cast(value, values.dtype, compute)
        leading = [] if len(row.shape) == 1 else b.indices(rank - 1)
        low, high = b.index_constant(0), b.dim(length)
        last = b.sub(b.dim(length), b.index_constant(1))
        for _ in range(steps):
            open_, middle = b.cmp("lt", low, high), b.shr(b.add(low, high), b.index_constant(1))
            at = b.minimum(middle, last)
            if sorter is not None:
                at = b.load(loaded[1], sorter, [*leading, at], checked=())
            other = b.cast(b.load(loaded[0], row, [*leading, at], _from_data(row, sorter)), row.dtype, compute)
            behind = b.not_(b.cmp("gt" if right else "ge", other, value))  # as torch asks, which places NaN at the end
            low = b.select(b.and_(open_, behind), b.add(middle, b.index_constant(1)), low)
            high = b.select(b.and_(open_, b.not_(behind)), middle, high)
        return low

    return cx.map(values.shape, [values, *tables], body, torch.int64)


def _from_data(row: View, sorter: View | None) -> Sequence[int]:
    """The dims of the row whose index comes from data."""
    return () if sorter is None else (len(row.shape) - 1,)


@rule("aten.histc.default")
def histc(cx: Builder, node: Node, x: View, bins: int = 100, min: Any = 0, max: Any = 0) -> View:
    """Counts of the values in equal bins; those outside are left out. Equal bounds mean the data's own."""
    dtype = cx.meta(node).dtype
    compute, n = COMPUTE[dtype], product(x.shape)
    if n == 0:
        return cx.fill(0, (bins,), dtype)
    flat = cx.reshape(x, (n,))
    if min == max:
        low, high = fold(
            cx, [flat], [0], lambda b, v: [b.cast(v, x.dtype, compute)] * 2, ["min", "max"], [compute] * 2, True
        )
    else:
        low, high = cx.fill(float(min), (1,), compute), cx.fill(float(max), (1,), compute)

    def widened(sign: int) -> Any:
        """A bound, moved outwards by 1 where both are equal."""
        return lambda b, bound, other: b.select(b.cmp("eq", bound, other), b.add(bound, b.like(bound, sign)), bound)

    lower = cx.elementwise(widened(-1), [low, high], compute, None, (1,), compute)
    upper = cx.elementwise(widened(1), [high, low], compute, None, (1,), compute)

    def body(b: Body, v: SSAValue, lo: SSAValue, hi: SSAValue) -> list[SSAValue]:
        v = b.cast(v, x.dtype, compute)
        share = b.mul(b.div(b.sub(v, lo), b.sub(hi, lo)), b.like(v, bins))
        inside = b.and_(b.cmp("ge", v, lo), b.cmp("le", v, hi))
        safe = b.select(inside, share, b.like(v, 0))
        bin_ = b.minimum(b.cast(safe, compute, torch.int64), b.index_constant(bins - 1))
        return [b.select(inside, bin_, b.index_constant(bins)), b.constant(1, compute)]

    counts = cx.scatter(cx.fill(0, (bins + 1,), compute), (n,), [flat, _wide(lower, n), _wide(upper, n)], body, "add")
    return cx.cast(View(counts.base, (bins,), counts.strides, 0, compute), dtype)


def _wide(scalar: View, n: Any) -> View:
    return View(scalar.base, (n,), (0,), scalar.offset, scalar.dtype)
