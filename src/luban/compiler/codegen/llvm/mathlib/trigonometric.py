"""sin, cos and tan.

sin and cos take away the nearest multiple of pi (tan: of pi/2) in three fused steps, which is exact enough while |x| is
below LIMIT. Lanes beyond it, rare in practice, take a path out of line: in float32 the reduction of Payne and Hanek
with 128 bits of 1/pi chosen by the exponent of x, in float64 the process's libm.
"""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib import coefficients as c
from luban.compiler.codegen.llvm.mathlib.lanes import ROUNDING_MAGIC, SIGN_BIT, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.registry import elementary, from_libm

# pi as a sum of machine numbers.
PI_PARTS = {
    "float": (3.1415927410125732, -8.742277657347586e-08, -3.4302490200117637e-15),
    "double": (3.141592653589793, 1.2246467991473532e-16, -2.9947698097183397e-33),
}
SINE = {"float": c.SIN_FLOAT, "double": c.SIN_DOUBLE}
LIMIT = {"float": 2.0**17, "double": 2.0**30}
# floor(2^248 / pi): the first bit stands for 2^7, so that a window may start before the binary point.
INVERSE_PI = 0x00517CC1B727220A94FE13ABE8FA9A6EE06DB14ACC9E21C820FF28B1D5EF5DE2
# The smallest exponent field of a float that is not below LIMIT.
FAR_EXPONENT = 127 + 17


def sine_of_reduced(lanes: Lanes, r: Value) -> Value:
    """sin(r) for |r| <= pi / 2."""
    u = r * r
    return lanes.fma(r * u, lanes.polynomial(u, SINE[r.elem]), r)


def subtract_multiple(lanes: Lanes, x: Value, n: Value) -> Value:
    """x - n pi, the first step of it exact."""
    for part in PI_PARTS[x.elem]:
        x = lanes.fma(n, -part, x)
    return x


def payne_hanek(lanes: Lanes, x: Value, doubled: bool, half: bool) -> list[Value]:
    """The double r and an i32 whose top bit is n's lowest, where x = (n + half / 2) * pi / (1 + doubled) + r >= LIMIT.

    The window of 1/pi starts where a bit times x's lowest digit is worth 1, because what stands before gives even
    multiples only; 24 bits of the 128 go to the product's rounding and at most 33 to cancellation.
    """
    fn = lanes.fn
    field = lanes.bits(x) >> 23
    digits = (lanes.bits(x) & 0x7FFFFF) | 0x800000
    start = field - (FAR_EXPONENT - 1 - int(doubled))
    table = fn.module.constant(
        "luban.inverse_pi", "[32 x i8] [" + ", ".join(f"i8 {b}" for b in INVERSE_PI.to_bytes(32)) + "]"
    )
    byte = fn.op(f"zext i32 {(start >> 3).text} to i64")
    address = fn.op(f"getelementptr i8, ptr {table}, i64 {byte}")
    window = fn.intrinsic("llvm.bswap.i128", "i128", [("i128", fn.op(f"load i128, ptr {address}, align 1"))])
    window = fn.op(f"shl i128 {window}, {fn.op(f'zext i32 {(start & 7).text} to i128')}")
    product = fn.op(f"mul i128 {window}, {fn.op(f'zext i32 {digits.text} to i128')}")
    if half:
        product = fn.op(f"sub i128 {product}, {1 << 126}")
    rounded = fn.op(f"lshr i128 {fn.op(f'add i128 {product}, {1 << 126}')}, 96")
    n = lanes.emit(f"trunc i128 {rounded} to i32", "i32") & SIGN_BIT["float"]
    fraction = lanes.emit(f"trunc i128 {fn.op(f'lshr i128 {product}, 63')} to i64", "i64")
    r = lanes.convert("sitofp", fraction, "double") * (math.pi / (1 + doubled) * 2.0**-64)
    return [lanes.select(field.eq(255), lanes.constant(math.nan, "double"), r), n]


def far_lanes(lanes: Lanes, near: list[Value], ax: Value, doubled: bool, half: bool) -> list[Value]:
    """Replaces (r, remainder of r, n) of the lanes of ax that are beyond LIMIT; `near` may leave out the remainder."""

    def one_lane(scalar: Lanes, lane_x: Value) -> list[Value]:
        # The table holds nothing for near lanes; LIMIT keeps the address inside it.
        inside = scalar.select(lane_x >= LIMIT["float"], lane_x, LIMIT["float"])
        kind = f"payne_hanek.{int(doubled)}{int(half)}"
        wide, n = scalar.call_outlined(
            kind, [inside], ["double", "i32"], lambda inner, v: payne_hanek(inner, v, doubled, half)
        )
        r = scalar.narrow(wide)
        return [r, scalar.narrow(wide - scalar.widen(r)), n]

    r, rest, n = lanes.each_lane(one_lane, ax)
    found = [r, rest, n] if len(near) == 3 else [r, n]
    far = ax >= LIMIT["float"]
    return [lanes.select(far, new, old) for new, old in zip(found, near, strict=True)]


def with_far_libm(lanes: Lanes, name: str, y: Value, x: Value) -> Value:
    """y, or the double libm function of x in the lanes beyond LIMIT."""

    def one_lane(scalar: Lanes, near: Value, lane_x: Value) -> list[Value]:
        callee = scalar.fn.module.declare(name, "double", ["double"])
        far = Value(scalar, scalar.fn.call("double", callee, [("double", lane_x.text)]), "double")
        return [scalar.select(scalar.abs(lane_x) >= LIMIT["double"], far, near)]

    def every_lane(inner: Lanes, near: Value, all_x: Value) -> list[Value]:
        return inner.each_lane(one_lane, near, all_x)

    return lanes.rarely(lanes.abs(x) >= LIMIT["double"], f"{name}.far", [y], [x], every_lane)[0]


def low_bit_to_sign(bits: Value) -> Value:
    return bits << (31 if bits.elem == "i32" else 63)


@elementary("sin", "float", "double")
def sin(lanes: Lanes, x: Value) -> Value:
    ax = lanes.abs(x)
    n, bits = lanes.nearest(ax, 1 / math.pi)
    r, parity = subtract_multiple(lanes, ax, n), low_bit_to_sign(bits)
    if x.elem == "float":
        far = ax >= LIMIT["float"]
        r, parity = lanes.rarely(
            far, "sin.far", [r, parity], [ax], lambda inner, a, b, v: far_lanes(inner, [a, b], v, False, False)
        )
    y = lanes.flip_sign(sine_of_reduced(lanes, r), lanes.sign_of(x) ^ parity)
    return y if x.elem == "float" else with_far_libm(lanes, "sin", y, x)


@elementary("cos", "float", "double")
def cos(lanes: Lanes, x: Value) -> Value:
    # |x| = (n + 1/2) pi + r, so that cos x = -(-1)^n sin r.
    ax = lanes.abs(x)
    shifted = lanes.fma(ax, 1 / math.pi, -0.5) + ROUNDING_MAGIC[x.elem]
    n, parity = shifted - ROUNDING_MAGIC[x.elem] + 0.5, low_bit_to_sign(lanes.bits(shifted))
    r = subtract_multiple(lanes, ax, n)
    if x.elem == "float":
        far = ax >= LIMIT["float"]
        r, parity = lanes.rarely(
            far, "cos.far", [r, parity], [ax], lambda inner, a, b, v: far_lanes(inner, [a, b], v, False, True)
        )
    y = lanes.flip_sign(sine_of_reduced(lanes, r), parity ^ SIGN_BIT[x.elem])
    return y if x.elem == "float" else with_far_libm(lanes, "cos", y, x)


@elementary("tan", "float")
def tan(lanes: Lanes, x: Value) -> Value:
    # |x| = n pi/2 + r + rest; the rest, what r rounds away, matters because tan and 1/tan magnify the error of r.
    ax = lanes.abs(x)
    n, bits = lanes.nearest(ax, 2 / math.pi)
    high, middle, low = (-part / 2 for part in PI_PARTS["float"])
    first = lanes.fma(n, high, ax)
    product = n * middle
    r = first + product
    rest = (first - r) + product + lanes.fma(n, low, lanes.fma(n, middle, -product))
    far = ax >= LIMIT["float"]
    r, rest, parity = lanes.rarely(
        far,
        "tan.far",
        [r, rest, low_bit_to_sign(bits)],
        [ax],
        lambda inner, a, b, d, v: far_lanes(inner, [a, b, d], v, True, False),
    )
    u = r * r
    y = r + lanes.fma(r * u, lanes.polynomial(u, c.TAN_FLOAT), lanes.fma(u, rest, rest))
    return lanes.flip_sign(lanes.select(parity < 0, -1.0 / y, y), lanes.sign_of(x))


from_libm("tan", "double")
