"""Reads at computed indices: gather, index_select and advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole, convert
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, expand, moved, unsqueeze
from luban.symbolic import Dim


def wrapped(b: Body, index: SSAValue, size: Dim) -> SSAValue:
    """A negative index counted from the end."""
    return b.select(b.cmp("lt", index, b.index_constant(0)), b.add(index, b.dim(size)), index)


@rule("aten.gather.default")
def gather(cx: Builder, node: Node, x: View, dim: int, index: View, *, sparse_grad: bool = False) -> View:
    if not x.shape:
        return expand(x, index.shape)
    d, n = dim % len(x.shape), len(x.shape)

    def body(b: Body, table: SSAValue, i: SSAValue) -> SSAValue:
        where = b.indices(n)
        where[d] = b.cast(i, index.dtype, torch.int64)
        return b.load(table, x, where, (d,))

    return cx.map(index.shape, [Whole(x), index], body, x.dtype)


@rule("aten.take.default")
def take(cx: Builder, node: Node, x: View, index: View) -> View:
    flat = cx.reshape(x, (x.numel,))

    def body(b: Body, table: SSAValue, i: SSAValue) -> SSAValue:
        return b.load(table, flat, [wrapped(b, i, x.numel)], (0,))

    return cx.map(index.shape, [Whole(flat), index], body, x.dtype)


@rule("aten.index_select.default")
def index_select(cx: Builder, node: Node, x: View, dim: int, index: View) -> View:
    if not x.shape:
        return x
    d, n = dim % len(x.shape), len(x.shape)
    shape = cx.meta(node).shape
    flat = index if index.shape else unsqueeze(index, 0)
    along = moved(flat, shape, [flat.strides[0] if i == d else 0 for i in range(n)])

    def body(b: Body, table: SSAValue, i: SSAValue) -> SSAValue:
        where = b.indices(n)
        where[d] = b.cast(i, index.dtype, torch.int64)
        return b.load(table, x, where, (d,))

    return cx.map(shape, [Whole(x), along], body, x.dtype)


@dataclass(frozen=True)
class Indexed:
    """Advanced indexing resolved: the selection's shape and, for each dim of the source, where its index comes from.

    `tensors[k]` indexes source dim `dims[k]`, read over selection dims `start` to `start + rank`; `kept[d]` is the
    selection dim of a source dim that is not indexed.
    """

    shape: tuple[Dim, ...]
    dims: tuple[int, ...]
    tensors: tuple[View, ...]
    kept: dict[int, int]

    def where(self, b: Body, source: View, indices: Sequence[SSAValue]) -> list[SSAValue]:
        """The source's indices at a point of the selection, negative ones wrapped."""
        found: list[Any] = [None] * len(source.shape)
        for d, place in self.kept.items():
            found[d] = b.index(place)
        for d, tensor, i in zip(self.dims, self.tensors, indices):
            found[d] = wrapped(b, b.cast(i, tensor.dtype, torch.int64), source.shape[d])
        return found


def resolve(x: View, indices: Sequence[View | None]) -> Indexed:
    """NumPy's rules: indexed dims that are neighbours stay in place, others come first."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        raise Unsupported("a mask, whose result has a size that only the data tell")
    common = broadcast_shape([i.shape for i in given])
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    start = dims[0] if together else 0
    rest = [d for d in range(len(x.shape)) if d not in dims]
    places = [p for p in range(len(rest) + len(common)) if not start <= p < start + len(common)]
    shape: list[Any] = [None] * (len(rest) + len(common))
    shape[start : start + len(common)] = common
    for d, p in zip(rest, places):
        shape[p] = x.shape[d]
    tensors = []
    for i in given:
        wide = expand(i, common)
        strides: list[Dim] = [0] * len(shape)
        strides[start : start + len(common)] = wide.strides
        tensors.append(moved(wide, shape, strides))
    return Indexed(tuple(shape), tuple(dims), tuple(tensors), dict(zip(rest, places)))


def broadcast_shape(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """The shape to which shapes broadcast."""
    n = max(len(s) for s in shapes)
    result: list[Dim] = [1] * n
    for s in shapes:
        for d, size in enumerate(s, n - len(s)):
            result[d] = size if size != 1 else result[d]
    return tuple(result)


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(cx: Builder, node: Node, x: View, indices: Sequence[View | None]) -> View:
    found = resolve(x, indices)

    def body(b: Body, table: SSAValue, *scalars: SSAValue) -> SSAValue:
        return b.load(table, x, found.where(b, x, scalars), found.dims)

    return cx.map(found.shape, [Whole(x), *found.tensors], body, x.dtype)


@rule("aten._unsafe_masked_index.default")
def masked_index(cx: Builder, node: Node, x: View, mask: View, indices: Sequence[View | None], fill: Any) -> View:
    """Where the mask is false the indices may be anything and the value is `fill`."""
    found = resolve(x, indices)
    shape = cx.meta(node).shape

    def body(b: Body, table: SSAValue, keep: SSAValue, *scalars: SSAValue) -> SSAValue:
        zero = b.index_constant(0)
        where = found.where(b, x, scalars)
        safe = [b.select(keep, w, zero) if d in found.dims else w for d, w in enumerate(where)]
        value = b.load(table, x, safe, found.dims)
        return b.select(keep, value, b.constant(convert(fill, x.dtype), x.dtype))

    return cx.map(shape, [Whole(x), mask, *found.tensors], body, x.dtype)
