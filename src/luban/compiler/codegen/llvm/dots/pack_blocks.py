"""Packing by blocks that fit the registers: transposed where source and panel disagree, row by row where they agree.

A block that the source or the panel holds only in part goes through the stack, so that the code of a block is written
once and knows no edges: its valid part is copied to a stage first (under masks, or value by value where the target has
none), and where K ends, only the lines that exist are copied from a second stage to the panel. Sources that are
contiguous neither way are staged throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from luban.compiler.codegen.llvm.dots.flow import loop, offset, plus, times, when
from luban.compiler.codegen.llvm.dots.fma import stored
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec, Panel
from luban.compiler.codegen.llvm.dots.pack_values import (
    Limit,
    as_words,
    convert,
    copy_first,
    limit,
    limit_if,
    store_words,
)
from luban.compiler.codegen.llvm.dots.transpose import side_by_side, transpose
from luban.compiler.codegen.llvm.emitter import Function

# Blocks ahead to prefetch where a block takes few rows: 8 rows of float32 from memory pack in 0.23 to 0.26 ns an element
# instead of 0.29 to 0.32 (in the second-level cache 0.086 instead of 0.081). Sixteen rows keep memory busy by themselves.
AHEAD, FEW_ROWS = 4, 8


def row_groups(fn: Function, rows: int, most: int, body: Callable[[str, int], None]) -> None:
    """`body(first, count)` for groups of `most` rows and for the smaller rest."""
    whole, rest = divmod(rows, most)

    def group(index: str, _values: list[str]) -> list[str]:
        body(times(fn, index, most), most)
        return []

    if whole:
        loop(fn, str(whole), [], group)
    if rest:
        body(str(whole * most), rest)


def groups_of_k(fn: Function, spec: PackSpec) -> str:
    """Groups of K that hold a value."""
    return fn.op(f"udiv i64 {plus(fn, '%K', spec.group - 1)}, {spec.group}")


@dataclass(frozen=True)
class Block:
    """What a transposition reads: rows `pitch` bytes apart, `rows` of them; the shape of its vectors.

    element, width, lane   integer type moved, elements in a vector, and in 128 bits of it
    per                    source values in an element
    """

    source: str
    pitch: str
    rows: int
    element: str
    width: int
    lane: int
    per: int


def transposed(fn: Function, spec: PackSpec, block: Block, blocks: int) -> list[str]:
    """The first `blocks * lane` columns of a block, a vector of `width` elements each."""
    pieces = block.width // block.lane
    bases = [_row(fn, block.source, block.pitch, piece * block.lane) for piece in range(pieces)]
    # float becomes bfloat before it is turned where that halves the shuffles, and what is taken apart where it is read
    early = spec.part != "whole" or spec.src_bytes * block.per * 8 != int(block.element[1:])
    ty, values = (stored(spec.src_type), block.lane * block.per) if early else (block.element, block.lane)

    def gather(i: int, c: int) -> str:
        parts = []
        for piece, base in enumerate(bases):
            at = offset(fn, _row(fn, base, block.pitch, i), c * block.lane * block.per * spec.src_bytes)
            inside = piece * block.lane + i < block.rows
            parts.append(fn.op(f"load <{values} x {ty}>, ptr {at}, align {spec.src_bytes}") if inside else "poison")
        whole = side_by_side(fn, parts, ty, values)
        if not early or whole == "poison":
            return whole
        short = convert(fn, spec, whole, values * pieces)
        if block.per == 1:
            return short
        return fn.op(f"bitcast <{values * pieces} x i16> {short} to <{block.width} x {block.element}>")

    return transpose(fn, gather, block.element, block.width, block.lane, blocks)


def _row(fn: Function, base: str, pitch: str, number: int) -> str:
    return offset(fn, base, fn.op(f"mul i64 {pitch}, {number}") if number else 0)


def fill(
    fn: Function,
    spec: PackSpec,
    source: str,
    stage: str,
    strides: tuple[str, str],
    rows: tuple[int, str],
    columns: Limit,
) -> None:
    """Copies the valid part of a block to the stage and zeros the rest; rows are (all, valid), strides in bytes."""

    def one(r: str, _values: list[str]) -> list[str]:
        inside = fn.op(f"icmp slt i64 {r}, {rows[1]}")
        at = offset(fn, source, fn.op(f"mul i64 {r}, {strides[0]}"))
        to = offset(fn, stage, times(fn, r, columns.count * spec.src_bytes))
        copy_first(fn, spec, at, to, limit_if(fn, inside, columns), strides[1])
        return []

    loop(fn, str(rows[0]), [], one)


def emit_across(fn: Function, spec: PackSpec, panel: Panel) -> None:
    """Packs one panel of single values or pairs: blocks of some words of K by a vector of rows, turned."""

    def rows(first: str, count: int) -> None:
        left = fn.op(f"sub i64 {panel.valid}, {first}")
        some = fn.op(f"icmp sgt i64 {left}, 0")
        target = offset(fn, panel.target, times(fn, first, spec.word_bytes))
        source = offset(fn, panel.source, fn.op(f"mul i64 {first}, {panel.row_bytes}") if first != "0" else 0)

        def zero(index: str, _values: list[str]) -> list[str]:
            at = offset(fn, target, times(fn, index, spec.line_bytes))
            fn.emit(f"store <{count} x {spec.word}> zeroinitializer, ptr {at}, align {spec.word_bytes}")
            return []

        def zeros() -> None:
            loop(fn, groups_of_k(fn, spec), [], zero)

        part = replace(panel, source=source, target=target, valid=left)
        when(fn, some, lambda: _across(fn, spec, part, count), zeros)

    row_groups(fn, spec.panel, spec.lanes, rows)


def _across(fn: Function, spec: PackSpec, panel: Panel, count: int) -> None:
    """All of K for `count` rows, at least one of them valid."""
    shape = _shape(spec, count)
    size, step = spec.src_bytes, spec.lanes * shape.per
    lines = step // spec.pair
    all_rows = fn.op(f"icmp sge i64 {panel.valid}, {count}") if spec.contiguous == "k" else "false"
    stage = fn.alloca(f"[{count * step * size} x i8]", 64)
    edge = fn.alloca(f"[{lines * spec.line_bytes} x i8]", 64)

    def body(index: str, _values: list[str]) -> list[str]:
        k = times(fn, index, step)
        left = fn.op(f"sub i64 %K, {k}")
        source = offset(fn, panel.source, fn.op(f"mul i64 {k}, {panel.k_bytes}"))
        target = offset(fn, panel.target, times(fn, index, lines * spec.line_bytes))
        all_k = fn.op(f"icmp sge i64 {left}, {step}")
        direct = fn.op(f"and i1 {all_rows}, {all_k}")

        def staged() -> None:
            k_bytes = str(size) if spec.contiguous == "k" else panel.k_bytes
            strides = (panel.row_bytes, k_bytes)
            fill(fn, spec, source, stage, strides, (count, panel.valid), limit(fn, spec, step, left))

        when(fn, fn.op(f"xor i1 {direct}, true"), staged)
        if count <= FEW_ROWS:
            _prefetch(fn, spec, panel, plus(fn, k, AHEAD * step), count, step)
        start = fn.op(f"select i1 {direct}, ptr {source}, ptr {stage}")
        pitch = fn.op(f"select i1 {direct}, i64 {panel.row_bytes}, i64 {step * size}")
        to = fn.op(f"select i1 {all_k}, ptr {target}, ptr {edge}")
        vectors = transposed(fn, spec, replace(shape, source=start, pitch=pitch), spec.lanes // shape.lane)
        words = [line for vector in vectors for line in _lines(fn, spec, vector, shape)]
        for number, line in enumerate(words):
            store_words(fn, spec, line, offset(fn, to, number * spec.line_bytes), shape.width, count)
        last = fn.op(f"udiv i64 {plus(fn, left, spec.pair - 1)}, {spec.pair}")
        partial = fn.op(f"xor i1 {all_k}, true")
        when(fn, partial, lambda: _copy_lines(fn, spec, edge, target, count, last))
        return []

    loop(fn, fn.op(f"udiv i64 {plus(fn, '%K', step - 1)}, {step}"), [], body)


def _prefetch(fn: Function, spec: PackSpec, panel: Panel, k: str, count: int, step: int) -> None:
    """Asks for a later block of the same rows, or for the end of the rows where there is none."""
    last = fn.op("sub i64 %K, 1")
    near = fn.intrinsic("llvm.smin.i64", "i64", [("i64", k), ("i64", last)])
    row = offset(fn, panel.source, fn.op(f"mul i64 {near}, {panel.k_bytes}"))
    for _ in range(count):
        for line in range(0, step * spec.src_bytes, 64):
            at = offset(fn, row, line)
            fn.intrinsic("llvm.prefetch.p0", "void", [("ptr", at), ("i32", "0"), ("i32", "3"), ("i32", "1")])
        row = offset(fn, row, panel.row_bytes)


def _shape(spec: PackSpec, count: int) -> Block:
    """The vectors of `count` rows: what lies side by side in the panel is turned as one element."""
    per = spec.pair if spec.pair > 1 else 2 if _splits(spec) else 1
    bits = 32 if per > 1 else 8 * spec.src_bytes
    lane = min(128 // bits, spec.lanes)
    width = lane
    while width < count:
        width *= 2
    return Block("", "", count, f"i{bits}", width, lane, per)


def _splits(spec: PackSpec) -> bool:
    """bfloat to float: pairs are turned as one element and widened after, a shift and an and, for half the shuffles."""
    return spec.pair == 1 < spec.lanes and (spec.src_type, spec.dst_type) == ("bfloat", "float")


def _lines(fn: Function, spec: PackSpec, vector: str, shape: Block) -> list[str]:
    """The words of a panel, as integers, in one column of a transposed block."""
    width = shape.width
    if _splits(spec):
        low = fn.op(f"shl <{width} x i32> {vector}, {fn.splat('i32', '16', width)}")
        return [low, fn.op(f"and <{width} x i32> {vector}, {fn.splat('i32', str(-65536), width)}")]
    if spec.pair > 1 or spec.src_type == spec.dst_type:
        return [vector]
    value = fn.op(f"bitcast <{width} x {shape.element}> {vector} to <{width} x {stored(spec.src_type)}>")
    return [as_words(fn, spec, convert(fn, spec, value, width), width)]


def _copy_lines(fn: Function, spec: PackSpec, source: str, target: str, count: int, lines: str) -> None:
    def one(index: str, _values: list[str]) -> list[str]:
        place = times(fn, index, spec.line_bytes)
        at, to = offset(fn, source, place), offset(fn, target, place)
        value = fn.op(f"load <{count} x {spec.word}>, ptr {at}, align {spec.word_bytes}")
        fn.emit(f"store <{count} x {spec.word}> {value}, ptr {to}, align {spec.word_bytes}")
        return []

    loop(fn, lines, [], one)
