"""Patches of an image copied into panels, a run of neighbouring points at a time.

A run stays within one line of the output and one panel and has at most as many points as a vector has lanes. For every
tap it is one load under the mask of what lies inside the image, and one store under the mask of the run; the columns'
masks are computed once a run, and taps above or below the image are stores of zeros. All runs of a panel are copied for a
few channels before the next ones: what is stored stays in the first cache until its lines are whole (a third of the time
of a 3 x 3 convolution otherwise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots.flow import (
    lane_mask,
    loop,
    mangled,
    masked_load,
    masked_store,
    offset,
    plus,
    times,
    when,
)
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.ir.window import Window

UNROLLED = 16  # taps side by side that are written out
NEAR = 16 << 10  # bytes of a panel that are written at a time


@dataclass(frozen=True)
class PatchSpec:
    """What to copy; see tile.PatchesOp. Strides are in elements; the size of the first point dim does not matter."""

    type: str
    lanes: int
    points: tuple[int, ...]
    point_strides: tuple[int, ...]
    taps: tuple[int, ...]
    tap_strides: tuple[int, ...]
    window: Window
    panel: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.type]

    @property
    def depth(self) -> int:
        """Rows of the matrix."""
        return math.prod(self.taps)

    @property
    def channels(self) -> int:
        """The first dim of taps where that is no spatial one."""
        return self.taps[0] if len(self.taps) > self.window.rank else 1

    @property
    def channel_stride(self) -> int:
        """Bytes from one channel to the next."""
        return self.tap_strides[0] * self.size if len(self.taps) > self.window.rank else 0

    @property
    def together(self) -> int:
        """Channels whose rows of a panel are written before the next ones'."""
        return max(1, min(self.channels, NEAR * self.channels // (self.depth * self.panel * self.size)))


@dataclass(frozen=True)
class _Part:
    """Some channels of a panel: where the image starts, where their rows go, and how many there are."""

    source: str
    target: str
    channels: str


@dataclass(frozen=True)
class _Run:
    """Neighbouring points: where the first one reads tap 0, its indices, how many, where row 0 of them goes."""

    source: str
    index: tuple[str, ...]
    mask: str
    count: str
    target: str
    channels: str


def emit_patches(module: Module, name: str, spec: PatchSpec, attributes: str = "nounwind") -> None:
    """Adds the internal function `name` (src, first, count, dst)."""
    listed = [("ptr", "src"), ("i64", "first"), ("i64", "count"), ("ptr", "dst")]
    fn = Function(module, name, "void", listed, "internal", attributes)

    def panel(index: str, _values: list[str]) -> list[str]:
        start = times(fn, index, spec.panel)
        target = offset(fn, "%dst", times(fn, index, spec.panel * spec.depth * spec.size))
        left = fn.op(f"sub i64 %count, {start}")
        live = fn.intrinsic("llvm.smin.i64", "i64", [("i64", left), ("i64", str(spec.panel))])

        def some(number: str, _values: list[str]) -> list[str]:
            channel = times(fn, number, spec.together)
            left = fn.op(f"sub i64 {spec.channels}, {channel}")
            source = offset(fn, "%src", times(fn, channel, spec.channel_stride))
            place = offset(fn, target, times(fn, channel, spec.depth // spec.channels * spec.panel * spec.size))
            few = _least(fn, left, str(spec.together)) if spec.channels % spec.together else str(spec.together)
            _runs(fn, spec, _Part(source, place, few), plus(fn, "%first", start), live)
            return []

        loop(fn, str(-(-spec.channels // spec.together)), [], some)
        return []

    loop(fn, fn.op(f"udiv i64 {plus(fn, '%count', spec.panel - 1)}, {spec.panel}"), [], panel)
    fn.emit("ret void")
    module.add(fn)


def _runs(fn: Function, spec: PatchSpec, part: _Part, first: str, live: str) -> None:
    """All points of a panel, `live` of them real, run by run."""

    def run(at: str) -> str:
        index = _digits(fn, plus(fn, first, at), spec.points)
        source = part.source
        for number, stride in zip(index, spec.point_strides, strict=True):
            source = offset(fn, source, times(fn, number, stride * spec.size))
        rest = fn.op(f"sub i64 {spec.points[-1]}, {index[-1]}")
        count = _least(fn, rest, fn.op(f"sub i64 {live}, {at}"), str(spec.lanes))
        place = offset(fn, part.target, times(fn, at, spec.size))
        _all_taps(fn, spec, _Run(source, index, lane_mask(fn, spec.lanes, count), count, place, part.channels))
        return plus(fn, at, count)

    _while_below(fn, live, run)

    def zeros(at: str) -> str:
        count = _least(fn, fn.op(f"sub i64 {spec.panel}, {at}"), str(spec.lanes))
        mask, place = lane_mask(fn, spec.lanes, count), offset(fn, part.target, times(fn, at, spec.size))

        def row(p: str, _values: list[str]) -> list[str]:
            _store(fn, spec, "zeroinitializer", offset(fn, place, times(fn, p, spec.panel * spec.size)), mask)
            return []

        loop(fn, times(fn, part.channels, spec.depth // spec.channels), [], row)
        return plus(fn, at, count)

    _while_below(fn, str(spec.panel), zeros, live)


def _least(fn: Function, *values: str) -> str:
    found = values[0]
    for value in values[1:]:
        found = fn.intrinsic("llvm.smin.i64", "i64", [("i64", found), ("i64", value)])
    return found


def _while_below(fn: Function, end: str, body: Callable[[str], str], start: str = "0") -> None:
    """`while at < end: at = body(at)`."""
    head, inside, done, before = fn.new_block("while"), fn.new_block("run"), fn.new_block("ran"), fn.current
    fn.branch(head)
    fn.place(head)
    at, slot = fn.fresh("at"), len(fn.lines)
    fn.branch_if(fn.op(f"icmp slt i64 {at}, {end}"), inside, done)
    fn.place(inside)
    following = body(at)
    latch = fn.current
    fn.branch(head)
    fn.lines.insert(slot, f"  {at} = phi i64 [ {start}, %{before} ], [ {following}, %{latch} ]")
    fn.place(done)


def _digits(fn: Function, flat: str, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """A flat row-major index as one index a dim; the first may be anything."""
    found: list[str] = []
    for size in reversed(sizes[1:]):
        found.append(fn.op(f"urem i64 {flat}, {size}"))
        flat = fn.op(f"udiv i64 {flat}, {size}")
    return (flat, *reversed(found))


def _all_taps(fn: Function, spec: PatchSpec, run: _Run) -> None:
    """The leading spatial taps in loops, then channels, then the taps along the line."""
    w, rank = spec.window, spec.window.rank
    plain = len(spec.taps) - rank  # dims of taps that are no spatial ones
    line = _Line(spec, run, _columns(fn, spec, run))

    def spatial(d: int, source: str, row: str, valid: str) -> None:
        if d == len(spec.taps) - 1 or rank == 0:
            _channels(fn, line, plain, source, row, valid)
            return
        s = d - plain
        point = run.index[len(spec.points) - rank + s]
        low = plus(fn, times(fn, point, w.n_step[s]), -w.pad[s])

        def tap(t: str, _values: list[str]) -> list[str]:
            at = plus(fn, low, times(fn, t, w.k_step[s]))
            fits = fn.op(f"icmp ult i64 {at}, {w.extent[s]}")
            both = fits if valid == "true" else fn.op(f"and i1 {valid}, {fits}")
            moved = offset(fn, source, times(fn, t, spec.tap_strides[d] * spec.size))
            spatial(d + 1, moved, plus(fn, row, times(fn, t, math.prod(spec.taps[d + 1 :]))), both)
            return []

        loop(fn, str(spec.taps[d]), [], tap)

    spatial(plain, run.source, "0", "true")


@dataclass(frozen=True)
class _Line:
    """The taps along a line of the image: `masks` of its written-out taps, or the start of a tap's columns."""

    spec: PatchSpec
    run: _Run
    masks: list[list[str]]


def _columns(fn: Function, spec: PatchSpec, run: _Run) -> list[list[str]]:
    """What lies inside the image along the line, for every tap that is written out."""
    if spec.window.rank == 0:
        return [[run.mask]]
    return [_mask(fn, spec, run, str(t)) for t in range(spec.taps[-1])] if spec.taps[-1] <= UNROLLED else []


def _pieces(spec: PatchSpec) -> int:
    """Vectors of neighbouring elements that hold every point of a run, 0 where a gather reads them."""
    step = spec.window.n_step[-1] if spec.window.rank else 1
    return step if step in (1, 2) and spec.point_strides[-1] == step else 0


def _mask(fn: Function, spec: PatchSpec, run: _Run, tap: str) -> list[str]:
    """Masks of the vectors that are read for a tap along the line; one a piece, or one for the points of a gather."""
    w, lanes, pieces = spec.window, spec.lanes, _pieces(spec)
    step = 1 if pieces else w.n_step[-1]
    first = plus(fn, times(fn, run.index[-1], w.n_step[-1]), -w.pad[-1])
    narrow = fn.op(f"trunc i64 {plus(fn, first, times(fn, tap, w.k_step[-1]))} to i32")
    found = []
    for piece in range(max(1, pieces)):
        numbers = ", ".join(f"i32 {(piece * lanes + i) * step}" for i in range(lanes))
        at = fn.op(f"add <{lanes} x i32> {fn.splat('i32', narrow, lanes)}, <{numbers}>")
        fits = fn.op(f"icmp ult <{lanes} x i32> {at}, {fn.splat('i32', str(w.extent[-1]), lanes)}")
        held = run.mask
        if pieces > 1:
            left = plus(fn, times(fn, run.count, pieces), -piece * lanes)
            held = lane_mask(fn, lanes, left)
        found.append(fn.op(f"and <{lanes} x i1> {fits}, {held}"))
    return found


def _channels(fn: Function, line: _Line, plain: int, source: str, row: str, valid: str) -> None:
    """All channels (the dims of taps before the spatial ones) for the leading taps that were chosen."""
    spec = line.spec
    along = spec.taps[-1] if spec.window.rank else 1
    pitch = spec.panel * spec.size
    first = offset(fn, line.run.target, times(fn, row, pitch))

    def nest(d: int, start: str, place: str, body: Callable[[str, str], None]) -> None:
        """The loops over channels; both pointers are carried, as nothing hoists or reduces them later."""
        if d == plain:
            body(start, place)
            return
        step = math.prod(spec.taps[d + 1 :]) * pitch

        def channel(_c: str, at: list[str]) -> list[str]:
            nest(d + 1, at[0], at[1], body)
            return [offset(fn, at[0], spec.tap_strides[d] * spec.size), offset(fn, at[1], step)]

        count = line.run.channels if d == 0 else str(spec.taps[d])
        loop(fn, count, [("ptr", start), ("ptr", place)], channel)

    def zero(_start: str, place: str) -> None:
        def tap(_t: str, at: list[str]) -> list[str]:
            _store(fn, spec, "zeroinitializer", at[0], line.run.mask)
            return [offset(fn, at[0], pitch)]

        loop(fn, str(along), [("ptr", place)], tap)

    def copy(start: str, place: str) -> None:
        stride = spec.tap_strides[-1] * spec.size if spec.window.rank else 0

        def later(t: str, at: list[str]) -> list[str]:
            _store(fn, spec, _load(fn, spec, at[0], _mask(fn, spec, line.run, t)), at[1], line.run.mask)
            return [offset(fn, at[0], stride), offset(fn, at[1], pitch)]

        for t, masks in enumerate(line.masks):
            value = _load(fn, spec, offset(fn, start, t * stride), masks)
            _store(fn, spec, value, offset(fn, place, t * pitch), line.run.mask)
        if not line.masks:
            loop(fn, str(along), [("ptr", start), ("ptr", place)], later)

    if valid == "true":
        nest(0, source, first, copy)
    else:
        when(fn, valid, lambda: nest(0, source, first, copy), lambda: nest(0, source, first, zero))


def _stored(spec: PatchSpec) -> str:
    return "i16" if spec.type == "bfloat" else spec.type


def _store(fn: Function, spec: PatchSpec, value: str, place: str, mask: str) -> None:
    masked_store(fn, spec.lanes, _stored(spec), value, place, mask, spec.size)


def _load(fn: Function, spec: PatchSpec, at: str, masks: list[str]) -> str:
    """The points of a run for one tap, zeros outside."""
    lanes, ty = spec.lanes, _stored(spec)
    vector = f"<{lanes} x {ty}>"
    if _pieces(spec) == 0:
        return _gather(fn, spec, at, masks[0])
    parts = [
        masked_load(fn, lanes, ty, offset(fn, at, piece * lanes * spec.size), mask, spec.size)
        for piece, mask in enumerate(masks)
    ]
    if len(parts) == 1:
        return parts[0]
    order = ", ".join(f"i32 {i * len(parts)}" for i in range(lanes))
    return fn.op(f"shufflevector {vector} {parts[0]}, {vector} {parts[1]}, <{lanes} x i32> <{order}>")


def _gather(fn: Function, spec: PatchSpec, at: str, mask: str) -> str:
    lanes, ty = spec.lanes, _stored(spec)
    vector, pointers = f"<{lanes} x {ty}>", f"<{lanes} x ptr>"
    numbers = ", ".join(f"i64 {i * spec.point_strides[-1] * spec.size}" for i in range(lanes))
    where = fn.op(f"getelementptr i8, ptr {at}, <{lanes} x i64> <{numbers}>")
    name = f"llvm.masked.gather.{mangled(lanes, ty)}.v{lanes}p0"
    listed = [(pointers, f"align {spec.size} {where}"), (f"<{lanes} x i1>", mask), (vector, "zeroinitializer")]
    callee = fn.module.declare(name, vector, [pointers, f"<{lanes} x i1>", vector])
    return fn.call(vector, callee, listed)
