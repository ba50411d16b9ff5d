"""tile.check: an index that may be wrong is replaced by 0 and the run is marked as failed."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, add, dim_value, emits, parts_of
from luban.compiler.codegen.llvm.dots.flow import when
from luban.compiler.codegen.llvm.lanes import any_of_parts
from luban.compiler.codegen.llvm.values import Ramp, Uniform, Value, Varying, constant, splat, vector_type

OUT_OF_RANGE = 1  # bit of the run's status
_STATUS_AT = 16  # byte offset of the status pointer in the run's struct


@emits("tile.check")
def _check(ctx: Context, op: Any) -> None:
    value, bound = ctx.values[op.index], dim_value(ctx, op.bound.data[0])
    if isinstance(value, Uniform):
        ctx.values[op.result] = _checked_scalar(ctx, value, bound, 1)
    elif _checks_as_one(ctx, value, bound):
        assert isinstance(value, Ramp)
        length = value.step * (ctx.width * ctx.copies - 1) + 1
        ctx.values[op.result] = Ramp(_checked_scalar(ctx, value.base, bound, length), value.step)
    else:
        ctx.values[op.result] = _checked_lanes(ctx, value, bound)


def _checks_as_one(ctx: Context, value: Value, bound: Uniform) -> bool:
    """True for lanes that lie side by side, all live, where the bound leaves room for them from element 0 on.

    A row of a table is then read as vectors. In a failed run its lanes read the first elements instead of element 0.
    """
    if not isinstance(value, Ramp) or value.step < 1 or ctx.masks is not None or bound.number is None:
        return False
    return int(bound.number) >= value.step * ctx.width * ctx.copies


def _checked_scalar(ctx: Context, value: Uniform, bound: Uniform, length: int) -> Uniform:
    """The index where it and the `length` elements from it on lie inside the bound, else 0."""
    fn = ctx.fn
    limit = add(ctx, bound, constant("i64", 1 - length))
    good = fn.op(f"icmp ult i64 {value.text}, {limit.text}")
    when(fn, fn.op(f"xor i1 {good}, true"), lambda: _mark(ctx))
    text = fn.op(f"select i1 {good}, i64 {value.text}, i64 0")
    return Uniform("i64", text, ctx.depth, None, None, value.multiple)


def _checked_lanes(ctx: Context, value: Value, bound: Uniform) -> Varying:
    fn, width = ctx.fn, ctx.width
    vector, condition = vector_type("i64", width), vector_type("i1", width)
    limit, zero = splat(fn, "i64", bound.text, width), splat(fn, "i64", "0", width)
    parts = parts_of(ctx, value)
    good = [fn.op(f"icmp ult {vector} {part}, {limit}") for part in parts]
    kept = [fn.op(f"select {condition} {g}, {vector} {p}, {vector} {zero}") for g, p in zip(good, parts, strict=True)]
    bad = [fn.op(f"xor {condition} {g}, {splat(fn, 'i1', 'true', width)}") for g in good]
    if ctx.masks:
        bad = [fn.op(f"and {condition} {b}, {m}") for b, m in zip(bad, ctx.masks, strict=True)]
    when(fn, any_of_parts(ctx, bad), lambda: _mark(ctx))
    return Varying("i64", tuple(kept))


def _mark(ctx: Context) -> None:
    fn = ctx.fn
    status = fn.op(f"load ptr, ptr {fn.op(f'getelementptr i8, ptr {ctx.rt}, i64 {_STATUS_AT}')}, align 8")
    fn.op(f"atomicrmw or ptr {status}, i64 {OUT_OF_RANGE} monotonic, align 8")
