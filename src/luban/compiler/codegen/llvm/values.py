"""What an SSA value of a tile kernel is in LLVM: one scalar for all lanes, a ramp of indices, or vectors of lanes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, Float64Type, IndexType, IntegerType
from xdsl.ir import Attribute

from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.ir.attributes import BufferType
from luban.errors import ConfigError

_FLOATS: dict[type, str] = {Float32Type: "float", Float64Type: "double", BFloat16Type: "bfloat", Float16Type: "half"}
BYTES = {"float": 4, "double": 8, "bfloat": 2, "half": 2, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "ptr": 8}
SMALL_FLOATS = ("bfloat", "half")
FLOATS = ("float", "double", *SMALL_FLOATS)


@dataclass(frozen=True)
class Uniform:
    """One scalar, the same for every lane.

    `depth` is the loop depth at which it is known, `number` its value where that is a constant, `span` the lowest and
    highest value it can take (integers, where known), and `multiple` a number that surely divides it.
    """

    type: str
    text: str
    depth: int = 0
    number: float | int | None = None
    span: tuple[int, int] | None = None
    multiple: int = 1

    @property
    def divisor(self) -> int:
        """A number that surely divides it; 0 for 0, which everything divides."""
        return self.multiple if self.number is None else abs(int(self.number))


@dataclass(frozen=True)
class Ramp:
    """An i64 that grows by `step` a lane from `base` at lane 0: an index that never needs to be a vector."""

    base: Uniform
    step: int
    span: tuple[int, int] | None = None

    @property
    def type(self) -> str:
        return "i64"


@dataclass(frozen=True)
class Varying:
    """A different value for each lane: `parts` are the vectors of the unrolled copies, in order."""

    type: str
    parts: tuple[str, ...]
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Buffer:
    """A pointer to elements of `type` (the type in bodies: i1 for bools, which take a byte in memory)."""

    type: str
    pointer: str


Value = Uniform | Ramp | Varying | Buffer


def scalar_type(ty: Attribute) -> str:
    """The LLVM type of a scalar, or of a buffer's elements. Raises ConfigError for types that no kernel holds."""
    if isinstance(ty, IntegerType):
        return f"i{ty.width.data}"
    if isinstance(ty, BufferType):
        return scalar_type(ty.dtype)
    if isinstance(ty, IndexType):
        return "i64"
    name = _FLOATS.get(type(ty))
    if name is None:
        raise ConfigError(f"the type {ty} has no LLVM form; tile kernels hold f64, f32, bf16, f16 and integers")
    return name


def memory_type(ty: str) -> str:
    """How an element lies in memory: bools take a byte, small floats are 16 bits."""
    return "i8" if ty == "i1" else register_type(ty)


def register_type(ty: str) -> str:
    """How a scalar is held in registers: small floats as their bits."""
    return "i16" if ty in SMALL_FLOATS else ty


def vector_type(ty: str, width: int) -> str:
    """`<width x ty>`, or the scalar type when the width is 1, as registers hold it."""
    held = register_type(ty)
    return held if width == 1 else f"<{width} x {held}>"


def splat(fn: Function, ty: str, text: str, width: int) -> str:
    """A vector of equal lanes; the scalar itself when the width is 1."""
    return fn.splat(register_type(ty), text, width)


def literal(ty: str, number: float | int | bool) -> str:
    """The text of a constant."""
    if ty == "i1":
        return "true" if number else "false"
    if ty not in FLOATS:
        bits = int(ty[1:])
        whole = int(number) & ((1 << bits) - 1)
        return str(whole - (1 << bits) if whole >> (bits - 1) else whole)
    if ty == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    if ty == "half":
        return literal("i16", _half_bits(number))
    if ty == "bfloat":
        return literal("i16", _bfloat_bits(number))
    return f"0x{struct.unpack('<Q', struct.pack('<d', _to_single(number)))[0]:016X}"


def constant(ty: str, number: float | int | bool) -> Uniform:
    """A uniform constant."""
    span = (int(number), int(number)) if ty not in FLOATS and ty != "i1" else None
    return Uniform(ty, literal(ty, number), 0, number, span)


def _to_single(number: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _half_bits(number: float) -> int:
    try:
        return struct.unpack("<H", struct.pack("<e", number))[0]
    except OverflowError:
        return 0x7C00 if number > 0 else 0xFC00


def _bfloat_bits(number: float) -> int:
    if number != number:
        return 0x7FC0
    bits = struct.unpack("<I", struct.pack("<f", _to_single(number)))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
