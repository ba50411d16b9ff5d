"""Embedding tables: rows read at checked indices, gradients added into the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, unsqueeze
from luban.symbolic import Dim


@rule("aten.embedding.default")
def embedding(
    cx: Builder,
    node: Node,
    weight: View,
    indices: View,
    padding_idx: Any = -1,
    scale: bool = False,
    sparse: bool = False,
) -> View:
    meta = cx.meta(node)
    last = len(meta.shape) - 1

    def body(b: Body, table: SSAValue, i: SSAValue) -> SSAValue:
        row = b.cast(i, indices.dtype, torch.int64)
        return b.load(table, weight, [row, b.index(last)], (0,))

    return cx.map(meta.shape, [Whole(weight), unsqueeze(indices, last)], body, weight.dtype)


@rule("aten.embedding_dense_backward.default")
def embedding_dense_backward(
    cx: Builder, node: Node, grad: View, indices: View, rows: Dim, padding_idx: Any, scale_grad_by_freq: bool
) -> View:
    if scale_grad_by_freq:
        raise Unsupported("scale_grad_by_freq=True")
    meta = cx.meta(node)
    compute = COMPUTE[meta.dtype]
    last, width = len(grad.shape) - 1, meta.shape[1]
    keep_all = isinstance(padding_idx, int) and padding_idx < 0

    def body(b: Body, g: SSAValue, i: SSAValue) -> list[SSAValue]:
        row = b.cast(i, indices.dtype, torch.int64)
        value = b.cast(g, grad.dtype, compute)
        if not keep_all:
            value = b.select(b.cmp("eq", row, b.dim(padding_idx)), b.constant(0.0, compute), value)
        return [b.linear(0, (width, 1), (row, b.index(last))), value]

    zeros = cx.fill(0, meta.shape, compute)
    return cx.scatter(zeros, grad.shape, [grad, unsqueeze(indices, last)], body, "add", meta.dtype)
