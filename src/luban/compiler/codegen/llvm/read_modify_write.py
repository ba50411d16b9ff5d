"""Stores that combine with what memory holds: a vector at a time where lanes cannot meet, else lane by lane."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.address import Place, copy_pointer, lane_pointers
from luban.compiler.codegen.llvm.combine import combine_values, identity
from luban.compiler.codegen.llvm.context import Context, parts_of
from luban.compiler.codegen.llvm.dots.flow import loop, masked_load, masked_store, when
from luban.compiler.codegen.llvm.lanes import combined_mask
from luban.compiler.codegen.llvm.reduce import combine_parts, reduce_lanes
from luban.compiler.codegen.llvm.values import BYTES, Uniform, Value, memory_type, splat, vector_type


def combine_store(ctx: Context, op: Any, place: Place, value: Value, mask: Value | None) -> None:
    """memory = memory combined with value, for every live lane."""
    combine = op.combine.data
    if ctx.width == 1:
        assert isinstance(value, Uniform)
        _guard(ctx, mask, lambda: _combine_one(ctx, combine, place.pointer, value.type, value.text))
    elif place.uniform:
        _combine_same(ctx, combine, place, value, mask)
    elif place.step == 1:
        _combine_neighbours(ctx, combine, place, value, mask)
    else:
        store_lane_by_lane(ctx, place, value, mask, combine)


def _guard(ctx: Context, mask: Value | None, then: Any) -> None:
    if mask is None:
        then()
    else:
        assert isinstance(mask, Uniform)
        when(ctx.fn, mask.text, then)


def _combine_one(ctx: Context, combine: str, pointer: str, ty: str, text: str) -> None:
    """One element; bools are a byte in memory."""
    fn, held = ctx.fn, memory_type(ty)
    if combine != "none":
        old = fn.op(f"load {held}, ptr {pointer}, align {BYTES[held]}")
        if ty == "i1":
            old = fn.op(f"icmp ne i8 {old}, 0")
        text = combine_values(ctx, combine, ty, 1, old, text)
    if ty == "i1":
        text = fn.op(f"zext i1 {text} to i8")
    fn.emit(f"store {held} {text}, ptr {pointer}, align {BYTES[held]}")


def _combine_same(ctx: Context, combine: str, place: Place, value: Value, mask: Value | None) -> None:
    """All lanes meet in one place: they are reduced first."""
    ty, parts = value.type, parts_of(ctx, value)
    masks = combined_mask(ctx, None if mask is None else parts_of(ctx, mask))
    if masks:
        vector, condition = vector_type(ty, ctx.width), vector_type("i1", ctx.width)
        empty = splat(ctx.fn, ty, identity(ty, combine, False), ctx.width)
        parts = [
            ctx.fn.op(f"select {condition} {m}, {vector} {p}, {vector} {empty}")
            for m, p in zip(masks, parts, strict=True)
        ]
    total = reduce_lanes(ctx, combine, ty, ctx.width, combine_parts(ctx, combine, ty, ctx.width, parts))
    _combine_one(ctx, combine, place.pointer, ty, total)


def _combine_neighbours(ctx: Context, combine: str, place: Place, value: Value, mask: Value | None) -> None:
    fn, width, ty = ctx.fn, ctx.width, value.type
    if ty == "i1":
        store_lane_by_lane(ctx, place, value, mask, combine)
        return
    held = memory_type(ty)
    masks = combined_mask(ctx, None if mask is None else parts_of(ctx, mask))
    for copy, text in enumerate(parts_of(ctx, value)):
        pointer = copy_pointer(ctx, place, copy)
        if masks:
            old = masked_load(fn, width, held, pointer, masks[copy], BYTES[held])
            new = combine_values(ctx, combine, ty, width, old, text)
            masked_store(fn, width, held, new, pointer, masks[copy], BYTES[held])
            continue
        old = fn.op(f"load <{width} x {held}>, ptr {pointer}, align {BYTES[held]}")
        new = combine_values(ctx, combine, ty, width, old, text)
        fn.emit(f"store <{width} x {held}> {new}, ptr {pointer}, align {BYTES[held]}")


def store_lane_by_lane(ctx: Context, place: Place, value: Value, mask: Value | None, combine: str) -> None:
    """Every live lane in turn, so that lanes that hit one place see each other."""
    masks = combined_mask(ctx, None if mask is None else parts_of(ctx, mask))
    for copy, pointers in enumerate(lane_pointers(ctx, place)):
        _walk_lanes(ctx, value.type, parts_of(ctx, value)[copy], pointers, masks[copy] if masks else None, combine)


def _walk_lanes(ctx: Context, ty: str, text: str, pointers: str, mask: str | None, combine: str) -> None:
    """A loop over lanes that are first put on the stack: its code does not grow with the width."""
    fn, width = ctx.fn, ctx.width
    held = memory_type(ty)
    places, values = _on_stack(ctx, "ptr", pointers), _on_stack(ctx, held, _widened(ctx, ty, text))
    live = _on_stack(ctx, "i8", _widened(ctx, "i1", mask)) if mask else None

    def lane(number: str, _carried: list[str]) -> list[str]:
        def write() -> None:
            pointer = fn.op(f"load ptr, ptr {_element(ctx, 'ptr', places, number)}, align 8")
            element = fn.op(f"load {held}, ptr {_element(ctx, held, values, number)}, align {BYTES[held]}")
            if ty == "i1":
                element = fn.op(f"icmp ne i8 {element}, 0")
            _combine_one(ctx, combine, pointer, ty, element)

        if live is None:
            write()
        else:
            byte = fn.op(f"load i8, ptr {_element(ctx, 'i8', live, number)}, align 1")
            when(fn, fn.op(f"icmp ne i8 {byte}, 0"), write)
        return []

    loop(fn, str(width), [], lane)


def _on_stack(ctx: Context, ty: str, text: str) -> str:
    slot = ctx.fn.alloca(f"<{ctx.width} x {ty}>", 64)
    ctx.fn.emit(f"store <{ctx.width} x {ty}> {text}, ptr {slot}, align 64")
    return slot


def _element(ctx: Context, ty: str, slot: str, number: str) -> str:
    return ctx.fn.op(f"getelementptr {ty}, ptr {slot}, i64 {number}")


def _widened(ctx: Context, ty: str, text: str) -> str:
    if ty != "i1":
        return text
    return ctx.fn.op(f"zext {vector_type('i1', ctx.width)} {text} to {vector_type('i8', ctx.width)}")
