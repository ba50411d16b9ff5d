"""Tile kernels from PyTorch functions or from text, run in Triton's interpreter and in Luban's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, make_boxed_func

from luban import symbolic, targets
from luban.compiler.codegen.triton import TritonKernel, generate, launch_interpreted
from luban.compiler.driver import GRAPH_PIPELINE, Kernels, lower_groups
from luban.compiler.frontend.torch.importer import import_graph
from luban.compiler.ir import graph
from luban.compiler.ir.interpret_tile import run_kernel
from luban.compiler.ir.numeric_types import numpy_dtype, round_to_bf16
from luban.compiler.passes.pipeline import run

SM90 = targets.get("cuda-sm90")
# A core so small that rows of more than 256 elements do not fit a block: everything goes through loops and workspaces.
TINY = replace(SM90, name="tiny", caches=(targets.Cache(1, 4096, 128),))
TARGETS = {"sm90": SM90, "tiny": TINY}


@dataclass
class Program:
    """One captured graph: its FX form, the arguments it was called with, and its tile kernels."""

    gm: torch.fx.GraphModule
    examples: list[Any]
    func: graph.FuncOp
    metadata: dict[str, Any]
    kernels: Kernels
    sources: dict[str, TritonKernel] = field(default_factory=dict)

    def symbols(self) -> dict[str, int]:
        found = {}
        for name, source in self.metadata["symbol_sources"].items():
            example = self.examples[source[1]]
            found[name] = int(example if source[0] == "input" else example.shape[source[2]])
        return found

    def operations(self) -> set[str]:
        """Names of the operations in the kernels."""
        return {op.name for lowered, _, _ in self.kernels.calls for op in lowered.kernel.walk()}

    def run(self, how: str, target: targets.Target) -> list[np.ndarray]:
        """The outputs, as flat arrays: "triton" in Triton's interpreter, "tile" in Luban's."""
        symbols = self.symbols()
        values: dict[Any, np.ndarray] = {}
        tensors = [e for e in self.examples if isinstance(e, torch.Tensor)]
        for arg, tensor in zip(self.func.body.block.args, tensors, strict=True):
            values[arg] = in_memory(tensor).float().numpy().copy()
        for lowered, inputs, outputs in self.kernels.calls:
            arrays = [values[v] for v in inputs]
            for v in outputs:
                size = symbolic.evaluate(symbolic.product(v.type.shape), symbols)
                values[v] = poison(size, v.type.dtype)
                arrays.append(values[v])
            scratch = lowered.kernel.body.block.args[len(arrays) :]
            for arg, size in zip(scratch, lowered.workspaces, strict=False):
                arrays.append(poison(symbolic.evaluate(size, symbols) // 4, arg.type.dtype))
            if how == "tile":
                run_kernel(lowered.kernel, arrays, symbols)
            else:
                made = generate(lowered.kernel, target)
                self.sources[made.name] = made
                launch_interpreted(made, arrays, symbols)
        return [values[v] for v in self.func.body.block.last_op.operands]

    def expected(self) -> list[np.ndarray]:
        """The outputs of the FX graph in float64, each as it lies in memory."""
        doubles = [
            e.detach().double() if isinstance(e, torch.Tensor) and e.is_floating_point() else e for e in self.examples
        ]
        found = self.gm(*doubles)
        symbols = self.symbols()
        flat = []
        for value, meta in zip(found, self.metadata["outputs"], strict=True):
            if meta["kind"] == "buffer":
                strides = [symbolic.evaluate(symbolic.parse(d), symbols) for d in meta["strides"]]
                target = torch.empty_strided(value.shape, strides, dtype=torch.float64)
                flat.append(in_memory(target.copy_(value.detach())).numpy())
        return flat


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def poison(size: int, dtype: Any) -> np.ndarray:
    array = np.zeros(size, numpy_dtype(dtype))
    array[...] = np.nan if array.dtype.kind == "f" else 99 if array.dtype.kind == "i" else True
    return array


def capture(fn, *args: torch.Tensor, target: targets.Target = SM90, dynamic: bool = False) -> list[Program]:
    """The forward and, where an argument wants a gradient, the backward graph of a function of tensors."""
    graphs: list[tuple[Any, list]] = []

    def note(gm, examples):
        graphs.append((gm, examples))
        calls = len(graphs) - 1

        def call(real):
            graphs[calls] = (gm, list(real))
            return gm(*real)

        return make_boxed_func(lambda *real: call(real))

    out = aot_function(fn, fw_compiler=note, bw_compiler=note, dynamic=dynamic)(*args)
    if out.requires_grad:
        out.sum().backward()
    programs = []
    for gm, examples in graphs:
        imported = import_graph(gm, "f")
        run(imported.module, GRAPH_PIPELINE)
        func = next(op for op in imported.module.body.block.ops if isinstance(op, graph.FuncOp))
        kernels = lower_groups(func, tuple(imported.metadata["symbols"]), target)
        programs.append(Program(gm, examples, func, imported.metadata, kernels))
    return programs


# ---- text


def dot(
    a: str,
    b: str,
    sizes: str,
    a_strides: str,
    b_strides: str,
    body: str,
    ty: str = "f32",
    bases: str = "%z, %z",
    acc: str = "f32",
    unsigned: str = "",
    **packed: int,
) -> str:
    """A tile.dot as text; sizes "%m, %n, %k", types of both operands in `ty` ("bf16" or "bf16, f32")."""
    left, _, right = ty.partition(", ")
    base = bases.split(", ")
    props = ", ".join(
        [f"{side}_strides = #graph.dims<[{s}]>" for side, s in (("a", a_strides), ("b", b_strides))]
        + [
            f"{n} = #builtin.int<{packed.get(n, d)}>"
            for n, d in (("a_panel", 0), ("b_panel", 0), ("kk", 1), ("rows", 4), ("columns", 16))
        ]
    )
    types = f"(!tile.buf<{left}>, i64, !tile.buf<{right or left}>, i64, i64, i64, i64) -> ()"
    region = f'^bb0(%acc: {acc}, %i: i64, %j: i64):\n{body}\n"tile.yield"() : () -> ()'
    operands = f"({a}, {base[0]}, {b}, {base[1]}, {sizes})"
    props += f', unsigned = "{unsigned}"' if unsigned else ""
    return f'"tile.dot"{operands} <{{{props}, unit = "fma"}}> ({{\n{region}\n}}) : {types}\n'


def pack(
    source: str,
    target: str,
    sizes: str,
    strides: str,
    panel: int,
    kk: int,
    ty: str = "f32",
    to: str = "",
    base: str = "%z",
) -> str:
    """A tile.pack as text; sizes "%outer, %k"."""
    props = f"strides = #graph.dims<[{strides}]>, panel = #builtin.int<{panel}>, kk = #builtin.int<{kk}>"
    types = f"(!tile.buf<{ty}>, i64, i64, i64, !tile.buf<{to or ty}>) -> ()"
    return f'"tile.pack"({source}, {base}, {sizes}, {target}) <{{{props}}}> : {types}\n'


def number(name: str, value: Any, ty: str = "i64") -> str:
    return f'%{name} = "arith.constant"() <{{value = {value} : {ty}}}> : () -> {ty}\n'


def size(name: str, dim: str) -> str:
    return f'%{name} = "tile.dim"() <{{value = #graph.dims<[{dim}]>}}> : () -> i64\n'


def compare(
    kernel,
    arrays: list[np.ndarray],
    symbols: dict[str, int] | None = None,
    target=SM90,
    rtol=1e-5,
    atol=1e-6,
    exact=False,
):
    """Runs a kernel in both interpreters and compares their buffers; gives Triton's and the Triton kernel."""
    made = generate(kernel, target)
    ours, theirs = [a.copy() for a in arrays], [a.copy() for a in arrays]
    run_kernel(kernel, ours, symbols or {})
    launch_interpreted(made, theirs, symbols or {})
    for i, (want, got) in enumerate(zip(ours, theirs, strict=True)):
        if exact or want.dtype.kind != "f":
            np.testing.assert_array_equal(got, want, err_msg=f"buffer {i}\n{made.source}")
        else:
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=f"buffer {i}\n{made.source}")
    return theirs, made


def noise(n: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def bf16(array: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values, as float32."""
    return round_to_bf16(array).astype(np.float32)


class Tools:
    """The helpers above, for the tests of this folder."""

    SM90, TINY, TARGETS = SM90, TINY, TARGETS
    capture, dot, pack, number, size = map(staticmethod, (capture, dot, pack, number, size))
    compare, noise, bf16 = map(staticmethod, (compare, noise, bf16))


@pytest.fixture(scope="session")
def tr():
    return Tools
