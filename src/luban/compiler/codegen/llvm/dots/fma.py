"""The universal unit: vector fused multiply-add with a broadcast of A, for any float type.

Narrow inputs (half, bfloat) are widened as they are loaded, so one unit serves every target that has vector FMA.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import mangled, masked_load
from luban.compiler.codegen.llvm.dots.outer import Unit, emit_outer
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES, DotSpec
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError

WIDER = {"half": ("float", "double"), "bfloat": ("float",), "float": ("float", "double"), "double": ("double",)}


def widen(fn: Function, value: str, ty: str, wide: str, lanes: int) -> str:
    """`value` (a vector of `lanes`, a scalar when 1; bfloat given as i16) converted exactly from `ty` to `wide`."""

    def of(element: str) -> str:
        return element if lanes == 1 else f"<{lanes} x {element}>"

    if ty == "bfloat":  # a shift: LLVM has no bfloat arithmetic on most targets
        bits = fn.op(f"zext {of('i16')} {value} to {of('i32')}")
        moved = fn.op(f"shl {of('i32')} {bits}, {fn.splat('i32', '16', lanes)}")
        return fn.op(f"bitcast {of('i32')} {moved} to {of('float')}")
    return value if ty == wide else fn.op(f"fpext {of(ty)} {value} to {of(wide)}")


def stored(ty: str) -> str:
    """The LLVM type a value is loaded as: bfloat travels as i16."""
    return "i16" if ty == "bfloat" else ty


def _broadcast(fn: Function, spec: DotSpec, pointer: str, _k: str, _whole: bool) -> str:
    value = fn.op(f"load {stored(spec.a_type)}, ptr {pointer}, align {ELEMENT_BYTES[spec.a_type]}")
    return fn.splat(spec.acc_type, widen(fn, value, spec.a_type, spec.acc_type, 1), spec.lanes)


def _load_b(fn: Function, spec: DotSpec, pointers: list[str], mask: str | None, _whole: bool) -> str:
    ty, size = stored(spec.b_type), ELEMENT_BYTES[spec.b_type]
    if mask:
        value = masked_load(fn, spec.lanes, ty, pointers[0], mask, size)
    else:
        align = size * spec.lanes if spec.b_layout == "packed" else size
        value = fn.op(f"load <{spec.lanes} x {ty}>, ptr {pointers[0]}, align {align}")
    return widen(fn, value, spec.b_type, spec.acc_type, spec.lanes)


def _multiply(fn: Function, spec: DotSpec, a: str, b: str, total: str) -> str:
    vector = spec.vector
    name = f"llvm.fma.{mangled(spec.lanes, spec.acc_type)}"
    return fn.intrinsic(name, vector, [(vector, a), (vector, b), (vector, total)])


FMA = Unit(1, _broadcast, _load_b, _multiply)


def emit_fma(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name` for `spec`, whose inputs are exact in its accumulator type; see DotSpec."""
    for ty in (spec.a_type, spec.b_type):
        if spec.acc_type not in WIDER[ty]:
            raise ConfigError(
                f"micro-kernel {name}: {ty} inputs cannot be accumulated in {spec.acc_type}; use a wider accumulator"
            )
    emit_outer(module, name, spec, FMA)
