"""The body of a tile.dot, run over a tile of sums: columns as lanes, whole tiles first, ragged ones under masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.address import place_of
from luban.compiler.codegen.llvm.context import Context, add, dim_value, emit_block, emit_op, lanes_of, multiply
from luban.compiler.codegen.llvm.dots.flow import lane_mask, masked_load, when
from luban.compiler.codegen.llvm.lanes import masks_are_cheap
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import BYTES, Ramp, Uniform, Value, Varying, constant
from luban.compiler.codegen.llvm.vectorise import varying_values
from luban.compiler.codegen.llvm.widths import divisors_of, weight_of
from luban.symbolic import Dim

# Bodies up to this weight take all vectors of a line at once: a chain such as that of the error function waits for itself
# most of the time (62 against 89 GFLOP/s for a product with GELU's gradient in its store).
_SHORT_BODY = 200


@dataclass(frozen=True)
class Tile:
    """Sums on the stack, `columns` a line, `height` x `width` of them valid; the first belongs to (`row`, `column`)."""

    pointer: str
    type: str
    lanes: int
    columns: int
    row: Uniform
    column: Uniform
    height: Uniform
    width: Uniform


def emit_epilogue(ctx: Context, op: Any, tile: Tile) -> None:
    """Writes the body for every sum of the tile, in the current function."""
    if tile.width.number == tile.columns:
        _rows(ctx, op, tile, True)
    elif tile.width.number is not None:
        _rows(ctx, op, tile, False)
    else:
        full = ctx.fn.op(f"icmp eq i64 {tile.width.text}, {tile.columns}")
        when(ctx.fn, full, lambda: _rows(ctx, op, tile, True), lambda: _rows(ctx, op, tile, False))


def _rows(ctx: Context, op: Any, tile: Tile, whole: bool) -> None:
    together = weight_of(op) <= _SHORT_BODY and not divisors_of(op)

    def row(i: Uniform, _carried: list[str]) -> list[str]:
        line = multiply(ctx, i, constant("i64", tile.columns))
        if whole and together:
            _vectors(ctx, op, tile, i, line, constant("i64", 0), tile.columns // tile.lanes, None)
        elif whole:
            _line(ctx, op, tile, i, line)
        else:
            _ragged(ctx, op, tile, i, line)
        return []

    emit_strip(ctx, strip_of(constant("i64", 0), tile.height, 1), [], row)


def _line(ctx: Context, op: Any, tile: Tile, i: Uniform, line: Uniform) -> None:
    """A whole line, one vector after the other."""

    def vector(c: Uniform, _carried: list[str]) -> list[str]:
        _vectors(ctx, op, tile, i, line, c, 1, None)
        return []

    emit_strip(ctx, strip_of(constant("i64", 0), constant("i64", tile.columns), tile.lanes), [], vector)


def _ragged(ctx: Context, op: Any, tile: Tile, i: Uniform, line: Uniform) -> None:
    """A line with fewer columns than the tile: one vector at a time, the last under a mask or lane by lane."""
    fn, lanes = ctx.fn, tile.lanes
    masked = masks_are_cheap(ctx.target)

    def vector(c: Uniform, _carried: list[str]) -> list[str]:
        left = fn.op(f"sub nsw i64 {tile.width.text}, {c.text}")
        _vectors(ctx, op, tile, i, line, c, 1, lane_mask(fn, lanes, left) if masked else None)
        return []

    def single(c: Uniform, _carried: list[str]) -> list[str]:
        place = fn.op(f"getelementptr {tile.type}, ptr {tile.pointer}, i64 {add(ctx, line, c).text}")
        value = fn.op(f"load {tile.type}, ptr {place}, align {BYTES[tile.type]}")
        _body(ctx, op, tile, i, add(ctx, tile.column, c), Uniform(tile.type, value, ctx.depth), 1, 1, None)
        return []

    end = tile.width
    if not masked:
        end = Uniform("i64", fn.op(f"and i64 {tile.width.text}, {-lanes}"), ctx.depth)
    emit_strip(ctx, strip_of(constant("i64", 0), end, lanes), [], vector)
    if not masked:
        emit_strip(ctx, strip_of(end, tile.width, 1), [], single)


def _vectors(
    ctx: Context, op: Any, tile: Tile, i: Uniform, line: Uniform, c: Uniform, copies: int, mask: str | None
) -> None:
    """The body for `copies` neighbouring vectors of a line, from column c of the tile on."""
    fn, lanes, ty = ctx.fn, tile.lanes, tile.type
    parts = []
    for copy in range(copies):
        offset = add(ctx, add(ctx, line, c), constant("i64", copy * lanes))
        place = fn.op(f"getelementptr {ty}, ptr {tile.pointer}, i64 {offset.text}")
        if mask:
            parts.append(masked_load(fn, lanes, ty, place, mask, BYTES[ty]))
        else:
            parts.append(fn.op(f"load <{lanes} x {ty}>, ptr {place}, align {BYTES[ty]}"))
    j = Ramp(add(ctx, tile.column, c), 1)
    _body(ctx, op, tile, i, j, Varying(ty, tuple(parts)), lanes, copies, (mask,) if mask else None)


def _body(
    ctx: Context, op: Any, tile: Tile, i: Uniform, j: Value, sums: Value, lanes: int, copies: int, masks: Any
) -> None:
    block = op.body.block
    ctx.values.update(zip(block.args, (sums, add(ctx, tile.row, i), j), strict=True))
    with lanes_of(ctx, lanes, copies, masks, varying_values(op) if lanes > 1 else frozenset()):
        emit_block(ctx, block)


# -- bodies that only store


@dataclass(frozen=True)
class DirectStore:
    """The store of a body that does nothing else: its place moves by `pitch` elements a row and by one a column."""

    op: Any
    pitch: Dim


def direct_store(op: Any) -> DirectStore | None:
    """The one plain store of the sum that a body consists of, or None where it does more."""
    block = op.body.block
    accumulator, i, j = block.args
    slopes: dict[SSAValue, tuple[Dim, Dim]] = {i: (1, 0), j: (0, 1)}
    store = None
    for inner in block.ops:
        if inner.name == "arith.addi":
            (a, b), (c, d) = (slopes.get(o, (0, 0)) for o in inner.operands)
            slopes[inner.results[0]] = (a + c, b + d)
        elif inner.name == "tile.store" and store is None:
            store = inner
        elif inner.name not in ("arith.constant", "tile.dim", "tile.yield"):
            return None
    if store is None or store.value is not accumulator or store.mask is not None or store.combine.data != "none":
        return None
    pitch: Dim = 0
    across: Dim = 0
    for index, stride in zip(store.indices, store.strides.data, strict=True):
        down, right = slopes.get(index, (0, 0))
        pitch, across = pitch + down * stride, across + right * stride
    return DirectStore(store, pitch) if across == 1 else None


def store_target(ctx: Context, op: Any, direct: DirectStore, i: Uniform, j: Uniform) -> tuple[str, Uniform]:
    """Where the tile that starts at (i, j) is stored, and how many elements lie between its rows."""
    block = op.body.block
    ctx.values.update(zip(block.args[1:], (i, j), strict=True))
    for inner in block.ops:
        if inner.name not in ("tile.store", "tile.yield"):
            emit_op(ctx, inner)
    store = direct.op
    place = place_of(ctx, store.buffer, store.indices, store.strides.data, store.offset.data[0])
    return place.pointer, dim_value(ctx, direct.pitch)
