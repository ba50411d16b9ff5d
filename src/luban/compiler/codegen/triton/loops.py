"""tile.for: program ids are dealt out by entries.py; here are the loops inside of a program.

A vector loop is one block where its extent is known to fit one, else a Python loop over blocks. A reduction it carries
is a block of partial results, combined to a scalar behind the loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xdsl.dialects.builtin import f32, i1, i64
from xdsl.ir import Operation, SSAValue

from luban.compiler.codegen.triton.blocks import power_of_two
from luban.compiler.codegen.triton.context import Context, Lanes, emit_block, emits
from luban.compiler.codegen.triton.expressions import ADD, ATOM, Value, is_half, literal
from luban.compiler.codegen.triton.extents import exact_trip, trip_bound
from luban.compiler.codegen.triton.memory import barrier, forget
from luban.compiler.codegen.triton.reductions import combined, identity, reduced
from luban.compiler.codegen.triton.scalar_ops import where
from luban.compiler.ir import tile
from luban.compiler.ir.attributes import BufferType

_BLOCK_LEVEL = ("tile.dot", "tile.pack")


def holds_blocks(op: tile.ForOp) -> bool:
    """Whether something inside becomes a block of its own, so that this loop's iterations cannot be lanes."""
    inner = (o for o in op.walk() if o is not op)
    return any(o.name in _BLOCK_LEVEL or (isinstance(o, tile.ForOp) and o.role.data == "vector") for o in inner)


@emits("tile.for")
def _for(ctx: Context, op: tile.ForOp) -> None:
    if exact_trip(op.lower, op.upper) == 1:
        _emit_once(ctx, op)
    elif op.role.data == "vector" and not ctx.axes and not holds_blocks(op):
        bound = trip_bound(op.lower, op.upper)
        if bound is not None and bound <= ctx.blocks.row:
            _emit_one_block(ctx, op, power_of_two(bound))
        else:
            _emit_blocks(ctx, op)
    else:
        _emit_serial(ctx, op)


def _emit_once(ctx: Context, op: tile.ForOp) -> None:
    """A loop of one iteration: just its body."""
    arguments = op.body.block.args
    ctx.values.update(zip(arguments, (ctx.values[v] for v in (op.lower, *op.init)), strict=True))
    yields = emit_block(ctx, op.body.block)
    ctx.values.update(zip(op.outs, (ctx.values[v] for v in yields), strict=True))


# ---- loops of Python


def stored_in(op: Operation) -> set[SSAValue]:
    """The buffers that an operation, or one inside of it, writes."""
    found = set()
    for inner in op.walk():
        if isinstance(inner, (tile.StoreOp, tile.PackOp)):
            found.add(inner.buffer if isinstance(inner, tile.StoreOp) else inner.target)
        elif isinstance(inner, tile.DotOp) and inner.keeps is not None and inner.partial is not None:
            found.add(inner.partial)
    return found


def touched_in(op: Operation) -> set[SSAValue]:
    """The buffers that an operation, or one inside of it, reads or writes."""
    return {v for inner in op.walk() for v in inner.operands if isinstance(v.type, BufferType)}


class PythonLoop:
    """`with PythonLoop(ctx, head, stored, touched):` a Python loop whose body uses these buffers, and its barriers."""

    def __init__(self, ctx: Context, head: str, stored: set[SSAValue], touched: set[SSAValue]):
        self.ctx, self.stored, self.touched = ctx, stored, touched
        self.managers = (ctx.hazards.loop(), ctx.block(head))

    def __enter__(self) -> None:
        if self.ctx.hazards.before_loop(self.touched, self.stored):
            barrier(self.ctx)
        forget(self.ctx, self.stored)
        for manager in self.managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        if not any(error) and self.ctx.hazards.needs_tail():
            barrier(self.ctx)
        for manager in reversed(self.managers):
            manager.__exit__(*error)
        forget(self.ctx, self.stored)


def counted(
    ctx: Context, hint: str, lower: Value, upper: Value, step: int = 1, static: bool = False
) -> tuple[str, str]:
    """The head of a loop and the name of its index, which `as_index` must define first in its body."""
    name = ctx.name(hint)
    steps = "" if step == 1 else f", {step}"
    head = f"for {name}_ in {'tl.static_range' if static else 'range'}({lower.text}, {upper.text}{steps}):"
    return head, name


def as_index(ctx: Context, name: str) -> Value:
    """A loop's index as a 64-bit integer, whatever Triton makes of the range."""
    ctx.line(f"{name} = tl.full([], {name}_, tl.int64)")
    return Value(name, i64)


def _emit_serial(ctx: Context, op: tile.ForOp) -> None:
    """One iteration after another, on scalars or, within lanes, on blocks."""
    lower, upper = (ctx.scalar(v, "a bound of a loop") for v in (op.lower, op.upper))
    names = [ctx.name("carried") for _ in op.init]
    axes = ctx.all_axes
    for name, init in zip(names, op.init, strict=True):
        ctx.line(f"{name} = {ctx.filled(ctx.values[init], init.type)}")
    arguments = op.body.block.args
    head, index = counted(ctx, "i", lower, upper, static=op.role.data == "unroll")
    with PythonLoop(ctx, head, stored_in(op), touched_in(op)):
        ctx.values[arguments[0]] = as_index(ctx, index)
        for name, argument in zip(names, arguments[1:], strict=True):
            ctx.values[argument] = Value(name, argument.type, axes)
        yields = [ctx.values[v] for v in emit_block(ctx, op.body.block)]
        _assign_all(ctx, names, [ctx.filled(v, v.type) for v in yields])
    ctx.values.update({r: Value(n, r.type, axes) for n, r in zip(names, op.outs, strict=True)})


def _assign_all(ctx: Context, names: Sequence[str], texts: Sequence[str]) -> None:
    """names = texts at once: what reads a name that is overwritten earlier is computed first."""
    texts = list(texts)
    for i in range(1, len(texts)):
        if any(re.search(rf"\b{name}\b", texts[i]) for name in names[:i]):
            texts[i] = ctx.assign("t", texts[i])
    for name, text in zip(names, texts, strict=True):
        if name != text:
            ctx.line(f"{name} = {text}")


# ---- vector loops


@dataclass(frozen=True)
class Carry:
    """One reduction: its combine kind and whether integers compare without a sign."""

    kind: str
    unsigned: bool
    identity: Value


def carries(op: tile.ForOp) -> list[Carry]:
    """The reductions that a vector loop carries."""
    found = []
    for kind, value in zip(op.combines, op.body.block.last_op.operands, strict=True):  # type: ignore[union-attr]
        unsigned = getattr(value.owner, "name", "") in ("arith.maxui", "arith.minui")
        found.append(Carry(kind.data, unsigned, identity(kind.data, value.type, unsigned)))
    return found


def lanes_from(ctx: Context, start: Value, upper: Value, size: int, masked: bool) -> Lanes:
    """`size` lanes from `start`, live below `upper`."""
    lane = ctx.once("lane", f"tl.arange(0, {size}).to(tl.int64)")
    if start.number != 0:
        lane = ctx.once("at", f"{start.at(ADD)} + {lane}")
    live = ctx.once("live", f"{lane} < {upper.at(ATOM)}") if masked else None
    return Lanes(lane, live, size)


def _emit_one_block(ctx: Context, op: tile.ForOp, size: int) -> None:
    lower, upper = (ctx.scalar(v, "a bound of a loop") for v in (op.lower, op.upper))
    masked = exact_trip(op.lower, op.upper) != size
    lanes = lanes_from(ctx, lower, upper, size, masked)
    kinds = carries(op)
    with ctx.lanes(lanes):
        partial = _body(ctx, op, lanes, [c.identity for c in kinds], _shares(op))
        partial = [_live_only(ctx, lanes, v, c) for v, c in zip(partial, kinds, strict=True)]
    _finish(ctx, op, kinds, partial)


def _live_only(ctx: Context, lanes: Lanes, value: Value, carry: Carry) -> Value:
    """A lane's share of a reduction, the identity where the lane is dead."""
    if lanes.mask is not None:
        return where(Value(lanes.mask, i1, frozenset({0})), value, carry.identity)
    return value if value.axes else Value(ctx.filled(value, value.type), value.type, frozenset({0}))


_COMBINES = {
    "add": ("arith.addf", "arith.addi"), "mul": ("arith.mulf", "arith.muli"), "and": ("arith.andi",),
    "or": ("arith.ori",),
    "max": ("arith.maximumf", "arith.maxsi", "arith.maxui"), "min": ("arith.minimumf", "arith.minsi", "arith.minui"),
}  # fmt: skip


def _shares(op: tile.ForOp) -> dict[int, SSAValue]:
    """What each reduction adds in an iteration, where its body just combines that with what it carries."""
    found = {}
    yields = op.body.block.last_op.operands  # type: ignore[union-attr]
    for i, (argument, value, kind) in enumerate(zip(op.body.block.args[1:], yields, op.combines, strict=True)):
        owner = value.owner
        once = len(list(argument.uses)) == len(list(value.uses)) == 1
        if once and getattr(owner, "name", "") in _COMBINES[kind.data] and argument in owner.operands:  # type: ignore[union-attr]
            found[i] = owner.operands[1 if owner.operands[0] is argument else 0]  # type: ignore[union-attr]
    return found


def _body(
    ctx: Context, op: tile.ForOp, lanes: Lanes, carried: Sequence[Value], shares: dict[int, SSAValue] | None = None
) -> list[Value]:
    """Writes the body once for all lanes and gives the next values; of `shares`, just these without the combination."""
    block, shares = op.body.block, shares or {}
    ctx.values[block.args[0]] = Value(lanes.index, i64, frozenset({0}))
    ctx.values.update(zip(block.args[1:], carried, strict=True))
    last = list(block.last_op.operands)  # type: ignore[union-attr]
    before, ctx.skip = ctx.skip, ctx.skip | {last[i].owner for i in shares}  # type: ignore[operator]
    emit_block(ctx, block)
    ctx.skip = before
    return [ctx.values[shares.get(i, v)] for i, v in enumerate(last)]


def _emit_blocks(ctx: Context, op: tile.ForOp) -> None:
    """Blocks one after another."""
    lower, upper = (ctx.scalar(v, "a bound of a loop") for v in (op.lower, op.upper))
    kinds, size, shares = carries(op), ctx.blocks.lanes, _shares(op)
    starts = [_wide(c.identity) if i in shares else c.identity for i, c in enumerate(kinds)]
    parts = [Value(ctx.name("part"), v.type, frozenset({0})) for v in starts]
    with ctx.lanes(Lanes("", None, size)):
        for part, start in zip(parts, starts, strict=True):
            ctx.line(f"{part.text} = {ctx.filled(start, start.type)}")
    head, index = counted(ctx, "start", lower, upper, size)
    with PythonLoop(ctx, head, stored_in(op), touched_in(op)):
        exact = exact_trip(op.lower, op.upper)
        masked = not (isinstance(exact, int) and exact % size == 0)
        lanes = lanes_from(ctx, as_index(ctx, index), upper, size, masked)
        with ctx.lanes(lanes):
            following = _body(ctx, op, lanes, parts, shares)
            for i, (part, carry) in enumerate(zip(parts, kinds, strict=True)):
                if i in shares:
                    following[i] = combined(ctx, carry.kind, part, _wide(following[i]), carry.unsigned)
                if lanes.mask is not None:
                    following[i] = where(Value(lanes.mask, i1, frozenset({0})), following[i], part)
            _assign_all(ctx, [p.text for p in parts], [ctx.filled(v, v.type) for v in following])
    _finish(ctx, op, kinds, parts)


def _wide(value: Value) -> Value:
    """Half floats as float32, so that partial results are rounded once, at the end."""
    if not is_half(value.type):
        return value
    return value.to(f32) if value.number is None else literal(value.number, f32)


def _finish(ctx: Context, op: tile.ForOp, kinds: Sequence[Carry], partial: Sequence[Value]) -> None:
    """Combines the lanes with what the loop began with."""
    for carry, block, init, result in zip(kinds, partial, op.init, op.outs, strict=True):
        value = reduced(ctx, carry.kind, _wide(block), carry.unsigned)
        begin = ctx.values[init]
        if begin.number is None or begin.number != carry.identity.number:
            value = combined(ctx, carry.kind, _wide(begin), value, carry.unsigned)
        if is_half(result.type):
            value = value.to(result.type)
        ctx.give(result, value, {"add": "total", "max": "largest", "min": "smallest"}.get(carry.kind, "t"))
