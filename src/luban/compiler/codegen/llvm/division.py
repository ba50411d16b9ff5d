"""Integer division, which never traps, and is done in 32-bit lanes where an index is known to fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from luban.compiler.codegen.llvm.context import Context, at_depth, emits, parts_of
from luban.compiler.codegen.llvm.integer_ops import span_of
from luban.compiler.codegen.llvm.scalar_ops import elementwise
from luban.compiler.codegen.llvm.values import (
    Ramp,
    Uniform,
    Value,
    Varying,
    constant,
    literal,
    scalar_type,
    splat,
    vector_type,
)


@emits(
    "arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.floordivsi", "arith.ceildivsi", "arith.ceildivui"
)
def _divide(ctx: Context, op: Any) -> None:
    """Division never traps: lanes that are switched off hold zeros, and a zero divisor counts as one."""
    kind = op.name.removeprefix("arith.")
    a, b = (ctx.values[operand] for operand in op.operands)
    divisor = int(b.number) if isinstance(b, Uniform) and b.number is not None else None
    span, ty = span_of(a), scalar_type(op.results[0].type)
    if _stays_in_block(ctx, a, divisor, kind):
        assert isinstance(a, Ramp) and divisor is not None
        quotient = not kind.startswith("rem")
        start = _uniform(ctx, "udiv" if quotient else "urem", a.base, divisor)
        ctx.values[op.results[0]] = start if quotient else Ramp(start, a.step, (0, divisor - 1))
        return
    if span and span[0] >= 0 and divisor is not None and divisor > 0 and not kind.startswith("ceil"):
        _divide_small(ctx, op, kind, a, divisor, span)
        return

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return _general_division(ctx, kind, ty, width, texts, divisor)

    elementwise(ctx, op, build)


def _stays_in_block(ctx: Context, a: Value, divisor: int | None, kind: str) -> bool:
    """True where the lanes in flight never cross a multiple of the divisor, as when a head's features are its lanes."""
    if not isinstance(a, Ramp) or divisor is None or divisor <= 0 or a.step <= 0 or kind.startswith("ceil"):
        return False
    if not kind.endswith("ui") and not (a.span and a.span[0] >= 0):
        return False
    block = a.step * ctx.width * ctx.copies
    return divisor % block == 0 and a.base.divisor % block == 0


def _uniform(ctx: Context, word: str, a: Uniform, divisor: int) -> Uniform:
    """The quotient or remainder of a scalar that is not negative."""
    whole = word == "udiv" and a.divisor % divisor == 0
    multiple = math.gcd(a.divisor, divisor) if word == "urem" else max(1, a.divisor // divisor) if whole else 1
    with at_depth(ctx, a.depth) as fn:
        return Uniform(a.type, fn.op(f"{word} {a.type} {a.text}, {divisor}"), a.depth, None, None, multiple)


def _divide_small(ctx: Context, op: Any, kind: str, a: Value, divisor: int, span: tuple[int, int]) -> None:
    """By a positive number, of something known not to be negative: unsigned, and in 32 bits where that is enough."""
    remainder = kind.startswith("rem")
    result_span = (0, min(span[1], divisor - 1)) if remainder else (span[0] // divisor, span[1] // divisor)
    if span[1] < divisor:
        ctx.values[op.results[0]] = a if remainder else constant(a.type, 0)
        return
    word = "urem" if remainder else "udiv"
    if isinstance(a, Uniform):
        ctx.values[op.results[0]] = replace(_uniform(ctx, word, a, divisor), span=result_span)
        return
    narrow = "i32" if a.type == "i64" and span[1] < 1 << 31 and divisor < 1 << 31 else a.type
    parts = []
    for part in parts_of(ctx, a):
        if narrow != a.type:
            part = ctx.fn.op(f"trunc {vector_type(a.type, ctx.width)} {part} to {vector_type(narrow, ctx.width)}")
        by = splat(ctx.fn, narrow, str(divisor), ctx.width)
        part = ctx.fn.op(f"{word} {vector_type(narrow, ctx.width)} {part}, {by}")
        if narrow != a.type:
            part = ctx.fn.op(f"zext nneg {vector_type(narrow, ctx.width)} {part} to {vector_type(a.type, ctx.width)}")
        parts.append(part)
    ctx.values[op.results[0]] = Varying(a.type, tuple(parts), result_span)


def _general_division(ctx: Context, kind: str, ty: str, width: int, texts: list[str], divisor: int | None) -> str:
    vector = vector_type(ty, width)
    a, b = texts
    if kind in ("divui", "remui", "ceildivui"):
        safe = b if divisor else _replace(ctx, ty, width, b, (0,))
        quotient = ctx.fn.op(f"udiv {vector} {a}, {safe}")
        return quotient if kind == "divui" else _unsigned_rest(ctx, kind, ty, width, a, quotient, safe)
    if divisor not in (None, 0, -1):
        return _signed(ctx, kind, ty, width, a, b)
    # 0 would trap, and so would the lowest number divided by -1.
    safe = _replace(ctx, ty, width, b, (0, -1))
    normal = _signed(ctx, kind, ty, width, a, safe)
    minus_one = ctx.fn.op(f"icmp eq {vector} {b}, {splat(ctx.fn, ty, '-1', width)}")
    zero = splat(ctx.fn, ty, "0", width)
    special = zero if kind == "remsi" else ctx.fn.op(f"sub {vector} {zero}, {a}")
    return ctx.fn.op(f"select {vector_type('i1', width)} {minus_one}, {vector} {special}, {vector} {normal}")


def _replace(ctx: Context, ty: str, width: int, text: str, numbers: tuple[int, ...]) -> str:
    """The text with lanes equal to one of the numbers replaced by 1."""
    vector, one = vector_type(ty, width), splat(ctx.fn, ty, "1", width)
    for number in numbers:
        hit = ctx.fn.op(f"icmp eq {vector} {text}, {splat(ctx.fn, ty, literal(ty, number), width)}")
        text = ctx.fn.op(f"select {vector_type('i1', width)} {hit}, {vector} {one}, {vector} {text}")
    return text


def _unsigned_rest(ctx: Context, kind: str, ty: str, width: int, a: str, quotient: str, b: str) -> str:
    vector = vector_type(ty, width)
    remainder = _remainder(ctx, vector, a, quotient, b)
    if kind == "remui":
        return remainder
    inexact = ctx.fn.op(f"icmp ne {vector} {remainder}, {splat(ctx.fn, ty, '0', width)}")
    return ctx.fn.op(f"add {vector} {quotient}, {_one_where(ctx, 'zext', ty, width, inexact)}")


def _signed(ctx: Context, kind: str, ty: str, width: int, a: str, b: str) -> str:
    """A quotient rounded towards zero, down ("floordivsi") or up ("ceildivsi"), or the remainder of the first."""
    vector, zero = vector_type(ty, width), splat(ctx.fn, ty, "0", width)
    quotient = ctx.fn.op(f"sdiv {vector} {a}, {b}")
    if kind == "divsi":
        return quotient
    remainder = _remainder(ctx, vector, a, quotient, b)
    if kind == "remsi":
        return remainder
    inexact = ctx.fn.op(f"icmp ne {vector} {remainder}, {zero}")
    signs = ctx.fn.op(f"xor {vector} {remainder}, {b}")
    down = kind == "floordivsi"
    side = ctx.fn.op(f"icmp {'slt' if down else 'sge'} {vector} {signs}, {zero}")
    moved = ctx.fn.op(f"and {vector_type('i1', width)} {inexact}, {side}")
    return ctx.fn.op(f"add {vector} {quotient}, {_one_where(ctx, 'sext' if down else 'zext', ty, width, moved)}")


def _one_where(ctx: Context, word: str, ty: str, width: int, mask: str) -> str:
    return ctx.fn.op(f"{word} {vector_type('i1', width)} {mask} to {vector_type(ty, width)}")


def _remainder(ctx: Context, vector: str, a: str, quotient: str, b: str) -> str:
    return ctx.fn.op(f"sub {vector} {a}, {ctx.fn.op(f'mul {vector} {quotient}, {b}')}")
