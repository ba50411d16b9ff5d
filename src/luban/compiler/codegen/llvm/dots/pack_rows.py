"""Packing of a source contiguous along the rows into words: copies, with pairs of K interleaved.

Whole panels are written side by side, one word of K (or a few, of narrow panels) of all of them after the other: memory
is read in order, every line of it once, and written in whole lines.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import loop, offset, plus, times
from luban.compiler.codegen.llvm.dots.fma import stored
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec, Panel
from luban.compiler.codegen.llvm.dots.pack_values import (
    Limit,
    as_words,
    convert,
    limit,
    load_exactly,
    load_first,
    store_words,
)
from luban.compiler.codegen.llvm.dots.transpose import interleave
from luban.compiler.codegen.llvm.emitter import Function

STRIP = 128  # bytes of a panel to write before the next one


def emit_full(fn: Function, spec: PackSpec, panel: Panel, count: str) -> None:
    """Packs `count` full panels from `panel` on."""
    _walk(fn, spec, panel, count, None)


def emit_partial(fn: Function, spec: PackSpec, panel: Panel) -> None:
    """Packs one panel of which only `valid` rows exist."""
    firsts = range(0, spec.panel, spec.lanes)
    limits = [limit(fn, spec, spec.lanes, fn.op(f"sub i64 {panel.valid}, {first}")) for first in firsts]
    _walk(fn, spec, panel, "1", limits)


def _walk(fn: Function, spec: PackSpec, panel: Panel, count: str, limits: list[Limit] | None) -> None:
    """All of K for `count` neighbouring panels."""
    words = fn.op(f"udiv i64 %K, {spec.pair}")
    unrolled = 1 if limits else max(1, min(4, STRIP // spec.line_bytes))
    turns = fn.op(f"udiv i64 {words}, {unrolled}") if unrolled > 1 else words
    _words(fn, spec, panel, count, limits, ("0", turns), unrolled)
    if unrolled > 1:
        done = times(fn, turns, unrolled)
        _words(fn, spec, panel, count, limits, (done, fn.op(f"sub i64 {words}, {done}")), 1)
    if spec.pair > 1:
        rest = fn.op(f"icmp ne i64 {fn.op(f'urem i64 %K, {spec.pair}')}, 0")
        _words(fn, spec, panel, count, limits, (words, fn.op(f"zext i1 {rest} to i64")), 1, half=True)


def _words(
    fn: Function,
    spec: PackSpec,
    panel: Panel,
    count: str,
    limits: list[Limit] | None,
    span: tuple[str, str],
    unrolled: int,
    half: bool = False,
) -> None:
    """`unrolled` words of K in each of span[1] turns from word span[0] on; `half` is the last word, which K does not fill."""
    first, turns = span
    pitch = fn.op(f"mul i64 {panel.k_bytes}, {spec.pair}")

    def turn(index: str, _values: list[str]) -> list[str]:
        word = plus(fn, first, times(fn, index, unrolled))
        source = offset(fn, panel.source, fn.op(f"mul i64 {word}, {pitch}"))
        target = offset(fn, panel.target, times(fn, word, spec.line_bytes))

        def one(_index: str, values: list[str]) -> list[str]:
            at, to = values
            for number in range(unrolled):
                start = offset(fn, at, fn.op(f"mul i64 {pitch}, {number}") if number else 0)
                _line(fn, spec, panel, start, offset(fn, to, number * spec.line_bytes), limits, half)
            return [offset(fn, at, spec.panel * spec.src_bytes), offset(fn, to, panel.size)]

        loop(fn, count, [("ptr", source), ("ptr", target)], one)
        return []

    loop(fn, turns, [], turn)


def _line(
    fn: Function, spec: PackSpec, panel: Panel, source: str, target: str, limits: list[Limit] | None, half: bool
) -> None:
    """One word of K of all rows of a panel."""
    for number, first in enumerate(range(0, spec.panel, spec.lanes)):
        count = min(spec.lanes, spec.panel - first)
        width = spec.lanes if limits else count
        at = offset(fn, source, first * spec.src_bytes)
        given = limits[number] if limits else None
        values = [_read(fn, spec, at, count, given)]
        for k in range(1, spec.pair):
            place, inside = _place(fn, spec, panel, at, k, half)
            value = _read(fn, spec, place, count, given) if inside != "false" else "zeroinitializer"
            if inside.startswith("%"):
                vector = f"<{width} x {stored(spec.src_type)}>"
                value = fn.op(f"select i1 {inside}, {vector} {value}, {vector} zeroinitializer")
            values.append(value)
        words = _words_of(fn, spec, values, width)
        store_words(fn, spec, words, offset(fn, target, first * spec.word_bytes), width, count)


def _place(fn: Function, spec: PackSpec, panel: Panel, at: str, k: int, half: bool) -> tuple[str, str]:
    """Where value of K number `k` of the word at `at` lies, and whether it exists; where it does not, the word's first."""
    if not half:
        return offset(fn, at, times(fn, panel.k_bytes, k)), "true"
    if k == spec.pair - 1:
        return at, "false"
    inside = fn.op(f"icmp ugt i64 {fn.op(f'urem i64 %K, {spec.pair}')}, {k}")
    return offset(fn, at, fn.op(f"select i1 {inside}, i64 {times(fn, panel.k_bytes, k)}, i64 0")), inside


def _read(fn: Function, spec: PackSpec, pointer: str, count: int, given: Limit | None) -> str:
    return load_first(fn, spec, pointer, given) if given else load_exactly(fn, spec, pointer, count)


def _words_of(fn: Function, spec: PackSpec, values: list[str], width: int) -> str:
    """Words from the values of one K, or from those of two or four."""
    if spec.pair == 1:
        return as_words(fn, spec, convert(fn, spec, values[0], width), width)
    short = stored(spec.dst_type)
    parts = [v if v == "zeroinitializer" else convert(fn, spec, v, width) for v in values]
    wide = width
    while len(parts) > 1:  # 0 and 2, 1 and 3, then both
        half = len(parts) // 2
        parts = [interleave(fn, a, b, short, wide) for a, b in zip(parts[:half], parts[half:], strict=True)]
        wide *= 2
    return fn.op(f"bitcast <{wide} x {short}> {parts[0]} to <{width} x i32>")
