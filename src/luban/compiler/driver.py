"""A graph module and its calling convention -> a Program: passes, lowering, buffer plan, machine code."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.codegen.llvm.emitter import Module
from luban.compiler.codegen.llvm.kernel import emit_kernel
from luban.compiler.codegen.llvm.program import Call, Operand, emit_entry
from luban.compiler.ir import graph
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.in_place import take_over
from luban.compiler.lowering.naming import kernel_name
from luban.compiler.lowering.nan import NanChecks
from luban.compiler.lowering.plan import Life, plan_arena
from luban.compiler.lowering.registry import Lowered, Request, builder
from luban.compiler.lowering.structure import structural_key
from luban.compiler.passes.pipeline import run
from luban.errors import ConfigError, LubanError
from luban.runtime import schedules
from luban.runtime.program import Program
from luban.runtime.report import stage
from luban.symbolic import Dim, product, symbol
from luban.targets.target import Target

GRAPH_PIPELINE = (
    "simplify,arg_reductions,cse,joins,attention_heads,inline_casts,dce,contract_layout,packed_casts,recompute,fuse"
)


@dataclass
class Kernels:
    """The kernels of one program: unique ones by structure, and one call for each group."""

    unique: dict[Hashable, Lowered] = field(default_factory=dict)
    calls: list[tuple[Lowered, tuple[SSAValue, ...], tuple[SSAValue, ...]]] = field(default_factory=list)


def compile_graph(
    module: ModuleOp,
    metadata: dict[str, Any],
    target: Target,
    name: str,
    pipeline: str = GRAPH_PIPELINE,
    detect_nan: bool = False,
) -> Program:
    """Compiles one `graph.func`. `metadata` holds inputs, outputs, symbols and symbol_sources as programs know them.

    With detect_nan the program stops at the first kernel that makes a NaN (see `lowering/nan.py`).
    """
    with stage("passes"):
        run(module, pipeline)
        func = next(op for op in module.body.block.ops if isinstance(op, graph.FuncOp))
        kernels = lower_groups(func, tuple(metadata["symbols"]), target)
    with stage("codegen"):
        return emit_program(func, kernels, metadata, target, name, detect_nan)


def lower_groups(func: graph.FuncOp, symbols: tuple[str, ...], target: Target, tile_size: int | None = None) -> Kernels:
    """One kernel for each group; equal groups share theirs. `tile_size` asks for cache blocks of that side."""
    kernels = Kernels()
    for op in func.body.block.ops:
        if isinstance(op, (graph.AssignOp, graph.ReturnOp)):
            continue
        if not isinstance(op, graph.GroupOp):
            raise ConfigError(
                f"{op.name} stands outside every group and would never run; end the pipeline with fuse or isolate"
            )
        key = structural_key(op)
        lowered = kernels.unique.get(key)
        if lowered is None:
            request = Request(op, kernel_name(op, len(kernels.unique)), symbols, target, tile_size)
            with schedules.recorded() as asked:
                lowered = builder(op.label.data)(request)
            lowered = kernels.unique[key] = replace(lowered, schedules=asked)
            kernels.calls.append((lowered, lowered.inputs, lowered.outputs))
        else:
            kernels.calls.append((lowered, *_rebind(lowered, op)))
    return kernels


def _rebind(lowered: Lowered, op: graph.GroupOp) -> tuple[tuple[SSAValue, ...], tuple[SSAValue, ...]]:
    """The inputs and outputs of a call of an equal group's kernel, by position of first use."""
    first = lowered.outputs[0].owner
    theirs, ours = _outside_values(first), _outside_values(op)  # type: ignore[arg-type]
    table = dict(zip(theirs, ours))
    results = dict(zip(first.results, op.results))  # type: ignore[union-attr]
    return tuple(table[v] for v in lowered.inputs), tuple(results[v] for v in lowered.outputs)


def _outside_values(op: graph.GroupOp) -> list[SSAValue]:
    inside = {r for o in op.body.block.ops for r in o.results}
    return list(dict.fromkeys(v for o in op.body.block.ops for v in o.operands if v not in inside))


@dataclass(frozen=True)
class Emitted:
    """A program as LLVM IR text, with its metadata: everything but the machine code."""

    text: str
    metadata: dict[str, Any]


def emit_program(
    func: graph.FuncOp, kernels: Kernels, metadata: dict[str, Any], target: Target, name: str, detect_nan: bool = False
) -> Program:
    """Places every value, writes the entry function and compiles the module."""
    emitted = emit_text(func, kernels, metadata, target, name, detect_nan)
    return Program(emitted.metadata, compile_module(emitted.text, target).object)


def emit_text(
    func: graph.FuncOp, kernels: Kernels, metadata: dict[str, Any], target: Target, name: str, detect_nan: bool = False
) -> Emitted:
    """Places every value and writes the module and the program's metadata."""
    places, lives = _place_values(func, kernels, metadata)
    module = Module()
    for lowered in kernels.unique.values():
        emit_kernel(module, lowered.kernel, target)
    _note_uses(kernels, places, metadata)
    calls = []
    checks = NanChecks(places, detect_nan)
    first = checks.of_inputs(func, metadata)
    dims = tuple(symbol(s) for s in metadata["symbols"])
    fallible = {low.kernel.sym_name.data for low in kernels.unique.values() if _may_fail(low)}
    for number, (lowered, inputs, outputs) in enumerate(kernels.calls):
        where = [places[v] for v in (*inputs, *outputs)]
        where += [places[(number, w)] for w in range(len(lowered.workspaces))]
        kernel = lowered.kernel.sym_name.data
        calls.append(Call(kernel, tuple(where), dims, checks.of_call(number, outputs), kernel in fallible))
    emit_entry(module, calls, metadata["symbols"], first=first)
    arena = plan_arena(lives)
    meta: dict[str, Any] = {
        "version": 1,
        "name": name,
        "target": target.name,
        "requires": list(target.required_features),
        **{k: metadata[k] for k in ("symbols", "symbol_sources", "inputs", "outputs", "seeds") if k in metadata},
        "temps": [{"bytes": _plain(life.bytes)} for life in lives],
        "arena": {"bytes": _plain(arena.bytes), "offsets": [_plain(o) for o in arena.offsets]},
        "kernels": [
            {
                **{"name": c.kernel, "kind": "generated", "flops": _plain(low.flops), "bytes": _plain(low.bytes)},
                **({"schedules": dict(low.schedules)} if low.schedules else {}),
            }
            for c, (low, _, _) in zip(calls, kernels.calls)
        ],
    }
    if detect_nan:
        meta["nan_checks"] = checks.described
    return Emitted(module.text(), meta)


def _may_fail(lowered: Lowered) -> bool:
    """Whether a kernel checks indices."""
    return any(op.name == "tile.check" for op in lowered.kernel.walk())


def _plain(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def _place_values(
    func: graph.FuncOp, kernels: Kernels, metadata: dict[str, Any]
) -> tuple[dict[Any, Operand], list[Life]]:
    """A place for every value that kernels touch: an argument of the program, or a temporary."""
    block = func.body.block
    places: dict[Any, Operand] = {}
    tensors = [i for i, entry in enumerate(metadata["inputs"]) if entry["kind"] == "tensor"]
    for position, arg in zip(tensors, block.args):
        places[arg] = ("arg", position, 0)
    _place_outputs(block, metadata, places)
    _place_assigned(block, kernels, places)
    lives: list[Life] = []
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    sizes: dict[Any, Dim] = {}
    for number, (lowered, inputs, outputs) in enumerate(kernels.calls):
        for w, size in enumerate(lowered.workspaces):
            first[(number, w)] = last[(number, w)] = number
            sizes[(number, w)] = size
        for v in (*inputs, *outputs):
            first.setdefault(v, number)
            last[v] = number
            sizes[v] = product(v.type.shape) * bytes_of(v.type.dtype)  # type: ignore[attr-defined]
    taken = _taken_over(kernels, places, last)
    for value, begin in first.items():
        if value in taken:
            places[value] = places[taken[value]]
            at = places[value][1]
            lives[at] = replace(lives[at], last=last[value])
        elif value not in places:
            places[value] = ("temp", len(lives), 0)
            lives.append(Life(sizes[value], begin, last[value]))
    return places, lives


def _note_uses(kernels: Kernels, places: dict[Any, Operand], metadata: dict[str, Any]) -> None:
    """Writes into the metadata the last kernel that touches each input and the first that touches each output.

    A kernel counts by its position; an input that none touches has -1.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, (_, inputs, outputs) in enumerate(kernels.calls):
        for kind, position, _ in (places[v] for v in (*inputs, *outputs)):
            if kind == "arg":
                first.setdefault(position, number)
                last[position] = number
    count = len(metadata["inputs"])
    metadata["inputs"] = [
        {**e, "last": last.get(i, -1)} if e["kind"] == "tensor" else e for i, e in enumerate(metadata["inputs"])
    ]
    metadata["outputs"] = [
        {**e, "first": first[count + i]} if e["kind"] == "buffer" and count + i in first else e
        for i, e in enumerate(metadata["outputs"])
    ]


def _taken_over(kernels: Kernels, places: dict[Any, Operand], last: dict[Any, int]) -> dict[SSAValue, SSAValue]:
    """Temporaries that take the memory of another one whose last reader makes them."""
    found: dict[SSAValue, SSAValue] = {}
    for number, (_, inputs, outputs) in enumerate(kernels.calls):
        owner = outputs[0].owner if outputs else None
        if isinstance(owner, graph.GroupOp):
            dying = [v for v in inputs if v not in places and last[v] == number]
            found.update({v: old for v, old in take_over(owner, dying).items() if v not in places})
    return found


def _place_outputs(block, metadata: dict[str, Any], places: dict[Any, Operand]) -> None:
    """Returned values live in the output that shows them."""
    returned = block.last_op
    count = len(metadata["inputs"])
    positions = [i for i, entry in enumerate(metadata["outputs"]) if entry["kind"] == "buffer"]
    for position, value in zip(positions, returned.operands, strict=True):
        if value in places:
            raise LubanError(
                f"output {position} shows a value that another argument holds already; the frontend must copy it"
            )
        places[value] = ("arg", count + position, 0)


def _place_assigned(block, kernels: Kernels, places: dict[Any, Operand]) -> None:
    """An assigned value is computed straight into its target's memory (fusion keeps that safe, see passes/graph/assign)."""
    for op in block.ops:
        if isinstance(op, graph.AssignOp):
            if op.value in places:
                raise LubanError(
                    "a value that is assigned to an argument is also returned or assigned elsewhere; the frontend must copy it"
                )
            places[op.value] = places[op.target]


__all__ = ["GRAPH_PIPELINE", "compile_graph", "emit_program", "emit_text", "lower_groups"]
