"""Vector loops of generated code: tails, strides, gathers, masks, element types, against NumPy and the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luban import targets

SYMBOLIC = """
%z = "arith.constant"() <{value = 0 : i64}> : () -> i64
%n = "tile.dim"() <{value = #graph.dims<[s0]>}> : () -> i64
"""


def fixed(n: int) -> str:
    return f"""
%z = "arith.constant"() <{{value = 0 : i64}}> : () -> i64
%n = "arith.constant"() <{{value = {n} : i64}}> : () -> i64
"""


ADD = """
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : f32
%y = load %b[%i] [1] + 0 : f32
%w = "arith.addf"(%x, %y) : (f32, f32) -> f32
store %w, %o[%i] [1] + 0 : f32
}
"""


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_every_tail_with_a_symbolic_length(tile, target):
    kernel = tile.load(tile.text(SYMBOLIC + ADD, "%a: f32, %b: f32, %o: f32", "s0"), target)
    rng = np.random.default_rng(0)
    for n in [*range(71), 127, 128, 129, 1000]:
        a, b = rng.standard_normal((2, n)).astype(np.float32)
        out = np.full(n + 8, 7, np.float32)
        kernel(a, b, out, symbols=(n,))
        assert np.array_equal(out[:n], a + b) and (out[n:] == 7).all(), n


@pytest.mark.parametrize("n", [0, 1, 3, 10, 16, 17, 48, 64, 65, 96, 100, 128, 130])
def test_tails_with_a_known_length(tile, n):
    kernel = tile.load(tile.text(fixed(n) + ADD, "%a: f32, %b: f32, %o: f32"))
    a, b = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    out = np.full(n + 8, 7, np.float32)
    kernel(a, b, out)
    assert np.array_equal(out[:n], a + b) and (out[n:] == 7).all()


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("stride, offset", [(1, 3), (0, 5), (2, 1), (3, 0), (-1, 70), (-2, 150), (7, 2)])
@pytest.mark.parametrize("ty", ["f32", "i64", "f16", "i8"])
def test_strided_loads_and_stores(tile, target, stride, offset, ty):
    dtype = {"f32": np.float32, "i64": np.int64, "f16": np.float16, "i8": np.int8}[ty]
    body = f"""
for vector %i = %z to %n {{
%x = load %a[%i] [{stride}] + {offset} : {ty}
store %x, %o[%i] [1] + 0 : {ty}
store %x, %p[%i] [{stride or 1}] + {offset} : {ty}
}}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, f"%a: {ty}, %o: {ty}, %p: {ty}", "s0"), target)
    a = np.arange(600).astype(dtype)
    for n in (0, 1, 5, 16, 35, 64, 70):
        out, spread = np.full(80, 9, dtype), np.full(600, 9, dtype)
        kernel(a, out, spread, symbols=(n,))
        at = offset + stride * np.arange(n)
        want, want_spread = np.full(80, 9, dtype), np.full(600, 9, dtype)
        want[:n] = a[at]
        want_spread[offset + (stride or 1) * np.arange(n)] = a[at]
        assert np.array_equal(out, want) and np.array_equal(spread, want_spread), n


def test_symbolic_strides_and_two_indices(tile):
    body = """
%m = "tile.dim"() <{value = #graph.dims<[s1]>}> : () -> i64
for serial %i = %z to %n {
for vector %j = %z to %m {
%x = load %a[%i, %j] [1, s0] + 0 : f32
%y = load %b[%j] [1] + 0 : f32
%w = "arith.mulf"(%x, %y) : (f32, f32) -> f32
store %w, %o[%i, %j] ["s1", 1] + 0 : f32
}
}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, "%a: f32, %b: f32, %o: f32", "s0, s1"))
    rng = np.random.default_rng(0)
    for n, m in ((3, 40), (17, 5), (1, 70)):
        a, b = rng.standard_normal((m, n)).astype(np.float32), rng.standard_normal(m).astype(np.float32)
        out = np.zeros((n, m), np.float32)
        kernel(a, b, out, symbols=(n, m))
        assert np.array_equal(out, a.T * b)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", ["f32", "i8", "f64"])
def test_gather_and_masked_gather(tile, target, ty):
    dtype = {"f32": np.float32, "i8": np.int8, "f64": np.float64}[ty]
    body = f"""
%limit = "arith.constant"() <{{value = 20 : i64}}> : () -> i64
for vector %i = %z to %n {{
%at = load %index[%i] [1] + 0 : i64
%m = "arith.cmpi"(%at, %limit) <{{predicate = 2 : i64}}> : (i64, i64) -> i1
%x = load %a[%at, %i] [3, 1] + 1 : {ty}
%y = load %a[%at] [2] + 0 if %m : {ty}
%u = load %a[%z] [1] + 4 if %m : {ty}
store %x, %o[%i] [1] + 0 : {ty}
store %y, %p[%i] [1] + 0 : {ty}
store %u, %q[%i] [1] + 0 if %m : {ty}
}}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, f"%a: {ty}, %index: i64, %o: {ty}, %p: {ty}, %q: {ty}", "s0"), target)
    rng = np.random.default_rng(0)
    for n in (0, 1, 9, 16, 33, 64):
        a, index = (np.arange(200) % 120).astype(dtype), rng.integers(0, 40, n)
        low = np.where(index < 20, index, 0)
        out = np.full((3, n), 5, dtype)
        kernel(a, index, *out, symbols=(n,))
        assert np.array_equal(out[0], a[index * 3 + np.arange(n) + 1])
        assert np.array_equal(out[1], np.where(index < 20, a[low * 2], 0))
        assert np.array_equal(out[2], np.where(index < 20, a[4], 5))


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_masked_neighbours_never_touch_what_the_mask_forbids(tile, target):
    """Padding as convolutions read it: the index runs below and above the buffer, which lies at the edge of a page."""
    import mmap

    body = """
%four = "arith.constant"() <{value = 4 : i64}> : () -> i64
%end = "arith.constant"() <{value = 1028 : i64}> : () -> i64
for vector %i = %z to %n {
%lo = "arith.cmpi"(%i, %four) <{predicate = 5 : i64}> : (i64, i64) -> i1
%hi = "arith.cmpi"(%i, %end) <{predicate = 2 : i64}> : (i64, i64) -> i1
%m = "arith.andi"(%lo, %hi) : (i1, i1) -> i1
%x = load %a[%i] [1] + -4 if %m : f32
store %x, %o[%i] [1] + 0 : f32
}
"""
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    whole = np.frombuffer(pages, np.float32)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, 2):
        assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + page * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    a = whole[1024:2048]
    a[:] = np.arange(1024)
    kernel = tile.load(tile.text(SYMBOLIC + body, "%a: f32, %o: f32", "s0"), target)
    out = np.full(1032, 7, np.float32)
    kernel(a, out, symbols=(1032,))
    assert np.array_equal(out, np.pad(np.arange(1024, dtype=np.float32), 4))


def test_scatter_combines_lanes_that_meet(tile):
    body = """
for vector %i = %z to %n {
%at = load %index[%i] [1] + 0 : i64
%x = load %a[%i] [1] + 0 : f32
store %x, %o[%at] [1] + 0 combine add : f32
store %x, %p[%at] [1] + 0 combine max : f32
store %x, %q[%i] [1] + 0 combine add : f32
store %x, %r[%z] [1] + 0 combine add : f32
store %x, %t[%at] [1] + 0 : f32
}
"""
    text = tile.text(SYMBOLIC + body, "%a: f32, %index: i64, %o: f32, %p: f32, %q: f32, %r: f32, %t: f32", "s0")
    rng = np.random.default_rng(0)
    for target in ("native", "x86-64-avx2"):
        kernel = tile.load(text, target)
        for n in (0, 1, 16, 37, 64):
            a, index = rng.integers(-9, 9, n).astype(np.float32), rng.integers(0, 6, n)
            outs = [
                np.zeros(6, np.float32),
                np.full(6, -99, np.float32),
                np.ones(n, np.float32),
                np.ones(1, np.float32),
            ]
            outs.append(np.zeros(6, np.float32))
            kernel(a, index, *outs, symbols=(n,))
            want = [np.zeros(6), np.full(6, -99.0), 1 + a, np.array([1 + a.sum()]), np.zeros(6)]
            np.add.at(want[0], index, a)
            np.maximum.at(want[1], index, a)
            for place, value in zip(index, a):
                want[4][place] = value
            for got, expected in zip(outs, want):
                assert np.array_equal(got, expected), (target, n)


def test_bools_take_a_byte(tile):
    body = """
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : i1
%y = load %b[%i] [1] + 0 : i1
%w = "arith.xori"(%x, %y) : (i1, i1) -> i1
store %w, %o[%i] [1] + 0 : i1
}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, "%a: i1, %b: i1, %o: i1", "s0"))
    rng = np.random.default_rng(0)
    for n in (0, 1, 40, 77):
        a, b = rng.integers(0, 2, (2, n)).astype(bool)
        out = np.zeros(n, bool)
        kernel(a, b, out, symbols=(n,))
        assert np.array_equal(out, a ^ b) and set(out.view(np.uint8).tolist()) <= {0, 1}


@pytest.mark.parametrize("target", ["native", "x86-64-avx2", "x86-64-avx512"])
@pytest.mark.parametrize("ty, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_small_floats_round_once_an_operation(tile, target, ty, dtype):
    body = f"""
for vector %i = %z to %n {{
%x = load %a[%i] [1] + 0 : {ty}
%y = load %b[%i] [1] + 0 : {ty}
%s = "arith.addf"(%x, %y) : ({ty}, {ty}) -> {ty}
store %s, %o[%i] [1] + 0 : {ty}
%wide = "arith.extf"(%x) : ({ty}) -> f32
%wy = "arith.extf"(%y) : ({ty}) -> f32
%p = "arith.divf"(%wide, %wy) : (f32, f32) -> f32
%narrow = "arith.truncf"(%p) : (f32) -> {ty}
store %narrow, %q[%i] [1] + 0 : {ty}
}}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, f"%a: {ty}, %b: {ty}, %o: {ty}, %q: {ty}", "s0"), target)
    for n in (1, 16, 50, 77):
        generator = torch.Generator().manual_seed(n)
        a, b = torch.randn(2, n, generator=generator).mul(100).to(dtype)
        out = torch.zeros(2, n, dtype=dtype)
        kernel(*(np.asarray(t.view(torch.int16)) for t in (a, b, out[0], out[1])), symbols=(n,))
        assert torch.equal(out[0], a + b) and torch.equal(out[1], a / b)


def test_float64_goes_to_small_floats(tile):
    body = """
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : f64
%h = "arith.truncf"(%x) : (f64) -> f16
%b = "arith.truncf"(%x) : (f64) -> bf16
store %h, %o[%i] [1] + 0 : f16
store %b, %p[%i] [1] + 0 : bf16
}
"""
    kernel = tile.load(tile.text(SYMBOLIC + body, "%a: f64, %o: f16, %p: bf16", "s0"))
    a = torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1000
    half, brain = torch.zeros(37, dtype=torch.float16), torch.zeros(37, dtype=torch.bfloat16)
    kernel(a.numpy(), half.view(torch.int16).numpy(), brain.view(torch.int16).numpy(), symbols=(37,))
    assert torch.equal(half, a.to(torch.float16)) and torch.equal(brain, a.to(torch.bfloat16))


STREAM = """
for vector %i = %z to %n {{
%x = load %a[%i] [1] + 0 : {ty}
"tile.store"(%x, %o, %i) <{{strides = #graph.dims<[1]>, offset = #graph.dims<[{offset}]>, combine = "none", streams, operandSegmentSizes = array<i32: 1, 1, 1, 0>}}> : ({ty}, !tile.buf<{ty}>, i64) -> ()
}}
"""  # noqa: E501


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", ["f32", "f64", "i64", "i8", "f16"])
def test_stores_past_the_caches_wherever_the_memory_lies(tile, target, ty):
    """Aligned or not, in front of the end or at it: the same bytes arrive, and no others change."""
    dtype = {"f32": np.float32, "f64": np.float64, "i64": np.int64, "i8": np.int8, "f16": np.float16}[ty]
    for offset in (0, 1, 5, 16):
        text = tile.text(SYMBOLIC + STREAM.format(ty=ty, offset=offset), f"%a: {ty}, %o: {ty}", "s0")
        kernel = tile.load(text, target)
        whole_lines = target == "native" and ty == "f32" and "avx512f" in targets.get("native").llvm_features
        assert whole_lines <= ("vmovnt" in kernel.compiled.assembly and "sfence" in kernel.compiled.assembly)
        for n in (0, 1, 15, 16, 64, 257, 1000):
            a, memory = np.arange(n).astype(dtype), np.full(1200, 9, dtype)
            for start in (0, 1, 3):
                out = memory[start : start + n + 32]
                out[:] = 9
                kernel(a, out, symbols=(n,))
                want = np.full(n + 32, 9, dtype)
                want[offset : offset + n] = a
                assert np.array_equal(out, want), (offset, n, start)


AHEAD = """
for vector %i = %z to %n {{
%x = "tile.load"(%a, %i) <{{strides = #graph.dims<[{stride}]>, offset = #graph.dims<[3]>, ahead, operandSegmentSizes = array<i32: 1, 1, 0>}}> : (!tile.buf<{ty}>, i64) -> {ty}
store %x, %o[%i] [1] + 0 : {ty}
}}
"""  # noqa: E501


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty,dtype", [("f32", np.float32), ("f64", np.float64), ("f16", np.float16), ("i8", np.int8)])
def test_fetching_ahead_changes_no_value(tile, target, ty, dtype):
    """What is fetched may lie beyond the end of the memory; only neighbours are fetched."""
    for stride in (1, 2, -1):
        text = tile.text(SYMBOLIC + AHEAD.format(ty=ty, stride=stride), f"%a: {ty}, %o: {ty}", "s0")
        kernel = tile.load(text, target)
        x86 = targets.get(target).triple.startswith("x86_64")
        assert ("prefetcht0" in kernel.compiled.assembly) == (x86 and stride == 1)
        for n in (0, 1, 15, 64, 1000) if stride > 0 else (0, 1, 4):
            a = np.arange(3 + max(stride, 1) * n + 8).astype(dtype)
            out = np.full(n + 8, 9, dtype)
            kernel(a, out, symbols=(n,))
            assert np.array_equal(out[:n], a[3 + stride * np.arange(n)]) and (out[n:] == 9).all()
