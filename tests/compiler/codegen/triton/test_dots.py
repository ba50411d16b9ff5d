"""Dots and packs from text: float64 NumPy and the tile interpreter as oracles, and what source they become."""

from __future__ import annotations

import numpy as np
import pytest

M, N, K = 130, 70, 50
HEAD = '%z = "arith.constant"() <{value = 0 : i64}> : () -> i64\n'
STORE = "store %acc, %c[%i, %j] [70, 1] + 0 : f32"
ADD = '\n%w = "arith.addf"(%acc, %v) : (f32, f32) -> f32\nstore %w, %c[%i, %j] [70, 1] + 0 : f32'
BIAS = "load %bias[%j] [1] + 0 : f32" + ADD


@pytest.fixture
def sizes(tr):
    return HEAD + "".join(tr.number(name, value) for name, value in (("m", M), ("n", N), ("k", K)))


@pytest.mark.parametrize("b_strides", ["1, 70", "50, 1"])
@pytest.mark.parametrize("ty", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("target", ["sm90", "tiny"])
def test_strided_operands_with_a_bias(tr, tile, sizes, ty, b_strides, target):
    kernel = tile.kernel(
        tile.text(
            sizes + tr.dot("%a", "%b", "%m, %n, %k", "50, 1", b_strides, "%v = " + BIAS, ty),
            f"%a: {ty}, %b: {ty}, %bias: f32, %c: f32",
        )
    )
    a, b, bias = tr.noise(M * K, 1), tr.noise(K * N, 2), tr.noise(N, 3)
    a, b = (tr.bf16(x) if ty == "bf16" else x.astype(np.float16 if ty == "f16" else np.float32) for x in (a, b))
    got, made = tr.compare(
        kernel, [a, b, bias, np.full(M * N, np.nan, np.float32)], target=tr.TARGETS[target], atol=1e-4
    )
    right = b.astype(np.float64).reshape(K, N) if b_strides == "1, 70" else b.astype(np.float64).reshape(N, K).T
    np.testing.assert_allclose(got[3].reshape(M, N), a.astype(np.float64).reshape(M, K) @ right + bias, atol=1e-4)
    assert made.entries[0].grid == ((1, 2, 1) if target == "sm90" else (1, 9, 5))  # tiles are programs
    assert ('input_precision="ieee"' in made.source) == (ty == "f32")


def test_integers_and_mixed_types(tr, tile, sizes):
    body = "store %acc, %c[%i, %j] [70, 1] + 0 : i32"
    kernel = tile.kernel(
        tile.text(
            sizes + tr.dot("%a", "%b", "%m, %n, %k", "50, 1", "1, 70", body, "i8", acc="i32"), "%a: i8, %b: i8, %c: i32"
        )
    )
    rng = np.random.default_rng(0)
    tr.compare(
        kernel,
        [
            rng.integers(-128, 128, M * K).astype(np.int8),
            rng.integers(-128, 128, K * N).astype(np.int8),
            np.zeros(M * N, np.int32),
        ],
    )
    kernel = tile.kernel(
        tile.text(
            sizes + tr.dot("%a", "%b", "%m, %n, %k", "50, 1", "1, 70", STORE, "bf16, f32"), "%a: bf16, %b: f32, %c: f32"
        )
    )
    tr.compare(kernel, [tr.bf16(tr.noise(M * K)), tr.noise(K * N, 1), np.zeros(M * N, np.float32)], atol=1e-4)


@pytest.mark.parametrize("unsigned", ["a", "b", "ab"])
def test_bytes_without_a_sign(tr, tile, sizes, unsigned):
    """tl.dot takes signed ones: they are moved down by 128, and what that leaves out is added."""
    body = "store %acc, %c[%i, %j] [70, 1] + 0 : i32"
    dot = tr.dot("%a", "%b", "%m, %n, %k", "50, 1", "1, 70", body, "i8", acc="i32", unsigned=unsigned)
    kernel = tile.kernel(tile.text(sizes + dot, "%a: i8, %b: i8, %c: i32"))
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, size).astype(np.int8) for size in (M * K, K * N))
    got, _ = tr.compare(kernel, [a, b, np.zeros(M * N, np.int32)])
    left, right = ((x.view(np.uint8) if name in unsigned else x).astype(np.int64) for x, name in ((a, "a"), (b, "b")))
    assert np.array_equal(got[2].reshape(M, N), left.reshape(M, K) @ right.reshape(K, N))


def test_a_batch_of_symbolic_sizes(tr, tile):
    """Grid: the batch, then row and column tiles; m, n and k come at launch."""
    text = (
        HEAD
        + tr.size("m", "s0")
        + tr.size("n", "s1")
        + tr.size("k", "s2")
        + tr.size("step", '"s0*s2"')
        + tr.number("batch", 3)
    )
    text += 'for parallel %b0 = %z to %batch {\n%base = "arith.muli"(%b0, %step) : (i64, i64) -> i64\n'
    body = 'store %acc, %c[%b0, %i, %j] ["s0*s1", s1, 1] + 0 : f32'
    text += tr.dot("%a", "%b", "%m, %n, %k", "s2, 1", "s2, 1", body, bases="%base, %z") + "}"
    kernel = tile.kernel(tile.text(text, "%a: f32, %b: f32, %c: f32", "s0, s1, s2"))
    arrays = [tr.noise(3 * 40 * 21), tr.noise(33 * 21, 1), np.zeros(3 * 40 * 33, np.float32)]
    _, made = tr.compare(kernel, arrays, {"s0": 40, "s1": 33, "s2": 21}, atol=1e-4)
    assert len(made.entries[0].grid) == 3 and made.entries[0].grid[0] == 3


def test_products_are_added_to_what_is_there(tr, tile, sizes):
    body = "load %c[%i, %j] [70, 1] + 0 : f32" + ADD
    text = (
        sizes
        + tr.number("two", 2)
        + "for serial %r = %z to %two {\n"
        + tr.dot("%a", "%b", "%m, %n, %k", "50, 1", "1, 70", "%v = " + body)
        + "}"
    )
    _, made = tr.compare(
        tile.kernel(tile.text(text, "%a: f32, %b: f32, %c: f32")),
        [tr.noise(M * K), tr.noise(K * N), tr.noise(M * N)],
        atol=2e-4,
    )
    assert "for row_ in range(0, 130, 128):" in made.source  # within one program, tile after tile


# ---- packed operands


def test_a_pack_becomes_nothing_where_the_dot_reads_its_source(tr, tile, sizes):
    text = sizes + tr.pack("%b", "%w", "%n, %k", "1, 70", 16, 2, "f32", "bf16")
    text += tr.dot("%a", "%w", "%m, %n, %k", "50, 1", "0, 0", STORE, "bf16", b_panel=16, kk=2)
    kernel = tile.kernel(tile.text(text, "%a: bf16, %b: f32, %w: bf16, %c: f32"))
    arrays = [
        tr.bf16(tr.noise(M * K)),
        tr.noise(K * N, 1),
        np.zeros(5 * 25 * 32, np.float32),
        np.zeros(M * N, np.float32),
    ]
    from luban.compiler.codegen.triton import generate, launch_interpreted

    made = generate(kernel, tr.SM90)
    launch_interpreted(made, arrays)
    want = arrays[0].astype(np.float64).reshape(M, K) @ tr.bf16(arrays[1]).astype(np.float64).reshape(K, N)
    np.testing.assert_allclose(arrays[3].reshape(M, N), want, atol=1e-4)
    assert made.entry_names == ("k",) and "%" not in made.source and ".to(tl.bfloat16)" in made.source


def test_a_pack_that_is_read_otherwise_is_a_copy_kernel(tr, tile, sizes):
    """The packed memory is an output too: it is written, and the dot reads the packed layout."""
    text = (
        sizes
        + tr.pack("%b", "%w", "%n, %k", "1, 70", 16, 4)
        + tr.dot("%a", "%w", "%m, %n, %k", "50, 1", "0, 0", STORE, b_panel=16, kk=4)
    )
    text += "%x = load %w[] [] + 3 : f32\nstore %x, %o[] [] + 0 : f32"
    kernel = tile.kernel(tile.text(text, "%a: f32, %b: f32, %w: f32, %c: f32, %o: f32"))
    arrays = [
        tr.noise(M * K),
        tr.noise(K * N, 1),
        np.full(5 * 13 * 64, np.nan, np.float32),
        np.zeros(M * N, np.float32),
        np.zeros(1, np.float32),
    ]
    _, made = tr.compare(kernel, arrays, atol=1e-4)  # the interpreter's packed memory with its zero padding, too
    assert made.entries[0].grid == (1, 3, 2) and len(made.entries) == 3


def panels(tr, sizes: str, b_base: str) -> str:
    """The shape of a CPU's schedule: blocks of rows in parallel, b packed in scratch, a dot for each panel."""
    text = sizes + "".join(
        tr.number(n, v)
        for n, v in (("block", 48), ("blocks", 3), ("columns", 16), ("panels", 5), ("panel", 800), ("width", 50))
    )
    text += "for parallel %ib = %z to %blocks {\n"
    text += '%s = "tile.alloc"() <{elements = #graph.dims<[4000]>}> : () -> !tile.buf<bf16>\n'
    text += (
        tr.pack("%b", "%s", "%n, %k", "1, 70", 16, 2, "f32", "bf16")
        + """%lo = "arith.muli"(%ib, %block) : (i64, i64) -> i64
%left = "arith.subi"(%m, %lo) : (i64, i64) -> i64
%rows = "arith.minsi"(%left, %block) : (i64, i64) -> i64
%from = "arith.muli"(%lo, %width) : (i64, i64) -> i64
for serial %p = %z to %panels {
%first = "arith.muli"(%p, %columns) : (i64, i64) -> i64
%rest = "arith.subi"(%n, %first) : (i64, i64) -> i64
%wide = "arith.minsi"(%rest, %columns) : (i64, i64) -> i64
"""
        + b_base
    )
    body = """%r = "arith.addi"(%i, %lo) : (i64, i64) -> i64
%q = "arith.addi"(%j, %first) : (i64, i64) -> i64
store %acc, %c[%r, %q] [70, 1] + 0 : f32"""
    return (
        text
        + tr.dot("%a", "%s", "%rows, %wide, %k", "50, 1", "0, 0", body, "bf16", bases="%from, %base", b_panel=16, kk=2)
        + "}\n}"
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_schedule_for_cpus_runs_on_blocks(tr, tile, sizes, direct):
    """With a panel's start as index times size the source is read; with a sum, which might be anything, the copy is."""
    base = '%base = "arith.muli"(%p, %panel) : (i64, i64) -> i64\n'
    if not direct:
        base = base.replace("%base", "%most") + '%base = "arith.addi"(%most, %z) : (i64, i64) -> i64\n'
    kernel = tile.kernel(tile.text(panels(tr, sizes, base), "%a: bf16, %b: f32, %c: f32"))
    arrays = [tr.bf16(tr.noise(M * K)), tr.noise(K * N, 1), np.zeros(M * N, np.float32)]
    _, made = tr.compare(kernel, arrays, atol=1e-4)
    assert bool(made.of_kind("workspace")) != direct and ("tl.debug_barrier()" in made.source) != direct
    assert "tl.zeros([64, 16], tl.float32)" in made.source  # blocks no larger than the schedule's
