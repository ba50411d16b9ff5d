"""Matrix products. A bias is added by the map that follows, which fusion makes an epilogue of the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE, LOW_PRECISION
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, moved
from luban.symbolic import product

BYTES = (torch.int8, torch.uint8)


def product_type(dtype: torch.dtype) -> torch.dtype:
    """What a product gives when a map follows it, so that rounding comes last: float32, and int32 of 8-bit integers."""
    return torch.float32 if dtype in LOW_PRECISION else torch.int32 if dtype in BYTES else dtype


def matrix_product(cx: Builder, a: View, b: View, dtype: torch.dtype) -> View:
    """(..., M, K) times (..., K, N) with equal batch dims; those of 8-bit integers are computed in 32 bits."""
    if a.dtype is torch.bool or (a.dtype is not b.dtype and not {a.dtype, b.dtype} <= set(BYTES)):
        raise Unsupported(f"dtypes {str(a.dtype)[6:]} and {str(b.dtype)[6:]}")
    batch = a.shape[:-2]
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    left = (*a.strides[:-2], a.strides[-2], 0, a.strides[-1])
    right = (*b.strides[:-2], 0, b.strides[-1], b.strides[-2])
    wide = torch.int32 if dtype in BYTES else dtype
    made = cx.contract(a, b, (len(batch), 1, 1, 1), (*batch, m, n, k), (left, right), wide)
    return made if wide is dtype else cx.cast(made, dtype)


@rule("aten.mm.default", "aten.bmm.default", "aten.mm.dtype", "aten.bmm.dtype")
def mm(cx: Builder, node: Node, a: View, b: View, *_: Any) -> View:
    return matrix_product(cx, a, b, cx.meta(node).dtype)


@rule("aten._int_mm.default")
def int_mm(cx: Builder, node: Node, a: View, b: View) -> View:
    return matrix_product(cx, a, b, torch.int32)


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(cx: Builder, node: Node, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> View:
    dtype = cx.meta(node).dtype
    made = matrix_product(cx, a, b, product_type(dtype))
    return scaled_sum(cx, node, made, None if beta == 0 else bias, beta, alpha)


def scaled_sum(cx: Builder, node: Node, made: View, bias: View | None, beta: Any, alpha: Any) -> View:
    """alpha * made + beta * bias."""

    def body(b: Body, value: SSAValue, *rest: SSAValue) -> SSAValue:
        if alpha != 1:
            value = b.mul(value, b.like(value, alpha))
        if not rest:
            return value
        return b.add(value, rest[0] if beta == 1 else b.mul(rest[0], b.like(value, beta)))

    return cx.pointwise(node, body, (made,) if bias is None else (made, bias))


@rule("aten.linear.default")
def linear(cx: Builder, node: Node, x: View, weight: View, bias: View | None = None) -> View:
    dtype = cx.meta(node).dtype
    rows = product(x.shape[:-1])
    flat = cx.reshape(x, (rows, x.shape[-1]))
    turned = moved(weight, weight.shape[::-1], weight.strides[::-1])
    made = matrix_product(cx, flat, turned, dtype if bias is None else product_type(dtype))
    made = cx.reshape(made, (*x.shape[:-1], weight.shape[0]))
    return made if bias is None else scaled_sum(cx, node, made, bias, 1, 1)


def _summed_products(cx: Builder, node: Node, a: View, b: View, parallel: Sequence[Any]) -> View:
    dtype = cx.meta(node).dtype
    compute = COMPUTE[dtype]

    def body(s: Body, x: SSAValue, y: SSAValue) -> SSAValue:
        return s.mul(s.cast(x, a.dtype, compute), s.cast(y, b.dtype, compute))

    found = cx.reduce(parallel, (a.shape[-1],), [a, b], body, ["add"], [compute])[0]
    return cx.cast(found, dtype)


@rule("aten.dot.default", "aten.vdot.default")
def dot(cx: Builder, node: Node, a: View, b: View) -> View:
    return _summed_products(cx, node, a, b, ())


@rule("aten.mv.default")
def mv(cx: Builder, node: Node, a: View, b: View) -> View:
    """A product with one column reads its matrix once: a reduction, not a contraction."""
    return _summed_products(cx, node, a, b, (a.shape[0],))


@rule("aten.addmv.default")
def addmv(cx: Builder, node: Node, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> View:
    compute = COMPUTE[cx.meta(node).dtype]

    def body(s: Body, x: SSAValue, y: SSAValue) -> SSAValue:
        return s.mul(s.cast(x, a.dtype, compute), s.cast(y, b.dtype, compute))

    made = cx.reduce((a.shape[0],), (a.shape[1],), [a, b], body, ["add"], [compute])[0]
    return scaled_sum(cx, node, made, None if beta == 0 else bias, beta, alpha)


@rule("aten.addbmm.default")
def addbmm(cx: Builder, node: Node, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> View:
    """The batch is one more dim of the sum."""
    n, m, k, p = *a.shape, b.shape[-1]
    left = (a.strides[1], 0, a.strides[0], a.strides[2])
    right = (0, b.strides[2], b.strides[0], b.strides[1])
    made = cx.contract(a, b, (0, 1, 1, 2), (m, p, n, k), (left, right), product_type(cx.meta(node).dtype))
    return scaled_sum(cx, node, made, None if beta == 0 else bias, beta, alpha)
