"""Pieces of Triton source: typed texts that know how tightly they bind, literals, names of types, dims as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from xdsl.dialects.builtin import BFloat16Type, Float16Type, bf16, f16, f32, f64, i1, i8, i16, i32, i64
from xdsl.ir import Attribute

from luban.errors import ConfigError
from luban.symbolic import Dim, parse, split_call

ATOM, SIGN, MUL, ADD, LOW = 4, 3, 2, 1, 0  # how tightly a text binds: names and calls, -x, x * y, x + y, the rest

_TL = {
    f32: "float32",
    f64: "float64",
    bf16: "bfloat16",
    f16: "float16",
    i1: "int1",
    i8: "int8",
    i16: "int16",
    i32: "int32",
    i64: "int64",
}
_TINY = 2.0**-126  # Triton 3.0 reads a smaller literal as float64


@dataclass(frozen=True)
class Value:
    """A scalar of the IR as source: its text, its type, and the lane axes along which it varies.

    `number` is set for a literal, which has no methods and takes its type from what it meets.
    """

    text: str
    type: Attribute
    axes: frozenset[int] = frozenset()
    level: int = ATOM
    number: Any = None

    def at(self, level: int) -> str:
        """The text, in parentheses where it binds less tightly than asked."""
        return self.text if self.level >= level else f"({self.text})"

    def to(self, ty: Attribute) -> Value:
        """Converted as Triton's `.to` does."""
        return replace(self, text=f"{tensor(self)}.to({tl_type(ty)})", type=ty, level=ATOM, number=None)


def tl_type(ty: Attribute) -> str:
    """`tl.float32` for f32. Raises ConfigError for a type that Triton does not have."""
    if ty not in _TL:  # type: ignore[comparison-overlap]
        raise ConfigError(f"Triton has no type for {ty}; convert it to one of {', '.join(_TL.values())} first")
    return f"tl.{_TL[ty]}"  # type: ignore[index]


def is_half(ty: Attribute) -> bool:
    """Whether arithmetic in this type is done in float32 and rounded."""
    return isinstance(ty, (BFloat16Type, Float16Type))


def literal(number: Any, ty: Attribute) -> Value:
    """A number of a type; as text it is typed wherever Triton's own reading of the number could differ."""
    if ty == i1:
        return Value(f"tl.full([], {bool(number)}, tl.int1)", ty, number=bool(number))
    if ty in (i64, i32):
        return Value(str(int(number)), ty, number=int(number))
    if ty in (i8, i16):
        return Value(f"tl.full([], {int(number)}, {tl_type(ty)})", ty, number=int(number))
    text = plain_number(number, ty)
    if ty != f32 or 0 < abs(number) < _TINY:
        text = f"tl.full([], {text}, {tl_type(ty)})"
    return Value(text, ty, number=float(number))


def plain_number(number: Any, ty: Attribute) -> str:
    """The shortest Python text that gives the number in its type."""
    if ty in (i64, i32, i16, i8):
        return str(int(number))
    if ty == i1:
        return str(bool(number))
    if not math.isfinite(number):
        return f'float("{float(number)}")'
    return str(np.float32(number)) if ty == f32 else repr(float(number))


def tensor(value: Value) -> str:
    """The text as something that has methods and a type of its own."""
    if value.number is None:
        return value.at(ATOM)
    return f"tl.full([], {plain_number(value.number, value.type)}, {tl_type(value.type)})"


def binary(sign: str, a: Value, b: Value, level: int, ty: Attribute | None = None) -> Value:
    """a sign b; left-associative."""
    text = f"{a.at(level if level else ATOM)} {sign} {b.at(level + 1 if level else ATOM)}"
    return Value(text, ty or a.type, a.axes | b.axes, level)


def call(name: str, *operands: Value, ty: Attribute | None = None) -> Value:
    """name(operands); literals are typed for functions that do not begin by making tensors of them."""
    axes = frozenset().union(*(v.axes for v in operands))
    texts = [v.text if name.startswith("tl.") else typed(v) for v in operands]
    return Value(f"{name}({', '.join(texts)})", ty or operands[0].type, axes)


def typed(value: Value) -> str:
    """The text as an argument of a call: anything but a bare literal."""
    return value.text if value.number is None else tensor(value)


def dim_text(dim: Dim, device: bool) -> str:
    """A dim as an expression over its symbols' names: Triton's on the device, Python's on the host.

    Sizes are not negative, so that // and % mean the same in both.
    """
    if isinstance(dim, int):
        return str(dim)
    terms = []
    for factors, c in dim.terms:
        texts = [_factor(f, device) for f in factors]
        alone = len(texts) == 1 and c == 1
        texts = [t if alone or " " not in t or t.startswith(("max(", "min(", "tl.")) else f"({t})" for t in texts]
        terms.append(" * ".join([*texts, *([str(c)] if c != 1 or not texts else [])]))
    return " + ".join(terms)


def dim_value(dim: Dim) -> Value:
    """A dim as a value in device code."""
    if isinstance(dim, int):
        return literal(dim, i64)
    text = dim_text(dim, True)
    return Value(text, i64, level=ADD if " + " in text else MUL if " " in text else ATOM)


def _factor(factor: str, device: bool) -> str:
    parts = split_call(factor)
    if parts is None:
        return factor
    kind, a, b = parts[0], *(dim_text(parse(p), device) for p in parts[1:])
    if kind in ("floordiv", "mod"):
        a, b = (f"({t})" if " " in t else t for t in (a, b))
        return f"{a} {'//' if kind == 'floordiv' else '%'} {b}"
    if device:
        return f"tl.{'maximum' if kind == 'max' else 'minimum'}({a}, {b})"
    return f"{kind}({a}, {b})"
