"""Control flow and addressing that the micro-kernel and packing emitters share."""

from __future__ import annotations

from collections.abc import Callable

from luban.compiler.codegen.llvm.emitter import Function

Carried = list[tuple[str, str]]  # (LLVM type, initial value)


def loop(fn: Function, count: str, carried: Carried, body: Callable[[str, list[str]], list[str]]) -> list[str]:
    """`for i in range(count)` carrying values; `body(i, values)` returns their next values. Returns the last ones.

    The loop is bottom-tested behind a guard, the shape LLVM's own loop passes produce; `count` may be 0 or negative.
    """
    head, done, before = fn.new_block("loop"), fn.new_block("done"), fn.current
    fn.branch_if(fn.op(f"icmp sgt i64 {count}, 0"), head, done)
    fn.place(head)
    index, successor = fn.fresh("i"), fn.fresh("n")
    names = [fn.fresh("c") for _ in carried]
    slot = len(fn.lines)  # the phis go here once the values of the back edge have names
    new = body(index, names)
    fn.emit(f"{successor} = add nuw nsw i64 {index}, 1")
    again = fn.op(f"icmp slt i64 {successor}, {count}")
    latch = fn.current
    fn.branch_if(again, head, done)
    phis = [f"  {index} = phi i64 [ 0, %{before} ], [ {successor}, %{latch} ]"]
    for name, (ty, init), value in zip(names, carried, new, strict=True):
        phis.append(f"  {name} = phi {ty} [ {init}, %{before} ], [ {value}, %{latch} ]")
    fn.lines[slot:slot] = phis
    fn.place(done)
    return [
        fn.op(f"phi {ty} [ {init}, %{before} ], [ {value}, %{latch} ]")
        for (ty, init), value in zip(carried, new, strict=True)
    ]


def when(fn: Function, condition: str, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """`if condition: then() else: otherwise()`, without results."""
    yes, end = fn.new_block("then"), fn.new_block("endif")
    no = fn.new_block("else") if otherwise else end
    fn.branch_if(condition, yes, no)
    fn.place(yes)
    then()
    fn.branch(end)
    if otherwise:
        fn.place(no)
        otherwise()
        fn.branch(end)
    fn.place(end)


def times(fn: Function, value: str, factor: int) -> str:
    """`value * factor` for an i64; constants stay constants."""
    if not value.startswith("%"):
        return str(int(value) * factor)
    if factor == 1:
        return value
    return fn.op(f"mul i64 {value}, {factor}")


def plus(fn: Function, left: str, right: str | int) -> str:
    """`left + right` for i64 operands."""
    right = str(right)
    if right == "0":
        return left
    if left == "0":
        return right
    return fn.op(f"add i64 {left}, {right}")


def offset(fn: Function, pointer: str, byte_count: str | int) -> str:
    """The pointer `byte_count` bytes further."""
    if str(byte_count) == "0":
        return pointer
    return fn.op(f"getelementptr i8, ptr {pointer}, i64 {byte_count}")


def lane_mask(fn: Function, lanes: int, count: str) -> str:
    """`<lanes x i1>` that is true in the first `count` lanes (an i64, any value)."""
    low = fn.intrinsic("llvm.smax.i64", "i64", [("i64", count), ("i64", "0")])
    clipped = fn.intrinsic("llvm.smin.i64", "i64", [("i64", low), ("i64", str(lanes))])
    narrow = fn.op(f"trunc i64 {clipped} to i32")
    numbers = ", ".join(f"i32 {i}" for i in range(lanes))
    return fn.op(f"icmp ult <{lanes} x i32> <{numbers}>, {fn.splat('i32', narrow, lanes)}")


def mangled(lanes: int, ty: str) -> str:
    """The part of an intrinsic's name that stands for `<lanes x ty>`, such as `v16f32`."""
    return f"v{lanes}" + {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}.get(ty, ty)


def masked_load(fn: Function, lanes: int, ty: str, pointer: str, mask: str, align: int) -> str:
    """Loads the lanes that `mask` selects; the others are zero and their memory is not touched."""
    vector = f"<{lanes} x {ty}>"
    arguments = [("ptr", f"align {align} {pointer}"), (f"<{lanes} x i1>", mask), (vector, "zeroinitializer")]
    name = f"llvm.masked.load.{mangled(lanes, ty)}.p0"
    callee = fn.module.declare(name, vector, ["ptr", f"<{lanes} x i1>", vector])
    return fn.call(vector, callee, arguments)


def masked_store(fn: Function, lanes: int, ty: str, value: str, pointer: str, mask: str, align: int) -> None:
    """Stores the lanes that `mask` selects."""
    vector = f"<{lanes} x {ty}>"
    callee = fn.module.declare(f"llvm.masked.store.{mangled(lanes, ty)}.p0", "void", [vector, "ptr", f"<{lanes} x i1>"])
    fn.call("void", callee, [(vector, value), ("ptr", f"align {align} {pointer}"), (f"<{lanes} x i1>", mask)])
