"""A workload as something that runs: a program for a schedule, operands, and a float64 reference to hold results to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
from xdsl.ir import Block, Operation, Region, SSAValue

from luban.compiler.driver import compile_graph
from luban.compiler.ir import dtypes, graph
from luban.compiler.ir.attributes import Access, TensorType, contiguous
from luban.kernels.tuning.workload import GEMM, Workload
from luban.runtime import schedules
from luban.runtime.loaded import LoadedProgram, load
from luban.runtime.schedules import Key, Schedule
from luban.targets.target import Target

COLD = 4  # operands go through so many second-level caches before one is used again, as in a training step
MOST_SETS = 16
RESERVE = 1 << 30  # bytes of operands that are enough in any case


class Problem(Protocol):
    """One operation: its operands as flat memory, the IR that computes it, and what is right."""

    @property
    def names(self) -> tuple[str, ...]:
        """The dtypes of the operands."""
        ...

    @property
    def extents(self) -> tuple[int, ...]:
        """The elements of the operands."""
        ...

    def operation(self, operands: list[SSAValue]) -> Operation:
        """The operation on its operands."""
        ...

    def operands(self) -> list[Tensor]:
        """Operands with random values, flat."""
        ...

    def reference(self, operands: list[Tensor]) -> list[tuple[Tensor, Any]]:
        """The right value of each result, computed in float64, and what an element may be off."""
        ...


@dataclass
class Bench:
    """A workload with operands, several sets of them where they are small: what `search` measures schedules on."""

    workload: Workload
    target: Target
    problem: Problem
    sets: list[list[Tensor]] = field(repr=False)

    def compiled(self, key: Key, schedule: Schedule | None) -> Callable[[int], list[Tensor]]:
        """The kernel with that schedule, None for the derived one: a function of the number of a set of operands."""
        with schedules.forced({} if schedule is None else {key: schedule}):
            loaded = program(self.problem, self.target)
        sets = self.sets
        return lambda turn: loaded(sets[turn % len(sets)])

    def right(self, run: Callable[[int], list[Tensor]]) -> bool:
        """Whether the results are those of float64, within what the types allow. Whatever it leaves out shows as NaN."""
        for result in run(0):  # the memory of these results is the next ones'
            result.fill_(float("nan"))
        return error(run(0), self._reference) <= 1

    @cached_property
    def _reference(self) -> list[tuple[Tensor, Any]]:
        return self.problem.reference(self.sets[0])


def error(results: list[Tensor], reference: list[tuple[Tensor, Any]]) -> float:
    """The largest error over what is tolerated; NaN where a result is NaN."""
    off = [float(((got - right).abs() / most).max()) for got, (right, most) in zip(results, reference, strict=True)]
    return math.nan if any(map(math.isnan, off)) else max(off)


def bench(workload: Workload, target: Target) -> Bench:
    """Operands for a workload, the same in every run."""
    from luban.kernels.tuning.attention_problem import attention
    from luban.kernels.tuning.gemm_problem import gemm

    problem: Problem = gemm(workload) if workload.op == GEMM else attention(workload)
    each = sum(n * dtypes.bytes_of(dtypes.from_name(name)) for n, name in zip(problem.extents, problem.names))
    wanted = min(MOST_SETS, -(-COLD * target.l2_bytes // each), max(1, RESERVE // each))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Bench(workload, target, problem, [problem.operands() for _ in range(max(1, wanted))])


def program(problem: Problem, target: Target) -> LoadedProgram:
    """The operation as a loaded program of one kernel."""
    types = [TensorType.of((n,), dtypes.from_name(name)) for n, name in zip(problem.extents, problem.names)]
    block = Block(arg_types=types)
    op = problem.operation(list(block.args))
    results = list(op.results)
    shown = {
        "shapes": ArrayAttr([r.type.dims for r in results]),  # type: ignore[attr-defined]
        "accesses": ArrayAttr([Access.of(contiguous(r.type.shape)) for r in results]),  # type: ignore[attr-defined]
    }
    block.add_ops([op, graph.ReturnOp.create(operands=results, properties=shown)])
    properties = {"sym_name": StringAttr("workload"), "symbols": ArrayAttr([])}
    module = ModuleOp([graph.FuncOp.create(properties=properties, regions=[Region(block)])])
    return load(compile_graph(module, _metadata(problem, results), target, "workload", "fuse"))


def _metadata(problem: Problem, results: list[SSAValue]) -> dict[str, Any]:
    inputs = [
        {"kind": "tensor", "dtype": name, "shape": [n], "strides": [1]}
        for n, name in zip(problem.extents, problem.names)
    ]
    outputs = [_output(result.type) for result in results]
    return {"symbols": [], "symbol_sources": {}, "inputs": inputs, "outputs": outputs}


def _output(type_: Any) -> dict[str, Any]:
    shape = list(type_.shape)
    return {
        "kind": "buffer",
        "dtype": name_of(type_.dtype),
        "shape": shape,
        "strides": list(contiguous(shape)),
        "offset": 0,
        "size": math.prod(shape),
        "pool": "own",
    }


def name_of(dtype: Any) -> str:
    """The name of a float type."""
    return next(n for n in ("float32", "float64", "bfloat16", "float16") if dtypes.from_name(n) == dtype)
