"""pow and the roots."""

from __future__ import annotations

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.exponential import scale_by_power
from luban.compiler.codegen.llvm.mathlib.lanes import (
    EXPONENT_BIAS,
    INFINITY,
    NAN,
    ROUNDING_MAGIC,
    Lanes,
    Value,
)
from luban.compiler.codegen.llvm.mathlib.logarithm import normalised
from luban.compiler.codegen.llvm.mathlib.registry import elementary, from_libm

# 1/3 and 2 / ln 2, each as a sum of two doubles.
THIRD = (0.3333333333333333, 1.850371707708594e-17)
TWO_LOG2_E = (2.8853900817779268, 4.0710547481862066e-17)
# Far beyond every exponent; a larger y decides nothing more.
LARGEST_EXPONENT = 2.0**65


@elementary("rsqrt", "float", "double")
def rsqrt(lanes: Lanes, x: Value) -> Value:
    return 1.0 / lanes.sqrt(x)


def whole_and_odd(lanes: Lanes, y: Value) -> tuple[Value, Value]:
    """Masks: is y an integer (infinities are), is it an odd one."""
    half = y * 0.5
    whole = lanes.floor(y).eq(y)
    return whole, whole & lanes.floor(half).ne(half)


def pow_special(lanes: Lanes, result: Value, x: Value, y: Value) -> list[Value]:
    """C99's special cases; `result` is |x|^y where x and y are finite, x is not 0 and nothing else is asked."""
    a, whole_odd = lanes.abs(x), whole_and_odd(lanes, y)
    whole, odd = whole_odd
    # y decides between 0 and infinity where |x|^y leaves the numbers.
    grows = (a > 1.0) ^ (y < 0.0)
    extreme = a.eq(0.0) | a.eq(INFINITY) | lanes.abs(y).eq(INFINITY)
    result = lanes.select(extreme, lanes.select(grows, lanes.constant(INFINITY, x.elem), 0.0), result)
    result = lanes.select(a.eq(1.0), 1.0, result)
    # Negative bases: NaN for a fraction as exponent, the sign of odd powers otherwise. -0 and -infinity accept
    # fractions.
    result = lanes.select((x < 0.0) & ~whole & a.ne(INFINITY), NAN, result)
    negative = lanes.flip_sign(result, lanes.sign_of(x))
    result = lanes.select(odd, negative, result)
    result = lanes.select(x.is_nan() | y.is_nan(), x + y, result)
    return [lanes.select(y.eq(0.0) | x.eq(1.0), 1.0, result)]


@elementary("pow", "float", arity=2)
def pow_float(lanes: Lanes, x: Value, y: Value) -> Value:
    # 2^(y log2 |x|) with the logarithm and the product in double: float32 would lose the digits left of the point.
    k, f = normalised(lanes, lanes.abs(x))
    wide_f = lanes.widen(f)
    log2 = lanes.fma(lanes.polynomial(wide_f, c.LOG2_WIDE), wide_f, lanes.widen(k))
    t = lanes.at_least(lanes.at_most(lanes.widen(y) * log2, 129.0), -151.0)
    shifted = t + ROUNDING_MAGIC["double"]
    r = lanes.narrow(t - (shifted - ROUNDING_MAGIC["double"]))
    n = lanes.convert("trunc", lanes.bits(shifted), "i32") + 2 * EXPONENT_BIAS["float"]
    result = scale_by_power(lanes, lanes.fma(lanes.polynomial(r, c.EXP2_FLOAT), r, 1.0), n)
    return with_special_cases(lanes, result, x, y)


def log2_extended(lanes: Lanes, x: Value) -> tuple[Value, Value]:
    """log2 of positive doubles as a sum of two doubles, about 64 bits in all."""
    k, f = normalised(lanes, x)
    # s = f / (2 + f) with its remainder, then atanh s = s (1 + z/3 + z^2 p(z)).
    g = f + 2.0
    g_low = f - (g - 2.0)
    inverse = 1.0 / g
    s = f * inverse
    s_low = lanes.fma(-s, g_low, lanes.fma(-s, g, f)) * inverse
    z = s * s
    z_low = lanes.fma(s, s, -z) + s * s_low * 2.0
    p = z * lanes.polynomial(z, c.ATANH_POW)
    t = p + THIRD[0]
    t_low = (p - (t - THIRD[0])) + THIRD[1]
    v = z * t
    v_low = lanes.fma(z, t, -v) + lanes.fma(z, t_low, z_low * t)
    w = s * v
    w_low = lanes.fma(s, v, -w) + lanes.fma(s, v_low, s_low * v)
    total = s + w
    low = (s - total) + w + (s_low + w_low)
    scaled = total * TWO_LOG2_E[0]
    scaled_low = lanes.fma(total, TWO_LOG2_E[0], -scaled) + lanes.fma(total, TWO_LOG2_E[1], low * TWO_LOG2_E[0])
    high = k + scaled
    return high, (k - high) + scaled + scaled_low


@elementary("pow", "double", arity=2)
def pow_double(lanes: Lanes, x: Value, y: Value) -> Value:
    high, low = log2_extended(lanes, lanes.abs(x))
    factor = lanes.at_least(lanes.at_most(y, LARGEST_EXPONENT), -LARGEST_EXPONENT)
    t = factor * high
    t_low = lanes.fma(factor, high, -t) + factor * low
    t_low = lanes.select(lanes.abs(t) < 1100.0, t_low, 0.0)
    t = lanes.at_least(lanes.at_most(t, 1025.0), -1076.0)
    n, bits = lanes.nearest(t, 1.0, 2 * EXPONENT_BIAS["double"])
    r = (t - n) + t_low
    result = scale_by_power(lanes, lanes.fma(lanes.polynomial(r, c.EXP2_DOUBLE), r, 1.0), bits)
    return with_special_cases(lanes, result, x, y)


def with_special_cases(lanes: Lanes, result: Value, x: Value, y: Value) -> Value:
    unusual = ~((x > 0.0) & (x < INFINITY) & (lanes.abs(y) < INFINITY))
    return lanes.rarely(unusual, "pow.special", [result], [x, y], pow_special)[0]


from_libm("cbrt", "float")
from_libm("cbrt", "double")
