"""The combine kinds: identities, two values combined, a block combined to a scalar."""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import IntegerType, f32, i1, i32
from xdsl.ir import Attribute

from luban.compiler.codegen.triton.context import Context
from luban.compiler.codegen.triton.expressions import ADD, LOW, MUL, Value, binary, call, is_half, literal
from luban.compiler.codegen.triton.scalar_ops import signed
from luban.compiler.codegen.triton.scalar_ops import unsigned as as_unsigned
from luban.errors import ConfigError


def identity(kind: str, ty: Attribute, unsigned: bool = False) -> Value:
    """The value that changes nothing when it is combined."""
    return literal(_identity(kind, ty, unsigned), ty)


def _identity(kind: str, ty: Attribute, unsigned: bool) -> Any:
    integer = isinstance(ty, IntegerType)
    if kind in ("add", "or"):
        return 0
    if kind == "mul" or ty == i1:
        return 1 if kind in ("mul", "and", "min") else 0
    if kind == "and":
        return -1
    if not integer:
        return float("-inf") if kind == "max" else float("inf")
    bits = ty.width.data  # type: ignore[attr-defined]
    if unsigned:
        return 0 if kind == "max" else -1
    return -(1 << (bits - 1)) if kind == "max" else (1 << (bits - 1)) - 1


def combined(ctx: Context, kind: str, a: Value, b: Value, unsigned: bool = False) -> Value:
    """a combined with b."""
    ty = a.type
    if a.number is not None and b.number is not None:
        raise ConfigError(f"kernel {ctx.kernel} combines two numbers; fold them first")
    if is_half(ty):
        a, b = (literal(v.number, f32) if v.number is not None else v.to(f32) for v in (a, b))
        return combined(ctx, kind, a, b).to(ty)
    if kind in ("and", "or"):
        return binary("&" if kind == "and" else "|", a, b, LOW)
    if ty == i1:
        return binary({"add": "^", "mul": "&", "max": "|", "min": "&"}[kind], a, b, LOW)
    if kind in ("add", "mul"):
        return binary("+" if kind == "add" else "*", a, b, ADD if kind == "add" else MUL)
    name = "tl.maximum" if kind == "max" else "tl.minimum"
    if unsigned:
        return signed(call(name, as_unsigned(a), as_unsigned(b)))
    value = call(name, a, b)
    if isinstance(ty, IntegerType):
        return value
    return Value(f"{value.text[:-1]}, propagate_nan=tl.PropagateNan.ALL)", ty, value.axes)


def reduced(ctx: Context, kind: str, block: Value, unsigned: bool = False) -> Value:
    """A block of one axis combined to a scalar of its type."""
    ty, name = block.type, block.text
    if ty == i1:
        wide = f"{block.at(4)}.to(tl.int32)"
        text = {
            "add": f"(tl.sum({wide}, axis=0) & 1)",
            "or": f"tl.max({wide}, axis=0)",
            "and": f"tl.min({wide}, axis=0)",
        }
        chosen = text[{"mul": "and", "min": "and", "max": "or"}.get(kind, kind)]
        return Value(f"{chosen} != 0", ty, level=LOW)
    if kind in ("mul", "and", "or"):
        helper = ctx.helper({"mul": "product", "and": "bitwise_and", "or": "bitwise_or"}[kind])
        return Value(f"tl.reduce({name}, 0, {helper})", ty)
    narrow = isinstance(ty, IntegerType) and ty.width.data < i32.width.data
    if kind == "add":
        found = Value(f"tl.sum({name}, axis=0)", ty)
    elif not isinstance(ty, IntegerType):
        found = Value(f"{ctx.helper('block_' + kind)}({name})", ty)
    elif unsigned:
        return signed(Value(f"tl.{kind}({as_unsigned(block).text}, axis=0)", ty))
    else:
        found = Value(f"tl.{kind}({name}, axis=0)", ty)
    return found.to(ty) if narrow else found
