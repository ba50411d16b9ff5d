"""An ATen FX graph -> a callable: from the cache if it is there, else through the compiler."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from luban import targets
from luban.compiler.frontend.fingerprint import graph_key
from luban.runtime import cache, report
from luban.runtime.loaded import load
from luban.runtime.program import Program
from luban.runtime.schedules import unchanged


class CompiledGraph:
    """A loaded program with the constants and random seeds that it takes besides the caller's arguments.

    It takes one list, which it empties, and returns a list (what AOTAutograd calls boxed).
    """

    def __init__(self, program: Program, constants: Sequence[torch.Tensor]):
        self.program = program
        self._run = load(program)
        self._constants = list(constants)
        self._seeds = program.metadata.get("seeds", 0)

    def donate(self, inputs: Iterable[int]) -> None:
        """Lets results lie in the memory of these inputs, see runtime/donation.py; called before the first call."""
        self._run.donated = frozenset(inputs)

    def __call__(self, args: list) -> list:
        inputs = [*args, *self._constants]
        args.clear()
        if self._seeds:
            inputs.append(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
        return self._run(inputs)


def compile_fx(
    gm: GraphModule,
    target_name: str,
    name: str,
    saved_from: int | None = None,
    assigned: dict[int, int] | None = None,
    detect_nan: bool = False,
) -> CompiledGraph:
    """Compiles a functional ATen graph.

    Outputs from position `saved_from` on are kept for a backward graph. `assigned` maps outputs to the inputs that they
    replace: these are written into the input's memory and not returned. With `detect_nan`, or LUBAN_DETECT_NAN=1, a call
    raises NanError naming the first kernel that makes a NaN.
    """
    target = targets.get(target_name)
    detect_nan = detect_nan or os.environ.get("LUBAN_DETECT_NAN") == "1"
    with report.stage("total"), _no_collection():
        with report.stage("frontend"):
            key = graph_key(gm, target, name, str(saved_from), str(assigned), *(["detect_nan"] if detect_nan else []))
        with report.stage("load"):
            program = None if os.environ.get("LUBAN_DUMP") else cache.get(key)  # a dump needs the passes to run
            if program is not None and not all(unchanged(k.get("schedules", {})) for k in program.kernels):
                program = None  # tuned since: it is compiled again under the same key
        if program is not None:
            report.add_cache_hit()
        else:
            program = _compile(gm, target, name, saved_from, assigned or {}, detect_nan)
            cache.put(key, program)
        with report.stage("load"):
            compiled = CompiledGraph(program, _constants(gm))
    report.add_graph(report.kernels_of(program, _first_sizes(gm, program)))
    return compiled


@contextmanager
def _no_collection() -> Iterator[None]:
    """Cyclic garbage collection off: IR objects are many and alive, and scanning them doubles the time of an import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _compile(
    gm: GraphModule, target: Any, name: str, saved_from: int | None, assigned: dict[int, int], detect_nan: bool
) -> Program:
    from luban.compiler.driver import compile_graph
    from luban.compiler.frontend.assign import assign_outputs
    from luban.compiler.frontend.torch.importer import import_graph

    with report.stage("frontend"):
        imported = import_graph(gm, name, saved_from=saved_from)
        metadata = imported.metadata
        assign_outputs(imported.module, metadata, assigned)
        metadata["seeds"] = sum(entry["kind"] == "seed" for entry in metadata["inputs"])
        seed = {"kind": "tensor", "dtype": "int64", "shape": [], "strides": []}
        metadata["inputs"] = [seed if entry["kind"] == "seed" else entry for entry in metadata["inputs"]]
    return compile_graph(imported.module, metadata, target, name, detect_nan=detect_nan)


def _first_sizes(gm: GraphModule, program: Program) -> dict[str, int]:
    """The values of the program's symbols for what the graph was traced with; sizes that depend on data have none."""
    given = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    found = {}
    for name, (kind, position, *dim) in program.metadata.get("symbol_sources", {}).items():
        value = given[position]
        if kind != "input":
            value = (value.shape if kind == "size" else value.stride())[dim[0]]
        size = value.node.hint if isinstance(value, torch.SymInt) else value
        if size is not None:
            found[name] = int(size)
    return found


def _constants(gm: GraphModule) -> list[torch.Tensor]:
    """Tensors that the graph holds, in the order in which it asks for them."""
    found = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value: Any = gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, torch.Tensor):
                found.append(value)
    return found
