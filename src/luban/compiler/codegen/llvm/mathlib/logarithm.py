"""log, log2, log10, log1p.

x = 2^k (1 + f) with 1 + f near 1. In float32 log(1 + f) is a polynomial in f; in float64 one in s = f / (2 + f), which
converges twice as fast and is worth its division there.
"""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.exponential import LN2_HIGH, LN2_LOW
from luban.compiler.codegen.llvm.mathlib.lanes import EXPONENT_BIAS, INFINITY, MANTISSA_BITS, NAN, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.registry import elementary

# Bit pattern of the smallest 1 + f: 2/3 in float32, sqrt(1/2) in float64.
LOWEST = {"float": 0x3F2AAAAB, "double": 0x3FE6A09E667F3BCD}
SMALLEST_NORMAL = {"float": 2.0**-126, "double": 2.0**-1022}
# The same for a double of which only float32 accuracy is wanted, and which takes the float32 polynomial's interval.
LOWEST_WIDE = 0x3FE5555555555555
LOG10_E = math.log10(math.e)


def split_exponent(lanes: Lanes, bits: Value, elem: str, lowest: int = 0) -> tuple[Value, Value]:
    """(k shifted to the exponent field, 1 + f as a float) of a positive normal number's bits."""
    exponent_mask = -(1 << MANTISSA_BITS[elem])
    shifted = (bits - (lowest or LOWEST[elem])) & exponent_mask
    return shifted, lanes.from_bits(bits - shifted)


def normalised(lanes: Lanes, x: Value) -> tuple[Value, Value]:
    """(k as a float, f) with x = 2^k (1 + f), denormals included; what comes out for x <= 0 means nothing."""
    digits = MANTISSA_BITS[x.elem]
    tiny = x < SMALLEST_NORMAL[x.elem]
    shifted, m = split_exponent(lanes, lanes.bits(lanes.select(tiny, x * 2.0**digits, x)), x.elem)
    correction = lanes.select(tiny, lanes.constant(-float(digits), x.elem), 0.0)
    k = lanes.fma(lanes.convert("sitofp", shifted, x.elem), 2.0**-digits, correction)
    return k, m - 1.0


def log_reduced(lanes: Lanes, f: Value) -> Value:
    """log(1 + f) - f."""
    if f.elem == "float":
        return f * f * lanes.fma(lanes.polynomial(f, c.LOG_FLOAT), f, -0.5)
    s = f / (f + 2.0)
    z, half = s * s, f * f * 0.5
    return lanes.fma(s, lanes.fma(lanes.polynomial(z, c.ATANH_DOUBLE), z, half), -half)


def combine(lanes: Lanes, k: Value, f: Value) -> Value:
    """k ln 2 + log(1 + f)."""
    rest = lanes.fma(k, LN2_LOW[f.elem], log_reduced(lanes, f))
    return lanes.fma(k, LN2_HIGH[f.elem], f + rest)


def outside_domain(lanes: Lanes, x: Value, y: Value, pole: float = 0.0) -> Value:
    """y for x above the pole, infinity there where x is, -infinity at the pole, NaN below it and for NaN."""
    edge = lanes.select(x.eq(pole), lanes.constant(-INFINITY, x.elem), NAN)
    return lanes.select(x > pole, lanes.select(x.eq(INFINITY), x, y), edge)


def log2_wide(lanes: Lanes, v: Value) -> Value:
    """log2 of positive normal doubles to 2^-40, for float32 functions that need more than float32 on the way."""
    shifted, m = split_exponent(lanes, lanes.bits(v), "double", LOWEST_WIDE)
    # The exponent's own word is enough, and 32-bit integers convert with one instruction everywhere.
    k = lanes.convert("sitofp", lanes.convert("trunc", shifted >> 32, "i32"), "double") * 2.0**-20
    f = m - 1.0
    return lanes.fma(lanes.polynomial(f, c.LOG2_WIDE), f, k)


@elementary("log", "float", "double")
def log(lanes: Lanes, x: Value) -> Value:
    return outside_domain(lanes, x, combine(lanes, *normalised(lanes, x)))


@elementary("log2", "float")
def log2(lanes: Lanes, x: Value) -> Value:
    k, f = normalised(lanes, x)
    return outside_domain(lanes, x, k + lanes.fma(lanes.polynomial(f, c.LOG2_FLOAT), f, f))


def scaled_log(lanes: Lanes, x: Value, scale: float, two: float) -> Value:
    """log(1 + f) * scale + k * two, each constant as a sum of two machine numbers."""
    k, f = normalised(lanes, x)
    scale_high, scale_low = split_constant(scale, x.elem)
    two_high, two_low = split_constant(two, x.elem)
    tail = log_reduced(lanes, f)
    rest = lanes.fma(f, scale_low, tail * scale_high)
    if two_low:
        rest = lanes.fma(k, two_low, rest)
    return outside_domain(lanes, x, lanes.fma(k, two_high, lanes.fma(f, scale_high, rest)))


def split_constant(value: float, elem: str) -> tuple[float, float]:
    """value as high + low; the low part of a double is taken as 0."""
    if elem == "double":
        return value, 0.0
    digits = 24 - math.frexp(value)[1]
    high = round(math.ldexp(value, digits)) / 2.0**digits
    return high, value - high


@elementary("log10", "float", "double")
def log10(lanes: Lanes, x: Value) -> Value:
    return scaled_log(lanes, x, LOG10_E, math.log10(2))


@elementary("log2", "double")
def log2_double(lanes: Lanes, x: Value) -> Value:
    return scaled_log(lanes, x, 1 / math.log(2), 1.0)


def log1p_parts(lanes: Lanes, x: Value) -> tuple[Value, Value]:
    """(k, f) with 1 + x = 2^k (1 + f), f rounded once, so that no digit of a small x is lost."""
    shifted, m = split_exponent(lanes, lanes.bits(x + 1.0), x.elem)
    digits = MANTISSA_BITS[x.elem]
    scale = lanes.from_bits(lanes.constant(EXPONENT_BIAS[x.elem] << digits, shifted.elem) - shifted)
    k = lanes.convert("sitofp", shifted, x.elem) * 2.0**-digits
    # For a large x the 1 is lost anyway, and 2^-k may be no normal number.
    return k, lanes.select(x > 2.0**60, m - 1.0, lanes.fma(x, scale, scale - 1.0))


@elementary("log1p", "float", "double")
def log1p(lanes: Lanes, x: Value) -> Value:
    y = combine(lanes, *log1p_parts(lanes, x))
    # +-0 goes through as it is.
    return lanes.select(x.eq(0.0), x, outside_domain(lanes, x, y, pole=-1.0))
