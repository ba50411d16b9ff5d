"""Kernels scheduled for AMX: machine code with its instructions, and tile IR that the interpreter finds right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from luban import targets
from luban.compiler import driver
from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.frontend.torch import import_graph, table
from luban.compiler.ir.interpret_graph import find_function
from luban.compiler.ir.interpret_tile import run_kernel
from luban.compiler.ir.numeric_types import numpy_dtype
from luban.compiler.passes.pipeline import run
from luban.symbolic import product

AMX = targets.get("x86-64-amx")
SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(q, k, v):
    return SDPA(q, k, v, 0.0, True)[0]


def attend_backward(q, k, v, grad):
    out, lse = SDPA(q, k, v, 0.0, True)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def heads(count):
    return [normal(1, 2, 70, 40, seed=i) for i in range(count)]


CASES = {
    "rows of A": (lambda a, b: a @ b, [normal(40, 70), normal(70, 50, seed=1)]),
    "columns of A": (lambda a, b: a.t() @ b, [normal(70, 40), normal(70, 50, seed=1)]),
    "both turned": (lambda a, b: a.t() @ b.t(), [normal(70, 40), normal(50, 70, seed=1)]),
    "attention": (attend, heads(3)),
    "attention backward": (attend_backward, heads(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_amx_kernels(name):
    function, args = CASES[name]
    imported = import_graph(make_fx(function, tracing_mode="fake", decomposition_table=table())(*args), "main")
    run(imported.module, driver.GRAPH_PIPELINE)
    func = find_function(imported.module)
    kernels = driver.lower_groups(func, (), AMX)
    units = {op.unit.data for low in kernels.unique.values() for op in low.kernel.walk() if op.name == "tile.dot"}
    assert units == {"amx"}
    emitted = driver.emit_text(func, kernels, imported.metadata, AMX, "main")
    assembly = compile_module(emitted.text, AMX).assembly
    assert "tdpbf16ps" in assembly and "ldtilecfg" in assembly
    expected = function(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for got, want in zip(interpreted(func, kernels, args), expected, strict=True):
        dense = torch.as_strided(want, (want.numel(),), (1,)).float().numpy()  # in the order of memory
        assert np.abs(got - dense).max() < 0.02 * np.abs(dense).max()


def interpreted(func, kernels, args):
    """Runs the kernels one after the other on flat arrays; gives the returned values."""
    values = {a: x.float().numpy().reshape(-1).copy() for a, x in zip(func.body.block.args, args, strict=True)}
    for low, inputs, outputs in kernels.calls:
        for v in outputs:
            values[v] = np.full(product(v.type.shape), np.nan, numpy_dtype(v.type.dtype))
        run_kernel(low.kernel, [values[v] for v in (*inputs, *outputs)])
    return [values[v] for v in func.body.block.last_op.operands]
