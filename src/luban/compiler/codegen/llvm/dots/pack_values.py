"""Values on their way into a panel: conversions, and loads and copies that stop where the source ends."""

from __future__ import annotations

from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots.flow import lane_mask, loop, masked_load, masked_store, offset, times
from luban.compiler.codegen.llvm.dots.fma import stored, widen
from luban.compiler.codegen.llvm.dots.pack_parts import part_of
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec
from luban.compiler.codegen.llvm.dots.transpose import side_by_side
from luban.compiler.codegen.llvm.emitter import Function
from luban.errors import ConfigError

COPIES = 4  # values that one turn of a copy loop moves


@dataclass(frozen=True)
class Limit:
    """How many of `count` (a power of two) neighbouring values are valid, 0 to all; as a mask too where loads take one."""

    count: int
    valid: str
    mask: str | None


def limit(fn: Function, spec: PackSpec, count: int, valid: str) -> Limit:
    """The first `valid` (an i64, any value) of `count` values."""
    least = fn.intrinsic("llvm.smax.i64", "i64", [("i64", valid), ("i64", "0")])
    clipped = clip(fn, least, count)
    return Limit(count, clipped, lane_mask(fn, count, clipped) if spec.masked else None)


def limit_if(fn: Function, condition: str, given: Limit) -> Limit:
    """`given`, or nothing where the condition is false."""
    valid, lanes = fn.op(f"select i1 {condition}, i64 {given.valid}, i64 0"), f"<{given.count} x i1>"
    mask = given.mask and fn.op(f"select i1 {condition}, {lanes} {given.mask}, {lanes} zeroinitializer")
    return Limit(given.count, valid, mask)


def load_first(fn: Function, spec: PackSpec, pointer: str, given: Limit) -> str:
    """The valid values from `pointer` on, zeros after them; memory beyond is not touched."""
    ty, size = stored(spec.src_type), spec.src_bytes
    if given.mask:
        return masked_load(fn, given.count, ty, pointer, given.mask, size)
    slot = fn.alloca(f"[{given.count} x {ty}]", 64)
    copy_first(fn, spec, pointer, slot, given, str(size))
    return fn.op(f"load <{given.count} x {ty}>, ptr {slot}, align {size}")


def copy_first(fn: Function, spec: PackSpec, source: str, target: str, given: Limit, step: str) -> None:
    """Writes the valid values, which lie `step` bytes apart, side by side, and zeros after them."""
    ty, size = stored(spec.src_type), spec.src_bytes
    if given.mask and step == str(size):
        value = load_first(fn, spec, source, given)
        fn.emit(f"store <{given.count} x {ty}> {value}, ptr {target}, align {size}")
        return
    fn.emit(f"store <{given.count} x {ty}> zeroinitializer, ptr {target}, align {size}")

    def copy(first: str, number: int) -> None:
        at = offset(fn, source, fn.op(f"mul i64 {first}, {step}"))
        to = offset(fn, target, times(fn, first, size))
        for i in range(number):
            value = fn.op(f"load {ty}, ptr {at}, align {size}")
            fn.emit(f"store {ty} {value}, ptr {offset(fn, to, i * size)}, align {size}")
            at = offset(fn, at, step) if i + 1 < number else at

    def several(index: str, _values: list[str]) -> list[str]:
        copy(times(fn, index, COPIES), COPIES)
        return []

    def one(index: str, _values: list[str]) -> list[str]:
        copy(fn.op(f"add i64 {done}, {index}"), 1)
        return []

    done = fn.op(f"and i64 {given.valid}, {-COPIES}")
    loop(fn, fn.op(f"udiv i64 {given.valid}, {COPIES}"), [], several)
    loop(fn, fn.op(f"sub i64 {given.valid}, {done}"), [], one)


def load_exactly(fn: Function, spec: PackSpec, pointer: str, count: int) -> str:
    """`count` neighbouring source values, all valid."""
    ty, size = stored(spec.src_type), spec.src_bytes
    if count & (count - 1) and spec.masked and size >= 4:  # widths that no plain load has, where a mask is cheap
        value = masked_load(fn, spec.lanes, ty, pointer, first_lanes(spec.lanes, count), size)
        return resize(fn, value, ty, spec.lanes, count)
    return fn.op(f"load <{count} x {ty}>, ptr {pointer}, align {size}")


def store_words(fn: Function, spec: PackSpec, value: str, pointer: str, width: int, count: int) -> None:
    """The first `count` words of a vector of `width`."""
    align = min(spec.word_bytes, 64)
    if count & (count - 1) and spec.masked and spec.word_bytes >= 4:
        masked_store(fn, width, spec.word, value, pointer, first_lanes(width, count), align)
        return
    value = resize(fn, value, spec.word, width, count)
    fn.emit(f"store <{count} x {spec.word}> {value}, ptr {pointer}, align {align}")


def first_lanes(lanes: int, count: int) -> str:
    """A constant mask."""
    return "<" + ", ".join(f"i1 {int(i < count)}" for i in range(lanes)) + ">"


def resize(fn: Function, value: str, ty: str, have: int, want: int) -> str:
    """The first lanes of a vector, or more of them than it has, which are then undefined."""
    return value if have == want else slice_of(fn, value, ty, have, 0, want)


def slice_of(fn: Function, value: str, ty: str, have: int, first: int, want: int) -> str:
    """Lanes `first` to `first + want` of a vector of `have`; those that it lacks are undefined."""
    order = ", ".join(f"i32 {i}" if i < have else "i32 poison" for i in range(first, first + want))
    return fn.op(f"shufflevector <{have} x {ty}> {value}, <{have} x {ty}> poison, <{want} x i32> <{order}>")


def clip(fn: Function, value: str, most: int) -> str:
    """min(value, most) for an i64."""
    return fn.intrinsic("llvm.smin.i64", "i64", [("i64", value), ("i64", str(most))])


def convert(fn: Function, spec: PackSpec, value: str, count: int) -> str:
    """A vector of `count` values from the source's type to the panel's; bfloat is an i16 on both sides."""
    source, target = spec.src_type, spec.dst_type
    if source == target and spec.part == "whole":
        return value
    if count == 1:  # the conversions take a scalar then
        single = fn.op(f"extractelement <1 x {stored(source)}> {value}, i64 0")
        result = stored(target)
        return fn.op(f"insertelement <1 x {result}> poison, {result} {_convert(fn, spec, single, 1)}, i64 0")
    if count > spec.lanes:  # a register at a time: LLVM 22 fails at a wider fptrunc to bfloat for SVE
        parts = [slice_of(fn, value, stored(source), count, i, spec.lanes) for i in range(0, count, spec.lanes)]
        return side_by_side(fn, [convert(fn, spec, part, spec.lanes) for part in parts], stored(target), spec.lanes)
    return _convert(fn, spec, value, count)


def _convert(fn: Function, spec: PackSpec, value: str, lanes: int) -> str:
    source, target = spec.src_type, spec.dst_type
    if spec.part != "whole":
        exact = widen(fn, value, source, "float", lanes)
        return part_of(fn, spec.part, exact, lanes, lambda x: narrow(fn, x, lanes, spec.native_bf16))
    if target == "float" and source in ("bfloat", "half"):
        return widen(fn, value, source, "float", lanes)
    if (source, target) == ("float", "bfloat"):
        return narrow(fn, value, lanes, spec.native_bf16)
    if (source, target) == ("i8", "i16"):
        ty = ("i8", "i16") if lanes == 1 else (f"<{lanes} x i8>", f"<{lanes} x i16>")
        return fn.op(f"{'zext' if spec.unsigned else 'sext'} {ty[0]} {value} to {ty[1]}")
    raise ConfigError(f"packing {source} into {target} is not known; convert before packing")


def as_words(fn: Function, spec: PackSpec, value: str, count: int) -> str:
    """`count` converted values as the integers that panels are written as, `spec.pair` values each."""
    ty = stored(spec.dst_type)
    if ty == spec.word:
        return value
    return fn.op(f"bitcast <{count} x {ty}> {value} to <{count // spec.pair} x {spec.word}>")


def narrow(fn: Function, value: str, lanes: int, native: bool) -> str:
    """float to bfloat (as i16), rounding to nearest even; NaN stays NaN."""

    def of(element: str) -> str:
        return element if lanes == 1 else f"<{lanes} x {element}>"

    if native:
        short = fn.op(f"fptrunc {of('float')} {value} to {of('bfloat')}")
        return fn.op(f"bitcast {of('bfloat')} {short} to {of('i16')}")

    def binary(operation: str, left: str, right: int | str) -> str:
        right = fn.splat("i32", str(right), lanes) if isinstance(right, int) else right
        return fn.op(f"{operation} {of('i32')} {left}, {right}")

    bits = fn.op(f"bitcast {of('float')} {value} to {of('i32')}")
    odd = binary("and", binary("lshr", bits, 16), 1)
    bumped = binary("add", binary("add", bits, 0x7FFF), odd)
    quiet = binary("or", bits, 0x400000)
    nan = fn.op(f"fcmp uno {of('float')} {value}, {value}")
    chosen = fn.op(f"select {of('i1')} {nan}, {of('i32')} {quiet}, {of('i32')} {bumped}")
    return fn.op(f"trunc {of('i32')} {binary('lshr', chosen, 16)} to {of('i16')}")
