"""Running sums along a dim."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
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


def _doubled(cx: Builder, x: View, d: int, reach: int) -> View:
    """x[i] + x[i - reach] along a dim."""

    def body(b: Body, v: SSAValue, table: SSAValue) -> SSAValue:
        where = b.indices(len(x.shape))
        before = b.sub(where[d], b.index_constant(reach))
        zero = b.index_constant(0)
        where[d] = b.maximum(before, zero)
        other = b.load(table, x, where)
        return b.select(b.cmp("ge", before, zero), b.add(v, other), v)

    return cx.map(x.shape, [x, Whole(x)], body, x.dtype)
