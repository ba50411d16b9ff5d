"""Elements taken from a source in order, wherever a mask is true: masked_scatter and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.scans import running_sums
from luban.compiler.frontend.torch.views import View, expand
from luban.symbolic import Dim, product


@rule("aten.masked_scatter.default")
def masked_scatter(cx: Builder, node: Node, x: View, mask: View, source: View) -> View:
    if 0 in x.shape or 0 in source.shape:
        return x
    shape = cx.meta(node).shape
    x, mask = expand(x, shape), expand(mask, shape)
    flat, count = cx.reshape(source, (product(source.shape),)), product(shape)

    def body(b: Body, keep: SSAValue, seen: SSAValue, old: SSAValue, table: SSAValue) -> SSAValue:
        at = b.select(keep, b.sub(seen, b.index_constant(1)), b.index_constant(0))
        return b.select(keep, b.load(table, flat, [at], (0,)), old)

    numbers = running_sums(cx, cx.reshape(mask, (count,)), 0, torch.int64)
    return cx.map(shape, [mask, cx.reshape(numbers, shape), x, Whole(flat)], body, x.dtype)


@rule("aten.masked_scatter_backward.default")
def masked_scatter_backward(cx: Builder, node: Node, grad: View, mask: View, sizes: Sequence[Dim]) -> View:
    """The gradients under the mask in order, zeros where the source had more; what is not under it goes behind the end."""
    shape, length, count = tuple(sizes), product(sizes), product(grad.shape)
    if 0 in grad.shape or 0 in shape:
        return cx.fill(0, shape, grad.dtype)
    taken = cx.reshape(expand(mask, grad.shape), (count,))

    def body(b: Body, keep: SSAValue, seen: SSAValue, value: SSAValue) -> list[SSAValue]:
        return [b.select(keep, b.sub(seen, b.index_constant(1)), b.dim(length)), value]

    inputs = [taken, running_sums(cx, taken, 0, torch.int64), cx.reshape(grad, (count,))]
    made = cx.scatter(cx.fill(0, (length + 1,), grad.dtype), (count,), inputs, body, "set")
    return cx.reshape(View(made.base, (length,), (1,), 0, grad.dtype), shape)
