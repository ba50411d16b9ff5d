"""The loops that measure a chip's peaks, as LLVM IR made from its target data.

Two kinds. A compute loop multiplies and adds in registers only, with enough independent sums to hide the latency. A memory
loop reads, writes or copies a region again and again. Every loop is `void NAME(ptr context, i64 tasks, ptr rt)`: the
tasks share out among the threads of the process's OpenMP pool as those of any other kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots import amx
from luban.compiler.codegen.llvm.dots.flow import loop, mangled, offset
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.lanes import features_of, function_attributes
from luban.compiler.codegen.llvm.parallel import PARALLEL_FOR, add_parallel_for
from luban.targets.target import DotUnit, Target

CONTEXT = ("count", "base", "stride", "bytes")  # the i64 slots of a loop's context
SLOT_BYTES = 8
SUMS = 24  # at most; 4 cycles of latency times 2 units need 8, and out-of-order chips run a little better with more
STEP_VECTORS = 8  # vectors that one turn of a memory loop moves
PREFETCH_BYTES = 2048  # how far a read loop asks ahead
_TYPES = {"float64": "double", "float32": "float", "float16": "half"}


@dataclass(frozen=True)
class ComputeLoop:
    """`operations` are the multiplications and additions of one turn of one task."""

    unit: str
    dtype: str
    operations: int
    write: Callable[[Function], None]

    @property
    def symbol(self) -> str:
        """The name of its function."""
        return f"peak.{self.unit}.{self.dtype}"


@dataclass(frozen=True)
class MemoryLoop:
    """What one pass does with a region: "read", "write" or "copy" (its first half to its second).

    `ahead`: what is read is asked for before, which gains a fifth from memory and costs a fifth in the first-level cache.
    `past_caches`: stores go to memory directly, as those of large kernels may.
    """

    does: str
    ahead: bool = False
    past_caches: bool = False

    @property
    def symbol(self) -> str:
        """The name of its function."""
        return f"memory.{self.does}{'.ahead' if self.ahead else ''}{'.past' if self.past_caches else ''}"


def memory_loops(target: Target) -> tuple[MemoryLoop, ...]:
    """Every memory loop, several for each thing to do; those past the caches where the target's kernels can store so."""
    past = (False, True) if target.family == "x86-64" else (False,)
    reads = tuple(MemoryLoop("read", ahead=a) for a in (False, True))
    writes = tuple(MemoryLoop("write", past_caches=p) for p in past)
    return reads + writes + tuple(MemoryLoop("copy", a, p) for a in (False, True) for p in past)


def compute_loops(target: Target) -> tuple[ComputeLoop, ...]:
    """The plain multiply-add in float32 and float64, and each dot unit of the target that has a loop here."""
    loops = [_fma(target, dtype) for dtype in ("float32", "float64") if dtype in target.dtypes]
    for unit in target.dot_units:
        if unit.kind == "fma" and unit.input == "float16":
            loops.append(_fma(target, "float16", unit.name))
        elif unit.name in _TILES and target.matrix_unit == "amx":
            loops.append(_amx(unit, _TILES[unit.name]))
        elif unit.name in _DOTS:
            loops.append(_dot(target, unit, _DOTS[unit.name]))
    return tuple(loops)


def module_text(target: Target) -> str:
    """One LLVM module with every loop of the target."""
    module = Module(features=features_of(target))
    add_parallel_for(module)
    if target.matrix_unit == "amx":
        amx.emit_configure(module, "configure")
    for compute in compute_loops(target):
        _emit(module, target, compute.symbol, compute.write)
    for memory in memory_loops(target):
        _emit(module, target, memory.symbol, functools.partial(_move, target, memory))
    return module.text()


def _emit(module: Module, target: Target, symbol: str, write: Callable[[Function], None]) -> None:
    """The entry, and the body that runs a thread's share of the tasks; `write` finds %count, %at and %bytes."""
    attributes = function_attributes(target)
    entry = Function(module, symbol, "void", [("ptr", "ctx"), ("i64", "tasks"), ("ptr", "rt")], "", attributes)
    body = f"{symbol}.body"
    arguments = [("ptr", f"@{body}"), ("ptr", "%ctx"), ("i64", "%tasks"), ("ptr", "%rt")]
    entry.call("void", f"@{PARALLEL_FOR}", arguments)
    entry.emit("ret void")
    module.add(entry)
    parameters = [("ptr", "ctx"), ("i64", "begin"), ("i64", "end")]
    fn = Function(module, body, "void", parameters, "internal", attributes)
    for number, name in enumerate(CONTEXT):
        fn.emit(f"%{name} = load i64, ptr {offset(fn, '%ctx', number * SLOT_BYTES)}, align 8")
    tasks = fn.op("sub i64 %end, %begin")

    def one(index: str, _values: list[str]) -> list[str]:
        number = fn.op(f"add i64 %begin, {index}")
        first = fn.op(f"mul i64 {number}, %stride")
        fn.emit(f"%at = inttoptr i64 {fn.op(f'add i64 %base, {first}')} to ptr")
        write(fn)
        return []

    loop(fn, tasks, [], one)
    fn.emit("ret void")
    module.add(fn)


# ---- compute


def sums_of(target: Target) -> int:
    """Independent sums that fit beside two operands in the registers."""
    return max(4, min(SUMS, target.vector_registers - 4))


def _sums(fn: Function, vector: str, align: int, sums: int, step: Callable[[str], str]) -> None:
    """`count` turns of `sums` steps, each on a sum of its own; the sums end in memory, so that none is left out."""

    def turn(_index: str, values: list[str]) -> list[str]:
        return [step(value) for value in values]

    for number, value in enumerate(loop(fn, "%count", [(vector, "zeroinitializer")] * sums, turn)):
        fn.emit(f"store {vector} {value}, ptr {offset(fn, '%at', number * align)}, align {align}")


def _fma(target: Target, dtype: str, unit: str = "fma") -> ComputeLoop:
    lanes, sums = target.lanes(dtype), sums_of(target)
    element = _TYPES[dtype]
    vector = f"<{lanes} x {element}>"

    def write(fn: Function) -> None:
        x, y = (_operand(fn, vector, n, target.vector_bytes) for n in range(2))

        def step(value: str) -> str:
            return fn.intrinsic(f"llvm.fma.{mangled(lanes, element)}", vector, [(vector, v) for v in (x, y, value)])

        _sums(fn, vector, target.vector_bytes, sums, step)

    return ComputeLoop(unit, dtype, 2 * lanes * sums, write)


def _operand(fn: Function, vector: str, number: int, align: int) -> str:
    return fn.op(f"load {vector}, ptr {offset(fn, '%at', number * align)}, align {align}")


@dataclass(frozen=True)
class _Dot:
    """An intrinsic of `bits` wide operands: sum' = f(sum, a, b)."""

    intrinsic: str
    bits: int
    operand: str
    total: str


_DOTS = {
    "avx512bf16.vdpbf16ps": _Dot("llvm.x86.avx512bf16.dpbf16ps.512", 512, "<32 x bfloat>", "<16 x float>"),
    "avx512vnni.vpdpbusd": _Dot("llvm.x86.avx512.vpdpbusd.512", 512, "<64 x i8>", "<16 x i32>"),
    "bf16.bfdot": _Dot("llvm.aarch64.neon.bfdot.v4f32.v8bf16", 128, "<8 x bfloat>", "<4 x float>"),
    "bf16.bfmmla": _Dot("llvm.aarch64.neon.bfmmla", 128, "<8 x bfloat>", "<4 x float>"),
    "dotprod.sdot": _Dot("llvm.aarch64.neon.sdot.v4i32.v16i8", 128, "<16 x i8>", "<4 x i32>"),
    "i8mm.smmla": _Dot("llvm.aarch64.neon.smmla.v4i32.v16i8", 128, "<16 x i8>", "<4 x i32>"),
}


def _dot(target: Target, unit: DotUnit, dot: _Dot) -> ComputeLoop:
    sums, size = sums_of(target), dot.bits // 8
    products = dot.bits // 32 * unit.k

    def write(fn: Function) -> None:
        a, b = (_operand(fn, dot.operand, n, size) for n in range(2))

        def step(value: str) -> str:
            return fn.intrinsic(dot.intrinsic, dot.total, [(dot.total, value), (dot.operand, a), (dot.operand, b)])

        _sums(fn, dot.total, size, sums, step)

    return ComputeLoop(unit.name, unit.input, 2 * products * sums, write)


_TILES = {"amx.tdpbf16ps": "tdpbf16ps", "amx.tdpbssd": "tdpbssd"}


def _amx(unit: DotUnit, instruction: str) -> ComputeLoop:
    """Four tiles of sums, two of each operand: what a micro-kernel keeps in the eight tile registers."""
    size = amx.ROWS * amx.ROW_BYTES

    def write(fn: Function) -> None:
        fn.call("void", "@configure", [])
        row = ("i64", str(amx.ROW_BYTES))
        for tile in (*amx.A_TILES, *amx.B_TILES):
            at = offset(fn, "%at", (tile - amx.A_TILES[0]) * size)
            fn.call("void", _tile(fn, "tileloadd64", 1), [("i8", str(tile)), ("ptr", at), row])
        for tile in amx.C_TILES:
            fn.call("void", _tile(fn, "tilezero", 0), [("i8", str(tile))])

        def turn(_index: str, _values: list[str]) -> list[str]:
            for c in amx.C_TILES:
                tiles = (c, amx.A_TILES[c // 2], amx.B_TILES[c % 2])
                fn.call("void", fn.module.declare(f"llvm.x86.{instruction}", "void", ["i8 immarg"] * 3), _bytes(tiles))
            return []

        loop(fn, "%count", [], turn)
        for tile in amx.C_TILES:
            fn.call("void", _tile(fn, "tilestored64", 1), [("i8", str(tile)), ("ptr", "%at"), row])

    return ComputeLoop(unit.name, unit.input, 2 * unit.rows * unit.cols * unit.k * len(amx.C_TILES), write)


def _bytes(numbers: tuple[int, ...]) -> list[tuple[str, str]]:
    return [("i8", str(n)) for n in numbers]


def _tile(fn: Function, operation: str, pointers: int) -> str:
    return fn.module.declare(f"llvm.x86.{operation}", "void", ["i8 immarg", *["ptr", "i64"] * pointers])


# ---- memory


def step_bytes(target: Target) -> int:
    """Bytes that one turn of a memory loop moves: regions are multiples of it."""
    return STEP_VECTORS * target.vector_bytes


def _move(target: Target, memory: MemoryLoop, fn: Function) -> None:
    size, step = target.vector_bytes, step_bytes(target)
    vector = f"<{size // 4} x i32>"
    half = fn.op("lshr i64 %bytes, 1")
    turns = fn.op(f"udiv i64 {half if memory.does == 'copy' else '%bytes'}, {step}")
    to = offset(fn, "%at", half) if memory.does == "copy" else "%at"
    note = f", !nontemporal {fn.module.note('i32 1')}" if memory.past_caches else ""
    loads, stores = memory.does != "write", memory.does != "read"

    def turn(index: str, sums: list[str]) -> list[str]:
        first = fn.op(f"mul i64 {index}, {step}")
        source, sink = offset(fn, "%at", first), offset(fn, to, first)
        values = ["zeroinitializer"] * STEP_VECTORS
        if loads:
            if memory.ahead:
                _ask_ahead(fn, target, source, step)
            values = [_operand_at(fn, vector, source, n * size) for n in range(STEP_VECTORS)]
        if not stores:
            return [fn.op(f"add {vector} {s}, {v}") for s, v in zip(sums, values, strict=True)]
        for n, value in enumerate(values):
            fn.emit(f"store {vector} {value}, ptr {offset(fn, sink, n * size)}, align {size}{note}")
        return []

    def one_pass(_index: str, sums: list[str]) -> list[str]:
        return loop(fn, turns, [(vector, s) for s in sums], turn)

    carried = [] if stores else [(vector, "zeroinitializer")] * STEP_VECTORS
    for number, total in enumerate(loop(fn, "%count", carried, one_pass)):
        fn.emit(f"store {vector} {total}, ptr {offset(fn, '%at', number * size)}, align {size}")
    if memory.past_caches:
        fn.call("void", fn.module.declare("llvm.x86.sse.sfence", "void", []), [])


def _operand_at(fn: Function, vector: str, pointer: str, byte: int) -> str:
    size = int(vector[1:].split()[0]) * 4
    return fn.op(f"load {vector}, ptr {offset(fn, pointer, byte)}, align {size}")


def _ask_ahead(fn: Function, target: Target, source: str, step: int) -> None:
    callee = fn.module.declare("llvm.prefetch.p0", "void", ["ptr", "i32 immarg", "i32 immarg", "i32 immarg"])
    for byte in range(0, step, target.line_bytes):
        ahead = offset(fn, source, PREFETCH_BYTES + byte)
        fn.call("void", callee, [("ptr", ahead), ("i32", "0"), ("i32", "3"), ("i32", "1")])
