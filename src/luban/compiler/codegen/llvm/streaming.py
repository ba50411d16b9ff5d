"""Loads that fetch what comes later, and stores past the caches.

Prefetching (x86): the chip's own prefetcher stops at every page of 4 KB, and a body of 60 instructions leaves room for
few loads in flight. Measured with GELU over 8 MB of bfloat16: 1.2 ms instead of 2.4 from memory, 1.1, not 1.3, from cache.

Stores past the caches (AVX-512): they do not read the line that they overwrite, but need aligned memory.

Whether a vector is aligned is asked when the kernel runs, since nobody promises where a result lies: a test and a branch
a vector, which cost nothing beside the memory. AArch64's pairs promise less order than its fences give back; not there.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.address import Place, shifted
from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.lanes import features_of
from luban.compiler.codegen.llvm.values import BYTES

# Bytes of a vector: a whole line. With half lines (bfloat16) layer norm took 2.2 ms instead of 1.7, softmax 2.6, not 2.3.
_LINE = 64


_AHEAD = 4096  # bytes; 1024 and 2048 gained a tenth less


def fetch_ahead(ctx: Context, place: Place) -> None:
    """Asks for the lines that the vectors in flight will need `_AHEAD` bytes later."""
    if not ctx.target.triple.startswith("x86_64"):
        return
    name = ctx.module.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
    size = BYTES[place.type]
    for at in range(0, ctx.copies * ctx.width * size, _LINE):
        pointer = shifted(ctx, place.pointer, place.type, (at + _AHEAD) // size)
        ctx.fn.call("void", name, [("ptr", pointer), ("i32", "0"), ("i32", "3"), ("i32", "1")])


def streams(ctx: Context, ty: str) -> bool:
    """Whether vectors of this element type can go past the caches here."""
    return "avx512f" in features_of(ctx.target) and ctx.width * BYTES[ty] >= _LINE


def stream(ctx: Context, ty: str, text: str, pointer: str) -> None:
    """Stores one vector past the caches where it is aligned, as usual elsewhere."""
    name, vector = f"luban.stream.{ty}.{ctx.width}", f"<{ctx.width} x {ty}>"
    if name not in ctx.module.functions:
        inner = Function(
            ctx.module, name, "void", [("ptr", "to"), (vector, "value")], "internal", "alwaysinline nounwind"
        )
        _write(inner, vector, ctx.width * BYTES[ty], BYTES[ty])
        ctx.module.add(inner)
    ctx.fn.call("void", f"@{name}", [("ptr", pointer), (vector, text)])
    ctx.streams = True


def _write(fn: Function, vector: str, size: int, element: int) -> None:
    address = fn.op("ptrtoint ptr %to to i64")
    aligned = fn.op(f"icmp eq i64 {fn.op(f'and i64 {address}, {size - 1}')}, 0")
    past, plain = fn.new_block("past"), fn.new_block("plain")
    fn.branch_if(aligned, past, plain)
    fn.place(past)
    fn.emit(f"store {vector} %value, ptr %to, align {size}, !nontemporal {fn.module.note('i32 1')}")
    fn.emit("ret void")
    fn.place(plain)
    fn.emit(f"store {vector} %value, ptr %to, align {element}")
    fn.emit("ret void")
