"""Operators of one operand that apply a function to each element, and conversions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE, ELEMENT, FLOATS
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View

Scalar1 = Callable[[Body, SSAValue], SSAValue]
_copies = itertools.count(-1, -1)


def _register(name: str, function: Scalar1, *more: str) -> None:
    @rule(f"aten.{name}.default", f"prims.{name}.default", *more)
    def unary(cx: Builder, node: Node, x: View) -> View:
        return cx.pointwise(node, function, (x,))


def _register_rounding(name: str, function: Scalar1) -> None:
    @rule(f"aten.{name}.default", f"prims.{name}.default")
    def rounding(cx: Builder, node: Node, x: View) -> View:
        return cx.pointwise(node, function, (x,)) if x.dtype in FLOATS else x


def _register_test(name: str, function: Scalar1, on_integers: bool) -> None:
    @rule(f"aten.{name}.default", f"prims.{name}.default")
    def test(cx: Builder, node: Node, x: View) -> View:
        if x.dtype not in FLOATS:
            return cx.fill(on_integers, x.shape, torch.bool)
        return cx.pointwise(node, function, (x,), COMPUTE[x.dtype], torch.bool)


def _sign(b: Body, x: SSAValue) -> SSAValue:
    zero, one = b.like(x, 0), b.like(x, 1)
    negative = b.select(b.cmp("lt", x, zero), b.like(x, -1), zero)
    return b.select(b.cmp("gt", x, zero), one, negative)


_SAME_NAMES = """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf
sqrt rsqrt reciprocal abs neg"""
for _name in _SAME_NAMES.split():
    _register(_name, getattr(Body, _name))
for _name in ("floor", "ceil", "trunc", "round"):
    _register_rounding(_name, getattr(Body, _name))
_register("square", lambda b, x: b.mul(x, x))
_register("deg2rad", lambda b, x: b.mul(x, b.like(x, math.pi / 180)))
_register("rad2deg", lambda b, x: b.mul(x, b.like(x, 180 / math.pi)))
_register("frac", lambda b, x: b.sub(x, b.trunc(x)))
_register("sigmoid", lambda b, x: sigmoid(b, x))
_register("bitwise_not", Body.not_)
_register_test("isnan", Body.isnan, False)
_register_test("isinf", lambda b, x: b.cmp("eq", b.abs(x), b.like(x, math.inf)), False)
_register_test("isfinite", lambda b, x: b.cmp("lt", b.abs(x), b.like(x, math.inf)), True)
_register_test("isposinf", lambda b, x: b.cmp("eq", x, b.like(x, math.inf)), False)
_register_test("isneginf", lambda b, x: b.cmp("eq", x, b.like(x, -math.inf)), False)


def sigmoid(b: Body, x: SSAValue) -> SSAValue:
    """1 / (1 + exp(-x))."""
    return b.reciprocal(b.add(b.like(x, 1.0), b.exp(b.neg(x))))


@rule("aten.sign.default", "aten.sgn.default", "prims.sign.default")
def sign(cx: Builder, node: Node, x: View) -> View:
    if x.dtype is torch.bool:
        return x
    return cx.pointwise(node, _sign, (x,))  # sign(NaN) is 0 in torch


@rule("aten.signbit.default", "prims.signbit.default")
def signbit(cx: Builder, node: Node, x: View) -> View:
    def body(b: Body, v: SSAValue) -> SSAValue:
        one = b.like(v, 1)
        return b.cmp("lt", b.copysign(one, v) if x.dtype in FLOATS else v, b.like(v, 0))

    return cx.pointwise(node, body, (x,), COMPUTE[x.dtype], torch.bool)


@rule("aten.erfc.default")
def erfc(cx: Builder, node: Node, x: View) -> View:
    """1 - erf(x), in float64 so that the small values keep float32's digits."""
    return cx.pointwise(node, lambda b, v: b.sub(b.like(v, 1.0), b.erf(v)), (x,), torch.float64)


@rule("aten.round.decimals")
def round_decimals(cx: Builder, node: Node, x: View, decimals: int = 0) -> View:
    scale = 10.0 ** abs(decimals)

    def body(b: Body, v: SSAValue) -> SSAValue:
        factor = b.like(v, scale)
        if decimals >= 0:
            return b.div(b.round(b.mul(v, factor)), factor)
        return b.mul(b.round(b.div(v, factor)), factor)

    return cx.pointwise(node, body, (x,)) if x.dtype in FLOATS else x


@rule("aten.logical_not.default")
def logical_not(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, Body.not_, (x,), torch.bool)


@rule("aten.nan_to_num.default")
def nan_to_num(cx: Builder, node: Node, x: View, nan: Any = None, posinf: Any = None, neginf: Any = None) -> View:
    if x.dtype not in FLOATS:
        return x
    limits = torch.finfo(x.dtype)
    top = limits.max if posinf is None else posinf
    bottom = limits.min if neginf is None else neginf

    def body(b: Body, v: SSAValue) -> SSAValue:
        high = b.select(b.cmp("eq", v, b.like(v, math.inf)), b.like(v, top), v)
        low = b.select(b.cmp("eq", v, b.like(v, -math.inf)), b.like(v, bottom), high)
        return b.select(b.isnan(v), b.like(v, 0.0 if nan is None else nan), low)

    return cx.pointwise(node, body, (x,))


@rule("aten._to_copy.default", "prims.convert_element_type.default", "aten.to.dtype")
def convert(cx: Builder, node: Node, x: View, *_: Any, **__: Any) -> View:
    meta = cx.meta(node)
    if meta.dtype is x.dtype:
        return views.as_copy(x, next(_copies))
    if x.fill is not None:
        return cx.fill(x.fill, x.shape, meta.dtype)
    return cx.pointwise(node, lambda b, v: b.cast(v, x.dtype, meta.dtype), (x,), x.dtype, meta.dtype)


@rule("aten.view.dtype")
def view_dtype(cx: Builder, node: Node, x: View, dtype: torch.dtype) -> View:
    if dtype.itemsize != x.dtype.itemsize or torch.bool in (dtype, x.dtype):
        raise Unsupported(f"{x.dtype} seen as {dtype}")
    if ELEMENT[dtype] == ELEMENT[x.dtype]:
        return cx.map(x.shape, [x], lambda b, v: v, dtype)
    return cx.map(x.shape, [x], lambda b, v: b.bitcast(v, ELEMENT[dtype]), dtype)
