"""Conversions between scalar types."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, emits
from luban.compiler.codegen.llvm.scalar_ops import convert_float, elementwise, working_type
from luban.compiler.codegen.llvm.small_floats import narrow_pairs, narrows_pairs
from luban.compiler.codegen.llvm.values import Varying, scalar_type, vector_type


@emits("arith.extf", "arith.truncf")
def _float_to_float(ctx: Context, op: Any) -> None:
    value, target = ctx.values[op.operands[0]], scalar_type(op.results[0].type)
    if isinstance(value, Varying) and (value.type, target) == ("float", "bfloat") and narrows_pairs(ctx):
        ctx.values[op.results[0]] = Varying(target, tuple(narrow_pairs(ctx, value.parts)))
        return
    elementwise(ctx, op, lambda ctx, types, width, texts: convert_float(ctx, types[0], types[1], width, texts[0]))


@emits("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")
def _integer_to_integer(ctx: Context, op: Any) -> None:
    source, target = (scalar_type(value.type) for value in (op.operands[0], op.results[0]))
    if source == target:
        ctx.values[op.results[0]] = ctx.values[op.operands[0]]
        return
    grow = "zext" if op.name == "arith.extui" else "sext"
    word = grow if int(source[1:]) < int(target[1:]) else "trunc"
    elementwise(ctx, op, lambda ctx, types, width, texts: cast(ctx, word, types, width, texts[0]))
    _keep_span(ctx, op, source, signed=word == "sext")


def _keep_span(ctx: Context, op: Any, source: str, signed: bool) -> None:
    """What widening tells about the range of an integer, for the division of indices."""
    result = ctx.values[op.results[0]]
    bits = int(source[1:])
    if isinstance(result, Varying) and not signed and bits <= 16 and op.name == "arith.extui":
        ctx.values[op.results[0]] = Varying(result.type, result.parts, (0, (1 << bits) - 1))


@emits("arith.sitofp", "arith.uitofp")
def _integer_to_float(ctx: Context, op: Any) -> None:
    word = op.name.removeprefix("arith.")

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[1])
        return convert_float(ctx, work, types[1], width, cast(ctx, word, [types[0], work], width, texts[0]))

    elementwise(ctx, op, build)


@emits("arith.fptosi", "arith.fptoui")
def _float_to_integer(ctx: Context, op: Any) -> None:
    """Values outside of the integer's range give what the hardware gives (frozen, so that they stay harmless).

    8- and 16-bit results wrap around a 32-bit conversion and unsigned 32-bit ones a 64-bit one, as in the frameworks.
    """

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        source, target = working_type(types[0]), types[1]
        value = convert_float(ctx, types[0], source, width, texts[0])
        wide = {"i1": "i32", "i8": "i32", "i16": "i32"}.get(target, target)
        word = "fptosi"
        if op.name == "arith.fptoui" and target == "i32":
            wide = "i64"
        if op.name == "arith.fptoui" and target == "i64":
            word = "fptoui"
        raw = cast(ctx, word, [source, wide], width, value)
        whole = ctx.fn.op(f"freeze {vector_type(wide, width)} {raw}")
        return whole if wide == target else cast(ctx, "trunc", [wide, target], width, whole)

    elementwise(ctx, op, build)


@emits("arith.bitcast")
def _bitcast(ctx: Context, op: Any) -> None:
    elementwise(ctx, op, lambda ctx, types, width, texts: cast(ctx, "bitcast", types, width, texts[0]))


def cast(ctx: Context, word: str, types: list[str], width: int, text: str) -> str:
    return ctx.fn.op(f"{word} {vector_type(types[0], width)} {text} to {vector_type(types[1], width)}")
