"""Element types in NumPy, rounding to bfloat16, and conversions from and to torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from xdsl.dialects.builtin import IntegerType, bf16, f16, f32, f64, i1, i8, i64

from luban.compiler.ir.numeric_types import conform, from_array, numpy_dtype, round_to_bf16, to_torch, write_back
from luban.errors import ConfigError


def test_rounding_to_bfloat16_is_torch_s_for_all_kinds_of_numbers():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    halves = (rng.integers(0, 2**16, 10_000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([bits, halves, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)])
    want = torch.from_numpy(x).bfloat16().float().numpy()
    got = round_to_bf16(x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(x)]), np.signbit(want[~np.isnan(x)]))


@pytest.mark.parametrize("element, dtype", [
    (f32, torch.float32), (f64, torch.float64), (f16, torch.float16), (bf16, torch.bfloat16), (i64, torch.int64),
    (i8, torch.int8), (i8, torch.uint8), (i1, torch.bool),
])  # fmt: skip
def test_torch_tensors_travel_both_ways(element, dtype):
    t = torch.tensor([0.0, 1.0, 3.25, 200.0]).to(dtype)
    array = from_array(t, element)
    assert array.dtype == numpy_dtype(element)
    back = to_torch(array, element, dtype)
    assert back.dtype is dtype and torch.equal(back, t)
    target = torch.zeros_like(t)
    write_back(target, array, element)
    assert torch.equal(target, t)


def test_views_of_any_layout_become_dense():
    t = torch.arange(12).reshape(3, 4).t()
    array = from_array(t, i64)
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, t.numpy())
    assert from_array(np.array(2.0, np.float32), f32).shape == ()
    unsigned = np.zeros(2, np.uint8)
    write_back(unsigned, np.array([-1, 3], np.int8), i8)
    np.testing.assert_array_equal(unsigned, [255, 3])


def test_wrong_types_are_named():
    with pytest.raises(ConfigError, match="input 3 has dtype int32 where the program wants f32"):
        from_array(np.zeros(2, np.int32), f32, "input 3")
    with pytest.raises(ConfigError, match="the element type i7 has no NumPy form"):
        numpy_dtype(IntegerType(7))


def test_conform_rounds_wraps_and_takes_the_lowest_bit():
    assert conform(np.float64(1 / 3), f32) == np.float32(1 / 3)
    assert conform(np.int64(300), i8) == 44
    np.testing.assert_array_equal(conform(np.array([2, 3, -1]), i1), [False, True, True])


def test_importing_the_interpreters_imports_no_torch():
    modules = "luban.compiler.ir.interpret_graph, luban.compiler.ir.interpret_tile"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
