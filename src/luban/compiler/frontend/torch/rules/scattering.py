"""Writes at computed indices: scatter, index_put and index_add. Sums of bfloat16 and float16 accumulate in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Operand, convert, meta_of
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.indexing import resolve, wrapped
from luban.compiler.frontend.torch.views import View, expand, is_dense, moved, unsqueeze
from luban.compiler.ir.attributes import contiguous
from luban.symbolic import Dim

KINDS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}
Where = Callable[[Body, Sequence[SSAValue]], list[SSAValue]]
"""Gives the target's indices at a point of the domain from the index scalars."""


def combine(
    cx: Builder, x: View, shape: Sequence[Dim], indices: Sequence[View], source: Operand, where: Where,
    dims: Sequence[int], kind: str,
) -> View:  # fmt: skip
    """x with source values combined in at `where`, over the domain `shape`; `dims` are those with indices from data."""
    compute = x.dtype if kind == "set" else COMPUTE[x.dtype]
    start = cx.cast(x, compute)
    tensor = isinstance(source, View) and source.fill is None
    inputs = [*indices, expand(source, shape)] if tensor else list(indices)  # type: ignore[arg-type]
    strides = contiguous(x.shape)

    def body(b: Body, *scalars: SSAValue) -> list[SSAValue]:
        if tensor:
            value = b.cast(scalars[-1], source.dtype, compute)  # type: ignore[union-attr]
        else:
            known = source.fill if isinstance(source, View) else source
            value = b.constant(convert(known, compute), compute)
        target = where(b, scalars[: len(indices)])
        if any(dims):  # an index outside dim 0 leaves the tensor by itself
            target = [b.or_far(i, x.shape[d], x.numel) if d in dims else i for d, i in enumerate(target)]
        return [b.linear(0, strides, target), value]

    return cx.cast(cx.scatter(start, shape, inputs, body, kind), x.dtype)


def _along(x: View, dim: int, index: View) -> tuple[Where, View]:
    """The target of scatter: the point itself, with dim replaced by the index."""
    d, n = dim % max(len(x.shape), 1), len(x.shape)

    def where(b: Body, scalars: Sequence[SSAValue]) -> list[SSAValue]:
        found = b.indices(n)
        if found:
            found[d] = b.cast(scalars[0], index.dtype, torch.int64)
        return found

    return where, index


def _scatter(cx: Builder, x: View, dim: int, index: View, source: Operand, kind: str) -> View:
    where, index = _along(x, dim, index)
    if isinstance(source, View) and source.fill is None and len(source.shape) == len(index.shape):
        source = moved(source, index.shape, source.strides)  # the source may be larger than the index
    dims = [dim % len(x.shape)] if x.shape else []
    return combine(cx, x, index.shape, [index], source, where, dims, kind)


@rule("aten.scatter.src", "aten.scatter.value")
def scatter(cx: Builder, node: Node, x: View, dim: int, index: View, source: Operand) -> View:
    return _scatter(cx, x, dim, index, source, "set")


@rule("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_reduce_old(
    cx: Builder, node: Node, x: View, dim: int, index: View, source: Operand, *, reduce: str
) -> View:
    return _scatter(cx, x, dim, index, source, KINDS[reduce])


@rule("aten.scatter_add.default")
def scatter_add(cx: Builder, node: Node, x: View, dim: int, index: View, source: View) -> View:
    return _scatter(cx, x, dim, index, source, "add")


@rule("aten.scatter_reduce.two")
def scatter_reduce(
    cx: Builder, node: Node, x: View, dim: int, index: View, source: View, reduce: str, include_self: bool = True
) -> View:
    if reduce not in KINDS:
        raise Unsupported(f"reduce={reduce!r}")
    if not include_self:
        floating = x.dtype.is_floating_point
        low = float("-inf") if floating else torch.iinfo(x.dtype).min
        high = float("inf") if floating else torch.iinfo(x.dtype).max
        x = _scatter(cx, x, dim, index, {"add": 0, "mul": 1, "max": low, "min": high}[KINDS[reduce]], "set")
    return _scatter(cx, x, dim, index, source, KINDS[reduce])


@rule("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def index_put(
    cx: Builder, node: Node, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False, *_: Any
) -> View:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype is torch.bool and values.numel == 1 and not accumulate:
        return _masked_put(cx, x, indices, given[0], values)
    found = resolve(x, indices)

    def where(b: Body, scalars: Sequence[SSAValue]) -> list[SSAValue]:
        return found.where(b, x, scalars)

    return combine(cx, x, found.shape, found.tensors, values, where, found.dims, "add" if accumulate else "set")


def _masked_put(cx: Builder, x: View, indices: Sequence[View | None], mask: View, values: View) -> View:
    """One value wherever a mask is true: a choice, not a write."""
    before = next(k for k, i in enumerate(indices) if i is not None)
    after = len(x.shape) - before - len(mask.shape)
    seen = moved(mask, (*mask.shape, *[1] * after), (*mask.strides, *[0] * after))
    value = cx.reshape(values, ())
    compute = COMPUTE[x.dtype]
    return cx.elementwise(Body.select, [seen, value, x], (torch.bool, compute, compute), compute, x.shape, x.dtype)


@rule("aten.index_add.default")
def index_add(cx: Builder, node: Node, x: View, dim: int, index: View, source: View, *, alpha: Any = 1) -> View:
    if alpha != 1:
        source = cx.elementwise(Body.mul, [source, alpha], COMPUTE[x.dtype], None, source.shape, x.dtype)
    return _index_write(cx, x, dim, index, source, "add")


@rule("aten.index_copy.default")
def index_copy(cx: Builder, node: Node, x: View, dim: int, index: View, source: View) -> View:
    return _index_write(cx, x, dim, index, source, "set")


@rule("aten.index_fill.int_Scalar")
def index_fill(cx: Builder, node: Node, x: View, dim: int, index: View, value: Any) -> View:
    return _index_write(cx, x, dim, index, value, "set")


def _index_write(cx: Builder, x: View, dim: int, index: View, source: Operand, kind: str) -> View:
    if not x.shape:
        source = unsqueeze(source, 0) if isinstance(source, View) and not source.shape else source
        return cx.reshape(_index_write(cx, unsqueeze(x, 0), 0, index, source, kind), ())
    d, n = dim % len(x.shape), len(x.shape)
    flat = index if index.shape else unsqueeze(index, 0)
    shape = (*x.shape[:d], flat.shape[0], *x.shape[d + 1 :])
    along = moved(flat, shape, [flat.strides[0] if i == d else 0 for i in range(n)])

    def where(b: Body, scalars: Sequence[SSAValue]) -> list[SSAValue]:
        found = b.indices(n)
        found[d] = wrapped(b, b.cast(scalars[0], index.dtype, torch.int64), x.shape[d])
        return found

    return combine(cx, x, shape, [along], source, where, [d], kind)


@rule("aten.as_strided_scatter.default", "prims.as_strided_scatter.default")
def as_strided_scatter(
    cx: Builder, node: Node, x: View, source: View, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Any = 0
) -> View:
    """Places are in the memory of the traced tensor, which must be row-major, as ours is."""
    meta = meta_of(node.args[0].meta["val"])  # type: ignore[union-attr]
    if not is_dense(meta.shape, meta.strides):
        raise Unsupported("a tensor that is not row-major")

    def body(b: Body, value: SSAValue) -> list[SSAValue]:
        return [b.linear(storage_offset or 0, stride, b.indices(len(size))), b.cast(value, source.dtype, x.dtype)]

    return cx.scatter(x, size, [expand(source, size)], body, "set")
