"""Values that a body uses from outside, for bodies that become functions of their own."""

from __future__ import annotations

from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.values import Buffer, Uniform, Value, register_type


def captured(ctx: Context, op: Any) -> dict[SSAValue, Value]:
    """Values from outside that the regions of `op` use, except constants."""
    inside = {result for inner in op.walk() for result in inner.results}
    inside |= {arg for inner in op.walk() for region in inner.regions for block in region.blocks for arg in block.args}
    used = {o: None for inner in op.walk() if inner is not op for o in inner.operands if o not in inside}
    return {value: ctx.values[value] for value in used if not _is_constant(ctx.values[value])}


def constants(ctx: Context) -> dict[SSAValue, Value]:
    """The values known as numbers, which every function may use as they are."""
    return {key: value for key, value in ctx.values.items() if _is_constant(value)}


def _is_constant(value: Value) -> bool:
    return isinstance(value, Uniform) and value.number is not None


def operand(value: Value) -> tuple[str, str]:
    """A captured value as (LLVM type, operand text)."""
    if isinstance(value, Buffer):
        return "ptr", value.pointer
    assert isinstance(value, Uniform)
    return register_type(value.type), value.text


def renamed(value: Value, text: str) -> Value:
    """The same value under the name that it has in another function."""
    if isinstance(value, Buffer):
        return Buffer(value.type, text)
    assert isinstance(value, Uniform)
    return Uniform(value.type, text, 0, None, value.span, value.multiple)
