"""tile.dot and tile.pack: loops over register tiles around the micro-kernels and packing functions of `dots`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.capture import captured, constants, operand, renamed
from luban.compiler.codegen.llvm.context import (
    Context,
    add,
    at_entry,
    buffer_of,
    dim_value,
    emit_block,
    emits,
    flatten,
    lanes_of,
    multiply,
    uniform_of,
)
from luban.compiler.codegen.llvm.dots import PANELS, DotSpec, PackSpec, emit_pack, emitter_for
from luban.compiler.codegen.llvm.dots.amx import emit_configure
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.lanes import features_of, function_attributes, loads_masked
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import Ramp, Uniform, Value, Varying, constant, scalar_type
from luban.compiler.codegen.llvm.widths import weight_of
from luban.errors import ConfigError
from luban.symbolic import Dim

CONFIGURE = "luban.amx_configure"
# Bodies up to this weight are written out for every accumulator of a tile, so that results never leave registers.
_SHORT_BODY = 4


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
    outside = captured(ctx, op)
    name = _micro_kernel(ctx, op, a, b, outside)
    if op.unit.data == "amx":
        _configure(ctx)
    rows, columns = op.rows.data, op.columns.data
    passed = [(ty, text) for ty, _, text in _extra(ctx, outside)]

    def column(j: Uniform, _carried: list[str]) -> list[str]:
        right, width = _tile_pointer(ctx, b, j, columns), _rest(ctx, n, j, columns)

        def row(i: Uniform, _carried: list[str]) -> list[str]:
            left, height = _tile_pointer(ctx, a, i, rows), _rest(ctx, m, i, rows)
            arguments = [("ptr", left), ("i64", a.outer.text), ("i64", a.k.text), ("ptr", right), ("i64", b.k.text)]
            arguments += [("i64", k.text), ("ptr", "null"), ("i64", "0"), ("i64", height), ("i64", width)]
            ctx.fn.call("void", f"@{name}", [*arguments, ("i64", i.text), ("i64", j.text), *passed])
            return []

        emit_strip(ctx, strip_of(constant("i64", 0), m, rows), [], row)
        return []

    emit_strip(ctx, strip_of(constant("i64", 0), n, columns), [], column)


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
    pointer = ctx.fn.op(f"getelementptr {_element(held.type)}, ptr {held.pointer}, i64 {start.text}")
    outer, along = (dim_value(ctx, stride) for stride in strides)
    if panel:
        wanted = op.rows.data if which == "a" else op.columns.data
        if panel != wanted:
            raise ConfigError(f"tile.dot reads {which} in panels of {panel}, its register tile needs {wanted}")
        size = multiply(ctx, _padded(ctx, k, PANELS[op.unit.data].k_multiple), constant("i64", panel))
        zero = constant("i64", 0)
        return Side(pointer, held.type, "packed", zero, zero, size)
    if which == "b":
        if outer.number != 1:
            raise ConfigError("tile.dot reads b in place only where neighbouring columns are neighbours; pack it first")
        return Side(pointer, held.type, "rows", outer, along, None)
    layout = "row_major" if along.number == 1 else "col_major" if outer.number == 1 else "strided"
    return Side(pointer, held.type, layout, outer, along, None)


def _element(ty: str) -> str:
    return "i16" if ty in ("bfloat", "half") else ty


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
    return ctx.fn.op(f"getelementptr {_element(side.type)}, ptr {side.pointer}, i64 {distance.text}")


def _rest(ctx: Context, size: Uniform, index: Uniform, tile: int) -> str:
    left = ctx.fn.op(f"sub nsw i64 {size.text}, {index.text}")
    return ctx.fn.intrinsic("llvm.smin.i64", "i64", [("i64", left), ("i64", str(tile))])


def _configure(ctx: Context) -> None:
    """Tile registers are set up once in every function that uses them, hence on the thread that does."""
    if CONFIGURE not in ctx.module.functions:
        emit_configure(ctx.module, CONFIGURE)
    call = f"  call void @{CONFIGURE}()"
    if call not in ctx.prologue:
        with at_entry(ctx) as fn:
            fn.lines.append(call)


def _extra(ctx: Context, outside: dict[SSAValue, Value]) -> list[tuple[str, str, str]]:
    """What a micro-kernel gets beside its own parameters: (type, name inside, operand here)."""
    listed = [("ptr", "rt", ctx.rt), *(("i64", f"s.{symbol}", text) for symbol, text in ctx.symbols.items())]
    return listed + [(*_typed(value, number),) for number, value in enumerate(outside.values())]


def _typed(value: Value, number: int) -> tuple[str, str, str]:
    ty, text = operand(value)
    return ty, f"e{number}", text


def _micro_kernel(ctx: Context, op: Any, a: Side, b: Side, outside: dict[SSAValue, Value]) -> str:
    """Adds the micro-kernel with the dot's body as its epilogue; returns its name."""
    accumulator = scalar_type(op.body.block.args[0].type)
    lanes = max(1, ctx.target.vector_bits // (64 if accumulator == "double" else 32))
    if op.columns.data % lanes:
        raise ConfigError(f"tile.dot has {op.columns.data} columns, which is no multiple of the target's {lanes} lanes")
    extra = [("i64", "row0"), ("i64", "column0"), *((ty, name) for ty, name, _ in _extra(ctx, outside))]
    spec = DotSpec(
        unit=op.unit.data,
        mr=op.rows.data,
        nr_vectors=op.columns.data // lanes,
        lanes=lanes,
        a_type=a.type,
        b_type=b.type,
        acc_type=accumulator,
        a_layout=a.layout,
        b_layout=b.layout,
        masked=loads_masked(ctx.target, "float"),
        epilogue=_epilogue(ctx, op, accumulator, outside),
        unroll_epilogue=weight_of(op) <= _SHORT_BODY,
        extra_params=tuple(extra),
    )
    name = _free_name(ctx)
    ctx.module.functions[name] = ""
    emitter_for(spec.unit)(ctx.module, name, spec)
    text = ctx.module.functions[name]
    ctx.module.functions[name] = text.replace(" nounwind {", f" {function_attributes(ctx.target)} {{", 1)
    return name


def _free_name(ctx: Context) -> str:
    number = 0
    while f"{ctx.fn.name}.dot{number}" in ctx.module.functions:
        number += 1
    return f"{ctx.fn.name}.dot{number}"


def _epilogue(ctx: Context, op: Any, accumulator: str, outside: dict[SSAValue, Value]) -> Callable[..., None]:
    """The hook that writes the dot's body for one vector of results."""
    block = op.body.block
    inherited = constants(ctx)
    symbols = {symbol: f"%s.{symbol}" for symbol in ctx.symbols}

    def write(fn: Function, value: str, row: str, column: str, mask: str | None, lanes: int) -> None:
        inner = Context(ctx.module, fn, ctx.target, symbols, "%rt", dict(inherited))
        inner.prologue = fn.lines  # type: ignore[assignment]  # dims are computed where they are used
        for number, (key, held) in enumerate(outside.items()):
            inner.values[key] = renamed(held, f"%e{number}")
        i = add(inner, Uniform("i64", "%row0", multiple=op.rows.data), _index(row, 1))
        j = add(inner, Uniform("i64", "%column0", multiple=op.columns.data), _index(column, lanes))
        inner.values[block.args[0]] = Varying(accumulator, (value,)) if lanes > 1 else Uniform(accumulator, value)
        inner.values[block.args[1]] = i
        inner.values[block.args[2]] = Ramp(j, 1) if lanes > 1 else j
        start = len(fn.lines)
        with lanes_of(inner, lanes, 1, (mask,) if mask else None, frozenset(block.args)):
            emit_block(inner, block)
        fn.lines[start:] = flatten(fn.lines[start:])

    return write


def _index(text: str, multiple: int) -> Uniform:
    return Uniform("i64", text, multiple=multiple) if text.startswith("%") else constant("i64", int(text))


@emits("tile.pack")
def _pack(ctx: Context, op: Any) -> None:
    source, target = buffer_of(ctx, op.source), buffer_of(ctx, op.target)
    base, outer, k = (uniform_of(ctx, value, "an operand of tile.pack") for value in (op.base, op.outer, op.k))
    strides = [dim_value(ctx, stride) for stride in op.strides.data]
    contiguous = "k" if strides[1].number == 1 else "rows" if strides[0].number == 1 else "none"
    wide = target.type == "double"
    spec = PackSpec(
        panel=op.panel.data,
        group=op.kk.data,
        contiguous=contiguous,
        src_type=source.type,
        dst_type=target.type,
        lanes=max(1, ctx.target.vector_bits // (64 if wide else 32)),
        masked=loads_masked(ctx.target, "double" if wide else "float"),
        native_bf16=not features_of(ctx.target).isdisjoint(("avx512bf16", "bf16")),
        k_multiple=_reader_multiple(op),
    )
    name = "luban.pack." + ".".join(str(field).lower() for field in vars(spec).values())
    if name not in ctx.module.functions:
        emit_pack(ctx.module, name, spec)
        text = ctx.module.functions[name]
        ctx.module.functions[name] = text.replace(" nounwind {", f" {function_attributes(ctx.target)} {{", 1)
    start = ctx.fn.op(f"getelementptr {_element(source.type)}, ptr {source.pointer}, i64 {base.text}")
    arguments = [("ptr", start), *(("i64", stride.text) for stride in strides), ("ptr", target.pointer)]
    ctx.fn.call("void", f"@{name}", [*arguments, ("i64", outer.text), ("i64", k.text)])


def _reader_multiple(op: Any) -> int:
    """What the dot that reads these panels pads k to; kk where no dot reads them."""
    for use in op.target.uses:
        if use.operation.name == "tile.dot":
            return PANELS[use.operation.unit.data].k_multiple
    return op.kk.data
