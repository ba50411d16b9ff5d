"""tanh, sinh, cosh and their inverses.

tanh and sinh start from e^r - 1, which is accurate for small and large arguments alike, so that no case is split off.
The inverses in float32 take a logarithm in double: that costs less than keeping float32's roundings apart.
"""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib.exponential import (
    EXP_RANGE,
    exp_reduced,
    expm1_parts,
    power_of_two,
    reduce_ln2,
)
from luban.compiler.codegen.llvm.mathlib.lanes import EXPONENT_BIAS, INFINITY, NAN, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.logarithm import log2_wide
from luban.compiler.codegen.llvm.mathlib.registry import elementary, from_libm

# tanh is 1 to within half an ulp beyond this.
TANH_SATURATES = {"float": 9.25, "double": 20.0}


@elementary("tanh", "float", "double")
def tanh(lanes: Lanes, x: Value) -> Value:
    # With h = (e^(2|x|) - 1) / 2, tanh |x| = h / (1 + h). Taken as m - m m / (1 + h) with m = min(h, 1) it is h (1 -
    # tanh) below and 1 - 1 / (1 + h) above: the quotient's error counts only where the result is not small.
    a = lanes.at_most(lanes.abs(x), TANH_SATURATES[x.elem])
    p, s = expm1_parts(lanes, a + a, -1)
    h = lanes.fma(s, p, s - 0.5)
    m = lanes.at_most(h, 1.0)
    return lanes.copysign(lanes.fma(-m, m / (h + 1.0), m), x)


@elementary("sinh", "float", "double")
def sinh(lanes: Lanes, x: Value) -> Value:
    # With E = 4 q = e^|x| - 1 and t = E / (2 E + 2), sinh |x| = E - E t = E / 2 + t; the first form while E is below 1,
    # the second beyond, so that t's error stays small. Quarters, because e^|x| overflows before sinh does.
    a = lanes.at_most(lanes.abs(x), EXP_RANGE[x.elem][1] + 0.5)
    p, s = expm1_parts(lanes, a, -2)
    q = lanes.fma(s, p, s - 0.25)
    half = q * 0.5
    small = q < 0.25
    factor, base = lanes.select(small, -q, 0.25), lanes.select(small, q, half)
    y = lanes.fma(factor, half / (q + 0.25), base) * 4.0
    # A denormal has no quarter.
    return lanes.copysign(lanes.select(a < 2.0**-30, a, y), x)


@elementary("cosh", "float", "double")
def cosh(lanes: Lanes, x: Value) -> Value:
    # With g = e^|x| / 4, cosh x = 2 (g + 1 / (16 g)).
    a = lanes.at_most(lanes.abs(x), EXP_RANGE[x.elem][1] + 0.5)
    r, bits = reduce_ln2(lanes, a, EXPONENT_BIAS[x.elem] - 2)
    g = exp_reduced(lanes, r) * power_of_two(lanes, bits, x.elem)
    return (g + 0.0625 / g) * 2.0


def log_of_wide(lanes: Lanes, v: Value, scale: float) -> Value:
    """scale * log(v) of a positive double, as a float."""
    return lanes.narrow(log2_wide(lanes, v) * (math.log(2) * scale))


# Below this |x| the inverses differ from x by less than half an ulp.
NEARLY_LINEAR = 2.0**-13


@elementary("asinh", "float")
def asinh(lanes: Lanes, x: Value) -> Value:
    a = lanes.abs(x)
    wide = lanes.widen(a)
    y = log_of_wide(lanes, wide + lanes.sqrt(lanes.fma(wide, wide, 1.0)), 1.0)
    # The comparison is false for NaN and infinity too, which stay what they are.
    return lanes.copysign(lanes.select((a >= NEARLY_LINEAR) & (a < INFINITY), y, a), x)


@elementary("acosh", "float")
def acosh(lanes: Lanes, x: Value) -> Value:
    wide = lanes.widen(x)
    y = log_of_wide(lanes, wide + lanes.sqrt(lanes.fma(wide, wide, -1.0)), 1.0)
    return lanes.select(x < INFINITY, lanes.select(x >= 1.0, y, NAN), x)


@elementary("atanh", "float")
def atanh(lanes: Lanes, x: Value) -> Value:
    a = lanes.abs(x)
    wide = lanes.widen(a)
    y = log_of_wide(lanes, (wide + 1.0) / (1.0 - wide), 0.5)
    y = lanes.select(a < 1.0, y, lanes.select(a.eq(1.0), lanes.constant(INFINITY, x.elem), NAN))
    return lanes.copysign(lanes.select(a < NEARLY_LINEAR, a, y), x)


for name in ("asinh", "acosh", "atanh"):
    from_libm(name, "double")
