"""Products of 8-bit integers summed in 32 bits, exactly: layouts, signs, odd sizes, extremes, every chip's unit."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import i8

from luban import targets
from luban.compiler import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir
from luban.errors import TargetError
from luban.kernels.gemm_schedule import Shape, choose, turns
from luban.kernels.integer_tiles import integer_tile
from luban.targets import x86_64
from luban.targets.target import Cache

HOST = targets.get("native")
SIGNS = list(itertools.product((False, True), repeat=2))
LAYOUTS = ("rows", "columns", "gaps", "second")
# around the tiles (32 x 32 of AMX with 64 values of k, 8 x 48 in groups of 4), the panels of 16 and the passes over k
SIZES = [
    (1, 1, 1), (1, 1, 1300), (2, 3, 1), (7, 23, 5), (8, 48, 16), (9, 49, 17), (16, 96, 33), (31, 33, 63), (32, 32, 64),
    (33, 31, 65), (64, 400, 64), (65, 129, 769), (100, 1, 50), (1, 100, 50), (33, 17, 1201), (70, 50, 2500),
]  # fmt: skip
# what this machine can run: its own chip, and those that it has all features of
CHIPS = [
    name
    for name in ("native", "x86-64-avx2", "x86-64-avx512", "x86-64-avx512-bf16", "x86-64-amx")
    if set(targets.get(name).required_features) <= set(HOST.required_features)
]


def dtype_of(unsigned):
    return torch.uint8 if unsigned else torch.int8


def drawn(rows, columns, unsigned=False, layout="rows", seed=0):
    """Integers over the whole range, the extremes among them, laid out as in test_gemm."""
    shape = {"columns": (columns, rows), "second": (rows, 2 * columns), "gaps": (rows, columns + 3)}
    dtype, made = dtype_of(unsigned), torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
    x = torch.randint(low, high, shape.get(layout, (rows, columns)), dtype=dtype, generator=made)
    return {"columns": x.t(), "second": x[:, ::2], "gaps": x[:, 1:-2]}.get(layout, x)


def exact(a, b):
    """The product by 64-bit NumPy, wrapped to 32 bits."""
    return (np.asarray(a).astype(np.int64) @ np.asarray(b).astype(np.int64)).astype(np.int32)


def compiled(a, b, target="native"):
    return compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), target))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_and_layouts(machine, size):
    m, n, k = size
    for left, right in [*itertools.product(LAYOUTS[:2], repeat=2), ("second", "gaps"), ("gaps", "second")]:
        for unsigned in (False, True):
            a, b = drawn(m, k, unsigned, left), drawn(k, n, False, right, seed=1)
            run = machine.compile(torch._int_mm, (a, b))
            got = run(a, b)[0]
            assert got.dtype is torch.int32 and np.array_equal(got.numpy(), exact(a, b)), (left, right, unsigned)
            assert all("contract" in name for name in run.kernels)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("signs", SIGNS, ids=str)
def test_every_unit_of_this_machine(chip, signs):
    for seed, (m, n, k) in enumerate(
        [(1, 1, 1), (5, 40, 3), (33, 31, 65), (70, 100, 90), (17, 130, 514), (64, 64, 256)]
    ):
        for left, right in itertools.product(LAYOUTS[:2], repeat=2):
            a, b = drawn(m, k, signs[0], left, seed), drawn(k, n, signs[1], right, seed + 100)
            got = compiled(a, b, chip)(a, b)
            assert got.dtype is torch.int32 and np.array_equal(got.numpy(), exact(a, b)), (m, n, k, left, right)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.tuples(*[st.integers(1, 150)] * 3),
    st.sampled_from(SIGNS),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(CHIPS),
    st.sampled_from([(4, 16), (16, 64), None]),
)
def test_any_size(sizes, signs, turned, chip, kilobytes):
    """Small caches too, so that small matrices take every way through k and through memory."""
    m, n, k = sizes
    target = targets.get(chip)
    if kilobytes:
        target = replace(target, caches=tuple(Cache(i + 1, kb << 10) for i, kb in enumerate(kilobytes)))
    left, right = ("columns" if t else "rows" for t in turned)
    a, b = drawn(m, k, signs[0], left), drawn(k, n, signs[1], right, 1)
    assert np.array_equal(compiled(a, b, target)(a, b).numpy(), exact(a, b))


@pytest.mark.parametrize("caches", [(4, 16), (16, 64), (48, 2048)], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=str)
def test_every_regime(caches, turned):
    """One pass; passes within a packed B; B packed pass by pass; few rows; more columns and rows than a block."""
    target = replace(HOST, caches=tuple(Cache(i + 1, kb << 10) for i, kb in enumerate(caches)))
    left, right = ("columns" if t else "rows" for t in turned)
    for m, n, k in ((70, 130, 1400), (65, 260, 129), (3, 700, 90), (8, 333, 257), (257, 70, 33), (9, 300, 256)):
        a, b = drawn(m, k, layout=left), drawn(k, n, layout=right, seed=1)
        assert np.array_equal(compiled(a, b, target)(a, b).numpy(), exact(a, b)), (m, n, k)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("signs", SIGNS, ids=str)
def test_extremes_do_not_saturate(chip, signs):
    """The largest products of every sign, in sums that 16 bits do not hold."""
    ends = [(0, 255) if u else (-128, 127) for u in signs]
    for x, y in itertools.product(*ends):
        a = torch.full((33, 300), x, dtype=dtype_of(signs[0]))
        b = torch.full((300, 50), y, dtype=dtype_of(signs[1]))
        assert np.array_equal(compiled(a, b, chip)(a, b).numpy(), np.full((33, 50), x * y * 300, np.int32))


def test_sums_wrap(machine):
    """2 ** 17 + 3 products of -128 by -128 are 2 ** 31 and more: modulo 2 ** 32, in order and in passes."""
    k = 2**17 + 3
    a, b = torch.full((2, k), -128, dtype=torch.int8), torch.full((k, 33), -128, dtype=torch.int8)
    assert np.array_equal(machine.compile(torch._int_mm, (a, b))(a, b)[0].numpy(), exact(a, b))
    assert exact(a, b).max() < 0
    for chip in CHIPS:
        a, b = (torch.full(s, 255, dtype=torch.uint8) for s in ((3, 40000), (40000, 20)))
        assert np.array_equal(compiled(a, b, chip)(a, b).numpy(), exact(a, b)), chip


@pytest.mark.parametrize("shapes", [((0, 5), (5, 3)), ((4, 0), (0, 3)), ((4, 5), (5, 0)), ((0, 0), (0, 0))], ids=str)
def test_nothing_to_multiply(machine, shapes):
    a, b = (torch.zeros(s, dtype=torch.int8) for s in shapes)
    got = machine.compile(torch._int_mm, (a, b))(a, b)[0]
    assert got.shape == (shapes[0][0], shapes[1][1]) and not got.any()


def test_batches_and_shared_operands(machine):
    a, b = drawn(90, 70).view(3, 30, 70), drawn(210, 50, seed=1).view(3, 70, 50)
    assert torch.equal(machine.compile(torch.bmm, (a, b))(a, b)[0], torch.bmm(a, b))
    x = drawn(40, 40)
    assert torch.equal(machine.compile(lambda x: x @ x.t(), (x,))(x)[0], x @ x.t())
    assert torch.equal(machine.compile(lambda x: x[:1].expand(40, 40) @ x, (x,))(x)[0], x[:1].expand(40, 40) @ x)


# ---- quantised layers

QUANTISED = {
    "scales and bias": lambda y, sx, sw, b: y.to(torch.float32) * sx * sw + b,
    "gelu": lambda y, sx, sw, b: F.gelu(y.float() * (sx * sw) + b),
    "bfloat16": lambda y, sx, sw, b: F.relu(y * sx * sw + b).bfloat16(),
    "requantised": lambda y, sx, sw, b: torch.clamp(torch.round(y.float() * sx * sw + b), -128, 127).to(torch.int8),
}


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_layer_is_one_kernel(machine, name, unsigned):
    x, w = drawn(37, 130, unsigned), drawn(70, 130, seed=1).t()
    sx, sw, b = torch.rand(37, 1) * 0.01, torch.rand(70) * 0.01, torch.randn(70)

    def layer(x, w, sx, sw, b):
        return QUANTISED[name](torch._int_mm(x, w), sx, sw, b)

    run = machine.compile(layer, (x, w, sx, sw, b))
    assert len(run.kernels) == 1 and "contract" in run.kernels[0]
    want = QUANTISED[name](torch.from_numpy(exact(x, w)), sx, sw, b)
    got = run(x, w, sx, sw, b)[0]
    assert got.dtype is want.dtype
    scale = want.double().abs().max()
    step = 1.0 if name == "requantised" else 1e-2 * scale if name == "bfloat16" else 1e-6 * scale
    assert (got.double() - want.double()).abs().max() <= step


@pytest.mark.parametrize("rows", [1, 9, 12, 13])
def test_few_rows_by_a_large_weight(machine, rows):
    """Up to 12 rows a chip with a matrix unit reads the weight in place and computes the transpose."""
    k = max(HOST.l2_bytes // 512, 2048) // 64 * 64 + 64  # more than the second-level cache holds
    x, w = drawn(rows, k), drawn(640, k, seed=1).t()
    sx, sw, b = torch.rand(rows, 1) * 0.01, torch.rand(640) * 0.01, torch.randn(640)
    run = machine.compile(lambda x, w, sx, sw, b: torch._int_mm(x, w) * sx * sw + b, (x, w, sx, sw, b))
    want = torch.from_numpy(exact(x, w)) * sx * sw + b
    assert len(run.kernels) == 1
    assert (run(x, w, sx, sw, b)[0] - want).abs().max() <= 1e-6 * want.abs().max()
    assert np.array_equal(machine.compile(torch._int_mm, (x, w))(x, w)[0].numpy(), exact(x, w))


def test_transposes_are_computed_where_they_pay():
    chip = targets.get("x86-64-amx")
    tile = integer_tile(chip)
    held = (i8, i8)
    lies = lambda m, k=4096, b_n=4096: Shape(1, m, 4096, k, k, 1, b_n, 1)  # noqa: E731
    assert turns(chip, lies(1), tile, held) and turns(chip, lies(12), tile, held)
    assert not turns(chip, lies(13), tile, held), "too many rows"
    assert not turns(chip, lies(8, 4095, 4095), tile, held), "rows of B begin inside cache lines"
    assert not turns(chip, Shape(1, 8, 4096, 4096, 4096, 1, 1, 4096), tile, held), "columns of B are neighbours"
    assert not turns(chip, Shape(1, 8, 64, 4096, 4096, 1, 4096, 1), tile, held), "B stays in a cache"
    assert not turns(chip, Shape(1, "s0", 4096, 4096, 4096, 1, 4096, 1), tile, held)
    assert not turns(targets.get("x86-64-avx512-bf16"), lies(8), integer_tile(targets.get("x86-64-avx512-bf16")), held)


# ---- chips

# target -> the instruction for signed by signed, signed by unsigned, unsigned by signed, unsigned by unsigned
INSTRUCTIONS = {
    "x86-64-amx": ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"),
    "x86-64-avx512-bf16": (r"vpdpbusd\t.*%zmm",) * 3 + (r"vpdpwssd\t.*%zmm",),
    "x86-64-avx512": (r"vpmaddwd\t.*%zmm",) * 4,
    "x86-64-avx2": (r"vpmaddwd\t.*%ymm",) * 4,
    "kunpeng-920": (r"\bsdot\tv", "smlal", "smlal", r"\budot\tv"),
    "aarch64-sve": (r"\bsdot\tz", r"\busdot\tz", r"\busdot\tz", r"\budot\tz"),
    "aarch64-neon": ("smlal", "smlal", "smlal", "umlal"),
    "riscv64-rvv": (r"vwmacc\.v", r"vwmaccsu\.v", r"vwmaccu?s?\.v", r"vwmaccu\.v"),
    "loongarch64-lasx": ("xvmadd",) * 4,
}


@pytest.mark.parametrize("signs", SIGNS, ids=str)
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_every_chip_has_its_instruction(name, signs):
    a, b = drawn(70, 90, signs[0]), drawn(90, 100, signs[1], seed=1)
    ir = generate_tiled_ir(a, b)
    optimized = apply_arch_specific_opts(ir, name)
    optimized.verify()
    for made in (ir.interpret(a, b), optimized.interpret(a, b)):
        assert made.dtype is torch.int32 and np.array_equal(made.numpy(), exact(a, b))
    assembly = compile_to_binary(optimized).assembly
    assert re.search(INSTRUCTIONS[name][SIGNS.index(signs)], assembly)
    assert "pmaddubsw" not in assembly, "which saturates"


def test_chips_with_vnni_but_no_wide_vectors():
    chip = replace(
        targets.get("x86-64-avx2"),
        llvm_features=targets.get("x86-64-avx2").llvm_features + ",+avxvnni",
        dot_units=(x86_64.FMA, x86_64.INT16_MADD, x86_64.AVX_INT16_DOT, x86_64.AVX_INT8_DOT),
    )
    for signs, wanted in zip(SIGNS, ("vpdpbusd", "vpdpbusd", "vpdpbusd", "vpdpwssd"), strict=True):
        a, b = drawn(70, 90, signs[0]), drawn(90, 100, signs[1], seed=1)
        optimized = apply_arch_specific_opts(generate_tiled_ir(a, b), chip)
        assert np.array_equal(optimized.interpret(a, b).numpy(), exact(a, b))
        assert re.search(rf"{wanted}\t.*%ymm", compile_to_binary(optimized).assembly)


ALL = [targets.get(name) for name in targets.names() if name != "native" and targets.get(name).is_cpu]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.sampled_from(ALL),
    st.sampled_from(SIGNS),
    st.tuples(*[st.one_of(st.integers(1, 9000), st.just("s0"))] * 3),
    st.sampled_from([1, 2, 7, 128]),
    st.booleans(),
)
def test_blocks_are_whole_tiles_that_fit(chip, signs, sizes, cores, turned):
    m, n, k = sizes
    numbers = [d if isinstance(d, int) else 1024 for d in sizes]
    a_strides = (1, numbers[0]) if turned else (numbers[2], 1)
    shape = Shape(1, m, n, k, *a_strides, 1, numbers[1])
    s = choose(replace(chip, cores=cores), shape, i8, (i8, i8), unsigned=signs)
    t = s.tile
    assert s.share_m % t.mr == s.mc % t.mr == s.share_n % t.nr == s.nc % t.nr == 0
    assert 0 < s.mc <= s.share_m and 0 < s.nc <= s.share_n and s.kc > 0
    assert s.depth % t.k_multiple == 0 and (isinstance(k, int) or s.kc == s.depth)
    assert t.mr * t.nr * 32 <= chip.vector_registers * chip.vector_bits or t.whole, "sums fit the registers"


def test_registers_hold_the_sums_of_the_bias():
    """Of two signed operands vpdpbusd needs one more row of sums: 24 + 3 + 3 of B, one of A and one constant are 32."""
    chip = targets.get("x86-64-avx512-bf16")
    tiles = [integer_tile(chip, signs) for signs in SIGNS[:3]]
    assert [(t.mr, t.nr, t.more_rows) for t in tiles] == [(8, 48, 1), (8, 48, 0), (8, 48, 0)]


def test_another_chips_unit_is_refused():
    if HOST.matrix_unit == "amx" or HOST.family != "x86-64":
        pytest.skip("needs an x86-64 chip without AMX")
    a, b = drawn(8, 8), drawn(8, 8)
    with pytest.raises(TargetError, match="amx-int8"):
        compiled(a, b, "x86-64-amx")(a, b)
