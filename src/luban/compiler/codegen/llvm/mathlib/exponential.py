"""exp, exp2, expm1 and the logistic function.

x = n ln 2 + r with an integer n; e^r comes from a polynomial and 2^n from the exponent bits. Above the usual range the
result overflows to infinity by itself, below it becomes denormal and then 0, rounded once.
"""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.lanes import EXPONENT_BIAS, MANTISSA_BITS, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.registry import elementary

EXP = {"float": c.EXP_FLOAT, "double": c.EXP_DOUBLE}
EXP2 = {"float": c.EXP2_FLOAT, "double": c.EXP2_DOUBLE}
LOG2_E = 1 / math.log(2)
# ln 2 as a sum of two machine numbers of the type.
LN2_HIGH = {"float": 0.693147182464599609375, "double": 0.6931471805599453}
LN2_LOW = {"float": -1.904654299957768e-09, "double": 2.3190468138462996e-17}
# Beyond these the result is infinity, or 0.
EXP_RANGE = {"float": (-104.0, 89.0), "double": (-746.0, 710.0)}
EXP2_RANGE = {"float": (-151.0, 129.0), "double": (-1076.0, 1025.0)}
# expm1 is -1 to within half an ulp below this.
EXPM1_LOWEST = {"float": -17.5, "double": -38.0}


def reduce_ln2(lanes: Lanes, x: Value, bias: int) -> tuple[Value, Value]:
    """(r, bits): x = n ln 2 + r, |r| <= ln 2 / 2, and n + bias in the low bits of the integer."""
    n, bits = lanes.nearest(x, LOG2_E, bias)
    return less_ln2(lanes, x, n), bits


def less_ln2(lanes: Lanes, x: Value, n: Value) -> Value:
    """x - n ln 2."""
    return lanes.fma(n, -LN2_LOW[x.elem], lanes.fma(n, -LN2_HIGH[x.elem], x))


def power_of_two(lanes: Lanes, bits: Value, elem: str) -> Value:
    """2^n where the low bits hold n plus the exponent's bias; n must be a normal exponent."""
    return lanes.from_bits(bits << MANTISSA_BITS[elem])


def scale_by_power(lanes: Lanes, y: Value, bits: Value) -> Value:
    """y * 2^n where the low bits hold n plus twice the exponent's bias.

    Two factors share n, so that it may lie outside the range of one and results overflow or become denormal.
    """
    shift = MANTISSA_BITS[y.elem]
    field = 2 * EXPONENT_BIAS[y.elem] + 1
    half = (bits << (shift - 1)) & (field << shift)
    rest = (bits << shift) - half
    return y * lanes.from_bits(half) * lanes.from_bits(rest)


def exp_reduced(lanes: Lanes, r: Value) -> Value:
    """e^r for |r| <= ln 2 / 2."""
    return lanes.fma(lanes.fma(lanes.polynomial(r, EXP[r.elem]), r, 1.0), r, 1.0)


def exp_in_range(lanes: Lanes, x: Value) -> Value:
    """e^x for x inside EXP_RANGE, or NaN."""
    if lanes.scales:
        n, _ = lanes.nearest(x, LOG2_E)
        return lanes.scale(exp_reduced(lanes, less_ln2(lanes, x, n)), n)
    r, bits = reduce_ln2(lanes, x, 2 * EXPONENT_BIAS[x.elem])
    return scale_by_power(lanes, exp_reduced(lanes, r), bits)


def expm1_parts(lanes: Lanes, x: Value, bias_offset: int) -> tuple[Value, Value]:
    """(e^r - 1, s) with e^x = e^r * s / 2^bias_offset; the caller keeps s a normal number."""
    r, bits = reduce_ln2(lanes, x, EXPONENT_BIAS[x.elem] + bias_offset)
    p = lanes.fma(r * r, lanes.polynomial(r, EXP[x.elem]), r)
    return p, power_of_two(lanes, bits, x.elem)


@elementary("exp", "float", "double")
def exp(lanes: Lanes, x: Value) -> Value:
    lowest, highest = EXP_RANGE[x.elem]
    return exp_in_range(lanes, lanes.at_least(lanes.at_most(x, highest), lowest))


@elementary("exp2", "float", "double")
def exp2(lanes: Lanes, x: Value) -> Value:
    lowest, highest = EXP2_RANGE[x.elem]
    x = lanes.at_least(lanes.at_most(x, highest), lowest)
    if lanes.scales:
        n, _ = lanes.nearest(x, 1.0)
        r = x - n
        return lanes.scale(lanes.fma(lanes.polynomial(r, EXP2[x.elem]), r, 1.0), n)
    n, bits = lanes.nearest(x, 1.0, 2 * EXPONENT_BIAS[x.elem])
    r = x - n
    return scale_by_power(lanes, lanes.fma(lanes.polynomial(r, EXP2[x.elem]), r, 1.0), bits)


@elementary("expm1", "float", "double")
def expm1(lanes: Lanes, x: Value) -> Value:
    # s is half of 2^n, so that the largest results do not overflow on the way; -0 needs its sign back.
    inside = lanes.at_least(lanes.at_most(x, EXP_RANGE[x.elem][1]), EXPM1_LOWEST[x.elem])
    p, half = expm1_parts(lanes, inside, -1)
    y = lanes.fma(half, p, half - 0.5)
    return lanes.copysign(y + y, x)


@elementary("sigmoid", "float", "double")
def sigmoid(lanes: Lanes, x: Value) -> Value:
    # e^-|x| never overflows. z / (1 + z) for negative x and 1 / (1 + z) for others are both m - m z / (1 + z), which
    # takes in the quotient's error only where the result is not small.
    z = exp_in_range(lanes, lanes.at_least(-lanes.abs(x), EXP_RANGE[x.elem][0]))
    m = lanes.select(x < 0.0, z, 1.0)
    return lanes.fma(-m, z / (z + 1.0), m)
