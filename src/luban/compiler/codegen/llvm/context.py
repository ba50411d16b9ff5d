"""The state of one function while a kernel is written: where values live, how wide lanes are, what masks them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.codegen.llvm.dims import emit_dim
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.values import Buffer, Ramp, Uniform, Value, Varying, constant, splat, vector_type
from luban.errors import ConfigError
from luban.symbolic import Dim
from luban.targets import Target

OpEmitter = Callable[["Context", Any], None]
_EMITTERS: dict[str, OpEmitter] = {}


def emits(*names: str) -> Callable[[OpEmitter], OpEmitter]:
    """Registers the emitter of the operations with these names."""

    def register(emitter: OpEmitter) -> OpEmitter:
        _EMITTERS.update({name: emitter for name in names})
        return emitter

    return register


@dataclass
class Preheader:
    """What runs once before a loop: `lines` of code and the vectors of equal lanes made there."""

    lines: list[str] = field(default_factory=list)
    splats: dict[tuple[str, str, int], str] = field(default_factory=dict)


@dataclass
class Context:
    """Everything that emitting an operation needs.

    `width` lanes a vector and `copies` vectors are in flight (1 and 1 outside of vector loops); `masks` holds one
    `<width x i1>` a copy where not every lane is live. `symbols` maps the kernel's symbols to i64 operands, `rt` points
    to the run's struct. `streams` tells that stores went past the caches. `prologue` collects what belongs at the
    function's entry; `preheaders` has an entry for each loop around the code being written: a value known at depth d
    belongs into `preheaders[d]`, where it is made once.
    """

    module: Module
    fn: Function
    target: Target
    symbols: dict[str, str]
    rt: str
    values: dict[SSAValue, Value] = field(default_factory=dict)
    width: int = 1
    copies: int = 1
    masks: tuple[str, ...] | None = None
    varying: frozenset[SSAValue] = frozenset()
    depth: int = 0
    prologue: list[str] = field(default_factory=list)
    preheaders: list[Preheader] = field(default_factory=list)
    dims: dict[str, str] = field(default_factory=dict)
    stack_bytes: int = 0
    heap: list[str] = field(default_factory=list)
    streams: bool = False

    def finish(self, entry_lines: int) -> None:
        """Ends the function: puts the prologue after its first `entry_lines` lines, frees heap scratch and returns."""
        for pointer in self.heap:
            self.fn.call("void", self.module.declare("free", "void", ["ptr"]), [("ptr", pointer)])
        if self.streams:  # whoever is told that the kernel is done must see what it stored
            self.fn.call("void", self.module.declare("llvm.x86.sse.sfence", "void", []), [])
        self.fn.emit("ret void")
        self.fn.lines[entry_lines:entry_lines] = self.prologue
        self.fn.lines = flatten(self.fn.lines)
        self.module.add(self.fn)


def flatten(lines: list) -> list[str]:
    """Lines with the preheaders, which stand among them as lists, in their places."""
    flat: list[str] = []
    for line in lines:
        if isinstance(line, list):
            flat += flatten(line)
        else:
            flat.append(line)
    return flat


def open_loop(ctx: Context) -> None:
    """Begins a loop: places its preheader here and goes one level deeper."""
    preheader = Preheader()
    ctx.fn.lines.append(preheader.lines)  # type: ignore[arg-type]
    ctx.preheaders.append(preheader)
    ctx.depth += 1


def close_loop(ctx: Context) -> None:
    """Ends the innermost loop."""
    ctx.preheaders.pop()
    ctx.depth -= 1


@contextlib.contextmanager
def at_depth(ctx: Context, depth: int) -> Iterator[Function]:
    """Instructions written inside run where values of this loop depth are computed; they must be pure."""
    body = ctx.fn.lines
    if depth < ctx.depth:
        ctx.fn.lines = ctx.preheaders[depth].lines
    try:
        yield ctx.fn
    finally:
        ctx.fn.lines = body


@contextlib.contextmanager
def at_entry(ctx: Context) -> Iterator[Function]:
    """Instructions written inside go to the function's entry block, once for the whole function."""
    body, ctx.fn.lines = ctx.fn.lines, ctx.prologue
    try:
        yield ctx.fn
    finally:
        ctx.fn.lines = body


@contextlib.contextmanager
def lanes_of(
    ctx: Context, width: int, copies: int, masks: tuple[str, ...] | None, varying: frozenset
) -> Iterator[None]:
    """Code written inside runs as `copies` vectors of `width` lanes, live where `masks` say."""
    saved = ctx.width, ctx.copies, ctx.masks, ctx.varying
    ctx.width, ctx.copies, ctx.masks, ctx.varying = width, copies, masks, varying
    try:
        yield
    finally:
        ctx.width, ctx.copies, ctx.masks, ctx.varying = saved


def emit_block(ctx: Context, block: Block) -> list[SSAValue]:
    """Writes every operation of a body; returns the operands of its terminator."""
    for op in block.ops:
        if op.name == "tile.yield":
            return list(op.operands)
        emit_op(ctx, op)
    return []


def emit_op(ctx: Context, op: Operation) -> None:
    """Writes one operation. Raises ConfigError for one that this code generator does not know."""
    emitter = _EMITTERS.get(op.name)
    if emitter is None:
        raise ConfigError(
            f"the LLVM code generator has no emitter for {op.name}; lower it to operations that it has first"
        )
    emitter(ctx, op)


def buffer_of(ctx: Context, value: SSAValue) -> Buffer:
    found = ctx.values[value]
    assert isinstance(found, Buffer)
    return found


def uniform_of(ctx: Context, value: SSAValue, what: str) -> Uniform:
    """The value as a scalar; ConfigError where it differs among lanes."""
    found = ctx.values[value]
    if isinstance(found, Uniform):
        return found
    raise ConfigError(f"{what} differs among the lanes of a vector loop; it has to be the same for all of them")


def parts_of(ctx: Context, value: Value) -> list[str]:
    """The value as vectors, one for each unrolled copy (scalars when the width is 1)."""
    fn, width, copies = ctx.fn, ctx.width, ctx.copies
    if isinstance(value, Varying):
        return list(value.parts)
    if isinstance(value, Uniform):
        return [splat_uniform(ctx, value)] * copies
    assert isinstance(value, Ramp)
    lanes = ", ".join(f"i64 {lane * value.step}" for lane in range(width))
    parts = []
    for copy in range(copies):
        start = add_number(ctx, value.base, copy * width * value.step)
        if width == 1:
            parts.append(start.text)
            continue
        spread = splat(fn, "i64", start.text, width)
        parts.append(fn.op(f"add {vector_type('i64', width)} {spread}, <{lanes}>"))
    return parts


def splat_uniform(ctx: Context, value: Uniform) -> str:
    """A uniform value in every lane, made outside of the loops that it does not depend on."""
    if ctx.width == 1 or value.depth >= ctx.depth or not value.text.startswith("%"):
        return splat(ctx.fn, value.type, value.text, ctx.width)
    made = ctx.preheaders[value.depth].splats
    key = (value.text, value.type, ctx.width)
    if key not in made:
        with at_depth(ctx, value.depth) as fn:
            made[key] = splat(fn, value.type, value.text, ctx.width)
    return made[key]


def add_number(ctx: Context, value: Uniform, number: int) -> Uniform:
    """value + number."""
    if number == 0:
        return value
    return add(ctx, value, constant("i64", number))


def add(ctx: Context, a: Uniform, b: Uniform) -> Uniform:
    """a + b for i64 scalars; constants are folded."""
    if a.number is not None and b.number is not None:
        return constant("i64", int(a.number) + int(b.number))
    if a.number == 0 or b.number == 0:
        return b if a.number == 0 else a
    span = (a.span[0] + b.span[0], a.span[1] + b.span[1]) if a.span and b.span else None
    divisor = math.gcd(a.divisor, b.divisor)
    return _index(ctx, f"add nsw i64 {a.text}, {b.text}", max(a.depth, b.depth), span, divisor)


def multiply(ctx: Context, a: Uniform, b: Uniform) -> Uniform:
    """a * b for i64 scalars; constants are folded."""
    if a.number is not None and b.number is not None:
        return constant("i64", int(a.number) * int(b.number))
    if a.number == 0 or b.number == 0:
        return constant("i64", 0)
    if a.number == 1 or b.number == 1:
        return b if a.number == 1 else a
    span = None
    if a.span and b.span:
        ends = [x * y for x in a.span for y in b.span]
        span = (min(ends), max(ends))
    return _index(ctx, f"mul nsw i64 {a.text}, {b.text}", max(a.depth, b.depth), span, a.divisor * b.divisor)


def _index(ctx: Context, text: str, depth: int, span: tuple[int, int] | None, multiple: int) -> Uniform:
    with at_depth(ctx, depth) as fn:
        return Uniform("i64", fn.op(text), depth, None, span, multiple)


def dim_value(ctx: Context, dim: Dim) -> Uniform:
    """A dim as an i64; computed once, at the entry of the function."""
    if isinstance(dim, int):
        return constant("i64", dim)
    key = str(dim)
    if key not in ctx.dims:
        with at_entry(ctx) as fn:
            ctx.dims[key] = emit_dim(fn, dim, ctx.symbols)
    return Uniform("i64", ctx.dims[key])
