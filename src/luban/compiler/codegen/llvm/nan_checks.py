"""Checks between kernels: is there a NaN in this memory? Only programs compiled with `detect_nan` hold them.

The entry function returns at the first NaN, with the check's number in the run's status above the bits of `checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from luban.compiler.codegen.llvm.dims import emit_dim
from luban.compiler.codegen.llvm.dots.flow import loop, offset
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.symbolic import Dim

STATUS_SHIFT = 8  # the status holds (number of the check + 1) << STATUS_SHIFT
STATUS_AT = 16  # byte offset of the status pointer in the run's struct
_LANES_BYTES = 32

# element type -> (bits, everything but the sign, the bits of infinity): larger than that is a NaN
_FORMS = {
    "float": (32, 0x7FFFFFFF, 0x7F800000),
    "double": (64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "half": (16, 0x7FFF, 0x7C00),
    "bfloat": (16, 0x7FFF, 0x7F80),
}


@dataclass(frozen=True)
class NanCheck:
    """`count` elements of an LLVM float type at a place (as in `program.Call.pointers`); `number` tells it from others."""

    number: int
    type: str
    place: Any
    count: Dim


def emit_checks(
    fn: Function, checks: Sequence[NanCheck], values: dict[str, str], pointer: Callable[[Any], str]
) -> None:
    """Adds the checks where `fn` stands; the function returns at the first NaN."""
    for check in checks:
        name = _scanner(fn.module, check.type)
        count = emit_dim(fn, check.count, values)
        found = fn.call("i1", f"@{name}", [("ptr", pointer(check.place)), ("i64", count)])
        bad, good = fn.new_block("nan"), fn.new_block("fine")
        fn.branch_if(found, bad, good)
        fn.place(bad)
        status = fn.op(f"load ptr, ptr {offset(fn, '%rt', STATUS_AT)}, align 8")
        old = fn.op(f"load i64, ptr {status}, align 8")
        fn.emit(f"store i64 {fn.op(f'or i64 {old}, {(check.number + 1) << STATUS_SHIFT}')}, ptr {status}, align 8")
        fn.emit("ret void")
        fn.place(good)


def _scanner(module: Module, ty: str) -> str:
    """The name of `i1 (ptr data, i64 count)`, which tells whether there is a NaN; added where it is not there yet."""
    name = f"luban.any_nan.{ty}"
    if name in module.functions:
        return name
    bits, mask, infinity = _FORMS[ty]
    lanes = _LANES_BYTES * 8 // bits
    fn = Function(module, name, "i1", [("ptr", "data"), ("i64", "count")], "internal", "noinline nounwind")
    vector, word = f"<{lanes} x i{bits}>", f"i{bits}"

    def scan(step: int, kind: str, start: str, first: str) -> Callable[[str, list[str]], list[str]]:
        def body(index: str, carried: list[str]) -> list[str]:
            at = fn.op(f"getelementptr {kind}, ptr {start}, i64 {index}")
            value = fn.op(f"load {kind}, ptr {at}, align {bits // 8}")
            magnitude = fn.op(f"and {kind} {value}, {fn.splat(word, str(mask), step)}")
            worse = fn.op(f"icmp ugt {kind} {magnitude}, {carried[0]}")
            return [fn.op(f"select {first} {worse}, {kind} {magnitude}, {kind} {carried[0]}")]

        return body

    turns, rest = fn.op(f"udiv i64 %count, {lanes}"), fn.op(f"urem i64 %count, {lanes}")
    (most,) = loop(fn, turns, [(vector, "zeroinitializer")], scan(lanes, vector, "%data", f"<{lanes} x i1>"))
    top = fn.intrinsic(f"llvm.vector.reduce.umax.v{lanes}i{bits}", word, [(vector, most)])
    end = fn.op(f"getelementptr {vector}, ptr %data, i64 {turns}")
    (top,) = loop(fn, rest, [(word, top)], scan(1, word, end, "i1"))
    fn.emit(f"ret i1 {fn.op(f'icmp ugt {word} {top}, {infinity}')}")
    module.add(fn)
    return name
