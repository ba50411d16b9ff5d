"""Integer arithmetic that keeps indices cheap: ramps stay ramps, and the range of an index is kept where known."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, add, emits, multiply
from luban.compiler.codegen.llvm.scalar_ops import CMPI, binary, elementwise, intrinsic
from luban.compiler.codegen.llvm.values import (
    Ramp,
    Uniform,
    Value,
    Varying,
    constant,
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
    if (
        a.type == "i64"
        and isinstance(b, Uniform)
        and (isinstance(a, Uniform) or (isinstance(a, Ramp) and b.number is not None))
    ):
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


@emits("arith.maxsi", "arith.minsi")
def _extreme(ctx: Context, op: Any) -> None:
    name = op.name.removeprefix("arith.")[:3]
    elementwise(ctx, op, lambda ctx, types, width, texts: intrinsic(ctx, f"s{name}", types[-1], width, texts))
    a, b = (span_of(ctx.values[operand]) for operand in op.operands)
    if a and b:
        pick = min if name == "min" else max
        _with_span(ctx, op, (pick(a[0], b[0]), pick(a[1], b[1])))
