"""Arithmetic, comparison and logic of two or three operands, with torch's type promotion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Operand
from luban.compiler.frontend.torch.dtypes import COMPUTE, FLOATS, result_type
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, expand

Scalar2 = Callable[[Body, SSAValue, SSAValue], SSAValue]


def promoted(operands: Sequence[Operand]) -> torch.dtype:
    """The dtype in which torch computes over these operands."""
    tensors = [(o.dtype, len(o.shape)) for o in operands if isinstance(o, View)]
    return result_type(tensors, [o for o in operands if not isinstance(o, View)])


def _register(function: Scalar2, *names: str) -> None:
    @rule(*names)
    def binary(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
        return cx.pointwise(node, function, (x, y))


def _register_compare(name: str) -> None:
    @rule(f"aten.{name}.Tensor", f"aten.{name}.Scalar", f"prims.{name}.default")
    def compare(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
        compute = COMPUTE[promoted((x, y))]
        return cx.pointwise(node, lambda b, p, q: b.cmp(name, p, q), (x, y), compute, torch.bool)


def _register_modular(function: Scalar2, *names: str) -> None:
    """float32 computes in float64, where x / y is exact enough to be cut to the right integer."""

    @rule(*names)
    def modular(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
        return cx.pointwise(node, function, (x, y), wide(cx.meta(node).dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64 for floats, the compute dtype for integers."""
    return torch.float64 if dtype in FLOATS else COMPUTE[dtype]


def _divisor(b: Body, y: SSAValue) -> SSAValue:
    """An integer divisor that cannot trap: eager refuses 0, a vector of lanes cannot."""
    if isinstance(y.owner, ConstantOp):
        return y
    return b.select(b.cmp("eq", y, b.like(y, 0)), b.like(y, 1), y)


def _remainder(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    """x - floor(x / y) * y with the sign of y."""
    if not _is_float(x):
        r = b.rem_int(x, _divisor(b, y))
        zero = b.like(x, 0)
        wrong = b.and_(b.cmp("ne", r, zero), b.cmp("ne", b.cmp("lt", r, zero), b.cmp("lt", y, zero)))
        return b.select(wrong, b.add(r, y), r)
    r = _fmod(b, x, y)
    zero = b.like(x, 0.0)
    wrong = b.and_(b.cmp("ne", r, zero), b.cmp("ne", b.cmp("lt", r, zero), b.cmp("lt", y, zero)))
    return b.select(wrong, b.add(r, y), r)


def _fmod(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    """x - trunc(x / y) * y with the sign of x; x itself for an infinite y."""
    if not _is_float(x):
        return b.rem_int(x, _divisor(b, y))
    r = b.sub(x, b.mul(b.trunc(b.div(x, y)), y))
    finite = b.cmp("lt", b.abs(x), b.like(x, float("inf")))
    infinite = b.and_(b.cmp("eq", b.abs(y), b.like(y, float("inf"))), finite)
    return b.copysign(b.select(infinite, x, r), x)


def _is_float(x: SSAValue) -> bool:
    return not isinstance(x.type, IntegerType)


_register(Body.sub, "prims.sub.default")
_register(Body.add, "prims.add.default")
_register(Body.mul, "aten.mul.Tensor", "aten.mul.Scalar", "prims.mul.default")
_register(Body.div, "aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor", "prims.div.default")
_register(Body.maximum, "aten.maximum.default", "prims.maximum.default")
_register(Body.minimum, "aten.minimum.default", "prims.minimum.default")
_register(Body.fmax, "aten.fmax.default", "prims.fmax.default")
_register(Body.fmin, "aten.fmin.default", "prims.fmin.default")
_register(Body.atan2, "aten.atan2.default", "prims.atan2.default")
_register(Body.copysign, "aten.copysign.Tensor", "aten.copysign.Scalar")
_register(Body.and_, "aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar", "prims.bitwise_and.default",
          "aten.__and__.Tensor", "aten.__and__.Scalar")  # fmt: skip
_register(Body.or_, "aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar", "prims.bitwise_or.default",
          "aten.__or__.Tensor", "aten.__or__.Scalar")  # fmt: skip
_register(Body.xor, "aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar", "prims.bitwise_xor.default")
_register(Body.shl, "aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar", "aten.__lshift__.Scalar")
_register(
    Body.shr, "aten.bitwise_right_shift.Tensor", "aten.bitwise_right_shift.Tensor_Scalar", "aten.__rshift__.Scalar"
)
_register_modular(_remainder, "aten.remainder.Tensor", "aten.remainder.Scalar", "prims.remainder.default")
_register_modular(_fmod, "aten.fmod.Tensor", "aten.fmod.Scalar", "prims.fmod.default")
_register(lambda b, x, y: b.sqrt(b.add(b.mul(x, x), b.mul(y, y))), "aten.hypot.default")
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register_compare(_name)


@rule("aten.add.Tensor", "aten.add.Scalar")
def add(cx: Builder, node: Node, x: Operand, y: Operand, alpha: Any = 1) -> View:
    if alpha == 1:
        return cx.pointwise(node, Body.add, (x, y))
    return cx.pointwise(node, lambda b, p, q, a: b.add(p, b.mul(a, q)), (x, y, alpha))


@rule("aten.sub.Tensor", "aten.sub.Scalar")
def sub(cx: Builder, node: Node, x: Operand, y: Operand, alpha: Any = 1) -> View:
    if alpha == 1:
        return cx.pointwise(node, Body.sub, (x, y))
    return cx.pointwise(node, lambda b, p, q, a: b.sub(p, b.mul(a, q)), (x, y, alpha))


@rule("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(cx: Builder, node: Node, x: Operand, y: Operand, alpha: Any = 1) -> View:
    return cx.pointwise(node, lambda b, p, q, a: b.sub(q, p if alpha == 1 else b.mul(a, p)), (x, y, alpha))


@rule("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(cx: Builder, node: Node, x: Operand, y: Operand, rounding_mode: str | None = None) -> View:
    compute = wide(cx.meta(node).dtype) if rounding_mode == "floor" else None
    return cx.pointwise(node, _DIVISIONS[rounding_mode], (x, y), compute)


@rule("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
    return cx.pointwise(node, _floor_divide, (x, y), wide(cx.meta(node).dtype))


def _floor_divide(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    """floor(x / y) as Python does it: from the exact remainder, so that rounding of x / y does not matter."""
    if not _is_float(x):
        return b.floordiv_int(x, _divisor(b, y))
    r = _fmod(b, x, y)
    zero = b.like(x, 0.0)
    q = b.div(b.sub(x, r), y)
    wrong = b.and_(b.cmp("ne", r, zero), b.cmp("ne", b.cmp("lt", y, zero), b.cmp("lt", r, zero)))
    q = b.round(b.select(wrong, b.sub(q, b.like(q, 1.0)), q))
    return b.select(b.cmp("eq", y, zero), b.div(x, y), q)


def _trunc_divide(b: Body, x: SSAValue, y: SSAValue) -> SSAValue:
    return b.trunc(b.div(x, y)) if _is_float(x) else b.div(x, _divisor(b, y))


_DIVISIONS: dict[str | None, Scalar2] = {None: Body.div, "floor": _floor_divide, "trunc": _trunc_divide}


@rule("aten.pow.Tensor_Tensor", "aten.pow.Scalar", "prims.pow.default")
def pow_tensor(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
    return cx.pointwise(node, Body.pow, (x, y))


@rule("aten.pow.Tensor_Scalar")
def pow_scalar(cx: Builder, node: Node, x: View, exponent: Any) -> View:
    short = _POWERS.get(exponent) if isinstance(exponent, (int, float)) else None
    if short is not None and (cx.meta(node).dtype in FLOATS or exponent in (0, 1, 2, 3)):
        return cx.pointwise(node, short, (x,))
    return cx.pointwise(node, Body.pow, (x, exponent))


_POWERS: dict[float, Callable[[Body, SSAValue], SSAValue]] = {
    0: lambda b, x: b.like(x, 1),
    1: lambda b, x: x,
    2: lambda b, x: b.mul(x, x),
    3: lambda b, x: b.mul(b.mul(x, x), x),
    0.5: Body.sqrt,
    -0.5: Body.rsqrt,
    -1: Body.reciprocal,
    -2: lambda b, x: b.reciprocal(b.mul(x, x)),
}


def _register_logical(name: str, function: Scalar2) -> None:
    @rule(f"aten.logical_{name}.default")
    def logical(cx: Builder, node: Node, x: View, y: View) -> View:
        return cx.pointwise(node, function, (x, y), torch.bool)


_register_logical("and", Body.and_)
_register_logical("or", Body.or_)
_register_logical("xor", Body.xor)


@rule("aten.where.self", "prims.where.default", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(cx: Builder, node: Node, condition: View, x: Operand, y: Operand) -> View:
    compute = COMPUTE[cx.meta(node).dtype]
    return cx.pointwise(node, Body.select, (condition, x, y), (torch.bool, compute, compute), compute)


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(cx: Builder, node: Node, x: View, mask: View, value: Operand) -> View:
    compute = COMPUTE[x.dtype]
    return cx.pointwise(node, Body.select, (mask, value, x), (torch.bool, compute, compute), compute)


@rule("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(cx: Builder, node: Node, start: View, end: View, weight: Operand) -> View:
    return cx.pointwise(node, _lerp, (start, end, weight))


def _lerp(b: Body, x: SSAValue, y: SSAValue, w: SSAValue) -> SSAValue:
    """From the nearer end, as torch does, so that a weight of 1 gives the end exactly."""
    difference, one = b.sub(y, x), b.like(w, 1.0)
    near = b.cmp("lt", b.abs(w), b.like(w, 0.5))
    return b.select(near, b.add(x, b.mul(w, difference)), b.sub(y, b.mul(difference, b.sub(one, w))))


@rule("aten.addcmul.default")
def addcmul(cx: Builder, node: Node, x: View, y: View, z: View, value: Any = 1) -> View:
    return cx.pointwise(node, lambda b, p, q, r, v: b.add(p, b.mul(v, b.mul(q, r))), (x, y, z, value))


@rule("prims.fma.default")
def fma(cx: Builder, node: Node, x: Operand, y: Operand, z: Operand) -> View:
    """x * y + z, which code generation contracts to one rounding where the chip can."""
    return cx.pointwise(node, lambda b, p, q, r: b.add(b.mul(p, q), r), (x, y, z))


@rule("aten.addcdiv.default")
def addcdiv(cx: Builder, node: Node, x: View, y: View, z: View, value: Any = 1) -> View:
    return cx.pointwise(node, lambda b, p, q, r, v: b.add(p, b.mul(v, b.div(q, r))), (x, y, z, value))


@rule("aten.logaddexp.default")
def logaddexp_(cx: Builder, node: Node, x: View, y: View) -> View:
    return cx.pointwise(node, logaddexp, (x, y))


def logaddexp(b: Body, p: SSAValue, q: SSAValue) -> SSAValue:
    """log(exp(p) + exp(q)) without overflow."""
    top = b.maximum(p, q)
    sum_ = b.add(top, b.log1p(b.exp(b.neg(b.abs(b.sub(p, q))))))
    same_infinity = b.and_(b.cmp("eq", p, q), b.cmp("eq", b.abs(p), b.like(p, float("inf"))))
    return b.select(same_infinity, p, sum_)


@rule("aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self")
def xlogy(cx: Builder, node: Node, x: Operand, y: Operand) -> View:
    def body(b: Body, p: SSAValue, q: SSAValue) -> SSAValue:
        zero = b.like(p, 0.0)
        value = b.select(b.cmp("eq", p, zero), zero, b.mul(p, b.log(q)))
        return b.select(b.isnan(q), q, value)

    return cx.pointwise(node, body, (x, y))


@rule("aten.copy.default")
def copy(cx: Builder, node: Node, x: View, source: View, non_blocking: bool = False) -> View:
    return cx.cast(expand(source, x.shape), x.dtype)


@rule("aten.clamp.default", "aten.clamp.Tensor", "aten.clip.default", "aten.hardtanh.default", "aten.clip.Tensor")
def clamp(cx: Builder, node: Node, x: View, low: Any = None, high: Any = None) -> View:
    if low is None and high is None and str(node.target) == "aten.hardtanh.default":
        low, high = -1.0, 1.0
    bounds = [v for v in (low, high) if v is not None]
    if not bounds:
        raise Unsupported("no bound")

    def body(b: Body, value: SSAValue, *ends: SSAValue) -> SSAValue:
        rest = iter(ends)
        if low is not None:
            value = b.maximum(value, next(rest))
        return b.minimum(value, next(rest)) if high is not None else value

    return cx.pointwise(node, body, (x, *bounds))


@rule("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(cx: Builder, node: Node, x: View, low: Operand) -> View:
    return cx.pointwise(node, Body.maximum, (x, low))


@rule("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(cx: Builder, node: Node, x: View, high: Operand) -> View:
    return cx.pointwise(node, Body.minimum, (x, high))


@rule("aten.heaviside.default")
def heaviside(cx: Builder, node: Node, x: View, values: View) -> View:
    def body(b: Body, p: SSAValue, at_zero: SSAValue) -> SSAValue:
        zero = b.like(p, 0)
        step = b.select(b.cmp("gt", p, zero), b.like(p, 1), zero)
        return b.select(b.cmp("eq", p, zero), at_zero, step)

    return cx.pointwise(node, body, (x, values))
