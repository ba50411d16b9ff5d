"""What happens to the accumulators of a tile: added to C, stored, or handed to an epilogue."""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import lane_mask, loop, masked_load, masked_store, offset, times, when
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES, DotSpec
from luban.compiler.codegen.llvm.emitter import Function


def finish(fn: Function, spec: DotSpec, sums: list[str]) -> None:
    """Ends a tile whose accumulators are SSA values, row by row.

    A full tile goes straight from registers to memory. Everything else goes through the stack (which stays in the first
    cache) and a rolled loop: the code of an epilogue is then written twice, not once an accumulator, and rows and
    columns beyond the tile's extents are never reached.
    """
    if spec.whole_tile:
        _store_whole(fn, spec, sums)
        return
    if spec.epilogue and not spec.unroll_epilogue:
        walk(fn, spec, _spill(fn, spec, sums))
        return
    full = fn.op(f"and i1 {fn.op(f'icmp eq i64 %m, {spec.mr}')}, {fn.op(f'icmp eq i64 %n, {spec.nr}')}")

    def direct() -> None:
        for number, value in enumerate(sums):
            row, column = divmod(number, spec.nr_vectors)
            deliver(fn, spec, value, str(row), str(column * spec.lanes), None, spec.lanes)

    when(fn, full, direct, lambda: walk(fn, spec, _spill(fn, spec, sums)))


def _store_whole(fn: Function, spec: DotSpec, sums: list[str]) -> None:
    step = spec.lanes * ELEMENT_BYTES[spec.acc_type]
    for number, value in enumerate(sums):
        place = offset(fn, "%C", number * step)
        if spec.accumulate:
            old = fn.op(f"load {spec.vector}, ptr {place}, align {step}")
            value = fn.op(f"{_addition(spec)} {spec.vector} {value}, {old}")
        fn.emit(f"store {spec.vector} {value}, ptr {place}, align {step}")


def _addition(spec: DotSpec) -> str:
    return "add" if spec.acc_type == "i32" else "fadd contract"


def walk(fn: Function, spec: DotSpec, buffer: str) -> None:
    """Delivers the valid part of a tile that lies in `buffer` (`mr` rows of `nr` accumulators, aligned to 64)."""
    size, lanes = ELEMENT_BYTES[spec.acc_type], spec.lanes
    whole = fn.op(f"udiv i64 %n, {lanes}")
    tail = fn.op(f"urem i64 %n, {lanes}")
    mask = lane_mask(fn, lanes, tail) if spec.masked else None
    edge = fn.op(f"mul i64 {whole}, {lanes}")

    def row(i: str, _values: list[str]) -> list[str]:
        line = offset(fn, buffer, times(fn, i, spec.nr * size))

        def vector(j: str, _values: list[str]) -> list[str]:
            column = times(fn, j, lanes)
            value = fn.op(f"load {spec.vector}, ptr {offset(fn, line, times(fn, column, size))}, align {size}")
            deliver(fn, spec, value, i, column, None, lanes)
            return []

        def single(j: str, _values: list[str]) -> list[str]:
            column = fn.op(f"add i64 {edge}, {j}")
            value = fn.op(f"load {spec.acc_type}, ptr {offset(fn, line, times(fn, column, size))}, align {size}")
            deliver(fn, spec, value, i, column, None, 1)
            return []

        def last() -> None:
            value = fn.op(f"load {spec.vector}, ptr {offset(fn, line, times(fn, edge, size))}, align {size}")
            deliver(fn, spec, value, i, edge, mask, lanes)

        loop(fn, whole, [], vector)
        if spec.masked:
            when(fn, fn.op(f"icmp ne i64 {tail}, 0"), last)
        else:
            loop(fn, tail, [], single)
        return []

    loop(fn, "%m", [], row)


def deliver(fn: Function, spec: DotSpec, value: str, row: str, column: str, mask: str | None, lanes: int) -> None:
    """One vector of results (a scalar when `lanes` is 1): adds C if asked, then stores or calls the epilogue."""
    ty, size = spec.acc_type, ELEMENT_BYTES[spec.acc_type]
    vector = ty if lanes == 1 else f"<{lanes} x {ty}>"
    pointer = ""
    if spec.accumulate or not spec.epilogue:
        start = fn.op(f"mul i64 {row}, %c_rs") if row != "0" else "0"
        place = fn.op(f"add i64 {start}, {column}")
        pointer = fn.op(f"getelementptr {ty}, ptr %C, i64 {place}")
    if spec.accumulate:
        old = (
            masked_load(fn, lanes, ty, pointer, mask, size)
            if mask
            else fn.op(f"load {vector}, ptr {pointer}, align {size}")
        )
        value = fn.op(f"{_addition(spec)} {vector} {value}, {old}")
    if spec.epilogue:
        spec.epilogue(fn, value, row, column, mask, lanes)
    elif mask:
        masked_store(fn, lanes, ty, value, pointer, mask, size)
    else:
        fn.emit(f"store {vector} {value}, ptr {pointer}, align {size}")


def _spill(fn: Function, spec: DotSpec, sums: list[str]) -> str:
    size = ELEMENT_BYTES[spec.acc_type]
    buffer = fn.alloca(f"[{spec.mr * spec.nr} x {spec.acc_type}]", 64)
    for number, value in enumerate(sums):
        place = offset(fn, buffer, number * spec.lanes * size)
        fn.emit(f"store {spec.vector} {value}, ptr {place}, align {size}")
    return buffer
