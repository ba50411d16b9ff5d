"""bfloat16 dot units: each lane adds the products of two neighbouring values of K to a float accumulator.

x86 AVX512-BF16 (vdpbf16ps) and AArch64 (bfdot) differ only in the name of the intrinsic. The first one takes denormals
for zero; results agree with a float64 product of the same inputs to float accuracy.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import masked_load, offset
from luban.compiler.codegen.llvm.dots.outer import Unit, emit_outer
from luban.compiler.codegen.llvm.dots.spec import DotSpec
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError


def _broadcast(fn: Function, spec: DotSpec, pointer: str, k_stride: str, whole: bool) -> str:
    if spec.a_layout in ("packed", "row_major") and whole:
        pair = fn.op(f"load i32, ptr {pointer}, align {4 if spec.a_layout == 'packed' else 2}")
    else:
        pair = fn.op(f"zext i16 {fn.op(f'load i16, ptr {pointer}, align 2')} to i32")
        if whole:
            second = fn.op(f"load i16, ptr {offset(fn, pointer, k_stride)}, align 2")
            high = fn.op(f"shl i32 {fn.op(f'zext i16 {second} to i32')}, 16")
            pair = fn.op(f"or i32 {pair}, {high}")
    return _pairs(fn, spec, fn.splat("i32", pair, spec.lanes))


def _load_b(fn: Function, spec: DotSpec, pointers: list[str], mask: str | None, whole: bool) -> str:
    lanes = spec.lanes
    if spec.b_layout == "packed":
        return fn.op(f"load <{2 * lanes} x bfloat>, ptr {pointers[0]}, align {4 * lanes}")

    def row(pointer: str) -> str:
        if mask:
            return masked_load(fn, lanes, "i16", pointer, mask, 2)
        return fn.op(f"load <{lanes} x i16>, ptr {pointer}, align 2")

    first = row(pointers[0])
    second = row(pointers[1]) if whole else "zeroinitializer"
    order = ", ".join(f"i32 {i}, i32 {i + lanes}" for i in range(lanes))
    vector = f"<{lanes} x i16>"
    both = fn.op(f"shufflevector {vector} {first}, {vector} {second}, <{2 * lanes} x i32> <{order}>")
    return fn.op(f"bitcast <{2 * lanes} x i16> {both} to <{2 * lanes} x bfloat>")


def _pairs(fn: Function, spec: DotSpec, words: str) -> str:
    return fn.op(f"bitcast <{spec.lanes} x i32> {words} to <{2 * spec.lanes} x bfloat>")


def _x86(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    vector, pairs = spec.vector, f"<{2 * spec.lanes} x bfloat>"
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * spec.lanes}"
    return fn.intrinsic(name, vector, [(vector, total), (pairs, a), (pairs, b)])


def _aarch64(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    vector, pairs = spec.vector, f"<{2 * spec.lanes} x bfloat>"
    return fn.intrinsic("llvm.aarch64.neon.bfdot.v4f32.v8bf16", vector, [(vector, total), (pairs, a), (pairs, b)])


BF16_DOT = Unit(2, _broadcast, _load_b, _x86)
BFDOT = Unit(2, _broadcast, _load_b, _aarch64)


def emit_bf16_dot(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for x86 vdpbf16ps (4, 8 or 16 lanes); see DotSpec."""
    _check(name, spec, (4, 8, 16))
    emit_outer(module, name, spec, BF16_DOT)


def emit_bfdot(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for AArch64 bfdot (4 lanes); see DotSpec."""
    _check(name, spec, (4,))
    emit_outer(module, name, spec, BFDOT)


def _check(name: str, spec: DotSpec, lanes: tuple[int, ...]) -> None:
    if (spec.a_type, spec.b_type, spec.acc_type) != ("bfloat", "bfloat", "float") or spec.lanes not in lanes:
        raise ConfigError(
            f"micro-kernel {name}: unit {spec.unit} needs bfloat inputs, float accumulators and {lanes} lanes, "
            f"got {spec.a_type}, {spec.b_type}, {spec.acc_type} and {spec.lanes}"
        )
