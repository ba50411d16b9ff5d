"""tile.dot: loops over register tiles around the shared micro-kernels of `dots`.

A micro-kernel is written once a module for each unit, tile and layout. It leaves its sums in a tile on the stack, which
stays in the first cache, and the dot's body reads them from there; a body that only stores has the micro-kernel write
to the place itself. Micro-kernels with the body inside would be faster by nothing and multiply the time of compilation.
Where the sums are built in passes over k, the tiles lie one after the other in the dot's `partial`, and the body reads
them there when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.context import (
    Context,
    add,
    at_entry,
    buffer_of,
    dim_value,
    emits,
    multiply,
    uniform_of,
)
from luban.compiler.codegen.llvm.dots import PANELS, DotSpec, emitter_for
from luban.compiler.codegen.llvm.dots.amx import AMX_UNITS, emit_configure
from luban.compiler.codegen.llvm.epilogue import Tile, direct_store, emit_epilogue, store_target
from luban.compiler.codegen.llvm.lanes import function_attributes, loads_masked
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import Uniform, constant, register_type, scalar_type
from luban.errors import ConfigError
from luban.symbolic import Dim

CONFIGURE = "luban.amx_configure"


@dataclass(frozen=True)
class Side:
    """One operand of a dot: `pointer` to element (0, 0), layout, strides; panels: their width and distance, also in `k`."""

    pointer: str
    type: str
    layout: str
    outer: Uniform
    k: Uniform
    width: int = 0
    panel: Uniform | None = None


@dataclass(frozen=True)
class Pass:
    """Values of k from `start` on, `k` of them; the sums begin with the partial ones or with 0, and are kept or used."""

    start: Uniform
    k: Uniform
    resumes: bool
    keeps: bool


@emits("tile.dot")
def _dot(ctx: Context, op: Any) -> None:
    if ctx.width > 1:
        raise ConfigError("tile.dot stands inside a vector loop; put it into a serial or parallel one")
    m, n, k = (uniform_of(ctx, value, "a size of tile.dot") for value in (op.m, op.n, op.k))
    a = _side(ctx, op, op.a, op.a_base, op.a_strides.data, op.a_panel.data, k, "a")
    b = _side(ctx, op, op.b, op.b_base, op.b_strides.data, op.b_panel.data, k, "b")
    if op.unit.data in AMX_UNITS:
        _configure(ctx)
    depth = op.depth.data if op.depth is not None else None
    begins, ends = op.resumes is not None, op.keeps is not None
    zero = constant("i64", 0)
    if depth is None or (k.number is not None and int(k.number) <= depth):
        _pass(ctx, op, a, b, (m, n), Pass(zero, k, begins, ends))
        return
    first = _least(ctx, k, depth)
    _pass(ctx, op, a, b, (m, n), Pass(zero, first, begins, True))
    last = _last_pass(ctx, k, depth)

    def middle(start: Uniform, _carried: list[str]) -> list[str]:
        _pass(ctx, op, a, b, (m, n), Pass(start, constant("i64", depth), True, True))
        return []

    emit_strip(ctx, strip_of(constant("i64", depth), last, depth), [], middle)
    rest = _least(ctx, add(ctx, k, multiply(ctx, last, constant("i64", -1))), depth)
    _pass(ctx, op, a, b, (m, n), Pass(last, rest, True, ends))


def _last_pass(ctx: Context, k: Uniform, depth: int) -> Uniform:
    """Where the last pass starts; behind the end of k, and then empty, where the first one takes all of it."""
    if k.number is not None:
        return constant("i64", (int(k.number) - 1) // depth * depth)
    before = ctx.fn.op(f"sdiv i64 {add(ctx, k, constant('i64', -1)).text}, {depth}")
    start = ctx.fn.op(f"mul i64 {before}, {depth}")
    text = ctx.fn.intrinsic("llvm.smax.i64", "i64", [("i64", start), ("i64", str(depth))])
    return Uniform("i64", text, ctx.depth)


def _least(ctx: Context, value: Uniform, most: int) -> Uniform:
    """min(value, most), at least 0."""
    if value.number is not None:
        return constant("i64", max(0, min(int(value.number), most)))
    text = ctx.fn.intrinsic("llvm.smin.i64", "i64", [("i64", value.text), ("i64", str(most))])
    return Uniform("i64", ctx.fn.intrinsic("llvm.smax.i64", "i64", [("i64", text), ("i64", "0")]), ctx.depth)


def _pass(ctx: Context, op: Any, a: Side, b: Side, extents: tuple[Uniform, Uniform], part: Pass) -> None:
    """All register tiles for some values of k, a column of them after the other or a row after the other."""
    m, n = extents
    rows, columns = op.rows.data, op.columns.data
    waits = part.resumes or part.keeps
    direct = None if waits else direct_store(op)
    name = _micro_kernel(ctx, op, a, b, part.resumes, direct is None)
    stack = None if direct or waits else ctx.fn.alloca(f"[{rows * columns} x {_accumulator(op)}]", 64)
    left, right = _from(ctx, a, part.start), _from(ctx, b, part.start)

    def tile(i: Uniform, j: Uniform, height: Uniform, width: Uniform) -> None:
        if direct:
            place, pitch = store_target(ctx, op, direct, i, j)
        else:
            place, pitch = stack or _partial_tile(ctx, op, n, i, j), constant("i64", columns)
        arguments = [("ptr", _tile_pointer(ctx, left, i)), ("i64", a.outer.text), ("i64", a.k.text)]
        arguments += [("ptr", _tile_pointer(ctx, right, j)), ("i64", b.k.text), ("i64", part.k.text)]
        arguments += [("ptr", place), ("i64", pitch.text), ("i64", height.text), ("i64", width.text)]
        ctx.fn.call("void", f"@{name}", arguments)
        if direct is None and not part.keeps:
            emit_epilogue(ctx, op, Tile(place, _accumulator(op), _lanes(ctx, op), columns, i, j, height, width))

    _walk(ctx, op.order is not None and op.order.data == "rows", (m, n), (rows, columns), tile)


def _walk(
    ctx: Context,
    by_rows: bool,
    extents: tuple[Uniform, Uniform],
    steps: tuple[int, int],
    tile: Callable[[Uniform, Uniform, Uniform, Uniform], None],
) -> None:
    """`tile(i, j, height, width)` for every register tile. The panel of the outer loop stays in the first cache."""
    outer, inner = (0, 1) if by_rows else (1, 0)
    zero = constant("i64", 0)

    def line(x: Uniform, _carried: list[str]) -> list[str]:
        wide = _rest(ctx, extents[outer], x, steps[outer])

        def one(y: Uniform, _carried: list[str]) -> list[str]:
            high = _rest(ctx, extents[inner], y, steps[inner])
            if by_rows:
                tile(x, y, wide, high)
            else:
                tile(y, x, high, wide)
            return []

        emit_strip(ctx, strip_of(zero, extents[inner], steps[inner]), [], one)
        return []

    emit_strip(ctx, strip_of(zero, extents[outer], steps[outer]), [], line)


def _partial_tile(ctx: Context, op: Any, n: Uniform, i: Uniform, j: Uniform) -> str:
    """Where the tile at (i, j) waits: tiles lie one after the other, row by row."""
    rows, columns = op.rows.data, op.columns.data
    across = _tiles(ctx, n, columns)
    number = add(ctx, multiply(ctx, _tiles(ctx, i, rows), across), _tiles(ctx, j, columns))
    start = multiply(ctx, number, constant("i64", rows * columns))
    return ctx.fn.op(f"getelementptr {_accumulator(op)}, ptr {buffer_of(ctx, op.partial).pointer}, i64 {start.text}")


def _tiles(ctx: Context, extent: Uniform, tile: int) -> Uniform:
    """Register tiles that an extent takes."""
    if extent.number is not None:
        return constant("i64", -(-int(extent.number) // tile))
    more = add(ctx, extent, constant("i64", tile - 1))
    return Uniform("i64", ctx.fn.op(f"udiv i64 {more.text}, {tile}"), ctx.depth)


def _from(ctx: Context, side: Side, start: Uniform) -> Side:
    """The operand from a value of k on."""
    if start.number == 0:
        return side
    step = constant("i64", side.width) if side.panel is not None else side.k
    distance = multiply(ctx, start, step)
    pointer = ctx.fn.op(f"getelementptr {register_type(side.type)}, ptr {side.pointer}, i64 {distance.text}")
    return replace(side, pointer=pointer)


def _accumulator(op: Any) -> str:
    return scalar_type(op.body.block.args[0].type)


def _lanes(ctx: Context, op: Any) -> int:
    lanes = max(1, ctx.target.vector_bits // (64 if _accumulator(op) == "double" else 32))
    if op.columns.data % lanes:
        raise ConfigError(f"tile.dot has {op.columns.data} columns, which is no multiple of the target's {lanes} lanes")
    return lanes


def _side(
    ctx: Context,
    op: Any,
    buffer: SSAValue,
    base: SSAValue,
    strides: tuple[Dim, ...],
    panel: int,
    k: Uniform,
    which: str,
) -> Side:
    held = buffer_of(ctx, buffer)
    start = uniform_of(ctx, base, "a base of tile.dot")
    pointer = ctx.fn.op(f"getelementptr {register_type(held.type)}, ptr {held.pointer}, i64 {start.text}")
    outer, along = (dim_value(ctx, stride) for stride in strides)
    if panel:
        unit = PANELS.get(op.unit.data)
        wanted = op.rows.data if which == "a" else (unit and unit.b_columns) or op.columns.data
        if panel != wanted:
            raise ConfigError(f"tile.dot reads {which} in panels of {panel}, its register tile needs {wanted}")
        _require_form(op, which)
        room = k if which == "a" or op.b_depth is None else constant("i64", op.b_depth.data)
        size = multiply(ctx, _padded(ctx, room, op.padding), constant("i64", panel))
        return Side(pointer, held.type, "packed", constant("i64", 0), size, panel, size)
    if which == "b":
        if outer.number != 1:
            raise ConfigError("tile.dot reads b in place only where neighbouring columns are neighbours; pack it first")
        return Side(pointer, held.type, "rows", outer, along)
    layout = "row_major" if along.number == 1 else "col_major" if outer.number == 1 else "strided"
    return Side(pointer, held.type, layout, outer, along)


def _require_form(op: Any, which: str) -> None:
    """The panels must be what the unit reads: a wrong group or padding would give wrong numbers."""
    unit = PANELS.get(op.unit.data)
    if unit is None:
        return  # emitter_for names the known units
    group, wanted = (op.groups[0], unit.a_group) if which == "a" else (op.groups[1], unit.b_group)
    if (group, op.padding) != (wanted, unit.k_multiple):
        raise ConfigError(
            f"tile.dot reads {which} in groups of {group} with k padded to {op.padding}, "
            f"the unit {op.unit.data} needs {wanted} and {unit.k_multiple}"
        )


def _padded(ctx: Context, k: Uniform, multiple: int) -> Uniform:
    """k rounded up to what a unit's panels hold."""
    if multiple == 1:
        return k
    if k.number is not None:
        return constant("i64", -(-int(k.number) // multiple) * multiple)
    more = add(ctx, k, constant("i64", multiple - 1))
    return Uniform("i64", ctx.fn.op(f"and i64 {more.text}, {-multiple}"), ctx.depth)


def _tile_pointer(ctx: Context, side: Side, index: Uniform) -> str:
    """Where the register tile that starts at row (or column) `index` finds the operand."""
    step = side.outer
    if side.panel is not None:  # index is a multiple of the panel, and panels lie one after the other
        index = Uniform("i64", ctx.fn.op(f"udiv exact i64 {index.text}, {side.width}"), ctx.depth)
        step = side.panel
    distance = multiply(ctx, index, step)
    return ctx.fn.op(f"getelementptr {register_type(side.type)}, ptr {side.pointer}, i64 {distance.text}")


def _rest(ctx: Context, size: Uniform, index: Uniform, tile: int) -> Uniform:
    """Rows or columns of the tile at `index`: a full tile, or what is left at the end."""
    if size.number is not None and int(size.number) % tile == 0:
        return constant("i64", tile)
    left = add(ctx, size, multiply(ctx, index, constant("i64", -1)))
    if left.number is not None:
        return constant("i64", min(int(left.number), tile))
    text = ctx.fn.intrinsic("llvm.smin.i64", "i64", [("i64", left.text), ("i64", str(tile))])
    return Uniform("i64", text, ctx.depth, None, (0, tile))


def _configure(ctx: Context) -> None:
    """Tile registers are set up once in every function that uses them, hence on the thread that does."""
    if CONFIGURE not in ctx.module.functions:
        emit_configure(ctx.module, CONFIGURE)
    call = f"  call void @{CONFIGURE}()"
    if call not in ctx.prologue:
        with at_entry(ctx) as fn:
            fn.lines.append(call)


def _micro_kernel(ctx: Context, op: Any, a: Side, b: Side, accumulate: bool, whole_tile: bool) -> str:
    """The name of the micro-kernel of this dot, which is added to the module where it is not there yet."""
    lanes = _lanes(ctx, op)
    spec = DotSpec(
        unit=op.unit.data,
        mr=op.rows.data,
        nr_vectors=op.columns.data // lanes,
        lanes=lanes,
        a_type=a.type,
        b_type=b.type,
        acc_type=_accumulator(op),
        unsigned="" if op.unsigned is None else op.unsigned.data,
        a_layout=a.layout,
        b_layout=b.layout,
        masked=loads_masked(ctx.target, "float"),
        accumulate=accumulate,
        whole_tile=whole_tile,
    )
    signs = f".u{spec.unsigned}" if spec.unsigned else ""
    parts = (spec.unit, spec.mr, spec.nr, spec.a_type, spec.b_type, spec.acc_type, spec.a_layout, spec.b_layout + signs)
    name = "luban.dot." + ".".join(map(str, parts)) + ".more" * accumulate + ".tile" * whole_tile
    if name not in ctx.module.functions:
        emitter_for(spec.unit)(ctx.module, name, spec)
        text = ctx.module.functions[name]
        ctx.module.functions[name] = text.replace(" nounwind {", f" {function_attributes(ctx.target)} {{", 1)
    return name
