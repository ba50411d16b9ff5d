"""Element types: the IR's, and the names by which programs and torch know them."""

from __future__ import annotations

from xdsl.dialects.builtin import bf16, f16, f32, f64, i1, i8, i16, i32, i64
from xdsl.ir import Attribute

_NAMES = {
    "float32": f32,
    "float64": f64,
    "bfloat16": bf16,
    "float16": f16,
    "int64": i64,
    "int32": i32,
    "int16": i16,
    "int8": i8,
    "uint8": i8,
    "bool": i1,
}
_BYTES = {f64: 8, i64: 8, f32: 4, i32: 4, bf16: 2, f16: 2, i16: 2, i8: 1, i1: 1}
FLOATS = (f32, f64, bf16, f16)


def from_name(name: str) -> Attribute:
    """The element type for a name such as "float32"; KeyError for one that the IR does not know."""
    return _NAMES[name]


def bytes_of(dtype: Attribute) -> int:
    """Bytes an element takes in memory (a bool takes one)."""
    return _BYTES[dtype]  # type: ignore[index]


def is_float(dtype: Attribute) -> bool:
    """Whether the element type is a floating-point type."""
    return dtype in FLOATS
