"""2^x for weights of a softmax: x <= 0 but for rounding, so that neither overflow nor denormal results need care.

n = round(x) comes from adding 1.5 * 2^23, whose low bits then hold n; with 127 added they are the exponent of 2^n. What
is below 2^-126 of the largest weight becomes 0, as does what causality hides (-inf); NaN stays. 14 instructions a vector
with degree 4, against 17 of the exact exp2.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32, i32
from xdsl.ir import Attribute, SSAValue

from luban.compiler.lowering.builder import KernelBuilder

# 2^r on [-0.5, 0.5]; largest relative error 2^-18.5, far below what rounding to 16 bits costs, and 2^-23.7.
SHORT = (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652)
# 181/128 * 2^r, between 1 and 2 but for 2^-13, where bfloat16 has steps of 2^-7; largest relative error 2^-13.3.
STEPPED = (1.4140625, 0.9803453683853149, 0.3425014317035675, 0.07778606563806534)
STEPS = float(3 << 15)  # added, it leaves multiples of 2^-7
ORIGIN = 0x47C00000  # the bits of STEPS
# 2^(g - 1) - g for g between 1 and 2, the first a multiple of 2^-7; largest error 2^-13.6 of 2^(g - 1).
FRACTION = (58 / 128, -0.52423881, -0.00667738, 0.07773826)
EXACT = (
    1.0000001192092896,
    0.6931469440460205,
    0.24022120237350464,
    0.05550713092088699,
    0.009675540961325169,
    0.0013276472454890609,
)
MAGIC = float(3 << 22) + 127
LOWEST = -126.0


def weight(b: KernelBuilder, x: SSAValue, dtype: Attribute) -> SSAValue:
    """2^x in float32, as exactly as an element type needs."""
    magic = b.constant(MAGIC, f32)
    shifted = b.binary(arith.AddfOp, x, magic)
    r = b.binary(arith.SubfOp, x, b.binary(arith.SubfOp, shifted, magic))
    *lower, value = [b.constant(c, f32) for c in (EXACT if dtype == f32 else SHORT)]
    for c in reversed(lower):
        value = _fma(b, value, r, c)
    keep = b.insert(arith.CmpfOp(x, b.constant(LOWEST, f32), "uge"))
    return b.select(keep, b.binary(arith.MulfOp, value, _power_of_two(b, shifted)), b.constant(0.0, f32))


def bfloat16_weight(b: KernelBuilder, product: SSAValue, scale: float, magic: SSAValue) -> SSAValue:
    """181/128 * 2^(product * scale - n), rounded to what bfloat16 holds, for exponents that a normal number has.

    `magic` is MAGIC less the whole number n. Weights that are summed as they are multiplied leave no error in a row that
    one of them governs; the last step of the polynomial rounds for one instruction more.
    """
    factor = b.constant(scale, f32)
    shifted = _fma(b, product, factor, magic)
    r = _fma(b, product, factor, b.binary(arith.SubfOp, magic, shifted))
    first, *middle, last = STEPPED
    value = b.constant(last, f32)
    for c in reversed(middle):
        value = _fma(b, value, r, b.constant(c, f32))
    stepped = _fma(b, value, r, b.constant(first + STEPS, f32))
    return b.binary(arith.MulfOp, b.binary(arith.SubfOp, stepped, b.constant(STEPS, f32)), _power_of_two(b, shifted))


def weight_bits(
    b: KernelBuilder, products: Sequence[SSAValue], scale: float, shift: SSAValue, origins: Sequence[int]
) -> list[SSAValue]:
    """2^(product * scale + shift - 127) as the bits of a bfloat16, added to an i32 near ORIGIN; several, side by side.

    The exponent must be from -63 to 0. 7 instructions a vector. x = product * scale + shift lies between 64 and 128, so
    that the low 17 bits of a float are its fraction; moved up under the exponent of 1 they are g = 1 + fraction, and
    2^fraction - g is a polynomial in g. x and that are the bits of the result in units of its exponent: rounding to
    multiples of 2^-7 ends the mantissa.
    """

    def bits(value: SSAValue, ty: Attribute) -> SSAValue:
        return b.insert(arith.BitcastOp.create(operands=[value], result_types=[ty]))

    factor, six, fraction, one = b.constant(scale, f32), *(b.constant(c, i32) for c in (6, 0x7FFFFF, 0x3F800000))
    xs = [_fma(b, product, factor, shift) for product in products]
    moved = [b.binary(arith.ShLIOp, bits(x, i32), six) for x in xs]
    gs = [bits(b.binary(arith.OrIOp, b.binary(arith.AndIOp, m, fraction), one), f32) for m in moved]
    last, *others = [b.constant(c, f32) for c in reversed(FRACTION[1:])]
    values = [last] * len(gs)
    for c in others:
        values = [_fma(b, value, g, c) for value, g in zip(values, gs, strict=True)]
    values = [_fma(b, value, g, x) for value, g, x in zip(values, gs, xs, strict=True)]
    ends = [b.constant(STEPS + FRACTION[0] + (origin - ORIGIN) / 128, f32) for origin in origins]
    return [bits(b.binary(arith.AddfOp, value, end), i32) for value, end in zip(values, ends, strict=True)]


def _fma(b: KernelBuilder, x: SSAValue, y: SSAValue, z: SSAValue) -> SSAValue:
    return b.insert(math.FmaOp.create(operands=[x, y, z], result_types=[f32]))


def _power_of_two(b: KernelBuilder, shifted: SSAValue) -> SSAValue:
    """2^n, where the low bits hold n + 127."""
    bits = b.insert(arith.BitcastOp.create(operands=[shifted], result_types=[i32]))
    power = b.binary(arith.ShLIOp, bits, b.constant(23, i32))
    return b.insert(arith.BitcastOp.create(operands=[power], result_types=[f32]))
