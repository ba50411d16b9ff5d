"""tile.dot: loops over register tiles around the shared micro-kernels of `dots`.

A micro-kernel is written once a module for each unit, tile and layout. It leaves its sums in a tile on the stack, which
stays in the first cache, and the dot's body reads them from there; a body that only stores has the micro-kernel write
to the place itself. Micro-kernels with the body inside would be faster by nothing and multiply the time of compilation.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from luban.compiler.codegen.llvm.dots.amx import emit_configure
from luban.compiler.codegen.llvm.epilogue import Tile, direct_store, emit_epilogue, store_target
from luban.compiler.codegen.llvm.lanes import function_attributes, loads_masked
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import Uniform, constant, register_type, scalar_type
from luban.errors import ConfigError
from luban.symbolic import Dim

CONFIGURE = "luban.amx_configure"


@dataclass(frozen=True)
class Side:
    """One operand of a dot: `pointer` to element (0, 0), layout, strides, and elements from one panel to the next."""

    pointer: str
    type: str
    layout: str
    outer: Uniform
    k: Uniform
    panel: Uniform | None


@emits("tile.dot")
def _dot(ctx: Context, op: Any) -> None:
    """Columns outside, rows inside: the panel of b that the rows walk past stays in the first cache."""
    if ctx.width > 1:
        raise ConfigError("tile.dot stands inside a vector loop; put it into a serial or parallel one")
    m, n, k = (uniform_of(ctx, value, "a size of tile.dot") for value in (op.m, op.n, op.k))
    a = _side(ctx, op, op.a, op.a_base, op.a_strides.data, op.a_panel.data, k, "a")
    b = _side(ctx, op, op.b, op.b_base, op.b_strides.data, op.b_panel.data, k, "b")
    name = _micro_kernel(ctx, op, a, b)
    if op.unit.data == "amx":
        _configure(ctx)
    rows, columns = op.rows.data, op.columns.data
    direct = direct_store(op)
    stack = None if direct else ctx.fn.alloca(f"[{rows * columns} x {_accumulator(op)}]", 64)

    def column(j: Uniform, _carried: list[str]) -> list[str]:
        right, width = _tile_pointer(ctx, b, j, columns), _rest(ctx, n, j, columns)

        def row(i: Uniform, _carried: list[str]) -> list[str]:
            left, height = _tile_pointer(ctx, a, i, rows), _rest(ctx, m, i, rows)
            place, pitch = store_target(ctx, op, direct, i, j) if direct else (stack, constant("i64", columns))
            arguments = [("ptr", left), ("i64", a.outer.text), ("i64", a.k.text), ("ptr", right), ("i64", b.k.text)]
            arguments += [("i64", k.text), ("ptr", str(place)), ("i64", pitch.text)]
            ctx.fn.call("void", f"@{name}", [*arguments, ("i64", height.text), ("i64", width.text)])
            if stack:
                emit_epilogue(ctx, op, Tile(stack, _accumulator(op), _lanes(ctx, op), columns, i, j, height, width))
            return []

        emit_strip(ctx, strip_of(constant("i64", 0), m, rows), [], row)
        return []

    emit_strip(ctx, strip_of(constant("i64", 0), n, columns), [], column)


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
        wanted = op.rows.data if which == "a" else op.columns.data
        if panel != wanted:
            raise ConfigError(f"tile.dot reads {which} in panels of {panel}, its register tile needs {wanted}")
        _require_form(op, which)
        size = multiply(ctx, _padded(ctx, k, op.padding), constant("i64", panel))
        zero = constant("i64", 0)
        return Side(pointer, held.type, "packed", zero, zero, size)
    if which == "b":
        if outer.number != 1:
            raise ConfigError("tile.dot reads b in place only where neighbouring columns are neighbours; pack it first")
        return Side(pointer, held.type, "rows", outer, along, None)
    layout = "row_major" if along.number == 1 else "col_major" if outer.number == 1 else "strided"
    return Side(pointer, held.type, layout, outer, along, None)


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


def _tile_pointer(ctx: Context, side: Side, index: Uniform, tile: int) -> str:
    """Where the register tile that starts at row (or column) `index` finds the operand."""
    step = side.outer
    if side.panel is not None:  # index is a multiple of the panel, and panels lie one after the other
        index = Uniform("i64", ctx.fn.op(f"udiv exact i64 {index.text}, {tile}"), ctx.depth)
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


def _micro_kernel(ctx: Context, op: Any, a: Side, b: Side) -> str:
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
        a_layout=a.layout,
        b_layout=b.layout,
        masked=loads_masked(ctx.target, "float"),
    )
    parts = (spec.unit, spec.mr, spec.nr, spec.a_type, spec.b_type, spec.acc_type, spec.a_layout, spec.b_layout)
    name = "luban.dot." + ".".join(map(str, parts))
    if name not in ctx.module.functions:
        emitter_for(spec.unit)(ctx.module, name, spec)
        text = ctx.module.functions[name]
        ctx.module.functions[name] = text.replace(" nounwind {", f" {function_attributes(ctx.target)} {{", 1)
    return name
