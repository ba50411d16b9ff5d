"""Packing into groups of K as wide as a vector (rows of an AMX tile): transposes of values, or copies row by row.

Edges go through the stack or under masks as in `pack_blocks`; a group is always written whole, zeros beyond K.
"""

from __future__ import annotations

from collections.abc import Callable

from luban.compiler.codegen.llvm.dots.flow import loop, offset, plus, times, when
from luban.compiler.codegen.llvm.dots.fma import stored
from luban.compiler.codegen.llvm.dots.pack_blocks import Block, fill, groups_of_k, row_groups, transposed
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec, Panel
from luban.compiler.codegen.llvm.dots.pack_values import clip, convert, copy_first, limit, load_first
from luban.compiler.codegen.llvm.emitter import Function


def emit_turned(fn: Function, spec: PackSpec, panel: Panel, count: str) -> None:
    """Packs `count` neighbouring panels from a source contiguous along the rows, one group of K of all after the other.

    So a row of the source is read in order; a panel alone would take one cache line of it at a time.
    """

    def group(index: str, _values: list[str]) -> list[str]:
        k = times(fn, index, spec.group)
        left = fn.op(f"sub i64 %K, {k}")
        across = offset(fn, panel.source, fn.op(f"mul i64 {k}, {panel.k_bytes}"))
        line = offset(fn, panel.target, times(fn, index, spec.line_bytes))

        def one(number: str, values: list[str]) -> list[str]:
            source, target = values
            valid = fn.op(f"sub i64 {panel.valid}, {times(fn, number, spec.panel)}")
            _turned(fn, spec, panel, (source, target), (valid, left))
            return [offset(fn, source, spec.panel * spec.src_bytes), offset(fn, target, panel.size)]

        loop(fn, count, [("ptr", across), ("ptr", line)], one)
        return []

    loop(fn, groups_of_k(fn, spec), [], group)


def _turned(fn: Function, spec: PackSpec, panel: Panel, pointers: tuple[str, str], extents: tuple[str, str]) -> None:
    """One group of K of one panel; `extents` are the rows and the values of K that exist from `pointers` on."""
    lane, row = min(16 // spec.dst_bytes, spec.group), spec.dst_bytes * spec.group
    value = f"i{8 * spec.dst_bytes}"
    most = max(lane, spec.lanes)
    all_k = fn.op(f"icmp sge i64 {extents[1]}, {spec.group}")
    stage = fn.alloca(f"[{spec.group * most} x {stored(spec.src_type)}]", 64)

    def rows(first: str, count: int) -> None:
        left = fn.op(f"sub i64 {extents[0]}, {first}")
        source = offset(fn, pointers[0], times(fn, first, spec.src_bytes))
        target = offset(fn, pointers[1], times(fn, first, row))

        def zero(r: str, _values: list[str]) -> list[str]:
            at = offset(fn, target, times(fn, r, row))
            fn.emit(f"store <{spec.group} x {value}> zeroinitializer, ptr {at}, align {spec.dst_bytes}")
            return []

        def turn() -> None:
            blocks = -(-count // lane)
            all_rows = fn.op(f"icmp sge i64 {left}, {blocks * lane}")
            direct = fn.op(f"and i1 {all_rows}, {all_k}")

            def staged() -> None:
                given = limit(fn, spec, most, left)
                fill(fn, spec, source, stage, (panel.k_bytes, str(spec.src_bytes)), (spec.group, extents[1]), given)

            when(fn, fn.op(f"xor i1 {direct}, true"), staged)
            start = fn.op(f"select i1 {direct}, ptr {source}, ptr {stage}")
            pitch = fn.op(f"select i1 {direct}, i64 {panel.k_bytes}, i64 {most * spec.src_bytes}")
            vectors = transposed(fn, spec, Block(start, pitch, spec.group, value, spec.group, lane, 1), blocks)
            for number, vector in enumerate(vectors[:count]):
                at = offset(fn, target, number * row)
                fn.emit(f"store <{spec.group} x {value}> {vector}, ptr {at}, align {spec.dst_bytes}")

        def zeros() -> None:
            loop(fn, str(count), [], zero)

        when(fn, fn.op(f"icmp sgt i64 {left}, 0"), turn, zeros)

    row_groups(fn, spec.panel, most, rows)


def emit_copied(fn: Function, spec: PackSpec, panel: Panel) -> None:
    """Packs one panel from a source that holds a group of K side by side too, or has no order (value by value)."""
    group, ty = spec.group, stored(spec.src_type)
    vector = f"<{group} x {ty}>"
    whole = fn.op(f"udiv i64 %K, {group}") if spec.contiguous == "k" else "0"
    slot = fn.alloca(f"[{group} x {ty}]", 64)

    def full(index: str, _values: list[str]) -> list[str]:
        _rows(fn, spec, panel, index, lambda at: fn.op(f"load {vector}, ptr {at}, align {spec.src_bytes}"))
        return []

    def partial(number: str, _values: list[str]) -> list[str]:
        index = plus(fn, whole, number)
        given = limit(fn, spec, group, fn.op(f"sub i64 %K, {times(fn, index, group)}"))

        def load(at: str) -> str:
            if spec.contiguous == "k":
                return load_first(fn, spec, at, given)
            copy_first(fn, spec, at, slot, given, panel.k_bytes)
            return fn.op(f"load {vector}, ptr {slot}, align {spec.src_bytes}")

        _rows(fn, spec, panel, index, load)
        return []

    if spec.contiguous == "k":
        loop(fn, whole, [], full)
    loop(fn, fn.op(f"sub i64 {groups_of_k(fn, spec)}, {whole}"), [], partial)


def _rows(fn: Function, spec: PackSpec, panel: Panel, index: str, load: Callable[[str], str]) -> None:
    """Group `index` of K of all rows of a panel; `load(pointer)` reads it from one row."""
    line = offset(fn, panel.target, times(fn, index, spec.line_bytes))
    source = offset(fn, panel.source, fn.op(f"mul i64 {times(fn, index, spec.group)}, {panel.k_bytes}"))
    rows = clip(fn, panel.valid, spec.panel)

    def put(value: str, r: str) -> list[str]:
        at = offset(fn, line, times(fn, r, spec.dst_bytes * spec.group))
        fn.emit(f"store <{spec.group} x {stored(spec.dst_type)}> {value}, ptr {at}, align {spec.dst_bytes}")
        return []

    def one(r: str, _values: list[str]) -> list[str]:
        value = load(offset(fn, source, fn.op(f"mul i64 {r}, {panel.row_bytes}")))
        return put(convert(fn, spec, value, spec.group), r)

    loop(fn, rows, [], one)
    rest = fn.op(f"sub i64 {spec.panel}, {rows}")
    loop(fn, rest, [], lambda r, _values: put("zeroinitializer", fn.op(f"add i64 {rows}, {r}")))
