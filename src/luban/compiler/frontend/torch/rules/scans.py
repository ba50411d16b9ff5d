"""Running sums and extremes along a dim."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE, FLOATS
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.binary import logaddexp
from luban.compiler.frontend.torch.views import View, moved

SHORT = 512  # up to here each sum is taken from the start, in one pass; beyond, sums of doubling length are combined


@rule("aten.cumsum.default")
def cumsum(cx: Builder, node: Node, x: View, dim: int, *, dtype: Any = None) -> View:
    result = cx.meta(node).dtype
    if not x.shape:
        return cx.cast(x, result)
    return cx.cast(running_sums(cx, x, dim % len(x.shape), COMPUTE[result]), result)


def running_sums(cx: Builder, x: View, d: int, compute: torch.dtype) -> View:
    """Element i of a row is the sum of the row up to i."""
    n = x.shape[d]
    if not isinstance(n, int) or n <= SHORT:
        return _from_start(cx, x, d, compute)
    current, reach = cx.cast(x, compute), 1
    while reach < n:
        current = _doubled(cx, current, d, reach)
        reach *= 2
    return current


def _from_start(cx: Builder, x: View, d: int, compute: torch.dtype) -> View:
    """A reduction over all elements of the row that takes those up to its own position."""
    row = [s for i, s in enumerate(x.strides) if i != d]
    across = [n for i, n in enumerate(x.shape) if i != d]
    n, last = x.shape[d], len(x.shape) - 1
    table = moved(x, (*across, n, n), (*row, 0, x.strides[d]))

    def body(b: Body, v: SSAValue) -> SSAValue:
        seen = b.cmp("le", b.index(last + 1), b.index(last))
        return b.select(seen, b.cast(v, x.dtype, compute), b.constant(0, compute))

    found = cx.reduce((*across, n), (n,), [table], body, ["add"], [compute])[0]
    order = [*range(d), last, *range(d, last)]
    return moved(found, x.shape, [found.strides[i] for i in order])


def _doubled(cx: Builder, x: View, d: int, reach: int, combine: Any = Body.add) -> View:
    """x[i] + x[i - reach], or what else combines them, along a dim."""

    def body(b: Body, v: SSAValue, table: SSAValue) -> SSAValue:
        where = b.indices(len(x.shape))
        before = b.sub(where[d], b.index_constant(reach))
        zero = b.index_constant(0)
        where[d] = b.maximum(before, zero)
        other = b.load(table, x, where)
        return b.select(b.cmp("ge", before, zero), combine(b, v, other), v)

    return cx.map(x.shape, [x, Whole(x)], body, x.dtype)


def _register_running_extreme(name: str, order: str) -> None:
    @rule(f"aten.{name}.default")
    def running(cx: Builder, node: Node, x: View, dim: int) -> tuple[View, View]:
        """The extreme of each row up to each element and its last place; a NaN stays from where it comes."""
        if not x.shape:
            return x, cx.fill(0, (), torch.int64)
        d, compute = dim % len(x.shape), torch.int32 if x.dtype is torch.bool else COMPUTE[x.dtype]

        def later(b: Body, mine: SSAValue, before: SSAValue) -> SSAValue:
            wins = b.cmp(order, mine, before)
            return b.or_(b.isnan(mine), wins) if x.dtype in FLOATS else wins

        values = cx.cast(x, compute)
        at = cx.map(x.shape, [], lambda b: b.index(d), torch.int64)
        n = x.shape[d]
        if not isinstance(n, int):
            raise Unsupported("a row of an open size")
        for reach in _reaches(n):
            values, at = _doubled_pair(cx, values, at, d, reach, later)
        return cx.cast(values, x.dtype), at


def _reaches(n: int) -> list[int]:
    """1, 2, 4... below n."""
    return [1 << i for i in range(max(n - 1, 0).bit_length())]


def _doubled_pair(cx: Builder, x: View, at: View, d: int, reach: int, later: Any) -> tuple[View, View]:
    """The pair of each element or that `reach` before it, whichever `later` says."""

    def body(b: Body, v: SSAValue, p: SSAValue, values: SSAValue, places: SSAValue) -> list[SSAValue]:
        where = b.indices(len(x.shape))
        before, zero = b.sub(where[d], b.index_constant(reach)), b.index_constant(0)
        where[d] = b.maximum(before, zero)
        w, q = b.load(values, x, where), b.load(places, at, where)
        mine = b.or_(b.cmp("lt", before, zero), later(b, v, w))
        return [b.select(mine, v, w), b.select(mine, p, q)]

    return cx.map(x.shape, [x, at, Whole(x), Whole(at)], body, [x.dtype, torch.int64])


_register_running_extreme("cummax", "ge")
_register_running_extreme("cummin", "le")


@rule("aten.logcumsumexp.default")
def logcumsumexp(cx: Builder, node: Node, x: View, dim: int) -> View:
    if not x.shape:
        return x
    d, compute = dim % len(x.shape), COMPUTE[x.dtype]
    n = x.shape[d]
    if not isinstance(n, int):
        raise Unsupported("a row of an open size")
    current = cx.cast(x, compute)
    for reach in _reaches(n):
        current = _doubled(cx, current, d, reach, logaddexp)
    return cx.cast(current, x.dtype)
