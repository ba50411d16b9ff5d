"""Integer arithmetic that keeps indices cheap: ramps stay ramps, and division of small lanes is done in 32 bits."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, add, at_depth, emits, multiply, parts_of
from luban.compiler.codegen.llvm.scalar_ops import CMPI, binary, elementwise
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

Span = tuple[int, int] | None


@emits("arith.addi", "arith.subi")
def _add(ctx: Context, op: Any) -> None:
    a, b = (ctx.values[operand] for operand in op.operands)
    if a.type != "i64" or isinstance(a, Varying) or isinstance(b, Varying):
        word = "add" if op.name == "arith.addi" else "sub"
        elementwise(ctx, op, lambda ctx, types, width, texts: binary(ctx, word, types[-1], width, *texts))
        if op.name == "arith.addi":
            _with_span(ctx, op, _sum_span(span_of(a), span_of(b)))
        return
    if op.name == "arith.subi":
        b = scale_index(ctx, b, constant("i64", -1))
    ctx.values[op.results[0]] = add_index(ctx, a, b)


@emits("arith.muli")
def _multiply(ctx: Context, op: Any) -> None:
    a, b = (ctx.values[operand] for operand in op.operands)
    if isinstance(a, Uniform) and isinstance(b, Ramp):
        a, b = b, a
    if a.type == "i64" and isinstance(b, Uniform) and (isinstance(a, Uniform) or (isinstance(a, Ramp) and b.number is not None)):
        ctx.values[op.results[0]] = scale_index(ctx, a, b)
        return
    elementwise(ctx, op, lambda ctx, types, width, texts: binary(ctx, "mul", types[-1], width, *texts))
    left, right = span_of(a), span_of(b)
    if left and right:
        ends = [x * y for x in left for y in right]
        _with_span(ctx, op, (min(ends), max(ends)))


def add_index(ctx: Context, a: Value, b: Value) -> Uniform | Ramp:
    """a + b for uniform or ramp indices."""
    assert isinstance(a, Uniform | Ramp) and isinstance(b, Uniform | Ramp)
    if isinstance(a, Uniform) and isinstance(b, Uniform):
        return add(ctx, a, b)
    step = sum(v.step for v in (a, b) if isinstance(v, Ramp))
    bases = [v.base if isinstance(v, Ramp) else v for v in (a, b)]
    base = add(ctx, bases[0], bases[1])
    return Ramp(base, step, _sum_span(span_of(a), span_of(b))) if step else base


def scale_index(ctx: Context, a: Value, factor: Uniform) -> Uniform | Ramp:
    """a * factor; a ramp needs a number as factor."""
    if isinstance(a, Uniform):
        return multiply(ctx, a, factor)
    assert isinstance(a, Ramp) and factor.number is not None
    number = int(factor.number)
    if number == 0:
        return constant("i64", 0)
    span = tuple(sorted(x * number for x in a.span)) if a.span else None
    return Ramp(multiply(ctx, a.base, factor), a.step * number, span)  # type: ignore[arg-type]


def span_of(value: Value) -> Span:
    """The lowest and highest value of an integer, where known."""
    return None if not isinstance(value, Uniform | Ramp | Varying) else value.span


def _sum_span(a: Span, b: Span) -> Span:
    return (a[0] + b[0], a[1] + b[1]) if a and b else None


def _with_span(ctx: Context, op: Any, span: Span) -> None:
    result = ctx.values[op.results[0]]
    if span is None or not -(1 << 62) < span[0] <= span[1] < 1 << 62:
        return
    if isinstance(result, Varying):
        ctx.values[op.results[0]] = Varying(result.type, result.parts, span)
    elif isinstance(result, Uniform):
        ctx.values[op.results[0]] = Uniform(result.type, result.text, result.depth, result.number, span)


@emits("arith.cmpi")
def _cmpi(ctx: Context, op: Any) -> None:
    predicate = CMPI[op.predicate.value.data]
    a, b = (ctx.values[operand] for operand in op.operands)
    if isinstance(a, Ramp) and a.step == 1 and isinstance(b, Uniform) and predicate in _RAMP_COMPARES and ctx.width > 1:
        ctx.values[op.results[0]] = Varying("i1", tuple(_compare_ramp(ctx, predicate, a, b)))
        return

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return ctx.fn.op(f"icmp {predicate} {vector_type(types[0], width)} {texts[0]}, {texts[1]}")

    elementwise(ctx, op, build)


# predicate -> (added to the bound, lanes below the bound are true)
_RAMP_COMPARES = {"slt": (0, True), "sle": (1, True), "sge": (0, False), "sgt": (1, False)}


def _compare_ramp(ctx: Context, predicate: str, ramp: Ramp, bound: Uniform) -> list[str]:
    """ramp < bound as lane number < bound - base, in 32 bits: a quarter of the work of comparing 64-bit lanes."""
    width = ctx.width
    extra, below = _RAMP_COMPARES[predicate]
    lanes = ", ".join(f"i32 {lane}" for lane in range(width))
    parts = []
    for copy in range(ctx.copies):
        distance = ctx.fn.op(f"sub nsw i64 {bound.text}, {ramp.base.text}")
        distance = ctx.fn.op(f"add nsw i64 {distance}, {extra - copy * width}")
        low = ctx.fn.intrinsic("llvm.smax.i64", "i64", [("i64", distance), ("i64", "0")])
        clipped = ctx.fn.intrinsic("llvm.smin.i64", "i64", [("i64", low), ("i64", str(width))])
        count = splat(ctx.fn, "i32", ctx.fn.op(f"trunc i64 {clipped} to i32"), width)
        parts.append(ctx.fn.op(f"icmp {'ult' if below else 'uge'} <{width} x i32> <{lanes}>, {count}"))
    return parts


@emits("arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.floordivsi", "arith.ceildivsi", "arith.ceildivui")
def _divide(ctx: Context, op: Any) -> None:
    """Division never traps: lanes that are switched off hold zeros, and a zero divisor counts as one."""
    kind = {"arith.floordivsi": "fdiv"}.get(op.name, op.name.removeprefix("arith."))
    a, b = (ctx.values[operand] for operand in op.operands)
    divisor = int(b.number) if isinstance(b, Uniform) and b.number is not None else None
    span, ty = span_of(a), scalar_type(op.results[0].type)
    if span and span[0] >= 0 and divisor is not None and divisor > 0:
        _divide_small(ctx, op, kind, a, divisor, span)
        return

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return _general_division(ctx, kind, ty, width, texts, divisor)

    elementwise(ctx, op, build)


def _divide_small(ctx: Context, op: Any, kind: str, a: Value, divisor: int, span: tuple[int, int]) -> None:
    """By a positive number, of something known not to be negative: unsigned, and in 32 bits where that is enough."""
    remainder = kind.startswith("rem")
    result_span = (0, min(span[1], divisor - 1)) if remainder else (span[0] // divisor, span[1] // divisor)
    if span[1] < divisor:
        ctx.values[op.results[0]] = a if remainder else constant(a.type, 0)
        return
    word = "urem" if remainder else "udiv"
    if isinstance(a, Uniform):
        with at_depth(ctx, a.depth) as fn:
            text = fn.op(f"{word} {a.type} {a.text}, {divisor}")
        ctx.values[op.results[0]] = Uniform(a.type, text, a.depth, None, result_span)
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
    if kind in ("divui", "remui"):
        safe = b if divisor else _replace(ctx, ty, width, b, (0,))
        quotient = ctx.fn.op(f"udiv {vector} {a}, {safe}")
        return quotient if kind == "divui" else _remainder(ctx, vector, a, quotient, safe)
    if divisor not in (None, 0, -1):
        return _signed(ctx, kind, vector, ty, width, a, b)
    # 0 would trap, and so would the lowest number divided by -1.
    safe = _replace(ctx, ty, width, b, (0, -1))
    normal = _signed(ctx, kind, vector, ty, width, a, safe)
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


def _signed(ctx: Context, kind: str, vector: str, ty: str, width: int, a: str, b: str) -> str:
    quotient = ctx.fn.op(f"sdiv {vector} {a}, {b}")
    if kind == "divsi":
        return quotient
    remainder = _remainder(ctx, vector, a, quotient, b)
    if kind == "remsi":
        return remainder
    zero = splat(ctx.fn, ty, "0", width)
    inexact = ctx.fn.op(f"icmp ne {vector} {remainder}, {zero}")
    opposite = ctx.fn.op(f"icmp slt {vector} {ctx.fn.op(f'xor {vector} {remainder}, {b}')}, {zero}")
    down = ctx.fn.op(f"and {vector_type('i1', width)} {inexact}, {opposite}")
    borrow = ctx.fn.op(f"sext {vector_type('i1', width)} {down} to {vector}")
    return ctx.fn.op(f"add {vector} {quotient}, {borrow}")


def _remainder(ctx: Context, vector: str, a: str, quotient: str, b: str) -> str:
    return ctx.fn.op(f"sub {vector} {a}, {ctx.fn.op(f'mul {vector} {quotient}, {b}')}")
