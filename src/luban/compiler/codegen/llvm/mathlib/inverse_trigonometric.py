"""asin, acos, atan and atan2."""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.lanes import INFINITY, NAN, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.registry import elementary, from_libm

# Beyond it w is under 1/2, so that doubling w costs the result no digit.
SWITCH = 0.5625


def arcsine_parts(lanes: Lanes, x: Value) -> tuple[Value, Value]:
    """(mask, w): where |x| > 9/16, asin |x| = pi/2 - 2 w; elsewhere asin |x| = w. NaN beyond 1."""
    a = lanes.abs(x)
    beyond = a > SWITCH
    u = lanes.select(beyond, lanes.fma(a, -0.5, 0.5), a * a)
    z = lanes.select(beyond, lanes.sqrt(u), a)
    return beyond, lanes.fma(z * u, lanes.polynomial(u, c.ASIN_FLOAT), z)


@elementary("asin", "float")
def asin(lanes: Lanes, x: Value) -> Value:
    beyond, w = arcsine_parts(lanes, x)
    return lanes.copysign(lanes.select(beyond, lanes.fma(w, -2.0, math.pi / 2), w), x)


@elementary("acos", "float")
def acos(lanes: Lanes, x: Value) -> Value:
    beyond, w = arcsine_parts(lanes, x)
    signed = lanes.flip_sign(w, lanes.sign_of(x))
    base = lanes.select(x < 0.0, lanes.constant(math.pi, x.elem), 0.0)
    return lanes.select(beyond, lanes.fma(signed, 2.0, base), math.pi / 2 - signed)


def arctangent_to_one(lanes: Lanes, z: Value) -> Value:
    """atan z for |z| <= 1."""
    u = z * z
    return lanes.fma(z * u, lanes.polynomial(u, c.ATAN_FLOAT), z)


@elementary("atan", "float")
def atan(lanes: Lanes, x: Value) -> Value:
    a = lanes.abs(x)
    beyond = a > 1.0
    y = arctangent_to_one(lanes, lanes.select(beyond, -1.0 / a, a))
    return lanes.copysign(lanes.select(beyond, y + math.pi / 2, y), x)


@elementary("atan2", "float", arity=2)
def atan2(lanes: Lanes, y: Value, x: Value) -> Value:
    ay, ax = lanes.abs(y), lanes.abs(x)
    steep = ay > ax
    low, high = lanes.select(steep, ax, ay), lanes.select(steep, ay, ax)
    # 0/0 counts as 0 and infinity/infinity as 1, as C99 wants.
    z = lanes.select(high.eq(0.0), 0.0, lanes.select(low.eq(INFINITY), 1.0, low / high))
    angle = arctangent_to_one(lanes, z)
    angle = lanes.select(steep, math.pi / 2 - angle, angle)
    angle = lanes.select(lanes.bits(x) < 0, math.pi - angle, angle)
    unordered = x.is_nan() | y.is_nan()
    return lanes.copysign(lanes.select(unordered, NAN, angle), y)


for name in ("asin", "acos", "atan"):
    from_libm(name, "double")
from_libm("atan2", "double", arity=2)
