"""x86 AMX: 2 x 2 tiles of 16 x 16 accumulators (or 2 x 1 of them for few columns), 32 values of K at a time of bfloat16
inputs, 64 of 8-bit integers.

A tile register holds 16 rows of 64 bytes. Four of the eight hold C, two A, two B: four loads feed four products. The
tiles' shapes must be configured before the first call, and other libraries release them: a kernel that calls such
micro-kernels calls the function of `emit_configure` when it starts.
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.dots.flow import loop, offset, times, when
from luban.compiler.codegen.llvm.dots.results import walk
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES, PARAMETERS, DotSpec
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError

AMX_A_GROUP = 32  # values of K in a tile of A
AMX_B_COLUMNS = (
    16  # a panel of B holds whole tiles, whose lines lie one after the other (2 to 8 % faster than 2 abreast)
)
ROWS, ROW_BYTES = 16, 64
C_TILES, A_TILES, B_TILES = (0, 1, 2, 3), (4, 5), (6, 7)
AMX_UNITS = ("amx", "amx_int8")
INT8 = {"": "tdpbssd", "a": "tdpbusd", "b": "tdpbsud", "ab": "tdpbuud"}  # by the unsigned operands
CONFIG_NAME = "luban_amx_tiles"


def emit_configure(module: Module, name: str) -> None:
    """Adds `void name()`, which gives all eight tiles 16 rows of 64 bytes; the process must hold the AMX permission."""
    fn = Function(module, name, "void", [], "internal", "nounwind")
    rows = [ROWS] * 8 + [0] * 8
    columns = [byte for _ in range(8) for byte in (ROW_BYTES, 0)] + [0] * 16  # 16-bit little endian
    config = ", ".join(f"i8 {b}" for b in [1, 0, *[0] * 14, *columns, *rows])
    module.constant(CONFIG_NAME, f"[64 x i8] [{config}], align 64")
    fn.intrinsic("llvm.x86.ldtilecfg", "void", [("ptr", f"@{CONFIG_NAME}")])
    fn.emit("ret void")
    module.add(fn)


def emit_amx(module: Module, name: str, spec: DotSpec) -> None:
    """Adds the internal function `name`: mr 32, one or two vectors of 16 lanes, B packed with K padded to 64 bytes.

    Inputs are bfloat and sums float, or i8 and i32. A is "packed" (rows of 64 bytes, `[ceil(K/32)][32][32]` for bfloat,
    zero padded) or "row_major", read in place. Partial tiles of A in place and
    the ragged end of K go through a zeroed stack panel. The tiles must have been configured (`emit_configure`).
    """
    types, shape = (spec.a_type, spec.b_type, spec.acc_type), (spec.mr, spec.lanes)
    known = types in (("bfloat", "bfloat", "float"), ("i8", "i8", "i32"))
    if not known or shape != (32, 16) or spec.nr_vectors > 2:
        raise ConfigError(
            f"micro-kernel {name}: AMX computes bfloat to float or i8 to i32 tiles of 32 x 1 or 2 vectors of 16, "
            f"got {types}, {shape} with {spec.nr_vectors}"
        )
    if spec.b_layout != "packed" or spec.a_layout not in ("packed", "row_major"):
        raise ConfigError(
            f"micro-kernel {name}: AMX takes A packed or row_major and B packed, "
            f"got {spec.a_layout}, {spec.b_layout}; pack first"
        )
    fn = Function(module, name, "void", [*PARAMETERS, *spec.extra_params], "internal", "nounwind")
    some = fn.op(f"and i1 {fn.op('icmp sgt i64 %m, 0')}, {fn.op('icmp sgt i64 %n, 0')}")
    when(fn, some, lambda: _tile(fn, spec))
    fn.emit("ret void")
    module.add(fn)


def _whole_tile(fn: Function, spec: DotSpec) -> None:
    row = str(ROW_BYTES * spec.nr_vectors)
    if spec.accumulate:
        _corners(fn, spec, "tileloadd64", "%C", row)
    else:
        _zero(fn, spec)
    _multiply(fn, spec)
    _corners(fn, spec, "tilestored64", "%C", row)


def _tile(fn: Function, spec: DotSpec) -> None:
    if spec.whole_tile:
        _whole_tile(fn, spec)
        return
    full = fn.op(f"and i1 {fn.op('icmp eq i64 %m, 32')}, {fn.op(f'icmp eq i64 %n, {spec.nr}')}")
    c_bytes = times(fn, "%c_rs", 4)
    plain = spec.epilogue is None
    direct = fn.op(f"and i1 {full}, {'true' if plain else 'false'}")
    begin = direct if spec.accumulate else "false"
    when(fn, begin, lambda: _corners(fn, spec, "tileloadd64", "%C", c_bytes), lambda: _zero(fn, spec))
    _multiply(fn, spec)
    buffer = fn.alloca(f"[1024 x {spec.acc_type}]", 64)

    def through_stack() -> None:
        _corners(fn, spec, "tilestored64", buffer, str(ROW_BYTES * spec.nr_vectors))
        walk(fn, spec, buffer)

    when(fn, direct, lambda: _corners(fn, spec, "tilestored64", "%C", c_bytes), through_stack)


def _multiply(fn: Function, spec: DotSpec) -> None:
    size = ELEMENT_BYTES[spec.a_type]
    group = ROW_BYTES // size  # values of K in a tile
    panel = 32 * ROW_BYTES  # bytes of a group of A
    tile = AMX_B_COLUMNS * ROW_BYTES  # and of one of the two panels of B
    blocks = fn.op(f"udiv i64 %K, {group}")
    if spec.a_layout == "packed":
        padded = fn.op(f"udiv i64 {fn.op(f'add i64 %K, {group - 1}')}, {group}")
        _blocks(fn, spec, ("%A", str(ROW_BYTES), str(panel)), "%B", padded)
        return
    stage = fn.alloca(f"[{panel} x i8]", 64)
    row = times(fn, "%a_rs", size)
    past = fn.op(f"mul i64 {blocks}, {group}")

    def staged(first: str, b: str, width: str) -> None:
        _clear(fn, stage, panel)
        _stage(fn, offset(fn, "%A", times(fn, first, size)), row, stage, times(fn, width, size))
        _blocks(fn, spec, (stage, str(ROW_BYTES), "0"), b, "1")

    def partial() -> None:
        def body(index: str, _values: list[str]) -> list[str]:
            staged(times(fn, index, group), offset(fn, "%B", times(fn, index, tile)), str(group))
            return []

        loop(fn, blocks, [], body)

    rows_full = fn.op("icmp eq i64 %m, 32")
    when(fn, rows_full, lambda: _blocks(fn, spec, ("%A", row, str(ROW_BYTES)), "%B", blocks), partial)
    rest = fn.op(f"urem i64 %K, {group}")
    ragged = fn.op(f"icmp ne i64 {rest}, 0")
    when(fn, ragged, lambda: staged(past, offset(fn, "%B", times(fn, blocks, tile)), rest))


def _blocks(fn: Function, spec: DotSpec, left: tuple[str, str, str], b: str, count: str) -> None:
    """`count` groups of K: of A given are its start and the bytes from row to row and from group to group."""
    a, a_row, a_step = left
    lower = fn.op(f"mul i64 {a_row}, {ROWS}")
    right = times(fn, "%b_rs", ELEMENT_BYTES[spec.b_type])
    product = "tdpbf16ps" if spec.b_type == "bfloat" else INT8[spec.unsigned]

    def body(_index: str, values: list[str]) -> list[str]:
        at, bt = values
        _tile_move(fn, "tileloadd64", A_TILES[0], at, a_row)
        _tile_move(fn, "tileloadd64", B_TILES[0], bt, str(ROW_BYTES))
        _tile_move(fn, "tileloadd64", A_TILES[1], offset(fn, at, lower), a_row)
        if spec.nr_vectors == 2:
            _tile_move(fn, "tileloadd64", B_TILES[1], offset(fn, bt, right), str(ROW_BYTES))
        for c in _c_tiles(spec):
            tiles = [("i8", str(t)) for t in (c, A_TILES[c // 2], B_TILES[c % 2])]
            fn.call("void", _declare(fn, product, ["i8 immarg"] * 3), tiles)
        return [offset(fn, at, a_step), offset(fn, bt, ROWS * ROW_BYTES)]

    loop(fn, count, [("ptr", a), ("ptr", b)], body)


def _clear(fn: Function, stage: str, size: int) -> None:
    """Zeros in a loop: LLVM takes one store of the panel apart byte by byte (0.4 of 0.55 s that an attention compiled)."""

    def line(i: str, _values: list[str]) -> list[str]:
        fn.emit(f"store <16 x float> zeroinitializer, ptr {offset(fn, stage, times(fn, i, ROW_BYTES))}, align 64")
        return []

    loop(fn, str(size // ROW_BYTES), [], line)


def _stage(fn: Function, source: str, row: str, stage: str, size: str) -> None:
    """Copies `size` bytes of each of the m rows of A to the stack panel."""

    def one(i: str, _values: list[str]) -> list[str]:
        line = offset(fn, source, fn.op(f"mul i64 {i}, {row}"))
        target = offset(fn, stage, times(fn, i, ROW_BYTES))
        fn.intrinsic("llvm.memcpy.p0.p0.i64", "void", [("ptr", target), ("ptr", line), ("i64", size), ("i1", "false")])
        return []

    loop(fn, "%m", [], one)


def _c_tiles(spec: DotSpec) -> tuple[int, ...]:
    return C_TILES if spec.nr_vectors == 2 else C_TILES[::2]


def _corners(fn: Function, spec: DotSpec, operation: str, base: str, row_bytes: str) -> None:
    """Loads or stores the tiles of C."""
    lower = offset(fn, base, fn.op(f"mul i64 {row_bytes}, {ROWS}"))
    for c in _c_tiles(spec):
        start = base if c < 2 else lower
        _tile_move(fn, operation, c, offset(fn, start, ROW_BYTES * (c % 2)), row_bytes)


def _zero(fn: Function, spec: DotSpec) -> None:
    for c in _c_tiles(spec):
        fn.call("void", _declare(fn, "tilezero", ["i8 immarg"]), [("i8", str(c))])


def _tile_move(fn: Function, operation: str, tile: int, pointer: str, row_bytes: str) -> None:
    callee = _declare(fn, operation, ["i8 immarg", "ptr", "i64"])
    fn.call("void", callee, [("i8", str(tile)), ("ptr", pointer), ("i64", row_bytes)])


def _declare(fn: Function, operation: str, arguments: list[str]) -> str:
    return fn.module.declare(f"llvm.x86.{operation}", "void", arguments)
