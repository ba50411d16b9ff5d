"""Operators that only change the window: no operation is made (but for a reshape that strides cannot say)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.builder import Builder, meta_of
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View
from luban.symbolic import Dim, Expr

_copies = itertools.count(1)


@rule("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default",
      "aten.view_copy.default", "prims.view_of.default", "aten.unflatten.int", "aten.flatten.using_ints")  # fmt: skip
def reshape(cx: Builder, node: Node, x: View, *_: Any) -> View:
    return cx.reshape(x, cx.meta(node).shape)


@rule("aten.expand.default", "aten.expand_copy.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(cx: Builder, node: Node, x: View, *_: Any, implicit: bool = False) -> View:
    return views.expand(x, cx.meta(node).shape)


@rule("prims.broadcast_in_dim.default")
def broadcast_in_dim(cx: Builder, node: Node, x: View, shape: Sequence[Dim], dims: Sequence[int]) -> View:
    shape = cx.meta(node).shape
    strides: list[Dim] = [0] * len(shape)
    for d, n, s in zip(dims, x.shape, x.strides):
        strides[d] = 0 if n == 1 and shape[d] != 1 else s
    return views.moved(x, shape, strides)


@rule("aten.permute.default", "aten.permute_copy.default", "prims.transpose.default")
def permute(cx: Builder, node: Node, x: View, order: Sequence[int]) -> View:
    return views.permute(x, order)


@rule("aten.transpose.int", "aten.transpose_copy.int", "aten.swapaxes.default")
def transpose(cx: Builder, node: Node, x: View, a: int, b: int) -> View:
    order = list(range(len(x.shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return views.permute(x, order)


@rule("aten.t.default", "aten.t_copy.default", "aten.numpy_T.default", "aten.mT.default", "aten.adjoint.default")
def t(cx: Builder, node: Node, x: View) -> View:
    n = len(x.shape)
    return views.permute(x, [*range(n - 2), n - 1, n - 2]) if n > 1 else x


def bounded(index: Any, size: Dim, default: Dim) -> Dim:
    """A slice bound as Python means it: negative counts from the end, too large means the end."""
    if index is None:
        return default
    if isinstance(index, int) and isinstance(size, int):
        return max(0, min(index + size if index < 0 else index, size))
    if isinstance(index, int):
        if index < 0:
            return size + index
        return size if index >= 1 << 62 else index
    return index


@rule("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_tensor(
    cx: Builder, node: Node, x: View, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> View:
    d = dim % len(x.shape)
    if isinstance(step, Expr):
        raise Unsupported("a symbolic step")
    return views.slice_dim(x, d, bounded(start, x.shape[d], 0), cx.meta(node).shape[d], step)


@rule("aten.select.int", "aten.select_copy.int")
def select(cx: Builder, node: Node, x: View, dim: int, index: Any) -> View:
    d = dim % len(x.shape)
    if isinstance(index, int) and index < 0:
        index = x.shape[d] + index
    return views.select(x, d, index)


@rule("aten.narrow.default")
def narrow(cx: Builder, node: Node, x: View, dim: int, start: Any, length: Dim) -> View:
    d = dim % len(x.shape)
    return views.slice_dim(x, d, bounded(start, x.shape[d], 0), length)


@rule("aten.squeeze.default", "aten.squeeze_copy.default")
def squeeze_all(cx: Builder, node: Node, x: View) -> View:
    return views.squeeze(x, range(len(x.shape)))


@rule(
    "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims", "prims.squeeze.default"
)
def squeeze(cx: Builder, node: Node, x: View, dim: int | Sequence[int]) -> View:
    n = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim
    return views.squeeze(x, [d % n for d in dims]) if n else x


@rule("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(cx: Builder, node: Node, x: View, dim: int) -> View:
    return views.unsqueeze(x, dim % (len(x.shape) + 1))


@rule("aten.flip.default", "prims.rev.default")
def flip(cx: Builder, node: Node, x: View, dims: Sequence[int]) -> View:
    return views.flip(x, [d % len(x.shape) for d in dims]) if x.shape else x


@rule("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(cx: Builder, node: Node, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    n = len(x.shape)
    return views.diagonal(x, offset, dim1 % n, dim2 % n, cx.meta(node).shape[-1])


@rule("aten.unfold.default", "aten.unfold_copy.default")
def unfold(cx: Builder, node: Node, x: View, dimension: int, size: int, step: int) -> View:
    if not x.shape:
        return views.moved(x, (size,), (0,))
    d = dimension % len(x.shape)
    strides = [*x.strides, x.strides[d]]
    strides[d] = x.strides[d] * step
    return views.moved(x, cx.meta(node).shape, strides)


@rule("aten.as_strided.default", "aten.as_strided_copy.default")
def as_strided(
    cx: Builder, node: Node, x: View, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Any = None
) -> View:
    """Strides are in the memory of the traced tensor, which must be laid out as ours is."""
    argument = node.args[0].meta["val"]  # type: ignore[union-attr]
    meta = meta_of(argument)
    offset = argument.storage_offset() if storage_offset is None else storage_offset
    if argument.storage_offset() != 0:
        raise Unsupported("a view that does not begin at its memory's start")
    source = x if views.same_layout(x.shape, x.strides, meta.strides) else cx.dense(x, meta.order)
    if not views.same_layout(source.shape, source.strides, meta.strides):
        raise Unsupported("memory with gaps")
    return views.moved(source, size, stride, source.offset + offset)


@rule("aten.split.Tensor", "aten.unsafe_split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default",
      "aten.unsafe_split_with_sizes.default", "aten.unsafe_chunk.default", "aten.split_copy.Tensor",
      "aten.split_with_sizes_copy.default", "aten.tensor_split.sections")  # fmt: skip
def split(cx: Builder, node: Node, x: View, sizes: Any, dim: int = 0) -> tuple[View, ...]:
    d = dim % len(x.shape)
    pieces, start = [], 0
    for meta in cx.metas(node):
        length = meta.shape[d]  # type: ignore[union-attr]
        pieces.append(views.slice_dim(x, d, start, length))
        start = start + length  # type: ignore[assignment]
    return tuple(pieces)


@rule("aten.unbind.int", "aten.unbind_copy.int")
def unbind(cx: Builder, node: Node, x: View, dim: int = 0) -> tuple[View, ...]:
    d = dim % len(x.shape)
    return tuple(views.select(x, d, i) for i in range(len(node.meta["val"])))


@rule("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten.lift.default",
      "aten.detach_copy.default", "aten.alias_copy.default", "aten._conj.default", "aten.resolve_conj.default",
      "aten.resolve_neg.default", "aten.contiguous.default", "aten.conj.default", "aten.conj_physical.default",
      "aten.real.default", "aten.positive.default")  # fmt: skip
def same(cx: Builder, node: Node, x: View, **_: Any) -> View:
    return x


@rule("aten.clone.default", "aten.lift_fresh_copy.default", "prims.clone.default")
def clone(cx: Builder, node: Node, x: View, memory_format: Any = None) -> View:
    """The same value: in a functional graph a copy matters only where memory is handed out."""
    return views.as_copy(x, next(_copies))
