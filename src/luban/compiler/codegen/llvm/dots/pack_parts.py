"""A float as the sum of two bfloats, on its way into panels: products of the parts stand for products of the whole.

x = high + low to 2^-18 of x for float32 and exactly for float16 (11 bits of significand are 8 and 3), so that
a * b = high * high + high * low + low * high but for low * low. "finite" is the high part where it is finite and 0
elsewhere: an infinity meets the other side's high part only, since infinity times a low part of 0 would be NaN.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import mangled
from luban.compiler.codegen.llvm.dots.fma import widen
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.ir.tile import PARTS

LARGEST = "0x47EFE00000000000"  # of bfloat16, as LLVM writes a float
INFINITY = "0x7FF0000000000000"


def part_of(fn: Function, part: str, value: str, lanes: int, narrow) -> str:
    """One part of a vector (a scalar when `lanes` is 1) of floats, as i16; `narrow(value)` rounds to bfloat."""

    def of(element: str) -> str:
        return element if lanes == 1 else f"<{lanes} x {element}>"

    def number(text: str) -> str:
        return fn.splat("float", text, lanes)

    def select(condition: str, yes: str, no: str, element: str) -> str:
        return fn.op(f"select {of('i1')} {condition}, {of(element)} {yes}, {of(element)} {no}")

    suffix = "f32" if lanes == 1 else mangled(lanes, "float")
    size = fn.intrinsic(f"llvm.fabs.{suffix}", of("float"), [(of("float"), value)])
    finite = fn.op(f"fcmp olt {of('float')} {size}, {number(INFINITY)}")
    beyond = fn.op(f"fcmp ogt {of('float')} {size}, {number(LARGEST)}")
    signed = fn.intrinsic(
        f"llvm.copysign.{suffix}", of("float"), [(of("float"), number(LARGEST)), (of("float"), value)]
    )
    held = select(fn.op(f"and {of('i1')} {finite}, {beyond}"), signed, value, "float")
    high = narrow(held)
    if part == "high":
        return high
    zero = "0" if lanes == 1 else "zeroinitializer"
    if part == "finite":
        return select(finite, high, zero, "i16")
    rest = fn.op(f"fsub {of('float')} {held}, {widen(fn, high, 'bfloat', 'float', lanes)}")
    return select(finite, narrow(rest), zero, "i16")


__all__ = ["PARTS", "part_of"]
