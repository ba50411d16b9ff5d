"""tile.check: an index that may be wrong is replaced by 0 and the run is marked as failed."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, dim_value, emits, parts_of
from luban.compiler.codegen.llvm.dots.flow import when
from luban.compiler.codegen.llvm.lanes import any_of_parts
from luban.compiler.codegen.llvm.values import Uniform, Value, Varying, splat, vector_type

OUT_OF_RANGE = 1  # bit of the run's status
_STATUS_AT = 16  # byte offset of the status pointer in the run's struct


@emits("tile.check")
def _check(ctx: Context, op: Any) -> None:
    fn = ctx.fn
    value, bound = ctx.values[op.index], dim_value(ctx, op.bound.data[0])
    uniform = isinstance(value, Uniform)
    width = 1 if uniform else ctx.width
    vector, condition = vector_type("i64", width), vector_type("i1", width)
    parts = [value.text] if isinstance(value, Uniform) else parts_of(ctx, value)
    limit, zero = splat(fn, "i64", bound.text, width), splat(fn, "i64", "0", width)
    good = [fn.op(f"icmp ult {vector} {part}, {limit}") for part in parts]
    kept = [fn.op(f"select {condition} {g}, {vector} {p}, {vector} {zero}") for g, p in zip(good, parts, strict=True)]
    bad = [fn.op(f"xor {condition} {g}, {splat(fn, 'i1', 'true', width)}") for g in good]
    if uniform:
        when(fn, bad[0], lambda: _mark(ctx))
        result: Value = Uniform("i64", kept[0], ctx.depth)
    else:
        if ctx.masks:
            bad = [fn.op(f"and {condition} {b}, {m}") for b, m in zip(bad, ctx.masks, strict=True)]
        when(fn, any_of_parts(ctx, bad), lambda: _mark(ctx))
        result = Varying("i64", tuple(kept))
    ctx.values[op.result] = result


def _mark(ctx: Context) -> None:
    fn = ctx.fn
    status = fn.op(f"load ptr, ptr {fn.op(f'getelementptr i8, ptr {ctx.rt}, i64 {_STATUS_AT}')}, align 8")
    fn.op(f"atomicrmw or ptr {status}, i64 {OUT_OF_RANGE} monotonic, align 8")
