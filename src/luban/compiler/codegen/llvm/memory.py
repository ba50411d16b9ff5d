"""tile.load and tile.store: whole vectors where lanes are neighbours, scalars where they agree, gathers otherwise."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.address import Place, copy_pointer, lane_pointers, place_of
from luban.compiler.codegen.llvm.context import Context, emits, parts_of
from luban.compiler.codegen.llvm.dots.flow import masked_load, masked_store, when
from luban.compiler.codegen.llvm.lanes import (
    any_of_parts,
    combined_mask,
    gather,
    gathers,
    loads_masked,
    reverse,
    scatter,
    shuffle,
)
from luban.compiler.codegen.llvm.read_modify_write import combine_store, store_lane_by_lane
from luban.compiler.codegen.llvm.streaming import fetch_ahead, stream, streams
from luban.compiler.codegen.llvm.values import BYTES, Uniform, Value, Varying, constant, scalar_type, splat, vector_type

ZEROS = "luban.zeros"  # 64 zero bytes, to read where a mask forbids the real place


@emits("tile.load")
def _load(ctx: Context, op: Any) -> None:
    place = place_of(ctx, op.buffer, op.indices, op.strides.data, op.offset.data[0])
    mask = ctx.values[op.mask] if op.mask is not None else None
    if isinstance(mask, Uniform) and mask.number:
        mask = None
    ty = scalar_type(op.result.type)
    if op.ahead is not None and place.step == 1 and mask is None and ctx.masks is None:
        fetch_ahead(ctx, place)
    ctx.values[op.result] = _load_same(ctx, place, ty, mask) if place.uniform else _load_lanes(ctx, place, ty, mask)


def _load_same(ctx: Context, place: Place, ty: str, mask: Value | None) -> Value:
    """All lanes read one place."""
    if mask is None:
        return _scalar(ctx, place, place.pointer, ty)
    if isinstance(mask, Uniform):
        return _scalar(ctx, place, _guarded(ctx, place.pointer, mask.text), ty)
    parts = parts_of(ctx, mask)
    found = _scalar(ctx, place, _guarded(ctx, place.pointer, any_of_parts(ctx, parts)), ty)
    vector, zero = vector_type(ty, ctx.width), splat(ctx.fn, ty, constant(ty, 0).text, ctx.width)
    spread = splat(ctx.fn, ty, found.text, ctx.width)
    condition = vector_type("i1", ctx.width)
    return Varying(ty, tuple(ctx.fn.op(f"select {condition} {p}, {vector} {spread}, {vector} {zero}") for p in parts))


def _scalar(ctx: Context, place: Place, pointer: str, ty: str) -> Uniform:
    text = ctx.fn.op(f"load {place.type}, ptr {pointer}, align {BYTES[place.type]}")
    return Uniform(ty, _from_memory(ctx, ty, 1, text), ctx.depth)


def _guarded(ctx: Context, pointer: str, condition: str) -> str:
    """The pointer, or one to zeros where the condition is false."""
    return ctx.fn.op(f"select i1 {condition}, ptr {pointer}, ptr {_zeros(ctx)}")


def _zeros(ctx: Context) -> str:
    return ctx.module.constant(ZEROS, "[64 x i8] zeroinitializer, align 64")


def _load_lanes(ctx: Context, place: Place, ty: str, mask: Value | None) -> Varying:
    masks = combined_mask(ctx, None if mask is None else parts_of(ctx, mask))
    if place.step in (1, -1, 2) and (masks is None or (place.step != 2 and loads_masked(ctx.target, ty))):
        parts = [_load_part(ctx, place, copy, masks[copy] if masks else None) for copy in range(ctx.copies)]
    else:
        parts = [
            _gather_part(ctx, place, p, masks[i] if masks else None) for i, p in enumerate(lane_pointers(ctx, place))
        ]
    return Varying(ty, tuple(_from_memory(ctx, ty, ctx.width, part) for part in parts))


def _load_part(ctx: Context, place: Place, copy: int, mask: str | None) -> str:
    """One vector of neighbours: forwards, backwards, or every second element of two vectors that just cover them."""
    fn, width, ty = ctx.fn, ctx.width, place.type
    if place.step == 2:
        low = _whole(ctx, ty, copy_pointer(ctx, place, copy), None)
        high = _whole(ctx, ty, copy_pointer(ctx, place, copy, width - 1), None)
        order = [2 * lane if 2 * lane < width else 2 * lane + 1 for lane in range(width)]
        return shuffle(fn, width, ty, low, high, order)
    if place.step == 1:
        return _whole(ctx, ty, copy_pointer(ctx, place, copy), mask)
    backwards = reverse(fn, width, "i1", mask) if mask else None
    return reverse(fn, width, ty, _whole(ctx, ty, copy_pointer(ctx, place, copy, 1 - width), backwards))


def _whole(ctx: Context, ty: str, pointer: str, mask: str | None) -> str:
    if mask:
        return masked_load(ctx.fn, ctx.width, ty, pointer, mask, BYTES[ty])
    return ctx.fn.op(f"load <{ctx.width} x {ty}>, ptr {pointer}, align {BYTES[ty]}")


def _gather_part(ctx: Context, place: Place, pointers: str, mask: str | None) -> str:
    live = splat(ctx.fn, "i1", "true", ctx.width)
    if mask and not gathers(ctx.target, place.type):
        # Lanes one by one would each need a branch; reading zeros instead of the forbidden place needs none.
        vector = f"<{ctx.width} x ptr>"
        zeros = splat(ctx.fn, "ptr", _zeros(ctx), ctx.width)
        pointers = ctx.fn.op(f"select <{ctx.width} x i1> {mask}, {vector} {pointers}, {vector} {zeros}")
        mask = None
    return gather(ctx.fn, ctx.width, place.type, pointers, mask or live)


def _from_memory(ctx: Context, ty: str, width: int, text: str) -> str:
    if ty != "i1":
        return text
    return ctx.fn.op(f"icmp ne {vector_type('i8', width)} {text}, {splat(ctx.fn, 'i8', '0', width)}")


def _to_memory(ctx: Context, value: Value) -> Value:
    if value.type != "i1":
        return value
    if isinstance(value, Uniform):
        return Uniform("i8", ctx.fn.op(f"zext i1 {value.text} to i8"), value.depth)
    source, target = vector_type("i1", ctx.width), vector_type("i8", ctx.width)
    return Varying("i8", tuple(ctx.fn.op(f"zext {source} {part} to {target}") for part in parts_of(ctx, value)))


@emits("tile.store")
def _store(ctx: Context, op: Any) -> None:
    place = place_of(ctx, op.buffer, op.indices, op.strides.data, op.offset.data[0])
    mask = ctx.values[op.mask] if op.mask is not None else None
    if isinstance(mask, Uniform) and mask.number:
        mask = None
    value = ctx.values[op.value]
    if op.combine.data != "none":
        combine_store(ctx, op, place, value, mask)
        return
    value = _to_memory(ctx, value)
    if place.uniform:
        _store_same(ctx, place, value, mask)
    elif op.streams is not None and place.step == 1 and mask is None and ctx.masks is None and streams(ctx, place.type):
        for copy, text in enumerate(parts_of(ctx, value)):
            stream(ctx, place.type, text, copy_pointer(ctx, place, copy))
    else:
        _store_lanes(ctx, place, value, mask)


def _store_same(ctx: Context, place: Place, value: Value, mask: Value | None) -> None:
    """All lanes write one place."""
    if not isinstance(value, Uniform):
        store_lane_by_lane(ctx, place, value, mask, "none")
        return

    def write() -> None:
        ctx.fn.emit(f"store {place.type} {value.text}, ptr {place.pointer}, align {BYTES[place.type]}")

    if mask is None:
        write()
    else:
        when(
            ctx.fn,
            mask.text
            if isinstance(mask, Uniform)
            else any_of_parts(ctx, combined_mask(ctx, parts_of(ctx, mask)) or []),
            write,
        )


def _store_lanes(ctx: Context, place: Place, value: Value, mask: Value | None) -> None:
    fn, width, ty = ctx.fn, ctx.width, place.type
    masks = combined_mask(ctx, None if mask is None else parts_of(ctx, mask))
    values = parts_of(ctx, value)
    if place.step not in (1, -1):
        for i, pointers in enumerate(lane_pointers(ctx, place)):
            scatter(fn, width, ty, values[i], pointers, masks[i] if masks else splat(fn, "i1", "true", width))
        return
    for copy in range(ctx.copies):
        text, live = values[copy], masks[copy] if masks else None
        pointer = copy_pointer(ctx, place, copy, 0 if place.step == 1 else 1 - width)
        if place.step == -1:
            text = reverse(fn, width, ty, text)
            live = reverse(fn, width, "i1", live) if live else None
        if live:
            masked_store(fn, width, ty, text, pointer, live, BYTES[ty])
        else:
            fn.emit(f"store <{width} x {ty}> {text}, ptr {pointer}, align {BYTES[ty]}")
