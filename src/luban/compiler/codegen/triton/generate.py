"""tile.kernel -> Triton source."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from xdsl.dialects.builtin import i64
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.codegen.triton import scratch  # noqa: F401 (registers an emitter)
from luban.compiler.codegen.triton.blocks import Blocks, blocks_of, power_of_two, warps
from luban.compiler.codegen.triton.context import Context, emit_block, emit_op
from luban.compiler.codegen.triton.dots import COPY, block_sizes, readable_sources
from luban.compiler.codegen.triton.expressions import ADD, MUL, Value, binary, literal, tl_type
from luban.compiler.codegen.triton.extents import exact_trip, upper_bound
from luban.compiler.codegen.triton.helpers import HELPERS
from luban.compiler.codegen.triton.kernel import Argument, Entry, TritonKernel
from luban.compiler.codegen.triton.loops import lanes_from
from luban.compiler.codegen.triton.phases import Phase, split
from luban.compiler.codegen.triton.source import assemble
from luban.compiler.codegen.triton.subset import check_subset
from luban.compiler.ir import tile
from luban.compiler.ir.attributes import BufferType
from luban.errors import ConfigError, TargetError
from luban.symbolic import Dim, floordiv, product
from luban.targets.target import Target

_ALWAYS = frozenset({"tl", "triton", "torch", "launch", "status", "program", *HELPERS, *keyword.kwlist})


@dataclass
class _Kernel:
    """A kernel under construction: `memory` are its workspaces, `spilled` the places of values that cross phases."""

    op: tile.KernelOp
    name: str
    blocks: Blocks
    buffers: dict[SSAValue, str]
    symbols: tuple[str, ...]
    sources: dict
    skip: frozenset[Operation]
    memory: dict[str, tuple[Attribute, Dim]] = field(default_factory=dict)
    spilled: dict[SSAValue, str] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)
    status: bool = False

    def workspace(self, ty: Attribute, elements: Dim) -> str:
        name = f"work{len(self.memory)}"
        self.memory[name] = (ty, elements)
        return name


def generate(kernel_op: tile.KernelOp, target: Target) -> TritonKernel:
    """The Triton source of one kernel for a target of the family "triton".

    Raises TargetError for a CPU, ConfigError for what has no form in the subset of Triton that all its dialects share.
    """
    if target.is_cpu:
        raise TargetError(f"{target.name} takes machine code, not Triton source; use the LLVM code generator for it")
    kernel = _open(kernel_op, target)
    phases = split(kernel_op, kernel.skip, kernel.sources)
    if not phases:
        raise ConfigError(f"kernel {kernel.name} does nothing; drop it")
    _share(kernel, phases)
    written = []
    for number, phase in enumerate(phases):
        name = kernel.name if len(phases) == 1 else f"{kernel.name}_{number}"
        written.append(_entry(kernel, phase, name))
    arguments = _arguments(kernel)
    entries = tuple(e for e, _ in written)
    source = assemble(kernel.name, arguments, list(entries), [text for _, text in written], kernel.helpers)
    check_subset(source)
    return TritonKernel(kernel.name, source, entries, arguments)


def _open(op: tile.KernelOp, target: Target) -> _Kernel:
    sources, skip = readable_sources(op)
    symbols = tuple(s.data for s in op.symbols)
    stored = {o.buffer for o in op.walk() if isinstance(o, tile.StoreOp)} | {
        o.target for o in op.walk() if isinstance(o, tile.PackOp)
    }
    read = {v for o in op.walk() if not isinstance(o, tile.StoreOp) for v in o.operands}
    buffers = {}
    for i, arg in enumerate(a for a in op.body.block.args if isinstance(a.type, BufferType)):
        role = "in" if arg not in stored else "both" if arg in read else "out"
        buffers[arg] = f"{role}{i}"
    name = re.sub(r"\W", "_", op.sym_name.data)
    if not name.isidentifier() or name in _ALWAYS:
        name = f"kernel_{name}"
    clash = [s for s in symbols if s in _ALWAYS or s in buffers.values() or re.fullmatch(r"work\d+", s)]
    if clash:
        raise ConfigError(
            f"the symbol {clash[0]} of kernel {name} has a name that Triton source uses otherwise; rename it"
        )
    return _Kernel(op, name, blocks_of(target), buffers, symbols, sources, skip)  # type: ignore[arg-type]


def _share(kernel: _Kernel, phases: list[Phase]) -> None:
    """Workspaces for what crosses phases: scalars, and scratch of the kernel's top level."""
    for phase in phases:
        for value in phase.loads:
            if value not in kernel.spilled:
                kernel.spilled[value] = kernel.workspace(value.type, 1)
    for op in kernel.op.body.block.ops:
        users = [p for p in phases if op in p.head]
        if (
            isinstance(op, tile.AllocOp)
            and op not in kernel.skip
            and (len(users) > 1 or any(p.kind != "single" for p in users))
        ):
            kernel.buffers[op.buffer] = kernel.workspace(op.buffer.type.dtype, op.elements.data[0])  # type: ignore[attr-defined]


def _arguments(kernel: _Kernel) -> tuple[Argument, ...]:
    own = [a for a in kernel.op.body.block.args if isinstance(a.type, BufferType)]
    found = [Argument(kernel.buffers[a], "buffer", tl_type(a.type.dtype)) for a in own]  # type: ignore[attr-defined]
    found += [Argument(s, "symbol", "tl.int64") for s in kernel.symbols]
    found += [Argument(n, "workspace", tl_type(ty), elements) for n, (ty, elements) in kernel.memory.items()]
    return (*found, *([Argument("status", "status", "tl.int64")] if kernel.status else []))


# ---- one entry


def _entry(kernel: _Kernel, phase: Phase, name: str) -> tuple[Entry, list[str]]:
    """Writes a phase: its entry and the lines of its body."""
    grid = _grid(kernel, phase)
    programs = product(grid)
    ctx = Context(kernel.name, kernel.blocks, dict(kernel.buffers))
    ctx.helpers = kernel.helpers
    ctx.skip, ctx.sources = kernel.skip, kernel.sources
    ctx.reserved = _ALWAYS | set(kernel.symbols) | set(kernel.buffers.values()) | {name}
    ctx.new_workspace = lambda buffer, elements: kernel.workspace(buffer.type.dtype, elements * programs)  # type: ignore[attr-defined]
    inner = [o for op in phase.operations for o in op.walk()]
    ctx.read_back = frozenset(o.buffer for o in inner if isinstance(o, tile.LoadOp))
    ctx.dot_tiles = phase.dot is not None
    if phase.kind in ("parallel", "lanes"):
        ctx.line("program = tl.program_id(0).to(tl.int64)")
        ctx.program = "program"
    for arg, symbol in zip(
        kernel.op.body.block.args[len(kernel.op.body.block.args) - len(kernel.symbols) :], kernel.symbols, strict=True
    ):
        ctx.values[arg] = Value(symbol, i64)
    for op in phase.head:
        emit_op(ctx, op)
    for value in phase.loads:
        ctx.values[value] = Value(ctx.assign("x", f"tl.load({ctx.use_argument(kernel.spilled[value])})"), value.type)
    _WRITERS[phase.kind](ctx, phase)
    for value, place in kernel.spilled.items():
        if value.owner in phase.operations:
            ctx.line(f"tl.store({ctx.use_argument(place)}, {ctx.values[value].text})")
    return _finish(kernel, ctx, name, grid)


def _finish(kernel: _Kernel, ctx: Context, name: str, grid: tuple[Dim, ...]) -> tuple[Entry, list[str]]:
    text = "\n".join(ctx.lines)
    used = [s for s in kernel.symbols if re.search(rf"\b{s}\b", text)]
    widened = [f"    {s} = tl.full([], {s}, tl.int64)" for s in used]
    order = [*kernel.buffers.values(), *kernel.memory, "status"]
    pointers = sorted(ctx.arguments, key=order.index)
    kernel.status |= "status" in pointers
    return Entry(name, grid, (*pointers, *used), warps(ctx.widest)), [*widened, *ctx.lines]


def _grid(kernel: _Kernel, phase: Phase) -> tuple[Dim, ...]:
    first: Dim = 1
    op = phase.operations[0]
    if phase.kind in ("parallel", "lanes"):
        assert isinstance(op, tile.ForOp)
        trip = exact_trip(op.lower, op.upper)
        if trip is None:
            raise ConfigError(
                f"the bounds of a parallel loop in kernel {kernel.name} depend on data; compute them from sizes"
            )
        first = trip if phase.kind == "parallel" else _up(trip, _lane_count(kernel.blocks, trip))
    if phase.dot is None:
        return (first,)
    dot = phase.dot
    if isinstance(dot, tile.PackOp):
        steps = ((dot.outer, dot.panel.data, COPY), (dot.k, dot.padding, COPY))
    else:
        assert isinstance(dot, tile.DotOp)
        rows, columns, _ = block_sizes(Context(kernel.name, kernel.blocks, {}), dot)
        steps = ((dot.m, 1, rows), (dot.n, 1, columns))
    sizes = [(_bounded(value), step, block) for value, step, block in steps]
    return (first, *(_up(_up(size, step) * step, block) for size, step, block in sizes))


def _bounded(value: SSAValue) -> Dim:
    found = upper_bound(value)
    assert found is not None  # phases.py looked
    return found


def _up(size: Dim, step: int) -> Dim:
    return floordiv(size + (step - 1), step)


def _lane_count(blocks: Blocks, trip: Dim) -> int:
    return min(blocks.lanes, power_of_two(trip)) if isinstance(trip, int) else blocks.lanes


def _write_parallel(ctx: Context, phase: Phase) -> None:
    op = phase.operations[0]
    assert isinstance(op, tile.ForOp)
    lower, program = ctx.values[op.lower], Value("program", i64)
    ctx.values[op.body.block.args[0]] = (
        program if lower.number == 0 else ctx.held(binary("+", lower, program, ADD), "i")
    )
    emit_block(ctx, op.body.block)


def _write_lanes(ctx: Context, phase: Phase) -> None:
    op = phase.operations[0]
    assert isinstance(op, tile.ForOp)
    trip = exact_trip(op.lower, op.upper)
    assert trip is not None
    size = _lane_count(ctx.blocks, trip)
    lower, start = ctx.values[op.lower], binary("*", Value("program", i64), literal(size, i64), MUL)
    start = start if lower.number == 0 else binary("+", lower, start, ADD)
    masked = not (isinstance(trip, int) and trip % size == 0)
    lanes = lanes_from(ctx, start, ctx.values[op.upper], size, masked)
    ctx.values[op.body.block.args[0]] = Value(lanes.index, i64, frozenset({0}))
    with ctx.lanes(lanes):
        emit_block(ctx, op.body.block)


def _write_all(ctx: Context, phase: Phase) -> None:
    for op in phase.operations:
        emit_op(ctx, op)


_WRITERS = {"parallel": _write_parallel, "lanes": _write_lanes, "tiles": _write_all, "single": _write_all}
