"""The entry function of a program's object: `luban_entry(args, syms, arena, offsets, rt)`, one call a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from luban.compiler.codegen.llvm.dims import emit_dim
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.nan_checks import STATUS_AT, NanCheck, emit_checks
from luban.compiler.codegen.llvm.python_call import add_python_call
from luban.symbolic import Dim

ENTRY = "luban_entry"
# bytes from the start of the run's struct: i64 num_threads, ptr stamps, ptr status
STAMPS_AT = 8
_CLOCK_MONOTONIC = 1

Operand = tuple[Literal["arg", "temp"], int, Dim]


@dataclass(frozen=True)
class Call:
    """One kernel call.

    kernel    name of a function `void @kernel(ptr..., i64..., ptr rt)` of the module
    pointers  its buffers: ("arg", i, byte offset) in the caller's argument i, ("temp", j, byte offset) in temporary j
    dims      values of its symbols, in its own order, as dims over the program's symbols
    checks    what is searched for a NaN after it
    fallible  whether it may meet bad data; the program then stops behind it, before anything more is overwritten
    """

    kernel: str
    pointers: tuple[Operand, ...]
    dims: tuple[Dim, ...] = ()
    checks: tuple[NanCheck, ...] = ()
    fallible: bool = False


def emit_entry(
    module: Module, calls: Sequence[Call], symbols: Sequence[str], name: str = ENTRY, first: Sequence[NanCheck] = ()
) -> None:
    """Adds the entry and its way in from Python; `symbols` are the program's symbols in the order of its `syms` array.

    When the run asks for it, every call is stamped: nanoseconds of the monotonic clock before and after it go to
    stamps[2 * k] and stamps[2 * k + 1] of the k-th call. `first` is searched for NaNs before the first call.
    """
    parameters = [("ptr", p) for p in ("args", "syms", "arena", "offsets", "rt")]
    fn = Function(module, name, "void", parameters, "", "nounwind")
    values = {symbol: _element(fn, "i64", "%syms", i) for i, symbol in enumerate(symbols)}
    stamps = fn.op(f"load ptr, ptr {fn.op(f'getelementptr i8, ptr %rt, i64 {STAMPS_AT}')}, align 8")
    if calls:
        _add_stamp(module)
    emit_checks(fn, first, values, lambda place: _pointer(fn, place, values))
    for number, call in enumerate(calls):
        arguments = [("ptr", _pointer(fn, operand, values)) for operand in call.pointers]
        arguments += [("i64", emit_dim(fn, dim, values)) for dim in call.dims]
        fn.call("void", f"@{_STAMP}", [("ptr", stamps), ("i64", str(2 * number))])
        fn.call("void", f"@{call.kernel}", [*arguments, ("ptr", "%rt")])
        fn.call("void", f"@{_STAMP}", [("ptr", stamps), ("i64", str(2 * number + 1))])
        if call.fallible and number + 1 < len(calls):
            _stop_on_bad_data(fn)
        emit_checks(fn, call.checks, values, lambda place: _pointer(fn, place, values))
    fn.emit("ret void")
    module.add(fn)
    add_python_call(module, name)


def _stop_on_bad_data(fn: Function) -> None:
    status = fn.op(f"load ptr, ptr {fn.op(f'getelementptr i8, ptr %rt, i64 {STATUS_AT}')}, align 8")
    bad, good = fn.new_block("bad"), fn.new_block("good")
    fn.branch_if(fn.op(f"icmp ne i64 {fn.op(f'load i64, ptr {status}, align 8')}, 0"), bad, good)
    fn.place(bad)
    fn.emit("ret void")
    fn.place(good)


def _element(fn: Function, ty: str, array: str, index: int) -> str:
    place = array if index == 0 else fn.op(f"getelementptr {ty}, ptr {array}, i64 {index}")
    return fn.op(f"load {ty}, ptr {place}, align 8")


def _pointer(fn: Function, operand: Operand, values: dict[str, str]) -> str:
    kind, index, offset = operand
    if kind == "arg":
        base = _element(fn, "ptr", "%args", index)
    else:
        base = fn.op(f"getelementptr i8, ptr %arena, i64 {_element(fn, 'i64', '%offsets', index)}")
    return base if offset == 0 else fn.op(f"getelementptr i8, ptr {base}, i64 {emit_dim(fn, offset, values)}")


_STAMP = "luban.stamp"


def _add_stamp(module: Module) -> None:
    """Adds `void luban.stamp(ptr stamps, i64 index)`: the monotonic clock in nanoseconds, unless stamps is null.

    It is never inlined: LLVM would otherwise write the entry twice, once for runs that record and once for those that
    do not.
    """
    module.declare("clock_gettime", "i32", ["i32", "ptr"], "nounwind")
    module.functions[_STAMP] = f"""define internal void @{_STAMP}(ptr %stamps, i64 %index) noinline nounwind {{
entry:
  %off = icmp eq ptr %stamps, null
  br i1 %off, label %done, label %on
on:
  %time = alloca [2 x i64], align 8
  %failed = call i32 @clock_gettime(i32 {_CLOCK_MONOTONIC}, ptr %time)
  %seconds = load i64, ptr %time, align 8
  %rest = getelementptr i8, ptr %time, i64 8
  %nanoseconds = load i64, ptr %rest, align 8
  %scaled = mul i64 %seconds, 1000000000
  %now = add i64 %scaled, %nanoseconds
  %at = getelementptr i64, ptr %stamps, i64 %index
  store i64 %now, ptr %at, align 8
  br label %done
done:
  ret void
}}"""
