"""float16, and float32 of less precision, on a matrix unit for bfloat16: numbers, infinities, and what stays exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from luban import targets
from luban.compiler import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir
from luban.compiler.ir.tile_memory import part_of
from luban.targets.target import Cache

HOST, AMX = targets.get("native"), targets.get("x86-64-amx")
needs_amx = pytest.mark.skipif(HOST.matrix_unit != "amx", reason="this chip has no AMX")
SIZES = [(1, 1, 1), (33, 17, 65), (64, 96, 300), (5, 200, 90), (130, 70, 1100)]


@pytest.fixture
def precision():
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


def laid(rows, columns, turned, dtype):
    return (torch.randn(columns, rows).t() if turned else torch.randn(rows, columns)).to(dtype)


def product(a, b, target="native"):
    return compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), target))(a, b)


def error(got, a, b):
    exact = a.double() @ b.double()
    return ((got.double() - exact).abs() / (a.double().abs() @ b.double().abs() + 1e-300)).max().item()


def test_the_parts_of_every_float16_make_it_up():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = values[np.isfinite(values)]
    assert np.array_equal(part_of(finite, "high") + part_of(finite, "low"), finite.astype(np.float32))
    odd = np.array([np.inf, -np.inf, np.nan], np.float16)
    assert not part_of(odd, "low").any() and not part_of(odd, "finite").any()
    assert np.array_equal(part_of(odd, "high"), odd.astype(np.float32), equal_nan=True)
    assert np.isfinite(part_of(np.array([3.4e38], np.float32), "high")).all(), "rounding makes no infinity"


@needs_amx
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("caches", ["own", "small"])
def test_float16_as_torch_or_better(size, turned, caches):
    m, n, k = size
    small = (Cache(1, 16 << 10), Cache(2, 64 << 10))
    target = HOST if caches == "own" else replace(HOST, caches=small)
    a, b = laid(m, k, turned[0], torch.float16), laid(k, n, turned[1], torch.float16)
    assert error(product(a, b, target), a, b) <= max(error(a @ b, a, b), 2**-11) * 1.05


@needs_amx
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name,bound", [("high", 2**-16), ("medium", 2**-7)])
def test_float32_in_the_precision_that_is_asked_for(precision, name, bound, size):
    m, n, k = size
    a, b = torch.randn(m, k), torch.randn(k, n)
    exact = error(product(a, b), a, b)
    precision(name)
    assert exact < error(product(a, b), a, b) <= bound or size == (1, 1, 1)
    compiled = torch.compile(lambda x, y: x @ y, backend="luban", options={"fallback": "error"})
    assert error(compiled(a, b), a, b) <= bound
    precision("highest")
    torch._dynamo.reset()
    assert error(compiled(a, b), a, b) == pytest.approx(exact, abs=1e-6), "the cache tells the precisions apart"


@needs_amx
@pytest.mark.parametrize("dtype,name", [(torch.float16, "highest"), (torch.float32, "high")], ids=str)
def test_infinity_and_nan_come_out_as_torch_gives_them(precision, dtype, name):
    a, b = torch.randn(20, 40).to(dtype), torch.randn(40, 30).to(dtype)
    a[3, 5], a[4, 6], a[7, 1], b[2, 9], b[8, 8] = float("inf"), -float("inf"), float("nan"), float("inf"), 0.0
    a[9, 8], b[5, 4] = float("inf"), 0.0  # infinity times 0
    want = a @ b
    precision(name)
    got = product(a, b)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got[got.isinf()], want[want.isinf()])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_interpreter_finds_the_scheduled_kernel_right(precision, dtype):
    a, b = (torch.randn(s).to(getattr(torch, dtype)) for s in ((40, 70), (70, 36)))
    precision("high")
    scheduled = apply_arch_specific_opts(generate_tiled_ir(a, b), AMX)
    assert "high" in str(scheduled) and "tile.pack" in str(scheduled)
    scheduled.verify()
    assert error(scheduled.interpret(a, b), a, b) <= (2**-11 if dtype == "float16" else 2**-16)


def test_a_chip_without_a_matrix_unit_multiplies_exactly(precision):
    precision("medium")
    ir = apply_arch_specific_opts(generate_tiled_ir(torch.randn(9, 9), torch.randn(9, 9)), "x86-64-avx512")
    assert 'unit = "fma"' in str(ir) and "parts" not in str(ir)
