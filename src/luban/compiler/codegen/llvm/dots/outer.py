"""The outer-product micro-kernel: for every step of K, broadcast a column of A against a row of B held in vectors.

All vector units share this loop nest; a `Unit` supplies the three things in which they differ. The accumulators live in
SSA values, hence in registers. A full tile and a partial one read in place take different loops: only the second one
clamps row pointers and masks loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots.flow import lane_mask, loop, offset, times, when
from luban.compiler.codegen.llvm.dots.results import finish
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES, PARAMETERS, DotSpec
from luban.compiler.codegen.llvm.emitter import Function, Module

GROUP_ROWS = (
    4  # rows addressed from one base pointer: x86 folds base + stride * {1, 2} and one register holds stride * 3
)


@dataclass(frozen=True)
class Unit:
    """How one instruction multiplies.

    group      values of K that one step consumes (kk of the packed layouts)
    broadcast  (fn, spec, pointer, k_stride_bytes, whole) -> operand made of A's values for one row
    load_b     (fn, spec, pointers of the `group` rows, mask, whole) -> operand made of one vector of B; for a packed
               panel the single pointer given is the interleaved vector. `whole` is False for the last, odd value of K
    multiply   (fn, spec, a, b, accumulator) -> the new accumulator
    bias       (fn, spec) -> an operand that is multiplied like one more row of A, or None; the sums of that row are
               subtracted from those of all others in the end
    """

    group: int
    broadcast: Callable[..., str]
    load_b: Callable[..., str]
    multiply: Callable[..., str]
    bias: Callable[[Function, DotSpec], str] | None = None


@dataclass(frozen=True)
class Access:
    """Addresses of one loop: byte offsets and strides, as LLVM operands."""

    a_bases: tuple[str, ...]
    a_rows: tuple[tuple[int, str], ...]  # per row: which base, byte offset from it
    a_step: str
    a_k: str
    b_step: str
    b_row: str
    b_masks: tuple[str, ...] | None
    b_stage: str | None  # stack rows to copy B through where the target has no masked loads


def emit_outer(module: Module, name: str, spec: DotSpec, unit: Unit) -> None:
    """Adds the internal function `name` computing one register tile; see DotSpec for its parameters."""
    fn = Function(module, name, "void", [*PARAMETERS, *spec.extra_params], "internal", "nounwind")
    some = fn.op(f"and i1 {fn.op('icmp sgt i64 %m, 0')}, {fn.op('icmp sgt i64 %n, 0')}")
    when(fn, some, lambda: _tile(fn, spec, unit))
    fn.emit("ret void")
    module.add(fn)


def _tile(fn: Function, spec: DotSpec, unit: Unit) -> None:
    count = spec.mr * spec.nr_vectors
    if not spec.in_place:
        finish(fn, spec, _multiply(fn, spec, unit, partial=False))
        return
    rows_full = fn.op(f"icmp eq i64 %m, {spec.mr}") if spec.a_layout != "packed" else "true"
    columns_full = fn.op(f"icmp eq i64 %n, {spec.nr}") if spec.b_layout != "packed" else "true"
    fast, slow, store = fn.new_block("whole"), fn.new_block("partial"), fn.new_block("store")
    fn.branch_if(fn.op(f"and i1 {rows_full}, {columns_full}"), fast, slow)
    fn.place(fast)
    whole, whole_end = _multiply(fn, spec, unit, partial=False), fn.current
    fn.branch(store)
    fn.place(slow)
    partial, partial_end = _multiply(fn, spec, unit, partial=True), fn.current
    fn.branch(store)
    fn.place(store)
    merged = [
        fn.op(f"phi {spec.vector} [ {whole[i]}, %{whole_end} ], [ {partial[i]}, %{partial_end} ]") for i in range(count)
    ]
    finish(fn, spec, merged)


def _multiply(fn: Function, spec: DotSpec, unit: Unit, partial: bool) -> list[str]:
    """The loops over K; returns the accumulators, row by row."""
    access = _access(fn, spec, unit, partial)
    zeros = ["zeroinitializer"] * ((spec.mr + (unit.bias is not None)) * spec.nr_vectors)
    state = [*access.a_bases, "%B", *zeros]
    types = ["ptr"] * (len(access.a_bases) + 1) + [spec.vector] * len(zeros)
    group = unit.group
    rounded = fn.op(f"add i64 %K, {group - 1}") if group > 1 and not spec.in_place else "%K"
    steps = fn.op(f"udiv i64 {rounded}, {group}") if group > 1 else rounded
    unroll = 1 if partial else spec.unroll

    def run(turns: str, repeat: int, whole: bool) -> None:
        nonlocal state

        def body(_index: str, values: list[str]) -> list[str]:
            return _advance(fn, spec, unit, access, values, repeat, whole)

        state = loop(fn, turns, list(zip(types, state, strict=True)), body)

    if unroll > 1:
        run(fn.op(f"udiv i64 {steps}, {unroll}"), unroll, True)
        steps = fn.op(f"urem i64 {steps}, {unroll}")
    run(steps, 1, True)
    if group > 1 and spec.in_place:
        rest = fn.op(f"urem i64 %K, {group}")
        run(rest if group == 2 else fn.op(f"zext i1 {fn.op(f'icmp ne i64 {rest}, 0')} to i64"), 1, False)
    return _unbiased(fn, spec, state[len(access.a_bases) + 1 :])


def _unbiased(fn: Function, spec: DotSpec, sums: list[str]) -> list[str]:
    """The sums of the tile's rows, less those of the row of a bias where there is one."""
    count = spec.mr * spec.nr_vectors
    if len(sums) == count:
        return sums
    return [fn.op(f"sub {spec.vector} {s}, {sums[count + i % spec.nr_vectors]}") for i, s in enumerate(sums[:count])]


def _access(fn: Function, spec: DotSpec, unit: Unit, partial: bool) -> Access:
    bases, rows, a_step, a_k = _a_access(fn, spec, unit.group, partial)
    b_bytes = ELEMENT_BYTES[spec.b_type]
    masks, stage = None, None
    if spec.b_layout == "packed":
        b_row, b_step = "0", str(spec.nr * unit.group * b_bytes)
    else:
        b_row = times(fn, "%b_rs", b_bytes)
        b_step = times(fn, b_row, unit.group)
        if partial and spec.masked:
            masks = tuple(
                lane_mask(fn, spec.lanes, fn.op(f"sub i64 %n, {j * spec.lanes}")) for j in range(spec.nr_vectors)
            )
        elif partial:
            panel = f"[{spec.nr * unit.group} x {spec.b_type}]"
            stage = fn.alloca(panel, 64)
            fn.emit(f"store {panel} zeroinitializer, ptr {stage}, align 64")
    return Access(bases, rows, a_step, a_k, b_step, b_row, masks, stage)


def _a_access(fn: Function, spec: DotSpec, group: int, partial: bool):
    size, rows = ELEMENT_BYTES[spec.a_type], range(spec.mr)
    if spec.a_layout == "packed":
        step = str(spec.mr * group * size)
        return ("%A",), tuple((0, str(i * group * size)) for i in rows), step, str(size)
    a_k = str(size) if spec.a_layout == "row_major" else times(fn, "%a_cs", size)
    row = str(size) if spec.a_layout == "col_major" else times(fn, "%a_rs", size)
    a_step = times(fn, a_k, group)
    if partial:
        offsets = [times(fn, row, i) if i else "0" for i in rows]
        valid = [fn.op(f"icmp sgt i64 %m, {i}") for i in rows]
        clamped = [fn.op(f"select i1 {v}, i64 {o}, i64 0") for v, o in zip(valid, offsets, strict=True)]
        return ("%A",), tuple((0, o) for o in clamped), a_step, a_k
    if spec.a_layout == "col_major":
        return ("%A",), tuple((0, str(i * size)) for i in rows), a_step, a_k
    bases = tuple(offset(fn, "%A", times(fn, row, g) if g else 0) for g in range(0, spec.mr, GROUP_ROWS))
    within = ["0", *(times(fn, row, i) for i in range(1, min(GROUP_ROWS, spec.mr)))]
    return bases, tuple((i // GROUP_ROWS, within[i % GROUP_ROWS]) for i in rows), a_step, a_k


def _advance(
    fn: Function, spec: DotSpec, unit: Unit, access: Access, values: list[str], repeat: int, whole: bool
) -> list[str]:
    """`repeat` steps of K; returns the new pointers and accumulators."""
    split = len(access.a_bases)
    bases, b, sums = values[:split], values[split], values[split + 1 :]
    for _ in range(repeat):
        sums = _step(fn, spec, unit, access, bases, b, sums, whole)
        bases = [offset(fn, base, access.a_step) for base in bases]
        b = offset(fn, b, access.b_step)
    return [*bases, b, *sums]


def _step(
    fn: Function, spec: DotSpec, unit: Unit, access: Access, bases: list[str], b: str, sums: list[str], whole: bool
) -> list[str]:
    vectors = _load_row(fn, spec, unit, access, b, whole)
    new = []
    for i, (base, distance) in enumerate(access.a_rows):
        a = unit.broadcast(fn, spec, offset(fn, bases[base], distance), access.a_k, whole or spec.a_layout == "packed")
        for j, vector in enumerate(vectors):
            new.append(unit.multiply(fn, spec, a, vector, sums[i * spec.nr_vectors + j]))
    if unit.bias is not None:
        a, more = unit.bias(fn, spec), sums[spec.mr * spec.nr_vectors :]
        new += [unit.multiply(fn, spec, a, vector, total) for vector, total in zip(vectors, more, strict=True)]
    return new


def _load_row(fn: Function, spec: DotSpec, unit: Unit, access: Access, b: str, whole: bool) -> list[str]:
    size = ELEMENT_BYTES[spec.b_type]
    packed = spec.b_layout == "packed"
    if packed and spec.prefetch_b:
        for line in range(0, spec.nr * unit.group * size, 64):
            ahead = offset(fn, b, spec.prefetch_b + line)
            fn.intrinsic("llvm.prefetch.p0", "void", [("ptr", ahead), ("i32", "0"), ("i32", "3"), ("i32", "1")])
    row = access.b_row
    if access.b_stage:
        _stage(fn, spec, access, b, unit.group if whole else 1)
        b, row = access.b_stage, str(spec.nr * size)
    width = spec.lanes * size * (unit.group if packed else 1)
    loaded = []
    for j in range(spec.nr_vectors):
        first = offset(fn, b, j * width)
        group = 1 if packed or not whole else unit.group
        pointers = [first, *(offset(fn, first, times(fn, row, k)) for k in range(1, group))]
        mask = access.b_masks[j] if access.b_masks else None
        loaded.append(unit.load_b(fn, spec, pointers, mask, whole))
    return loaded


def _stage(fn: Function, spec: DotSpec, access: Access, b: str, rows: int) -> None:
    """Copies the valid columns of `rows` rows of B to the zeroed stack panel, element by element."""
    size = ELEMENT_BYTES[spec.b_type]
    for k in range(rows):
        source = offset(fn, b, times(fn, access.b_row, k) if k else 0)
        assert access.b_stage is not None
        target = offset(fn, access.b_stage, k * spec.nr * size)

        def copy(index: str, _values: list[str], source: str = source, target: str = target) -> list[str]:
            at = fn.op(f"getelementptr {spec.b_type}, ptr {source}, i64 {index}")
            to = fn.op(f"getelementptr {spec.b_type}, ptr {target}, i64 {index}")
            fn.emit(f"store {spec.b_type} {fn.op(f'load {spec.b_type}, ptr {at}')}, ptr {to}")
            return []

        loop(fn, "%n", [], copy)
