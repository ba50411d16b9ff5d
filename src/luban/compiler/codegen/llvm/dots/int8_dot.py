"""Products of 8-bit integers summed in 32 bits: dot units of x86 and AArch64, and plain multiplications elsewhere.

A dot unit adds the products of four neighbouring values of K to a lane, or of two where the values lie in the panels as
16-bit integers. None of them saturates: sums wrap as those of 32-bit integers do.

vpdpbusd multiplies unsigned by signed values. Of two signed operands A is moved up by 128 (its highest bit turned), and
128 times the sum of B's column, which one more row of sums collects, is subtracted in the end.
"""

from __future__ import annotations

from dataclasses import replace

from luban.compiler.codegen.llvm.dots.flow import masked_load, offset, times
from luban.compiler.codegen.llvm.dots.outer import Unit, emit_outer
from luban.compiler.codegen.llvm.dots.spec import DotSpec
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError

TURN = -0x7F7F7F80  # 0x80808080: the highest bit of each of four bytes


# ---- four 8-bit values a lane


def _bytes(fn: Function, spec: DotSpec, words: str) -> str:
    return fn.op(f"bitcast <{spec.lanes} x i32> {words} to <{4 * spec.lanes} x i8>")


def _four(fn: Function, spec: DotSpec, pointer: str, k_stride: str, whole: bool) -> str:
    """Four values of K of a row in one word, zeros beyond K."""
    if spec.a_layout in ("packed", "row_major") and whole:
        return fn.op(f"load i32, ptr {pointer}, align {4 if spec.a_layout == 'packed' else 1}")
    left = "4" if whole else fn.op("urem i64 %K, 4")
    word = fn.op(f"zext i8 {fn.op(f'load i8, ptr {pointer}, align 1')} to i32")
    for i in range(1, 4):
        inside = "true" if whole else fn.op(f"icmp ugt i64 {left}, {i}")
        place = offset(fn, pointer, fn.op(f"select i1 {inside}, i64 {times(fn, k_stride, i)}, i64 0"))
        wide = fn.op(f"zext i8 {fn.op(f'load i8, ptr {place}, align 1')} to i32")
        held = fn.op(f"select i1 {inside}, i32 {wide}, i32 0")
        word = fn.op(f"or i32 {word}, {fn.op(f'shl i32 {held}, {8 * i}')}")
    return word


def _broadcast(fn: Function, spec: DotSpec, pointer: str, k_stride: str, whole: bool) -> str:
    return _bytes(fn, spec, fn.splat("i32", _four(fn, spec, pointer, k_stride, whole), spec.lanes))


def _turned(fn: Function, spec: DotSpec, pointer: str, k_stride: str, whole: bool) -> str:
    words = fn.splat("i32", _four(fn, spec, pointer, k_stride, whole), spec.lanes)
    return _bytes(fn, spec, fn.op(f"xor <{spec.lanes} x i32> {words}, {fn.splat('i32', str(TURN), spec.lanes)}"))


def _bias(fn: Function, spec: DotSpec) -> str:
    return fn.splat("i8", "-128", 4 * spec.lanes)


def _load_bytes(fn: Function, spec: DotSpec, pointers: list[str], _mask: str | None, _whole: bool) -> str:
    return fn.op(f"load <{4 * spec.lanes} x i8>, ptr {pointers[0]}, align {4 * spec.lanes}")


def _vpdpbusd(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    plain, signed = (b, a) if spec.unsigned == "b" else (a, b)
    four = f"<{4 * spec.lanes} x i8>"
    name = f"llvm.x86.avx512.vpdpbusd.{32 * spec.lanes}"
    return fn.intrinsic(name, spec.vector, [(spec.vector, total), (four, plain), (four, signed)])


def _sdot(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    """sdot, udot or usdot, NEON's or SVE's: LLVM picks it by how the factors are widened."""
    count = 4 * spec.lanes
    wide = [
        fn.op(f"{_extension(spec, name)} <{count} x i8> {value} to <{count} x i32>")
        for name, value in (("a", a), ("b", b))
    ]
    product = fn.op(f"mul <{count} x i32> {wide[0]}, {wide[1]}")
    name = f"llvm.vector.partial.reduce.add.v{spec.lanes}i32.v{count}i32"
    return fn.intrinsic(name, spec.vector, [(spec.vector, total), (f"<{count} x i32>", product)])


def _extension(spec: DotSpec, operand: str) -> str:
    return "zext" if operand in spec.unsigned else "sext"


# ---- two 16-bit values a lane


def _broadcast_pair(fn: Function, spec: DotSpec, pointer: str, _k_stride: str, _whole: bool) -> str:
    words = fn.splat("i32", fn.op(f"load i32, ptr {pointer}, align 4"), spec.lanes)
    return fn.op(f"bitcast <{spec.lanes} x i32> {words} to <{2 * spec.lanes} x i16>")


def _load_pairs(fn: Function, spec: DotSpec, pointers: list[str], _mask: str | None, _whole: bool) -> str:
    return fn.op(f"load <{2 * spec.lanes} x i16>, ptr {pointers[0]}, align {4 * spec.lanes}")


def _vpdpwssd(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    pairs = f"<{2 * spec.lanes} x i16>"
    name = f"llvm.x86.avx512.vpdpwssd.{32 * spec.lanes}"
    return fn.intrinsic(name, spec.vector, [(spec.vector, total), (pairs, a), (pairs, b)])


def _vpmaddwd(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    pairs = f"<{2 * spec.lanes} x i16>"
    name = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}[spec.lanes]
    product = fn.intrinsic(f"llvm.x86.{name}", spec.vector, [(pairs, a), (pairs, b)])
    return fn.op(f"add {spec.vector} {total}, {product}")


# ---- one value a lane


def _broadcast_one(fn: Function, spec: DotSpec, pointer: str, _k_stride: str, _whole: bool) -> str:
    value = fn.op(f"load i8, ptr {pointer}, align 1")
    return fn.splat("i16", fn.op(f"{_extension(spec, 'a')} i8 {value} to i16"), spec.lanes)


def _load_one(fn: Function, spec: DotSpec, pointers: list[str], mask: str | None, _whole: bool) -> str:
    if mask:
        value = masked_load(fn, spec.lanes, "i8", pointers[0], mask, 1)
    else:
        value = fn.op(f"load <{spec.lanes} x i8>, ptr {pointers[0]}, align 1")
    return fn.op(f"{_extension(spec, 'b')} <{spec.lanes} x i8> {value} to <{spec.lanes} x i16>")


def _multiply_one(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    """Of 16-bit values, which AArch64 and RISC-V multiply and add in one instruction."""
    wide = [fn.op(f"sext <{spec.lanes} x i16> {value} to {spec.vector}") for value in (a, b)]
    return fn.op(f"add {spec.vector} {total}, {fn.op(f'mul {spec.vector} {wide[0]}, {wide[1]}')}")


VPDPBUSD = Unit(4, _broadcast, _load_bytes, _vpdpbusd)
VPDPBUSD_SIGNED = replace(VPDPBUSD, broadcast=_turned, bias=_bias)
SDOT = Unit(4, _broadcast, _load_bytes, _sdot)
VPDPWSSD = Unit(2, _broadcast_pair, _load_pairs, _vpdpwssd)
VPMADDWD = Unit(2, _broadcast_pair, _load_pairs, _vpmaddwd)
IMUL = Unit(1, _broadcast_one, _load_one, _multiply_one)


def emit_vpdpbusd(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for x86 vpdpbusd (AVX-VNNI or AVX512-VNNI); not both operands unsigned."""
    _check(name, spec, "i8", (4, 8, 16))
    if spec.unsigned == "ab":
        raise ConfigError(f"micro-kernel {name}: vpdpbusd multiplies unsigned by signed values; use vpdpwssd")
    emit_outer(module, name, spec, VPDPBUSD if spec.unsigned else VPDPBUSD_SIGNED)


def emit_sdot(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for AArch64 sdot, udot and usdot."""
    _check(name, spec, "i8", (4, 8, 16, 32))
    emit_outer(module, name, spec, SDOT)


def emit_vpdpwssd(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for x86 vpdpwssd; both operands packed."""
    _check(name, spec, "i16", (4, 8, 16), ("packed",))
    emit_outer(module, name, spec, VPDPWSSD)


def emit_vpmaddwd(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for x86 vpmaddwd and an addition; both operands packed."""
    _check(name, spec, "i16", (4, 8, 16), ("packed",))
    emit_outer(module, name, spec, VPMADDWD)


def emit_imul(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for plain multiplications, which every target has."""
    if (spec.a_type, spec.b_type, spec.acc_type) != ("i8", "i8", "i32"):
        raise ConfigError(f"micro-kernel {name}: imul multiplies i8 by i8 into i32, got {spec.a_type}, {spec.b_type}")
    emit_outer(module, name, spec, IMUL)


def _check(
    name: str, spec: DotSpec, element: str, lanes: tuple[int, ...], a_layouts: tuple[str, ...] = ("packed", "row_major")
) -> None:
    types = (spec.a_type, spec.b_type, spec.acc_type)
    if types != (element, element, "i32") or spec.lanes not in lanes:
        raise ConfigError(
            f"micro-kernel {name}: unit {spec.unit} needs {element} inputs, i32 accumulators and {lanes} lanes, "
            f"got {', '.join(types)} and {spec.lanes}"
        )
    if spec.a_layout not in a_layouts or spec.b_layout != "packed":
        raise ConfigError(
            f"micro-kernel {name}: unit {spec.unit} takes A {' or '.join(a_layouts)} and B packed, "
            f"got {spec.a_layout}, {spec.b_layout}; pack first"
        )
