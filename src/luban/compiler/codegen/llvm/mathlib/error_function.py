"""erf and erfc."""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.exponential import (
    LOG2_E,
    exp_reduced,
    power_of_two,
    reduce_ln2,
    scale_by_power,
)
from luban.compiler.codegen.llvm.mathlib.lanes import EXPONENT_BIAS, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.registry import elementary

# From TAIL_STARTS on float32 erf is 1 minus a polynomial about the middle, up to where it is 1 to within half an ulp.
TAIL_STARTS, TAIL_CENTRE, ERF_SATURATES = 1.1875, 2.59375, 4.0
# erfc is 0 beyond this.
ERFC_VANISHES = {"float": 10.25, "double": 27.5}


# Centres of erf's pieces are this far apart.
ERF_STEP = 1089 / 4096


def erf_by_pieces(lanes: Lanes, x: Value) -> Value:
    """A polynomial about the nearest of 16 centres: 18 instructions in place of 29 for one polynomial a half."""
    a = lanes.at_most(lanes.abs(x), 15 * ERF_STEP)
    n, bits = lanes.nearest(a, 1 / ERF_STEP)
    t = lanes.fma(n, -ERF_STEP, a)
    constant, *rest = [lanes.lookup(row, bits) for row in c.ERF_PIECES_FLOAT]
    slope = rest.pop()
    for coefficient in reversed(rest):
        slope = lanes.fma(slope, t, coefficient)
    # The larger of the two is t in the first piece, where t stands for itself, and the constant in all others.
    return lanes.copysign(lanes.fma(slope, t, lanes.at_least(t, constant)), x)


@elementary("erf", "float")
def erf(lanes: Lanes, x: Value) -> Value:
    if lanes.looks_up:
        return erf_by_pieces(lanes, x)
    # Two polynomials and a choice cost less than an exponential or a division.
    a = lanes.abs(x)
    near = lanes.fma(lanes.polynomial(x * x, c.ERF_FLOAT), a, a)
    tail = 1.0 - lanes.polynomial(lanes.at_most(a, ERF_SATURATES) - TAIL_CENTRE, c.ERF_TAIL_FLOAT)
    return lanes.copysign(lanes.select(a < TAIL_STARTS, near, tail), x)


def reciprocal_shifted(lanes: Lanes, a: Value) -> Value:
    """1 / (a + 3), the variable of the scaled complementary error function's polynomial."""
    return 1.0 / (a + 3.0)


@elementary("erfc", "float")
def erfc(lanes: Lanes, x: Value) -> Value:
    # exp(-x^2) g(x) all in double: x^2 is exact there, and one float32 rounding at the end gives denormals their last
    # digit.
    a = lanes.widen(lanes.at_most(lanes.abs(x), ERFC_VANISHES["float"]))
    square = a * a
    n, bits = lanes.nearest(square, -LOG2_E, EXPONENT_BIAS["double"])
    r = lanes.fma(n, -math.log(2), -square)
    power = lanes.fma(lanes.fma(lanes.polynomial(r, c.EXP_FLOAT), r, 1.0), r, 1.0) * power_of_two(lanes, bits, "double")
    y = power * lanes.polynomial(reciprocal_shifted(lanes, a), c.ERFC_WIDE)
    y = lanes.select(x < 0.0, 2.0 - y, y)
    return lanes.narrow(y)


def erfc_beyond_one(lanes: Lanes, a: Value) -> Value:
    """erfc of doubles from about 1 to ERFC_VANISHES."""
    square = a * a
    error = lanes.fma(a, a, -square)
    r, bits = reduce_ln2(lanes, -square, 2 * EXPONENT_BIAS["double"])
    scaled = lanes.polynomial(reciprocal_shifted(lanes, a), c.ERFC_DOUBLE) * exp_reduced(lanes, r)
    return scale_by_power(lanes, lanes.fma(-scaled, error, scaled), bits)


def erf_to_one(lanes: Lanes, x: Value) -> Value:
    return lanes.fma(lanes.polynomial(x * x, c.ERF_DOUBLE), x, x)


@elementary("erf", "double")
def erf_double(lanes: Lanes, x: Value) -> Value:
    a = lanes.abs(x)
    tail = 1.0 - erfc_beyond_one(lanes, lanes.at_most(a, 6.0))
    return lanes.copysign(lanes.select(a < 1.0, erf_to_one(lanes, a), tail), x)


@elementary("erfc", "double")
def erfc_double(lanes: Lanes, x: Value) -> Value:
    tail = erfc_beyond_one(lanes, lanes.at_most(lanes.abs(x), ERFC_VANISHES["double"]))
    tail = lanes.select(x < 0.0, 2.0 - tail, tail)
    return lanes.select(lanes.abs(x) < 1.0, 1.0 - erf_to_one(lanes, x), tail)
