"""tile.alloc: scratch memory of one thread, on the stack while small, else from the heap once a function call."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, at_entry, buffer_of, dim_value, emits
from luban.compiler.codegen.llvm.values import BYTES, Buffer, memory_type, scalar_type
from luban.errors import ConfigError

STACK_BYTES = 64 * 1024  # of one function
_ALIGN = 64


@emits("tile.alloc")
def _alloc(ctx: Context, op: Any) -> None:
    if ctx.width > 1:
        raise ConfigError("tile.alloc inside a vector loop has no place a lane; allocate outside of the loop")
    ty = scalar_type(op.buffer.type)
    size = BYTES[memory_type(ty)]
    elements = op.elements.data[0]
    if isinstance(elements, int) and ctx.stack_bytes + elements * size <= STACK_BYTES:
        ctx.stack_bytes += elements * size
        pointer = ctx.fn.alloca(f"[{max(1, elements)} x {memory_type(ty)}]", _ALIGN)
    else:
        pointer = _from_heap(ctx, dim_value(ctx, elements).text, size)
    ctx.values[op.buffer] = Buffer(ty, pointer)


@emits("tile.pairs")
def _pairs(ctx: Context, op: Any) -> None:
    ctx.values[op.buffer] = Buffer(scalar_type(op.buffer.type), buffer_of(ctx, op.source).pointer)


def _from_heap(ctx: Context, elements: str, size: int) -> str:
    """Taken at the function's entry, given back at its end: a parallel body pays once a chunk, not an iteration."""
    with at_entry(ctx) as fn:
        total = fn.op(f"mul i64 {elements}, {size}")
        rounded = fn.op(f"and i64 {fn.op(f'add i64 {total}, {_ALIGN * 2 - 1}')}, {-_ALIGN}")
        callee = fn.module.declare("aligned_alloc", "ptr", ["i64", "i64"], "nounwind")
        pointer = fn.call("ptr", callee, [("i64", str(_ALIGN)), ("i64", rounded)])
    ctx.heap.append(pointer)
    return pointer
