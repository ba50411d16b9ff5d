"""Tensors made from nothing: constants, ranges, masks. Their contents need no input but sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Operand
from luban.compiler.frontend.torch.dtypes import COMPUTE, FLOATS
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.views import View


def _register_fill(value: int, *names: str) -> None:
    """Contents of empty tensors are unspecified in torch; here they are zeros, so that runs repeat."""

    @rule(*names)
    def made(cx: Builder, node: Node, *_: Any, **__: Any) -> View:
        meta = cx.meta(node)
        return cx.fill(value, meta.shape, meta.dtype)


_register_fill(0, "aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default", "aten.zero.default",
               "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default",
               "aten.empty_strided.default", "aten.empty_permuted.default", "aten.new_empty_strided.default",
               "prims.empty_strided.default", "prims.empty_permuted.default",
               "aten._efficientzerotensor.default")  # fmt: skip
_register_fill(1, "aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")


@rule(
    "aten.full.default", "aten.full_like.default", "aten.fill.Scalar", "prims.full.default", "prims.full_like.default"
)
def full(cx: Builder, node: Node, like: Any, value: Any, *_: Any, **__: Any) -> View:
    meta = cx.meta(node)
    return cx.fill(value, meta.shape, meta.dtype)


@rule("aten.new_full.default")
def new_full(cx: Builder, node: Node, x: View, size: Any, value: Any, **_: Any) -> View:
    meta = cx.meta(node)
    return cx.fill(value, meta.shape, meta.dtype)


@rule("aten.scalar_tensor.default", "prims.scalar_tensor.default")
def scalar_tensor(cx: Builder, node: Node, value: Any, **_: Any) -> View:
    return cx.fill(value, (), cx.meta(node).dtype)


@rule("aten.fill.Tensor")
def fill_tensor(cx: Builder, node: Node, x: View, value: View) -> View:
    return cx.pointwise(node, lambda b, v: v, (value,))


def _ramp(cx: Builder, node: Node, start: Operand, step: Operand) -> View:
    """start + step * i in the dtype of the result."""
    meta = cx.meta(node)
    compute = torch.float64 if meta.dtype in FLOATS else torch.int64

    def body(b: Body) -> SSAValue:
        i = b.cast(b.index(0), torch.int64, compute)
        value = b.add(_number(b, start, compute), b.mul(i, _number(b, step, compute)))
        return b.store_cast(value, compute, meta.dtype)

    return cx.map(meta.shape, (), body, meta.dtype)


def _number(b: Body, value: Operand, dtype: torch.dtype) -> SSAValue:
    return b.constant(value, dtype) if isinstance(value, (int, float)) else b.dim_as(value, dtype)  # type: ignore[arg-type]


@rule("aten.arange.default")
def arange(cx: Builder, node: Node, end: Operand, **_: Any) -> View:
    return _ramp(cx, node, 0, 1)


@rule("aten.arange.start")
def arange_start(cx: Builder, node: Node, start: Operand, end: Operand, **_: Any) -> View:
    return _ramp(cx, node, start, 1)


@rule("aten.arange.start_step")
def arange_step(cx: Builder, node: Node, start: Operand, end: Operand, step: Operand = 1, **_: Any) -> View:
    return _ramp(cx, node, start, step)


@rule("prims.iota.default")
def iota(cx: Builder, node: Node, length: Operand, start: Operand = 0, step: Operand = 1, **_: Any) -> View:
    return _ramp(cx, node, start, step)


@rule("aten.linspace.default")
def linspace(cx: Builder, node: Node, start: Any, end: Any, steps: Any, **_: Any) -> View:
    """Counted from the nearer end, so that both ends are exact."""
    meta = cx.meta(node)

    def body(b: Body) -> SSAValue:
        f64 = torch.float64
        i, n = b.cast(b.index(0), torch.int64, f64), b.dim_as(steps, f64)
        last = b.sub(n, b.constant(1.0, f64))
        one = b.constant(1.0, f64)
        width = b.div(b.constant(float(end) - float(start), f64), b.maximum(last, one))
        low = b.add(b.constant(float(start), f64), b.mul(i, width))
        high = b.sub(b.constant(float(end), f64), b.mul(b.sub(last, i), width))
        near = b.cmp("lt", b.add(i, i), n)
        return b.store_cast(b.select(near, low, high), f64, meta.dtype)

    return cx.map(meta.shape, (), body, meta.dtype)


@rule("aten.eye.default", "aten.eye.m")
def eye(cx: Builder, node: Node, *_: Any, **__: Any) -> View:
    meta = cx.meta(node)
    return cx.map(
        meta.shape, (), lambda b: b.cast(b.cmp("eq", b.index(0), b.index(1)), torch.bool, meta.dtype), meta.dtype
    )


def _triangle(cx: Builder, x: View, diagonal: Operand, keep: str, dtype: torch.dtype) -> View:
    n = len(x.shape)

    def body(b: Body, v: SSAValue) -> SSAValue:
        row = b.add(b.index(n - 2), _number(b, diagonal, torch.int64))
        zero = b.constant(0, COMPUTE[x.dtype])
        value = b.select(b.cmp(keep, b.index(n - 1), row), b.cast(v, x.dtype, COMPUTE[x.dtype]), zero)
        return b.store_cast(value, COMPUTE[x.dtype], dtype)

    return cx.map(x.shape, [x], body, dtype)


@rule("aten.tril.default")
def tril(cx: Builder, node: Node, x: View, diagonal: Operand = 0) -> View:
    return _triangle(cx, x, diagonal, "le", x.dtype)


@rule("aten.triu.default")
def triu(cx: Builder, node: Node, x: View, diagonal: Operand = 0) -> View:
    return _triangle(cx, x, diagonal, "ge", x.dtype)
