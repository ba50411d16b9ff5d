"""bfloat16 and float16 to and from float32.

Kernels hold both as 16-bit integers, so that moving them works on every chip; a conversion is one instruction where the
target has it and integer arithmetic where it has not (LLVM itself would call a library function for every lane).
"""

from __future__ import annotations

from collections.abc import Sequence

from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.lanes import features_of, shuffle
from luban.compiler.codegen.llvm.values import vector_type

# Features that bring vector conversions, by small type.
_NATIVE = {
    "half": frozenset(("f16c", "avx512f", "neon", "fp-armv8", "sve", "zvfhmin", "zvfh")),
    "bfloat": frozenset(("avx512bf16", "bf16", "zvfbfmin")),
}


def widen(ctx: Context, ty: str, width: int, text: str) -> str:
    """A small float (as i16) as float32, exactly."""
    fn = ctx.fn
    if ty == "bfloat":
        high = _bits(fn, "shl", width, _cast(fn, "zext", "i16", "i32", width, text), 16)
        return _cast(fn, "bitcast", "i32", "float", width, high)
    if _native(ctx, ty):
        return _cast(fn, "fpext", "half", "float", width, _cast(fn, "bitcast", "i16", "half", width, text))
    return _half_to_single(fn, width, _cast(fn, "zext", "i16", "i32", width, text))


def narrow(ctx: Context, ty: str, width: int, text: str) -> str:
    """float32 rounded to a small float (as i16), to nearest, ties to even; NaN stays NaN."""
    fn = ctx.fn
    if _native(ctx, ty):
        return _cast(fn, "bitcast", ty, "i16", width, _cast(fn, "fptrunc", "float", ty, width, text))
    bits = _cast(fn, "bitcast", "float", "i32", width, text)
    rounded = _single_to_bfloat(fn, width, text, bits) if ty == "bfloat" else _single_to_half(fn, width, bits)
    return _cast(fn, "trunc", "i32", "i16", width, rounded)


def narrows_pairs(ctx: Context) -> bool:
    """Whether two float32 vectors become one of bfloat16 in one instruction (0.35 ns a vector instead of 0.53)."""
    has = _native(ctx, "bfloat") and "avx512bf16" in features_of(ctx.target)
    return has and ctx.width == 16 and ctx.copies % 2 == 0


def narrow_pairs(ctx: Context, parts: Sequence[str]) -> list[str]:
    """Parts of float32 rounded to bfloat16, two at a time; LLVM joins the stores of neighbours."""
    fn, wide, found = ctx.fn, vector_type("bfloat", 32), []
    single = vector_type("float", 16)
    for low, high in zip(parts[::2], parts[1::2], strict=True):
        listed = [(single, high), (single, low)]
        both = fn.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", "<32 x bfloat>", listed)
        bits = fn.op(f"bitcast <32 x bfloat> {both} to {wide}")
        found += [shuffle(fn, 32, "bfloat", bits, "poison", [*range(first, first + 16)]) for first in (0, 16)]
    return found


def _native(ctx: Context, ty: str) -> bool:
    return not features_of(ctx.target).isdisjoint(_NATIVE[ty])


def _single_to_bfloat(fn: Function, width: int, text: str, bits: str) -> str:
    odd = _bits(fn, "and", width, _bits(fn, "lshr", width, bits, 16), 1)
    sum_ = fn.op(f"add {vector_type('i32', width)} {_bits(fn, 'add', width, bits, 0x7FFF)}, {odd}")
    nan = fn.op(f"fcmp uno {vector_type('float', width)} {text}, {text}")
    return _pick(fn, width, nan, fn.splat("i32", str(0x7FC0), width), _bits(fn, "lshr", width, sum_, 16))


def _half_to_single(fn: Function, width: int, half: str) -> str:
    """A multiplication with 2^112 moves the exponent, which makes subnormals right; infinity and NaN are patched."""
    magnitude = _bits(fn, "shl", width, _bits(fn, "and", width, half, 0x7FFF), 13)
    scale = fn.splat("float", "0x46F0000000000000", width)  # 2^112
    floats = vector_type("float", width)
    scaled = fn.op(f"fmul {floats} {_cast(fn, 'bitcast', 'i32', 'float', width, magnitude)}, {scale}")
    normal = _cast(fn, "bitcast", "float", "i32", width, scaled)
    special = _compare(fn, "uge", width, magnitude, 0x0F800000)
    patched = _pick(fn, width, special, _bits(fn, "or", width, normal, 0x7F800000), normal)
    sign = _bits(fn, "shl", width, _bits(fn, "and", width, half, 0x8000), 16)
    return _cast(fn, "bitcast", "i32", "float", width, fn.op(f"or {vector_type('i32', width)} {patched}, {sign}"))


def _single_to_half(fn: Function, width: int, bits: str) -> str:
    vector, floats = vector_type("i32", width), vector_type("float", width)
    magnitude = _bits(fn, "and", width, bits, 0x7FFFFFFF)
    # Subnormal results: adding 0.5 lines the bits up at the end of the mantissa, and the addition rounds them.
    half = fn.splat("float", "0.5", width)
    lined = fn.op(f"fadd {floats} {_cast(fn, 'bitcast', 'i32', 'float', width, magnitude)}, {half}")
    small = _bits(fn, "sub", width, _cast(fn, "bitcast", "float", "i32", width, lined), 0x3F000000)
    odd = _bits(fn, "and", width, _bits(fn, "lshr", width, magnitude, 13), 1)
    rebased = _bits(fn, "add", width, magnitude, 0xFFF - (112 << 23))
    normal = _bits(fn, "lshr", width, fn.op(f"add {vector} {rebased}, {odd}"), 13)
    result = _pick(fn, width, _compare(fn, "ult", width, magnitude, 113 << 23), small, normal)
    infinite, nan = fn.splat("i32", str(0x7C00), width), fn.splat("i32", str(0x7E00), width)
    result = _pick(fn, width, _compare(fn, "uge", width, magnitude, 143 << 23), infinite, result)
    result = _pick(fn, width, _compare(fn, "ugt", width, magnitude, 0x7F800000), nan, result)
    sign = _bits(fn, "and", width, _bits(fn, "lshr", width, bits, 16), 0x8000)
    return fn.op(f"or {vector} {result}, {sign}")


def _cast(fn: Function, word: str, source: str, target: str, width: int, text: str) -> str:
    types = [ty if width == 1 else f"<{width} x {ty}>" for ty in (source, target)]
    return fn.op(f"{word} {types[0]} {text} to {types[1]}")


def _bits(fn: Function, word: str, width: int, text: str, number: int) -> str:
    signed = number - (1 << 32) if number >> 31 == 1 else number
    return fn.op(f"{word} {vector_type('i32', width)} {text}, {fn.splat('i32', str(signed), width)}")


def _compare(fn: Function, predicate: str, width: int, text: str, number: int) -> str:
    return fn.op(f"icmp {predicate} {vector_type('i32', width)} {text}, {fn.splat('i32', str(number), width)}")


def _pick(fn: Function, width: int, condition: str, yes: str, no: str) -> str:
    vector = vector_type("i32", width)
    return fn.op(f"select {vector_type('i1', width)} {condition}, {vector} {yes}, {vector} {no}")
