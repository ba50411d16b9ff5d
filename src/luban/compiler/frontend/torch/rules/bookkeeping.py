"""Operators without a value of their own: assertions that tracing has settled, and writes into arguments."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from xdsl.ir import BlockArgument

from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, expand, storage_order
from luban.compiler.ir import graph


@rule("aten._assert_scalar.default", "aten._assert_tensor_metadata.default", "aten.sym_constrain_range.default",
      "aten.sym_constrain_range_for_size.default", "aten._assert_async.msg", "aten._assert_async.default")  # fmt: skip
def nothing(cx: Builder, node: Node, *_: Any, **__: Any) -> None:
    return None


@rule("aten.copy_.default")
def copy_into(cx: Builder, node: Node, target: View, source: View, non_blocking: bool = False) -> View:
    """The update of an argument that AOTAutograd leaves at the end of a graph."""
    base = target.base
    if not isinstance(base, BlockArgument) or target.offset != 0:
        raise Unsupported("a target that is not an input")
    hints = [s if isinstance(s, int) else 1 << 40 for s in target.strides]
    order = storage_order(target.shape, target.strides, hints)
    if order is None:
        raise Unsupported("a target with gaps in memory")
    value = cx.cast(expand(source, target.shape), target.dtype)
    if value.base.type != base.type or value.offset != 0 or value.strides != target.strides or value.base is base:
        value = cx.dense(value, order)
    cx.add(graph.AssignOp.create(operands=[base, value.base]))
    return target
