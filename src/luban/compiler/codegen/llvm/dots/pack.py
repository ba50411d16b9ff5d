"""Packing: strided blocks of A or B copied into the panels that micro-kernels read, converted on the way.

A panel holds `panel` rows of A (or columns of B; "rows" below) and all of K, as `[K/group][panel][group]`. The unit
of the vector code is a *word*: one value, or for bfloat16 pairs two neighbouring values of K. A source contiguous along
K is transposed in registers; one contiguous along the rows is copied, with its K pairs interleaved. Ragged ends go
element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from luban.compiler.codegen.llvm.dots.flow import loop, masked_load, masked_store, offset, plus, times, when
from luban.compiler.codegen.llvm.dots.fma import stored, widen
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES
from luban.compiler.codegen.llvm.dots.transpose import transpose
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError

CONTIGUOUS = ("k", "rows", "none")
CACHE_LINE = 64


@dataclass(frozen=True)
class PackSpec:
    """One packing function, `void name(ptr src, i64 src_rs, i64 src_ks, ptr dst, i64 rows, i64 K)`.

    Element (r, k) is read at `src[r * src_rs + k * src_ks]`; `ceil(rows / panel)` panels of `panel * Kp` elements are
    written one after the other, `Kp` being K rounded up to `k_multiple`; what lies beyond `rows` or K is zero.

    panel        rows of a panel: MR for A, NR for B
    group        values of K side by side: see `dots.PANELS`
    contiguous   "k" (src_ks is 1), "rows" (src_rs is 1) or "none"
    src_type, dst_type   LLVM element types; float to bfloat rounds to nearest even
    lanes        words in a vector register: 16 for AVX-512, 8 for AVX2, 4 for NEON
    masked       the target has masked vector memory operations
    native_bf16  the target converts float to bfloat itself (AVX512-BF16, FEAT_BF16)
    k_multiple   0 means `group`; see `dots.PANELS`
    """

    panel: int
    group: int = 1
    contiguous: str = "k"
    src_type: str = "float"
    dst_type: str = "float"
    lanes: int = 16
    masked: bool = True
    native_bf16: bool = False
    k_multiple: int = 0

    def __post_init__(self) -> None:
        if self.contiguous not in CONTIGUOUS:
            raise ConfigError(f"packing: contiguous {self.contiguous!r} is unknown; use one of {CONTIGUOUS}")
        if self.group > 1 and (ELEMENT_BYTES[self.dst_type] != 2 or self.group % 2):
            raise ConfigError(f"packing: groups of {self.group} need a 2-byte type, got {self.dst_type}; use group 1")

    @property
    def k_step(self) -> int:
        """K is padded to a multiple of this."""
        return self.k_multiple or self.group

    @property
    def pair(self) -> int:
        """Values of K in a word."""
        return min(self.group, 2)

    @property
    def word(self) -> str:
        """LLVM type of a word."""
        return "i32" if self.pair == 2 else stored(self.dst_type)

    @property
    def word_bytes(self) -> int:
        return self.pair * ELEMENT_BYTES[self.dst_type]


def emit_pack(module: Module, name: str, spec: PackSpec) -> None:
    """Adds the internal function `name`; see PackSpec for its parameters."""
    listed = [("ptr", "src"), ("i64", "src_rs"), ("i64", "src_ks"), ("ptr", "dst"), ("i64", "rows"), ("i64", "K")]
    fn = Function(module, name, "void", listed, "internal", "nounwind")
    chunks = fn.op(f"udiv i64 {plus(fn, '%K', spec.k_step - 1)}, {spec.k_step}")
    padded = times(fn, chunks, spec.k_step)
    panels = fn.op(f"udiv i64 {plus(fn, '%rows', spec.panel - 1)}, {spec.panel}")
    row_bytes = times(fn, "%src_rs", ELEMENT_BYTES[spec.src_type])
    k_bytes = times(fn, "%src_ks", ELEMENT_BYTES[spec.src_type])
    size = fn.op(f"mul i64 {padded}, {spec.panel * ELEMENT_BYTES[spec.dst_type]}")

    def block(index: str) -> _Block:
        first = times(fn, index, spec.panel)
        source = offset(fn, "%src", fn.op(f"mul i64 {first}, {row_bytes}"))
        target = offset(fn, "%dst", fn.op(f"mul i64 {index}, {size}"))
        return _Block(source, target, fn.op(f"sub i64 %rows, {first}"), row_bytes, k_bytes, padded, size)

    side, done = _side(spec), "0"
    if side > 1:
        wide = fn.op(f"udiv i64 %rows, {side * spec.panel}")
        done = times(fn, wide, side)

        def several(index: str, _values: list[str]) -> list[str]:
            _copy_rows(fn, spec, block(times(fn, index, side)), side)
            return []

        loop(fn, wide, [], several)

    def one(index: str, _values: list[str]) -> list[str]:
        _panel(fn, spec, block(plus(fn, done, index)))
        return []

    loop(fn, fn.op(f"sub i64 {panels}, {done}"), [], one)
    fn.emit("ret void")
    module.add(fn)


@dataclass(frozen=True)
class _Block:
    """A panel being written: its source and target, valid rows, byte strides, padded K, bytes to the next panel."""

    source: str
    target: str
    valid: str
    row_bytes: str
    k_bytes: str
    padded: str
    size: str


def _side(spec: PackSpec) -> int:
    """Panels to copy side by side from a source contiguous along the rows, so that every cache line is read once."""
    if spec.contiguous != "rows" or spec.group > 2 or spec.lanes % spec.panel:
        return 1
    return max(1, CACHE_LINE // (spec.panel * ELEMENT_BYTES[spec.src_type]))


def _panel(fn: Function, spec: PackSpec, block: _Block) -> None:
    """Full groups of rows take the vector code up to the last whole block of K; the rest goes element by element."""
    if spec.contiguous == "none":
        _single(fn, spec, block, "0", spec.panel, "0")
        return
    if spec.contiguous == "rows" and spec.group <= 2:  # copies: all rows of one k together, to read memory in order
        full = fn.op(f"icmp sge i64 {block.valid}, {spec.panel}")

        when(fn, full, lambda: _copy_rows(fn, spec, block, 1), lambda: _single(fn, spec, block, "0", spec.panel, "0"))
        return
    whole, rest = divmod(spec.panel, spec.lanes)

    def several(index: str, _values: list[str]) -> list[str]:
        _rows(fn, spec, block, times(fn, index, spec.lanes), spec.lanes)
        return []

    if whole:
        loop(fn, str(whole), [], several)
    if rest:
        _rows(fn, spec, block, str(whole * spec.lanes), rest)


def _rows(fn: Function, spec: PackSpec, block: _Block, first: str, count: int) -> None:
    """Packs `count` rows (at most a vector) from row `first` on."""
    full = fn.op(f"icmp sge i64 {block.valid}, {plus(fn, first, count)}")
    step = spec.lanes * spec.pair

    def vectors() -> None:
        turns = fn.op(f"udiv i64 %K, {step}")

        def body(index: str, _values: list[str]) -> list[str]:
            _square(fn, spec, block, index, first, count)
            return []

        loop(fn, turns, [], body)
        _single(fn, spec, block, first, count, times(fn, turns, step))

    when(fn, full, vectors, lambda: _single(fn, spec, block, first, count, "0"))


def _square(fn: Function, spec: PackSpec, block: _Block, index: str, first: str, count: int) -> None:
    """One block of `lanes` words of K by `count` rows; transposed where source and panel disagree."""
    lanes, chunk = spec.lanes, spec.group // spec.pair
    k = times(fn, index, lanes * spec.pair)
    start = offset(fn, block.source, fn.op(f"mul i64 {k}, {block.k_bytes}"))
    start = offset(fn, start, fn.op(f"mul i64 {first}, {block.row_bytes}") if first != "0" else 0)
    row_major = chunk > 1
    if row_major and chunk != lanes:
        raise ConfigError(f"packing: groups of {spec.group} need vectors of {chunk} words, got {lanes}; use group 2")
    if spec.contiguous == "k":
        words = [
            _along_k(fn, spec, offset(fn, start, fn.op(f"mul i64 {block.row_bytes}, {r}") if r else 0))
            for r in range(count)
        ]
        crossed = not row_major
    else:
        words = []
        for c in range(lanes):
            words.append(
                _along_rows(fn, spec, block, offset(fn, start, times(fn, block.k_bytes, c * spec.pair)), count)
            )
        crossed = row_major
    if crossed:
        words += ["poison"] * (lanes - len(words))
        words = transpose(fn, words, spec.word, 16 // spec.word_bytes)
    base = plus(fn, times(fn, k, spec.panel), times(fn, first, spec.group))
    target = offset(fn, block.target, times(fn, base, ELEMENT_BYTES[spec.dst_type]))
    pitch, width = (chunk, lanes) if row_major else (spec.panel, count)
    for number, vector in enumerate(words[:count] if row_major else words):
        _store(fn, spec, _part(fn, spec, vector, 0, width), offset(fn, target, number * pitch * spec.word_bytes), width)


def _copy_rows(fn: Function, spec: PackSpec, block: _Block, side: int) -> None:
    """`side` full panels, all their rows for one word of K after the other."""
    targets = [offset(fn, block.target, fn.op(f"mul i64 {block.size}, {q}") if q else 0) for q in range(side)]

    def body(index: str, _values: list[str]) -> list[str]:
        source = offset(fn, block.source, fn.op(f"mul i64 {times(fn, index, spec.pair)}, {block.k_bytes}"))
        line = times(fn, index, spec.panel * spec.word_bytes)
        rows = side * spec.panel
        for first in range(0, rows, spec.lanes):
            count = min(spec.lanes, rows - first)
            words = _along_rows(fn, spec, block, offset(fn, source, first * ELEMENT_BYTES[spec.src_type]), count)
            for start in range(first, first + count, min(spec.panel, spec.lanes)):
                width = min(spec.panel - start % spec.panel, first + count - start)
                part = _part(fn, spec, words, start - first, width)
                panel, within = divmod(start, spec.panel)
                at = offset(fn, offset(fn, targets[panel], line), within * spec.word_bytes)
                _store(fn, spec, part, at, width)
        return []

    loop(fn, fn.op(f"udiv i64 %K, {spec.pair}"), [], body)
    done = fn.op(f"and i64 %K, {-spec.pair}")

    def tail(q: str, _values: list[str]) -> list[str]:
        source = offset(fn, block.source, fn.op(f"mul i64 {times(fn, q, spec.panel)}, {block.row_bytes}"))
        target = offset(fn, block.target, fn.op(f"mul i64 {q}, {block.size}"))
        panel = replace(block, source=source, target=target, valid=str(spec.panel))
        _single(fn, spec, panel, "0", spec.panel, done)
        return []

    loop(fn, str(side), [], tail)


def _along_k(fn: Function, spec: PackSpec, pointer: str) -> str:
    """`lanes` words of one row."""
    values = _load(fn, spec, pointer, spec.lanes * spec.pair)
    if spec.pair == 1:
        return values
    return fn.op(f"bitcast <{spec.lanes * 2} x i16> {values} to <{spec.lanes} x i32>")


def _along_rows(fn: Function, spec: PackSpec, block: _Block, pointer: str, count: int) -> str:
    """The words of `count` neighbouring rows, `lanes` wide; lanes beyond `count` are undefined."""
    lanes = spec.lanes
    first = _load(fn, spec, pointer, count)
    if spec.pair == 1:
        return _resize(fn, first, stored(spec.dst_type), count, lanes)
    second = _load(fn, spec, offset(fn, pointer, block.k_bytes), count)
    order = ", ".join(f"i32 {i}, i32 {i + count}" if i < count else "i32 poison, i32 poison" for i in range(lanes))
    both = fn.op(f"shufflevector <{count} x i16> {first}, <{count} x i16> {second}, <{2 * lanes} x i32> <{order}>")
    return fn.op(f"bitcast <{2 * lanes} x i16> {both} to <{lanes} x i32>")


def _load(fn: Function, spec: PackSpec, pointer: str, count: int) -> str:
    """`count` neighbouring values in the panel's type (bfloat as i16)."""
    ty, size = stored(spec.src_type), ELEMENT_BYTES[spec.src_type]
    if count & (count - 1) and spec.masked and size >= 4:
        value = masked_load(fn, spec.lanes, ty, pointer, _first_lanes(spec.lanes, count), size)
        value = _resize(fn, value, ty, spec.lanes, count)
    else:
        value = fn.op(f"load <{count} x {ty}>, ptr {pointer}, align {size}")
    return convert(fn, spec, value, count)


def _store(fn: Function, spec: PackSpec, value: str, pointer: str, count: int) -> None:
    """A vector of `count` words, or the first `count` of a vector of `lanes` where the target can mask the store."""
    align = min(spec.word_bytes, ELEMENT_BYTES[spec.dst_type])
    if _masks_store(spec, count):
        masked_store(fn, spec.lanes, spec.word, value, pointer, _first_lanes(spec.lanes, count), align)
    else:
        fn.emit(f"store <{count} x {spec.word}> {value}, ptr {pointer}, align {align}")


def _masks_store(spec: PackSpec, count: int) -> bool:
    """Widths that no plain store has, where one under a mask is cheap."""
    return spec.masked and spec.word_bytes >= 4 and count & (count - 1) != 0


def _part(fn: Function, spec: PackSpec, value: str, start: int, count: int) -> str:
    """What `_store` takes to store words `start` to `start + count` of a vector."""
    if start == 0 and _masks_store(spec, count):
        return value
    return _slice(fn, value, spec.word, spec.lanes, start, count)


def _slice(fn: Function, value: str, ty: str, lanes: int, start: int, count: int) -> str:
    if (start, count) == (0, lanes):
        return value
    order = ", ".join(f"i32 {i}" for i in range(start, start + count))
    return fn.op(f"shufflevector <{lanes} x {ty}> {value}, <{lanes} x {ty}> poison, <{count} x i32> <{order}>")


def _first_lanes(lanes: int, count: int) -> str:
    return "<" + ", ".join(f"i1 {int(i < count)}" for i in range(lanes)) + ">"


def _resize(fn: Function, value: str, ty: str, have: int, want: int) -> str:
    if have == want:
        return value
    order = ", ".join(f"i32 {i}" if i < have else "i32 poison" for i in range(want))
    return fn.op(f"shufflevector <{have} x {ty}> {value}, <{have} x {ty}> poison, <{want} x i32> <{order}>")


def _single(fn: Function, spec: PackSpec, block: _Block, first: str, count: int, k_first: str) -> None:
    """Rows `first` to `first + count`, K from `k_first` to its padded end: one element at a time, zeros beyond."""
    source_ty, target_ty = stored(spec.src_type), stored(spec.dst_type)
    zero = "0" if target_ty == "i16" else "0.0"

    def along_k(index: str, _values: list[str]) -> list[str]:
        k = plus(fn, k_first, index)
        inside = fn.op(f"icmp slt i64 {k}, %K")
        chunk = fn.op(f"udiv i64 {k}, {spec.group}")
        within = fn.op(f"urem i64 {k}, {spec.group}")
        line = plus(fn, times(fn, chunk, spec.panel * spec.group), within)
        column = fn.op(f"mul i64 {k}, {block.k_bytes}")

        def along_rows(number: str, _values: list[str]) -> list[str]:
            r = plus(fn, first, number)
            present = fn.op(f"icmp slt i64 {r}, {block.valid}")
            valid = fn.op(f"and i1 {inside}, {present}")
            distance = plus(fn, column, fn.op(f"mul i64 {r}, {block.row_bytes}"))
            at = offset(fn, block.source, fn.op(f"select i1 {valid}, i64 {distance}, i64 0"))  # never beyond the source
            value = convert(fn, spec, fn.op(f"load {source_ty}, ptr {at}"), 1)
            kept = fn.op(f"select i1 {valid}, {target_ty} {value}, {target_ty} {zero}")
            place = times(fn, plus(fn, line, times(fn, r, spec.group)), ELEMENT_BYTES[spec.dst_type])
            fn.emit(f"store {target_ty} {kept}, ptr {offset(fn, block.target, place)}")
            return []

        loop(fn, str(count), [], along_rows)
        return []

    loop(fn, fn.op(f"sub i64 {block.padded}, {k_first}"), [], along_k)


def convert(fn: Function, spec: PackSpec, value: str, lanes: int) -> str:
    """`value` from the source's type to the panel's; bfloat is an i16 on both sides."""
    source, target = spec.src_type, spec.dst_type
    if source == target:
        return value
    if target == "float" and source in ("bfloat", "half"):
        return widen(fn, value, source, "float", lanes)
    if (source, target) == ("float", "bfloat"):
        return narrow(fn, value, lanes, spec.native_bf16)
    raise ConfigError(f"packing {source} into {target} is not known; convert before packing")


def narrow(fn: Function, value: str, lanes: int, native: bool) -> str:
    """float to bfloat (as i16), rounding to nearest even; NaN stays NaN."""

    def of(element: str) -> str:
        return element if lanes == 1 else f"<{lanes} x {element}>"

    if native:
        short = fn.op(f"fptrunc {of('float')} {value} to {of('bfloat')}")
        return fn.op(f"bitcast {of('bfloat')} {short} to {of('i16')}")

    def binary(operation: str, left: str, right: int | str) -> str:
        right = fn.splat("i32", str(right), lanes) if isinstance(right, int) else right
        return fn.op(f"{operation} {of('i32')} {left}, {right}")

    bits = fn.op(f"bitcast {of('float')} {value} to {of('i32')}")
    odd = binary("and", binary("lshr", bits, 16), 1)
    bumped = binary("add", binary("add", bits, 0x7FFF), odd)
    quiet = binary("or", bits, 0x400000)
    nan = fn.op(f"fcmp uno {of('float')} {value}, {value}")
    chosen = fn.op(f"select {of('i1')} {nan}, {of('i32')} {quiet}, {of('i32')} {bumped}")
    return fn.op(f"trunc {of('i32')} {binary('lshr', chosen, 16)} to {of('i16')}")
