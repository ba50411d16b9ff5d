"""Where a load or store goes: a scalar pointer, and how the place moves from lane to lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.context import Context, add, at_depth, buffer_of, dim_value, multiply
from luban.compiler.codegen.llvm.values import Ramp, Uniform, Varying, constant, memory_type
from luban.symbolic import Dim


@dataclass(frozen=True)
class Place:
    """`pointer` is the element of lane 0 of the first copy as far as uniform terms go; `type` is the element in memory.

    Lanes move by `step` elements each, or, where `offsets` is given, to those element offsets (one i64 vector a copy).
    """

    pointer: str
    type: str
    step: int
    offsets: tuple[str, ...] | None = None

    @property
    def uniform(self) -> bool:
        return self.step == 0 and self.offsets is None


def place_of(ctx: Context, buffer: SSAValue, indices: Sequence[SSAValue], strides: Sequence[Dim], offset: Dim) -> Place:
    """The place of buffer[offset + sum of stride * index]."""
    target = buffer_of(ctx, buffer)
    ty = memory_type(target.type)
    terms, step, moving = [dim_value(ctx, offset)], 0, []
    for index, stride in zip(indices, strides, strict=True):
        value = ctx.values[index]
        if isinstance(stride, int) and stride == 0:
            continue
        factor = dim_value(ctx, stride)
        if isinstance(value, Uniform):
            terms.append(multiply(ctx, value, factor))
        elif isinstance(value, Ramp):
            terms.append(multiply(ctx, value.base, factor))
            if isinstance(stride, int):
                step += value.step * stride
            else:
                moving.append(_symbolic_lanes(ctx, multiply(ctx, factor, constant("i64", value.step))))
        else:
            assert isinstance(value, Varying)
            moving.append([_times(ctx, part, factor) for part in value.parts])
    pointer = _pointer(ctx, target.pointer, ty, terms)
    if not moving:
        return Place(pointer, ty, step)
    return Place(pointer, ty, 0, tuple(_sum_lanes(ctx, moving, step)))


def lane_pointers(ctx: Context, place: Place) -> list[str]:
    """A vector of pointers for each copy."""
    fn, width = ctx.fn, ctx.width
    if place.offsets is not None:
        listed = list(place.offsets)
        return [fn.op(f"getelementptr {place.type}, ptr {place.pointer}, <{width} x i64> {part}") for part in listed]
    # 32-bit offsets, which LLVM sign-extends: half the work of 64-bit ones where a gather takes them
    lanes = ", ".join(f"i32 {lane * place.step}" for lane in range(width))
    starts = [copy_pointer(ctx, place, copy) for copy in range(ctx.copies)]
    return [fn.op(f"getelementptr {place.type}, ptr {start}, <{width} x i32> <{lanes}>") for start in starts]


def copy_pointer(ctx: Context, place: Place, copy: int, extra: int = 0) -> str:
    """The pointer to lane 0 of one copy, moved by `extra` elements."""
    return shifted(ctx, place.pointer, place.type, copy * ctx.width * place.step + extra)


def shifted(ctx: Context, pointer: str, ty: str, elements: int) -> str:
    """The pointer moved by a number of elements."""
    return pointer if elements == 0 else ctx.fn.op(f"getelementptr {ty}, ptr {pointer}, i64 {elements}")


def _pointer(ctx: Context, base: str, ty: str, terms: list[Uniform]) -> str:
    """base + the sum of the terms, outermost first, so that what an inner loop does not change can move out of it.

    On x86 a number comes last: an instruction takes it for nothing, while a pointer for each of many numbers (the taps of a
    depthwise convolution) lives outside of the loop, on the stack, and is read again for every use.
    """
    number = 0
    if ctx.target.triple.startswith("x86_64") and any(term.depth > 0 for term in terms):
        number = sum(int(term.number) for term in terms if term.number is not None)
        terms = [term for term in terms if term.number is None]
    depths = sorted({term.depth for term in terms})
    for depth in depths:
        total = constant("i64", 0)
        for term in terms:
            if term.depth == depth:
                total = add(ctx, total, term)
        if total.number != 0:
            with at_depth(ctx, depth) as fn:
                base = fn.op(f"getelementptr {ty}, ptr {base}, i64 {total.text}")
    if number:
        with at_depth(ctx, depths[-1]) as fn:
            base = fn.op(f"getelementptr {ty}, ptr {base}, i64 {number}")
    return base


def _symbolic_lanes(ctx: Context, step: Uniform) -> list[str]:
    """Offsets of lanes that are `step` elements apart."""
    fn, width = ctx.fn, ctx.width
    splat = fn.splat("i64", step.text, width)
    parts = []
    for copy in range(ctx.copies):
        lanes = ", ".join(f"i64 {copy * width + lane}" for lane in range(width))
        parts.append(fn.op(f"mul nsw <{width} x i64> {splat}, <{lanes}>"))
    return parts


def _times(ctx: Context, part: str, factor: Uniform) -> str:
    if factor.number == 1:
        return part
    return ctx.fn.op(f"mul <{ctx.width} x i64> {part}, {ctx.fn.splat('i64', factor.text, ctx.width)}")


def _sum_lanes(ctx: Context, moving: list[list[str]], step: int) -> list[str]:
    fn, width = ctx.fn, ctx.width
    parts = []
    for copy in range(ctx.copies):
        total = moving[0][copy]
        for other in moving[1:]:
            total = fn.op(f"add <{width} x i64> {total}, {other[copy]}")
        if step:
            lanes = ", ".join(f"i64 {(copy * width + lane) * step}" for lane in range(width))
            total = fn.op(f"add <{width} x i64> {total}, <{lanes}>")
        parts.append(total)
    return parts
