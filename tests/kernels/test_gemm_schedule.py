"""How products are cut up: every way through k and through memory, on chips with caches small enough for small tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import bf16, f32

from luban import targets
from luban.compiler import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir
from luban.kernels.gemm_rules import SCRATCH
from luban.kernels.gemm_schedule import Shape, choose
from luban.targets.target import Cache

HOST = targets.get("native")
CACHES = {
    "tiny": (Cache(1, 4 << 10), Cache(2, 16 << 10)),
    "small": (Cache(1, 16 << 10), Cache(2, 64 << 10)),
    "own": HOST.caches,
}
DTYPES = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float64: 1e-13}
sizes = st.integers(1, 300)


def laid(rows, columns, turned, dtype):
    return (torch.randn(columns, rows).t() if turned else torch.randn(rows, columns)).to(dtype)


def check(target, a, b):
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), target))
    got, exact = matmul(a, b).double(), a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    assert torch.all((got - exact).abs() <= DTYPES[a.dtype] * scale + 1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=str)
def test_every_regime_gives_the_product(caches, turned, dtype):
    """One pass; passes within a packed B; B packed pass by pass; few rows; more columns and rows than a block."""
    target = replace(HOST, caches=CACHES[caches])
    for m, n, k in ((70, 130, 700), (65, 260, 129), (3, 700, 90), (8, 333, 257), (257, 70, 33), (9, 300, 128)):
        check(target, laid(m, k, turned[0], dtype), laid(k, n, turned[1], dtype))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, st.booleans(), st.booleans(), st.sampled_from(list(DTYPES)), st.sampled_from(list(CACHES)))
def test_any_size(m, n, k, a_turned, b_turned, dtype, caches):
    check(replace(HOST, caches=CACHES[caches]), laid(m, k, a_turned, dtype), laid(k, n, b_turned, dtype))


CHIPS = [targets.get(name) for name in targets.names() if name != "native" and targets.get(name).is_cpu]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(CHIPS),
    st.sampled_from([f32, bf16]),
    st.tuples(*[st.one_of(st.integers(1, 9000), st.just("s0"))] * 3),
    st.integers(1, 200),
    st.sampled_from([1, 2, 7, 128]),
)
def test_blocks_are_whole_tiles_that_fit(chip, dtype, sizes, batch, cores):
    m, n, k = sizes
    numbers = [d if isinstance(d, int) else 1024 for d in sizes]
    shape = Shape(batch, *sizes, numbers[2], 1, 1, numbers[1])
    s = choose(replace(chip, cores=cores), shape, dtype)
    t = s.tile
    assert s.share_m % t.mr == s.mc % t.mr == s.share_n % t.nr == s.nc % t.nr == 0
    assert 0 < s.mc <= s.share_m and 0 < s.nc <= s.share_n and s.kc > 0
    assert s.depth % t.k_multiple == 0, "a pass ends where a group of k does"
    assert isinstance(k, int) or s.kc == s.depth, "what is unknown is worked through pass by pass"
    size = 4 if dtype == f32 else 2
    assert not s.pack_b or s.nc == t.nr or s.nc * min(s.depth, numbers[2]) * size <= chip.l2_bytes
    assert not s.pack_b or s.nc == t.nr or s.nc * min(s.kc, numbers[2]) * size <= SCRATCH
    tasks = batch * -(-numbers[0] // s.share_m) * -(-numbers[1] // s.share_n)
    widest = batch * -(-numbers[0] // t.mr) * -(-numbers[1] // t.nr)
    assert tasks >= min(cores, widest) / 2, "no half of the cores stands idle"
