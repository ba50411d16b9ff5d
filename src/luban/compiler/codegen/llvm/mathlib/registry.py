"""Which elementary functions exist, and the call that brings one into a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.mathlib.lanes import Lanes, Value

Builder = Callable[..., Value]


@dataclass(frozen=True)
class Elementary:
    """One elementary function: how many arguments it takes and what writes its body for each scalar type."""

    name: str
    arity: int
    builders: dict[str, Builder]


_FUNCTIONS: dict[str, Elementary] = {}


def elementary(name: str, *scalar_types: str, arity: int = 1) -> Callable[[Builder], Builder]:
    """Registers `builder(lanes, *values) -> value` as the body of `name` for these scalar types."""

    def register(builder: Builder) -> Builder:
        entry = _FUNCTIONS.setdefault(name, Elementary(name, arity, {}))
        entry.builders.update({scalar_type: builder for scalar_type in scalar_types})
        return builder

    return register


def from_libm(name: str, scalar_type: str, arity: int = 1) -> None:
    """Registers the process's own libm, one lane at a time, for a function and type that have no vector form here."""
    symbol = name + ("f" if scalar_type == "float" else "")

    def call_lane(lanes: Lanes, *values: Value) -> list[Value]:
        lanes.fn.module.declare(symbol, scalar_type, [scalar_type] * arity)
        listed = [(scalar_type, value.text) for value in values]
        return [Value(lanes, lanes.fn.call(scalar_type, f"@{symbol}", listed), scalar_type)]

    elementary(name, scalar_type, arity=arity)(lambda lanes, *values: lanes.each_lane(call_lane, *values)[0])


def names() -> list[str]:
    """Every elementary function, sorted."""
    return sorted(_FUNCTIONS)


def lookup(name: str) -> Elementary:
    """The function's entry; KeyError names what there is."""
    if name not in _FUNCTIONS:
        raise KeyError(f"no elementary function {name!r}; there are {', '.join(names())}")
    return _FUNCTIONS[name]


def call(fn: Function, name: str, scalar_type: str, width: int, args: list[str]) -> str:
    """Emits a call of the elementary function `name` into `fn` and returns the result's operand text.

    `scalar_type` is "float" or "double"; `args` are operands of type `<width x scalar_type>`, or of the scalar type
    when the width is 1. The function itself, `@luban.<name>.<scalar_type>.<width>`, is added to the module once and
    always inlined.
    """
    entry = lookup(name)
    if len(args) != entry.arity:
        raise ValueError(f"{name} takes {entry.arity} argument(s), not {len(args)}")
    full = f"luban.{name}.{scalar_type}.{width}"
    vector = scalar_type if width == 1 else f"<{width} x {scalar_type}>"
    if full not in fn.module.functions:
        parameters = [(vector, f"x{i}") for i in range(entry.arity)]
        inner = Function(fn.module, full, vector, parameters, "internal", "alwaysinline nounwind")
        lanes = Lanes(inner, scalar_type, width)
        result = entry.builders[scalar_type](lanes, *(Value(lanes, f"%{arg}", scalar_type) for _, arg in parameters))
        inner.emit(f"ret {vector} {result.text}")
        fn.module.add(inner)
    return fn.call(vector, f"@{full}", [(vector, arg) for arg in args])
