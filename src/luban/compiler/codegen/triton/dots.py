"""tile.dot -> tl.dot on blocks, tile.pack -> nothing where every dot can read its source, else a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, f32, i8, i32, i64
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.codegen.triton.context import Context, Lanes, emit_block, emits
from luban.compiler.codegen.triton.expressions import (
    ADD,
    ATOM,
    MUL,
    Value,
    binary,
    literal,
    plain_number,
    tl_type,
)  # fmt: skip
from luban.compiler.codegen.triton.extents import as_dim, upper_bound
from luban.compiler.codegen.triton.loops import PythonLoop, as_index, counted, stored_in, touched_in
from luban.compiler.codegen.triton.memory import barrier, forget, linear, pointer
from luban.compiler.ir import tile
from luban.errors import ConfigError
from luban.symbolic import Dim

COPY = 32  # rows and columns of a block of a copy into packed form
_ROW, _COLUMN, _BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


@dataclass(frozen=True)
class Side:
    """How a dot reads one operand, element (i, p): strided from `base`, or packed.

    Read from what was to be packed, i begins at `shift` (a value and what it counts, in rows) and ends at `limit`.
    Panels have `room` for so many values of k, for all that the dot has where that is None.
    """

    buffer: SSAValue
    base: SSAValue
    strides: tuple[Dim, Dim]
    panel: int
    kk: int
    element: Attribute
    shift: tuple[SSAValue, int] | None = None
    limit: SSAValue | None = None
    room: int | None = None


def readable_sources(kernel: tile.KernelOp) -> tuple[dict[tuple[Operation, str], tile.PackOp], frozenset[Operation]]:
    """For dots, the pack whose source they can read directly; and the packs (and their memory) that become nothing."""
    stored = stored_in(kernel)
    sources: dict[tuple[Operation, str], tile.PackOp] = {}
    gone: set[Operation] = set()
    for pack in (op for op in kernel.walk() if isinstance(op, tile.PackOp)):
        users = [use.operation for use in pack.target.uses if use.operation is not pack]
        readers = [(op, side) for op in users if isinstance(op, tile.DotOp) for side in _sides_of(op, pack.target)]
        direct = all(isinstance(op, tile.DotOp) for op in users) and pack.source not in stored
        direct = direct and pack.target_base is None  # several packs may share the memory
        if direct and readers and all(_reads_all(op, side, pack) for op, side in readers):
            sources.update(dict.fromkeys(readers, pack))
            gone |= {pack, *([pack.target.owner] if isinstance(pack.target.owner, Operation) else [])}
    return sources, frozenset(gone)


def _sides_of(dot: tile.DotOp, buffer: SSAValue) -> list[str]:
    return [side for side, value in (("a", dot.a), ("b", dot.b)) if value is buffer]


def _reads_all(dot: tile.DotOp, side: str, pack: tile.PackOp) -> bool:
    """Whether a dot reads the packed block in its layout from the start of a panel, after it was packed."""
    panel = dot.a_panel if side == "a" else dot.b_panel
    base = dot.a_base if side == "a" else dot.b_base
    same_k = dot.k is pack.k or (as_dim(dot.k) is not None and as_dim(dot.k) == as_dim(pack.k))
    kk = dot.groups[0 if side == "a" else 1]
    same = panel.data == pack.panel.data and kk == pack.kk.data and dot.padding == pack.padding and same_k
    return same and (as_dim(base) == 0 or _shift(base, pack) is not None) and _comes_before(pack, dot)


def _shift(base: SSAValue, pack: tile.PackOp) -> tuple[SSAValue, int] | None:
    """For a base that is a value times whole panels of numbers: that value, and the rows that one of it means."""
    k, owner = as_dim(pack.k), base.owner
    if not isinstance(k, int) or k <= 0 or not isinstance(owner, Operation) or owner.name != "arith.muli":
        return None
    whole = -(-k // pack.padding) * pack.padding * pack.panel.data
    for value, factor in (owner.operands, reversed(owner.operands)):
        number = as_dim(factor)
        if isinstance(number, int) and number % whole == 0:
            return value, number // whole * pack.panel.data
    return None


def _comes_before(first: Operation, second: Operation) -> bool:
    """Whether `first` stands in a block around `second`, before it."""
    block, inner = first.parent_block(), second
    while inner.parent_block() is not block:
        parent = inner.parent_op()
        if parent is None:
            return False
        inner = parent
    return block is not None and block.get_operation_index(first) < block.get_operation_index(inner)


def dot_type(dot: tile.DotOp) -> Attribute:
    """The element type in which both operands are multiplied. Raises ConfigError for one that tl.dot does not take."""
    types = {dot.a.type.dtype, dot.b.type.dtype}  # type: ignore[attr-defined]
    if types == {i8}:
        return i8
    if all(isinstance(t, (Float32Type, BFloat16Type, Float16Type)) for t in types):
        return types.pop() if len(types) == 1 else f32
    raise ConfigError(
        f"tile.dot multiplies {' by '.join(str(t) for t in sorted(types, key=str))}, which tl.dot does not take; "
        "convert its operands to float32, bfloat16, float16 or int8"
    )


def block_sizes(ctx: Context, dot: tile.DotOp) -> tuple[int, int, int]:
    """Rows, columns and depth of a dot's blocks."""
    bounds = (upper_bound(v) for v in (dot.m, dot.n, dot.k))
    numbers = [d if isinstance(d, int) else None for d in bounds]
    name = tl_type(dot_type(dot)).removeprefix("tl.")
    return ctx.blocks.dot(name, *numbers)


@emits("tile.dot")
def _dot(ctx: Context, dot: tile.DotOp) -> None:
    rows, columns, depth = block_sizes(ctx, dot)
    m, n = (ctx.scalar(v, "the size of a dot") for v in (dot.m, dot.n))
    a, b = _side(ctx, dot, "a"), _side(ctx, dot, "b")
    with tiles(ctx, m, n, rows, columns, dot) as (i, j):
        ctx.widest = max(ctx.widest, rows * columns)
        total = _multiply(ctx, dot, (a, b), (i, j), depth)
        if dot.keeps is not None:
            _keep(ctx, dot, total, (i, j))
        else:
            with ctx.lanes(i, j):
                _body(ctx, dot, total, i, j)


def _kept(ctx: Context, dot: tile.DotOp, at: tuple[Lanes, Lanes]) -> tuple[str, str]:
    """Where the sums of a tile wait between dots, row-major, and the mask of those that exist."""
    row, column = Value(at[0].index, i64, _ROW), Value(at[1].index, i64, _COLUMN)
    n = ctx.scalar(dot.n, "the size of a dot")
    assert dot.partial is not None
    place = pointer(ctx, dot.partial, linear([(binary("*", row, n, MUL), 1), (column, 1)], 0))
    return place, " & ".join(m for m in (at[0].mask, at[1].mask) if m)


def _keep(ctx: Context, dot: tile.DotOp, total: str, at: tuple[Lanes, Lanes]) -> None:
    if ctx.hazards.store(dot.partial, None):
        barrier(ctx)
    place, mask = _kept(ctx, dot, at)
    ctx.line(f"tl.store({place}, {total}{f', mask={mask}' if mask else ''})")


def _body(ctx: Context, dot: tile.DotOp, total: str, i: Lanes, j: Lanes) -> None:
    arguments = dot.body.block.args
    own = i32 if dot_type(dot) == i8 else f32
    value = Value(total, own, _BOTH)
    ctx.values[arguments[0]] = value if arguments[0].type == own else value.to(arguments[0].type)
    ctx.values[arguments[1]] = Value(i.index, i64, _ROW)
    ctx.values[arguments[2]] = Value(j.index, i64, _COLUMN)
    emit_block(ctx, dot.body.block)


@contextmanager
def tiles(ctx: Context, m: Value, n: Value, rows: int, columns: int, op: Operation) -> Iterator[tuple[Lanes, Lanes]]:
    """The tiles of an m x n block, in which `op` is done: one after another, or as programs of the grid's axes 1, 2."""
    if ctx.dot_tiles:
        starts = [Value(f"tl.program_id({axis}).to(tl.int64)", i64) for axis in (1, 2)]
        yield _tile_lanes(
            ctx,
            binary("*", starts[0], literal(rows, i64), MUL),
            binary("*", starts[1], literal(columns, i64), MUL),
            m,
            n,
            rows,
            columns,
        )
        return
    zero, stored, touched = literal(0, i64), stored_in(op), touched_in(op)
    head, name = counted(ctx, "row", zero, m, rows)
    with PythonLoop(ctx, head, stored, touched):
        row = as_index(ctx, name)
        head, name = counted(ctx, "column", zero, n, columns)
        with PythonLoop(ctx, head, stored, touched):
            yield _tile_lanes(ctx, row, as_index(ctx, name), m, n, rows, columns)


def _tile_lanes(
    ctx: Context, row: Value, column: Value, m: Value, n: Value, rows: int, columns: int
) -> tuple[Lanes, Lanes]:
    i = ctx.assign("i", f"({row.at(ADD)} + tl.arange(0, {rows}))[:, None]")
    j = ctx.assign("j", f"({column.at(ADD)} + tl.arange(0, {columns}))[None, :]")
    return (
        Lanes(i, None if _divides(rows, m) else ctx.assign("in_m", f"{i} < {m.at(ATOM)}"), rows),
        Lanes(j, None if _divides(columns, n) else ctx.assign("in_n", f"{j} < {n.at(ATOM)}"), columns),
    )


def _divides(step: int, extent: Value) -> bool:
    return extent.number is not None and extent.number % step == 0


def _side(ctx: Context, dot: tile.DotOp, side: str) -> Side:
    """How an operand is read: as the dot says, or from what was to be packed."""
    buffer, base, strides, panel, outer = (
        (dot.a, dot.a_base, dot.a_strides, dot.a_panel, dot.m)
        if side == "a"
        else (dot.b, dot.b_base, dot.b_strides, dot.b_panel, dot.n)
    )
    pack = ctx.sources.get((dot, side))
    if pack is None:
        kk = dot.groups[0 if side == "a" else 1]
        room = dot.b_depth.data if side == "b" and dot.b_depth is not None else None
        return Side(buffer, base, strides.data, panel.data, kk, buffer.type.dtype, room=room)  # type: ignore[attr-defined]
    shift = None if as_dim(base) == 0 else _shift(base, pack)
    same = outer is pack.outer or (as_dim(outer) is not None and as_dim(outer) == as_dim(pack.outer))
    limit = None if same and shift is None else pack.outer
    return Side(pack.source, pack.base, pack.strides.data, 0, 0, pack.target.type.dtype, shift, limit)


def _multiply(ctx: Context, dot: tile.DotOp, sides: tuple[Side, Side], at: tuple[Lanes, Lanes], depth: int) -> str:
    """The sum over k of a tile, as a variable."""
    rows, columns = at[0].size, at[1].size
    sums = "tl.int32" if dot_type(dot) == i8 else "tl.float32"
    total = ctx.name("total")
    if dot.resumes is None:
        ctx.line(f"{total} = tl.zeros([{rows}, {columns}], {sums})")
    else:
        if ctx.hazards.load(dot.partial, None):
            barrier(ctx)
        place, mask = _kept(ctx, dot, at)
        ctx.line(f"{total} = tl.load({place}{f', mask={mask}, other=0' if mask else ''})")
    k = ctx.scalar(dot.k, "the depth of a dot")
    head, name = counted(ctx, "k", literal(0, i64), k, depth)
    with PythonLoop(ctx, head, set(), {side.buffer for side in sides}):
        start = as_index(ctx, name)
        depths = ctx.assign("p", f"{start.text} + tl.arange(0, {depth})")
        live = None if _divides(depth, k) else f"({depths} < {k.at(ATOM)})"
        blocks = [
            _operand(ctx, dot, side, lanes, depths, live, k, first)
            for side, lanes, first in zip(sides, at, (True, False), strict=True)
        ]
        options = (
            ', input_precision="ieee"'
            if dot_type(dot) == f32
            else ", out_dtype=tl.int32"
            if dot_type(dot) == i8
            else ""
        )
        ctx.line(f"{total} = tl.dot({blocks[0]}, {blocks[1]}, {total}{options})")
        moved = _moved_down(dot, blocks, depth)
        if moved:
            ctx.line(f"{total} += {moved}")
    return total


def _moved_down(dot: tile.DotOp, blocks: list[str], depth: int) -> str:
    """What unsigned operands, which are read 128 lower to fit tl.dot's signed bytes, leave out of a sum of products."""
    unsigned = "" if dot.unsigned is None else dot.unsigned.data
    a, b = blocks
    parts = [f"tl.sum({b}.to(tl.int32), axis=0)[None, :]"] if "a" in unsigned else []
    parts += [f"tl.sum({a}.to(tl.int32), axis=1)[:, None]"] if "b" in unsigned else []
    whole = f" + {128 * 128 * depth}" if unsigned == "ab" else ""
    return f"128 * ({' + '.join(parts)}){whole}" if parts else ""


def _operand(
    ctx: Context, dot: tile.DotOp, side: Side, lanes: Lanes, depths: str, live: str | None, k: Value, first: bool
) -> str:
    """One operand's block: rows by depth for the left one, depth by columns for the right one."""
    along = "[None, :]" if first else "[:, None]"
    outer = Value(lanes.index, i64, _ROW if first else _COLUMN)
    inner = Value(f"{depths}{along}", i64, _COLUMN if first else _ROW)
    base = ctx.values[side.base]
    if side.shift is not None:
        outer = linear([(ctx.values[side.shift[0]], side.shift[1]), (outer, 1)], 0)
    if side.panel:
        room = k if side.room is None else literal(side.room, i64)
        index = packed_index(base, outer, inner, room, side.panel, side.kk, dot.padding)
    else:
        index = linear([(base, 1), (outer, side.strides[0]), (inner, side.strides[1])], 0)
    masks = [m for m in (lanes.mask, f"{live}{along}" if live else None) if m]
    if side.limit is not None:
        masks.append(f"({outer.at(ADD)} < {ctx.values[side.limit].at(ATOM)})")
    address = pointer(ctx, side.buffer, index)
    if ctx.hazards.load(side.buffer, None):
        barrier(ctx)
    zero = plain_number(0, side.buffer.type.dtype)  # type: ignore[attr-defined]
    mask = f", mask={' & '.join(masks)}, other={zero}" if masks else ""
    value = Value(f"tl.load({address}{mask})", side.buffer.type.dtype)  # type: ignore[attr-defined]
    for ty in (side.element, dot_type(dot)):
        value = value if value.type == ty else value.to(ty)
    if dot.unsigned is not None and ("a" if first else "b") in dot.unsigned.data:
        return ctx.assign("a" if first else "b", f"({value.at(ATOM)} ^ -128).to(tl.int8)")
    return ctx.assign("a" if first else "b", value.text)


def packed_index(base: Value, outer: Value, inner: Value, k: Value, panel: int, kk: int, multiple: int) -> Value:
    """Where tile.pack puts element (outer, inner) of an operand of depth k, which it pads to a multiple."""
    steps = _steps(k, kk, multiple)
    size = literal(panel * kk, i64)
    across = literal(steps.number * size.number, i64) if steps.number is not None else binary("*", steps, size, MUL)
    terms: list[tuple[Value, Any]] = [
        (base, 1),
        (binary("*", binary("//", outer, literal(panel, i64), MUL), across, MUL), 1),
        (binary("%", outer, literal(panel, i64), MUL), kk),
    ]
    if kk == 1:
        return linear([*terms, (inner, panel)], 0)
    steps_in = binary("//", inner, literal(kk, i64), MUL)
    return linear([*terms, (steps_in, panel * kk), (binary("%", inner, literal(kk, i64), MUL), 1)], 0)


def _steps(k: Value, kk: int, multiple: int) -> Value:
    """Groups of kk values in a padded panel."""
    if k.number is not None:
        return literal(-(-k.number // multiple) * (multiple // kk), i64)
    times = f" * {multiple // kk}" if multiple > kk else ""
    return Value(f"({k.at(ADD)} + {multiple - 1}) // {multiple}{times}", i64, level=MUL)


@emits("tile.pack")
def _pack(ctx: Context, op: tile.PackOp) -> None:
    """Copies a block, and zeros for its padding, tile by tile."""
    if op.parts is not None:
        raise ConfigError(
            "tile.pack takes values apart, which no Triton target asks for; schedule the kernel for this one"
        )
    outer, k, base = (ctx.held(ctx.scalar(v, "the size of a pack")) for v in (op.outer, op.k, op.base))
    panel, kk = op.panel.data, op.kk.data
    with tiles(ctx, _padded(outer, panel), _padded(k, op.padding), COPY, COPY, op) as (i, j):
        ctx.widest = max(ctx.widest, COPY * COPY)
        row, column = Value(i.index, i64, _ROW), Value(j.index, i64, _COLUMN)
        index = linear([(base, 1), (row, op.strides.data[0]), (column, op.strides.data[1])], 0)
        inside = f"({i.index} < {outer.at(ATOM)}) & ({j.index} < {k.at(ATOM)})"
        zero = plain_number(0, op.source.type.dtype)  # type: ignore[attr-defined]
        if ctx.hazards.load(op.source, None):
            barrier(ctx)
        value = ctx.assign("x", f"tl.load({pointer(ctx, op.source, index)}, mask={inside}, other={zero})")
        if ctx.hazards.store(op.target, None):
            barrier(ctx)
        first = literal(0, i64) if op.target_base is None else ctx.values[op.target_base]
        where = packed_index(first, row, column, k, panel, kk, op.padding)
        live = " & ".join(m for m in (i.mask, j.mask) if m)
        kept = f".to({tl_type(op.target.type.dtype)})" if op.target.type.dtype != op.source.type.dtype else ""  # type: ignore[attr-defined]
        ctx.line(f"tl.store({pointer(ctx, op.target, where)}, {value}{kept}{', mask=' + live if live else ''})")
    forget(ctx, {op.target})


def _padded(extent: Value, step: int) -> Value:
    """The extent rounded up to a multiple of a step."""
    if extent.number is not None:
        return literal(-(-extent.number // step) * step, i64)
    return Value(f"({extent.at(ADD)} + {step - 1}) // {step} * {step}", i64, level=MUL) if step > 1 else extent
