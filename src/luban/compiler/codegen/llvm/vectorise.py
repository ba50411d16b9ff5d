"""Vector loops: a main strip of several vectors at once, then what is left, under a mask or one by one.

An iteration of the main strip writes every operation once for each of its vectors, so that the vectors are independent
and a reduction keeps an accumulator for each; values that do not move with the loop are written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xdsl.ir import Block, SSAValue

from luban.compiler.codegen.llvm.combine import combine_values, identity
from luban.compiler.codegen.llvm.context import Context, add, add_number, at_depth, emit_block, lanes_of, parts_of
from luban.compiler.codegen.llvm.dots.flow import lane_mask
from luban.compiler.codegen.llvm.lanes import masks_are_cheap
from luban.compiler.codegen.llvm.reduce import combine_parts, reduce_lanes
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import Ramp, Uniform, Value, Varying, constant, scalar_type, splat, vector_type
from luban.compiler.codegen.llvm.widths import choose_copies, choose_width


@dataclass(frozen=True)
class Carry:
    """One reduction of a vector loop: LLVM type, combine kind, and whether integers compare without sign."""

    type: str
    combine: str
    unsigned: bool

    @property
    def identity(self) -> str:
        return identity(self.type, self.combine, self.unsigned)


@dataclass(frozen=True)
class Shape:
    """How a vector loop is cut: its reductions, lanes, vectors in flight, trip count where known, and what varies."""

    carries: tuple[Carry, ...]
    width: int
    copies: int
    trip: int | None
    varying: frozenset[SSAValue]


def holds_vector_loop(op: Any) -> bool:
    """True where another vector loop lies inside: only the innermost one becomes lanes."""
    return any(inner is not op and inner.name == "tile.for" and inner.role.data == "vector" for inner in op.walk())


def emit_vector(ctx: Context, op: Any, lower: Uniform, upper: Uniform) -> list[Value]:
    """Writes the loop and returns its reductions."""
    shape = _shape(ctx, op, lower, upper)
    start, totals = lower, None
    for copies in _strips(shape.trip, shape.width, shape.copies):
        start, parts = _main(ctx, op, shape, copies, start, upper)
        totals = _joined(ctx, shape, totals, parts)
    finished = start.number is not None and start.number == upper.number
    if masks_are_cheap(ctx.target) and not finished:
        totals = _tail(ctx, op, shape, start, upper, totals)
    sums = _scalars(ctx, shape, totals)
    if not masks_are_cheap(ctx.target) and not finished:
        sums = _one_by_one(ctx, op, shape, start, upper, sums)
    return [
        Uniform(c.type, combine_values(ctx, c.combine, c.type, 1, _init_text(ctx, init), total, c.unsigned), ctx.depth)
        for c, init, total in zip(shape.carries, op.init, sums, strict=True)
    ]


def _shape(ctx: Context, op: Any, lower: Uniform, upper: Uniform) -> Shape:
    carries, width, trip = _carries(op), choose_width(ctx.target, op), _trip(lower, upper)
    return Shape(tuple(carries), width, choose_copies(op, width, trip, bool(carries)), trip, varying_values(op))


def _strips(trip: int | None, width: int, copies: int) -> list[int]:
    """Vectors in flight of each strip of whole vectors; a known trip count has one more for what the first leaves."""
    if trip is None:
        return [copies]
    rest = trip % (width * copies) // width
    return [n for n in (copies if trip >= width * copies else 0, rest) if n]


def _joined(ctx: Context, shape: Shape, totals: list[str] | None, parts: list[list[str]]) -> list[str]:
    """One accumulator vector for each reduction, from the copies of a strip and what was there before."""
    held: Sequence[str | None] = totals or [None] * len(parts)
    return [
        combine_parts(ctx, c.combine, c.type, shape.width, [*p, *([t] if t else [])], c.unsigned)
        for c, t, p in zip(shape.carries, held, parts, strict=True)
    ]


def _init_text(ctx: Context, init: SSAValue) -> str:
    value = ctx.values[init]
    assert isinstance(value, Uniform)
    return value.text


def _carries(op: Any) -> list[Carry]:
    yielded = op.body.block.last_op.operands
    return [
        Carry(scalar_type(value.type), combine.data, getattr(value.owner, "name", "") in ("arith.maxui", "arith.minui"))
        for value, combine in zip(yielded, op.combines, strict=True)
    ]


def _trip(lower: Uniform, upper: Uniform) -> int | None:
    if lower.number is None or upper.number is None:
        return None
    return max(0, int(upper.number) - int(lower.number))


def _main(
    ctx: Context, op: Any, shape: Shape, copies: int, lower: Uniform, upper: Uniform
) -> tuple[Uniform, list[list[str]]]:
    """A strip of whole vectors, `copies` at a time; returns where it ends and the accumulators."""
    width, carries = shape.width, shape.carries
    end = _main_end(ctx, lower, upper, width * copies)
    start = [
        (vector_type(c.type, width), splat(ctx.fn, c.type, c.identity, width)) for c in carries for _ in range(copies)
    ]

    def body(index: Uniform, names: list[str]) -> list[str]:
        with lanes_of(ctx, width, copies, None, shape.varying):
            groups = [names[i * copies : (i + 1) * copies] for i in range(len(carries))]
            new = _iteration(ctx, op, carries, index, upper, groups)
            return [part for parts in new for part in parts]

    last = emit_strip(ctx, strip_of(lower, end, width * copies), start, body)
    return end, [last[i * copies : (i + 1) * copies] for i in range(len(carries))]


def _main_end(ctx: Context, lower: Uniform, upper: Uniform, step: int) -> Uniform:
    """The last index that whole steps from `lower` reach, at least `lower`."""
    trip = _trip(lower, upper)
    if trip is not None:
        return add_number(ctx, lower, trip - trip % step)
    distance = add(ctx, upper, _negative(ctx, lower))
    with at_depth(ctx, distance.depth) as fn:
        count = fn.intrinsic("llvm.smax.i64", "i64", [("i64", distance.text), ("i64", "0")])
        if step & (step - 1) == 0:
            whole = fn.op(f"and i64 {count}, {-step}")
        else:
            whole = fn.op(f"sub i64 {count}, {fn.op(f'urem i64 {count}, {step}')}")
    return add(ctx, lower, Uniform("i64", whole, distance.depth, multiple=step))


def _negative(ctx: Context, value: Uniform) -> Uniform:
    if value.number is not None:
        return constant("i64", -int(value.number))
    with at_depth(ctx, value.depth) as fn:
        return Uniform("i64", fn.op(f"sub nsw i64 0, {value.text}"), value.depth)


def _tail(ctx: Context, op: Any, shape: Shape, start: Uniform, upper: Uniform, totals: list[str] | None) -> list[str]:
    """What the main strip leaves, one vector at a time under a mask; lanes that are off keep their accumulators."""
    fn, width, carries = ctx.fn, shape.width, shape.carries
    vectors = [vector_type(c.type, width) for c in carries]
    totals = totals or [splat(fn, c.type, c.identity, width) for c in carries]
    strip = strip_of(start, upper, width)
    strip = replace(strip, once=strip.once or shape.copies == 1)

    def body(index: Uniform, names: list[str]) -> list[str]:
        mask = _tail_mask(ctx, width, add(ctx, upper, _negative(ctx, index)))
        with lanes_of(ctx, width, 1, (mask,), shape.varying):
            new = _iteration(ctx, op, carries, index, upper, [[name] for name in names])
        condition = vector_type("i1", width)
        return [
            fn.op(f"select {condition} {mask}, {vector} {parts[0]}, {vector} {name}")
            for parts, name, vector in zip(new, names, vectors, strict=True)
        ]

    return emit_strip(ctx, strip, list(zip(vectors, totals, strict=True)), body)


def _tail_mask(ctx: Context, width: int, left: Uniform) -> str:
    if left.number is not None:
        lanes = ", ".join(f"i1 {'true' if lane < left.number else 'false'}" for lane in range(width))
        return f"<{lanes}>"
    return lane_mask(ctx.fn, width, left.text)


def _scalars(ctx: Context, shape: Shape, totals: list[str] | None) -> list[str]:
    if totals is None:
        return [c.identity for c in shape.carries]
    return [
        reduce_lanes(ctx, c.combine, c.type, shape.width, total, c.unsigned)
        for c, total in zip(shape.carries, totals, strict=True)
    ]


def _one_by_one(ctx: Context, op: Any, shape: Shape, start: Uniform, upper: Uniform, sums: list[str]) -> list[str]:
    """What the main strip leaves, as scalars: for targets whose vectors take no masks."""

    def body(index: Uniform, names: list[str]) -> list[str]:
        with lanes_of(ctx, 1, 1, None, frozenset()):
            return [parts[0] for parts in _iteration(ctx, op, shape.carries, index, upper, [[n] for n in names])]

    before = [(vector_type(carry.type, 1), total) for carry, total in zip(shape.carries, sums, strict=True)]
    return emit_strip(ctx, strip_of(start, upper, 1), before, body)


def _iteration(
    ctx: Context, op: Any, carries: Sequence[Carry], index: Uniform, upper: Uniform, names: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The body once, for the lanes in flight; returns the next accumulators, a part for each copy."""
    block: Block = op.body.block
    span = None
    if index.span and upper.span:
        span = (index.span[0], max(index.span[0], upper.span[1] - 1))
    ctx.values[block.args[0]] = Ramp(index, 1, span) if ctx.width > 1 else index
    for arg, carry, parts in zip(block.args[1:], carries, names, strict=True):
        ctx.values[arg] = _carried(ctx, carry, parts)
    return [parts_of(ctx, ctx.values[value]) for value in emit_block(ctx, block)]


def _carried(ctx: Context, carry: Carry, parts: Sequence[str]) -> Value:
    return Varying(carry.type, tuple(parts)) if ctx.width > 1 else Uniform(carry.type, parts[0], ctx.depth)


def varying_values(op: Any) -> frozenset[SSAValue]:
    """The values inside a vector loop that differ among its lanes, as far as loops inside need to know it."""
    found: set[SSAValue] = set(op.body.block.args)
    size = -1
    while size != len(found):  # again while a loop inside carries something that turned out to vary
        size = len(found)
        _spread(op.body.block, found)
    return frozenset(found)


def _spread(block: Block, found: set[SSAValue]) -> None:
    for op in block.ops:
        if op.name == "tile.for":
            inner = op.body.block
            yielded = inner.last_op.operands
            for init, arg, value, result in zip(op.init, inner.args[1:], yielded, op.results, strict=True):
                if init in found or value in found:
                    found.update((arg, result))
            _spread(inner, found)
        elif any(operand in found for operand in op.operands):
            found.update(op.results)
