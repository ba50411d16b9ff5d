"""Packing: strided blocks of A or B copied into the panels that micro-kernels read, converted on the way.

A panel holds `panel` rows of A (or columns of B; "rows" below) and all of K, as `[K/group][panel][group]`. The unit
of the vector code is a *word*: one value, or 4 bytes of neighbouring values of K: pairs, or four. Where source and panel
agree in what lies side by side, vectors are copied (`pack_rows`, and `pack_blocks` for groups as wide as a vector);
where they differ, blocks are transposed in registers (`pack_blocks`). Ragged ends take the same code under masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from luban.compiler.codegen.llvm.dots.flow import loop, offset, plus, times, when
from luban.compiler.codegen.llvm.dots.pack_blocks import emit_across
from luban.compiler.codegen.llvm.dots.pack_groups import emit_copied, emit_turned
from luban.compiler.codegen.llvm.dots.pack_rows import emit_full, emit_partial
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec, Panel
from luban.compiler.codegen.llvm.dots.pack_values import clip
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES
from luban.compiler.codegen.llvm.emitter import Function, Module

SIDE = 8  # panels side by side


def emit_pack(module: Module, name: str, spec: PackSpec, attributes: str = "nounwind") -> None:
    """Adds the internal function `name`; see PackSpec for its parameters."""
    listed = [("ptr", "src"), ("i64", "src_rs"), ("i64", "src_ks"), ("ptr", "dst"), ("i64", "rows"), ("i64", "K")]
    fn = Function(module, name, "void", listed, "internal", attributes)
    chunks = fn.op(f"udiv i64 {plus(fn, '%K', spec.k_step - 1)}, {spec.k_step}")
    padded = times(fn, chunks, spec.k_step)
    size = fn.op(f"mul i64 {padded}, {spec.panel * ELEMENT_BYTES[spec.dst_type]}")
    for number, part in enumerate(spec.parts):
        start = offset(fn, "%dst", times(fn, size, number)) if number else "%dst"
        _part(fn, replace(spec, part=part), start, padded, times(fn, size, len(spec.parts)))
    fn.emit("ret void")
    module.add(fn)


def _part(fn: Function, spec: PackSpec, target: str, padded: str, size: str) -> None:
    """Packs one part of all panels; the first lies at `target`, the next ones `size` bytes apart."""
    row_bytes, k_bytes = (times(fn, stride, spec.src_bytes) for stride in ("%src_rs", "%src_ks"))

    def panel(index: str) -> Panel:
        first = times(fn, index, spec.panel)
        source = offset(fn, "%src", fn.op(f"mul i64 {first}, {row_bytes}"))
        place = offset(fn, target, fn.op(f"mul i64 {index}, {size}"))
        return Panel(source, place, fn.op(f"sub i64 %rows, {first}"), row_bytes, k_bytes, padded, size)

    def beside(count: str, pack: Callable[[Panel, str], None]) -> None:
        """`pack(first, count)` for every SIDE of `count` panels: a source contiguous along the rows is read in order."""

        def side(index: str, _values: list[str]) -> list[str]:
            first = times(fn, index, SIDE)
            pack(panel(first), clip(fn, fn.op(f"sub i64 {count}, {first}"), SIDE))
            return []

        loop(fn, fn.op(f"udiv i64 {plus(fn, count, SIDE - 1)}, {SIDE}"), [], side)

    def one(index: str, _values: list[str]) -> list[str]:
        (emit_across if spec.group == spec.pair else emit_copied)(fn, spec, panel(index))
        return []

    def padding(index: str, _values: list[str]) -> list[str]:
        _zero(fn, spec, panel(index))
        return []

    panels = fn.op(f"udiv i64 {plus(fn, '%rows', spec.panel - 1)}, {spec.panel}")
    if spec.contiguous == "rows" and spec.group > spec.pair:
        beside(panels, lambda first, count: emit_turned(fn, spec, first, count))
    elif spec.contiguous == "rows":
        full = fn.op(f"udiv i64 %rows, {spec.panel}")
        beside(full, lambda first, count: emit_full(fn, spec, first, count))
        when(fn, fn.op(f"icmp ne i64 {full}, {panels}"), lambda: emit_partial(fn, spec, panel(full)))
    else:
        loop(fn, panels, [], one)
    if spec.k_step > spec.group:
        loop(fn, panels, [], padding)


def _zero(fn: Function, spec: PackSpec, panel: Panel) -> None:
    """The groups of K that hold no value."""
    held = fn.op(f"udiv i64 {plus(fn, '%K', spec.group - 1)}, {spec.group}")
    words = spec.group // spec.pair

    def line(index: str, _values: list[str]) -> list[str]:
        start = offset(fn, panel.target, times(fn, plus(fn, held, index), spec.line_bytes))

        def part(number: str, _values: list[str]) -> list[str]:
            at = offset(fn, start, times(fn, number, spec.panel * spec.word_bytes))
            fn.emit(f"store <{spec.panel} x {spec.word}> zeroinitializer, ptr {at}, align {spec.word_bytes}")
            return []

        loop(fn, str(words), [], part)
        return []

    total = fn.op(f"udiv i64 {panel.padded}, {spec.group}")
    loop(fn, fn.op(f"sub i64 {total}, {held}"), [], line)
