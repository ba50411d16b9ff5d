"""Parallel loops: their bodies become functions of their own, run by the process's OpenMP pool."""

from __future__ import annotations

from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.capture import captured, constants, operand, renamed
from luban.compiler.codegen.llvm.context import Context, add, emit_block, uniform_of
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.lanes import function_attributes
from luban.compiler.codegen.llvm.strips import Strip, emit_strip
from luban.compiler.codegen.llvm.values import BYTES, Uniform, Value

PARALLEL_FOR = "luban.parallel_for"
_THREAD = "luban.thread"
_SLOT = 8  # bytes of one captured value in the context


def emit_parallel(ctx: Context, op: Any) -> None:
    """Writes the body function and the call that runs it on [0, upper - lower)."""
    fn = ctx.fn
    add_parallel_for(ctx.module)
    lower, upper = uniform_of(ctx, op.lower, "a loop bound"), uniform_of(ctx, op.upper, "a loop bound")
    outside = captured(ctx, op)
    listed = [operand(value) for value in outside.values()] + [("i64", text) for text in ctx.symbols.values()]
    listed += [("i64", lower.text), ("ptr", ctx.rt)]
    block = fn.alloca(f"[{len(listed)} x i64]", 8)
    for number, (ty, text) in enumerate(listed):
        fn.emit(f"store {ty} {text}, ptr {_slot(fn, block, number)}, align {BYTES[ty]}")
    name = _body_name(ctx)
    ctx.module.functions[name] = ""  # holds the name while the body is written
    _emit_body(ctx, op, name, outside, lower, upper)
    count = fn.op(f"sub nsw i64 {upper.text}, {lower.text}")
    fn.call("void", f"@{PARALLEL_FOR}", [("ptr", f"@{name}"), ("ptr", block), ("i64", count), ("ptr", ctx.rt)])


def _body_name(ctx: Context) -> str:
    number = 0
    while f"{ctx.fn.name}.p{number}" in ctx.module.functions:
        number += 1
    return f"{ctx.fn.name}.p{number}"


def _slot(fn: Function, block: str, number: int) -> str:
    return block if number == 0 else fn.op(f"getelementptr i8, ptr {block}, i64 {number * _SLOT}")


def _emit_body(
    ctx: Context, op: Any, name: str, outside: dict[SSAValue, Value], lower: Uniform, upper: Uniform
) -> None:
    parameters = [("ptr", "ctx"), ("i64", "begin"), ("i64", "end")]
    fn = Function(ctx.module, name, "void", parameters, "internal", function_attributes(ctx.target))
    numbers = iter(range(len(outside) + len(ctx.symbols) + 2))

    def next_captured(ty: str) -> str:
        return fn.op(f"load {ty}, ptr {_slot(fn, '%ctx', next(numbers))}, align {BYTES[ty]}")

    values = constants(ctx)
    for key, value in outside.items():
        values[key] = renamed(value, next_captured(operand(value)[0]))
    symbols = {symbol: next_captured("i64") for symbol in ctx.symbols}
    first = next_captured("i64")
    start = lower if lower.number is not None else Uniform("i64", first, 0, None, lower.span)
    inner = Context(ctx.module, fn, ctx.target, symbols, next_captured("ptr"), values)
    entry_lines = len(fn.lines)
    most = upper.span[1] - lower.span[0] if lower.span and upper.span else None
    _run_chunk(inner, op, start, None if most is None else (0, max(0, most)))
    inner.finish(entry_lines)


def _run_chunk(ctx: Context, op: Any, start: Uniform, iterations: tuple[int, int] | None) -> None:
    """The loop over [start + begin, start + end), which lies within `iterations` of start."""
    block = op.body.block

    def body(index: Uniform, _carried: list[str]) -> list[str]:
        ctx.values[block.args[0]] = index
        emit_block(ctx, block)
        return []

    begin, end = (Uniform("i64", f"%{name}", span=iterations) for name in ("begin", "end"))
    emit_strip(ctx, Strip(add(ctx, start, begin), add(ctx, start, end), 1, certain=True), [], body)


def add_parallel_for(module: Module) -> None:
    """Adds `void luban.parallel_for(body, ctx, n, rt)`: body(ctx, begin, end) on [0, n), split among threads."""
    if PARALLEL_FOR in module.functions:
        return
    module.declare("GOMP_parallel", "void", ["ptr", "ptr", "i32", "i32"], "nounwind")
    module.declare("omp_get_thread_num", "i32", [], "nounwind")
    module.declare("omp_get_num_threads", "i32", [], "nounwind")
    module.declare("llvm.smin.i64", "i64", ["i64", "i64"])
    module.functions[_THREAD] = _THREAD_TEXT
    module.functions[PARALLEL_FOR] = _PARALLEL_FOR_TEXT


_THREAD_TEXT = f"""define internal void @{_THREAD}(ptr %task) nounwind {{
entry:
  %body = load ptr, ptr %task, align 8
  %ctx.at = getelementptr i8, ptr %task, i64 8
  %ctx = load ptr, ptr %ctx.at, align 8
  %n.at = getelementptr i8, ptr %task, i64 16
  %n = load i64, ptr %n.at, align 8
  %me.narrow = call i32 @omp_get_thread_num()
  %all.narrow = call i32 @omp_get_num_threads()
  %me = zext i32 %me.narrow to i64
  %all = zext i32 %all.narrow to i64
  %low = mul i64 %me, %n
  %begin = udiv i64 %low, %all
  %high = add i64 %low, %n
  %end = udiv i64 %high, %all
  %some = icmp ult i64 %begin, %end
  br i1 %some, label %run, label %done
run:
  call void %body(ptr %ctx, i64 %begin, i64 %end)
  br label %done
done:
  ret void
}}"""

_PARALLEL_FOR_TEXT = f"""define internal void @{PARALLEL_FOR}(ptr %body, ptr %ctx, i64 %n, ptr %rt) noinline nounwind {{
entry:
  %task = alloca [3 x i64], align 8
  %threads = load i64, ptr %rt, align 8
  %some = icmp sgt i64 %n, 0
  br i1 %some, label %check, label %done
check:
  %useful = call i64 @llvm.smin.i64(i64 %threads, i64 %n)
  %alone = icmp sle i64 %useful, 1
  br i1 %alone, label %here, label %team
here:
  call void %body(ptr %ctx, i64 0, i64 %n)
  br label %done
team:
  store ptr %body, ptr %task, align 8
  %ctx.at = getelementptr i8, ptr %task, i64 8
  store ptr %ctx, ptr %ctx.at, align 8
  %n.at = getelementptr i8, ptr %task, i64 16
  store i64 %n, ptr %n.at, align 8
  %width = trunc i64 %useful to i32
  call void @GOMP_parallel(ptr @{_THREAD}, ptr %task, i32 %width, i32 0)
  br label %done
done:
  ret void
}}"""
