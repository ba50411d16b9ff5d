"""Reductions, scratch, masks, phases and what else kernels do with memory, from text, against the tile interpreter."""

from __future__ import annotations

import re

import numpy as np
import pytest

from luban.compiler.codegen.triton import generate, launch_interpreted
from luban.errors import LubanError

FLOAT = {"add": "addf", "mul": "mulf", "max": "maximumf", "min": "minimumf"}
INTEGER = {"add": "addi", "mul": "muli", "max": "maxsi", "min": "minsi", "and": "andi", "or": "ori"}
NUMPY = {"f32": np.float32, "bf16": np.float32, "i64": np.int64, "i8": np.int8, "i1": np.bool_}
ZERO = '%z = "arith.constant"() <{value = 0 : i64}> : () -> i64\n'
HEAD = ZERO + ZERO.replace("%z", "%one").replace("0", "1")


def several(tile, body: str, buffers: str, symbols: str = ""):
    """A kernel from text in which %r_at1 stands for the second result of %r."""
    return tile.kernel(re.sub(r"_at(\d)", r"#\1", tile.text(body, buffers, symbols)))


@pytest.mark.parametrize("n", ["37", "700", "s0"])
@pytest.mark.parametrize("ty", ["f32", "bf16", "i64", "i8", "i1"])
def test_reductions_of_every_kind(tr, tile, ty, n):
    """A vector loop that carries all kinds at once, starting from what is not their identity."""
    kinds = {
        k: o for k, o in (FLOAT if ty.endswith(("f32", "f16")) else INTEGER).items() if ty != "i1" or k in ("and", "or")
    }
    first = tr.number("init", {"i1": "1", "f32": "1.5", "bf16": "1.5"}.get(ty, "3"), ty)
    carried = ", ".join(f"%c_{k}" for k in kinds)
    body = (
        HEAD
        + tr.size("n", n)
        + first
        + f"%r, %s = for vector %i = %z to %n carry {carried} = {', '.join(['%init'] * len(kinds))} "
    )
    body += f"combine {', '.join(kinds)} : {', '.join([ty] * len(kinds))} {{\n%x = load %a[%i] [1] + 0 : {ty}\n"
    for k, op in kinds.items():
        body += f'%n_{k} = "arith.{op}"(%c_{k}, %x) : ({ty}, {ty}) -> {ty}\n'
    body += f"yield {', '.join(f'%n_{k}' for k in kinds)} : {', '.join([ty] * len(kinds))}\n}}\n"
    body += "\n".join(f"store %r_at{i}, %o[] [] + {i} : {ty}" for i in range(len(kinds)))
    rng = np.random.default_rng(1)
    a = rng.uniform(0.98, 1.02, 700) if ty.endswith(("f32", "f16")) else rng.integers(-1, 3, 700)
    a = tr.bf16(a.astype(np.float32)) if ty == "bf16" else a.astype(NUMPY[ty])
    kernel = several(tile, body, f"%a: {ty}, %o: {ty}", "s0" if n == "s0" else "")
    for target in (tr.SM90, tr.TINY):
        symbols = {"s0": 650} if n == "s0" else {}
        tr.compare(kernel, [a, np.zeros(len(kinds), NUMPY[ty])], symbols, target, rtol=0.01 if ty == "bf16" else 2e-5)


def test_unsigned_maximum_and_minimum(tr, tile):
    text = HEAD + tr.number("n", 36) + tr.number("top", -1, "i8") + tr.number("low", 0, "i8")
    text += """%r, %s = for vector %i = %z to %n carry %p, %q = %low, %top combine max, min : i8, i8 {
%x = load %a[%i] [1] + 0 : i8
%u = "arith.maxui"(%p, %x) : (i8, i8) -> i8
%v = "arith.minui"(%q, %x) : (i8, i8) -> i8
yield %u, %v : i8, i8
}
store %r_at0, %o[] [] + 0 : i8
store %r_at1, %o[] [] + 1 : i8"""
    a = np.array([3, 200, 7, 100] * 9, np.uint8).view(np.int8)
    out = np.zeros(2, np.uint8)
    launch_interpreted(generate(several(tile, text, "%a: i8, %o: i8"), tr.SM90), [a, out])
    assert out.tolist() == [200, 3]


ROWS = """for parallel %r = %z to %rows {
%s = "tile.alloc"() <{elements = #graph.dims<[N]>}> : () -> !tile.buf<f32>
%t = for vector %i = %z to %n carry %c = %zero combine add : f32 {
%x = load %a[%r, %i] [N, 1] + 0 : f32
%e = "math.exp"(%x) <{fastmath = #arith.fastmath<none>}> : (f32) -> f32
store %e, %s[%i] [1] + 0 : f32
%d = "arith.addf"(%c, %e) : (f32, f32) -> f32
yield %d : f32
}
for vector %j = %z to %n {
%k = load %s[SECOND
%q = "arith.divf"(%k, %t) : (f32, f32) -> f32
store %q, %o[%r, %j] [N, 1] + 0 : f32
}
}"""


@pytest.mark.parametrize("target", ["sm90", "tiny"])
@pytest.mark.parametrize("second", ["%j] [1] + 0 : f32", "%j] [-1] + 299 : f32"])
def test_scratch_is_a_block_or_memory(tr, tile, target, second):
    """Read back as it was written it stays a value; read backwards, or too long for a block, it is memory."""
    text = HEAD + tr.number("rows", 20) + tr.number("n", 300) + tr.number("zero", "0.0", "f32")
    text += ROWS.replace("SECOND", second).replace("N", "300")
    kernel = tile.kernel(tile.text(text, "%a: f32, %o: f32"))
    _, made = tr.compare(kernel, [tr.noise(6000), np.zeros(6000, np.float32)], target=tr.TARGETS[target])
    in_registers = target == "sm90" and "[1]" in second
    assert bool(made.of_kind("workspace")) != in_registers
    assert ("tl.debug_barrier()" in made.source) != in_registers
    if not in_registers:
        assert made.of_kind("workspace")[0].elements == 6000  # a row for each program


def test_values_cross_phases_through_memory(tr, tile):
    """A total at the top of a kernel, used by a loop whose blocks are programs of their own."""
    text = HEAD + tr.size("n", "s0") + tr.number("zero", "0.0", "f32")
    text += """%t = for vector %i = %z to %n carry %c = %zero combine add : f32 {
%x = load %a[%i] [1] + 0 : f32
%d = "arith.addf"(%c, %x) : (f32, f32) -> f32
yield %d : f32
}
for vector %j = %z to %n {
%y = load %a[%j] [1] + 0 : f32
%q = "arith.divf"(%y, %t) : (f32, f32) -> f32
store %q, %o[%j] [1] + 0 : f32
}"""
    kernel = tile.kernel(tile.text(text, "%a: f32, %o: f32", "s0"))
    a = np.abs(tr.noise(1000))
    got, made = tr.compare(kernel, [a, np.zeros(1000, np.float32)], {"s0": 1000}, tr.TINY)
    np.testing.assert_allclose(got[1], a / a.astype(np.float64).sum(), rtol=1e-5)
    assert made.entry_names == ("k_0", "k_1") and str(made.entries[1].grid[0]) == "floordiv(63 + s0, 64)"
    assert [w.elements for w in made.of_kind("workspace")] == [1]


def test_nothing_is_launched_for_an_empty_size(tr, tile):
    text = (
        HEAD
        + tr.size("n", "s0")
        + "for parallel %i = %z to %n {\n%x = load %a[%i] [1] + 0 : f32\nstore %x, %o[%i] [1] + 0 : f32\n}"
    )
    kernel = tile.kernel(tile.text(text, "%a: f32, %o: f32", "s0"))
    got, _ = tr.compare(kernel, [np.ones(1, np.float32), np.zeros(1, np.float32)], {"s0": 0})
    assert got[1][0] == 0


def test_serial_unrolled_and_carried_loops(tr, tile):
    """Fibonacci by a serial loop with a swap, within lanes a polynomial by an unrolled loop."""
    text = HEAD + tr.number("n", 20) + tr.number("four", 4) + tr.number("half", "0.5", "f32")
    text += """%f, %g = for serial %i = %z to %n carry %p, %q = %z, %one combine none, none : i64, i64 {
%s = "arith.addi"(%p, %q) : (i64, i64) -> i64
store %s, %fib[%i] [1] + 0 : i64
yield %q, %s : i64, i64
}
store %f_at0, %fib[] [] + 20 : i64
for vector %l = %z to %n {
%x = load %a[%l] [-2] + 38 : f32
%h = for unroll %k = %z to %four carry %c = %half combine none : f32 {
%y = "arith.mulf"(%c, %x) : (f32, f32) -> f32
%w = "arith.addf"(%y, %half) : (f32, f32) -> f32
yield %w : f32
}
store %h, %o[%l] [1] + 0 : f32
}"""
    arrays = [tr.noise(40), np.zeros(21, np.int64), np.zeros(20, np.float32)]
    got, made = tr.compare(several(tile, text, "%a: f32, %fib: i64, %o: f32"), arrays)
    assert got[1].tolist()[:6] == [1, 2, 3, 5, 8, 13] and "tl.static_range(0, 4)" in made.source


def test_masks_atomics_and_checked_indices(tr, tile):
    text = HEAD + tr.number("n", 300) + tr.number("limit", 250)
    text += """for vector %i = %z to %n {
%live = "arith.cmpi"(%i, %limit) <{predicate = 2 : i64}> : (i64, i64) -> i1
%x = load %a[%i] [1] + 0 if %live : f32
store %x, %o[%i] [1] + 0 : f32
store %x, %o[%i] [1] + 300 if %live : f32
%w = load %w[] [] + 0 if %live : f32
store %w, %o[%i] [1] + 600 : f32
%k = load %at[%i] [1] + 0 : i64
%c = "tile.check"(%k) <{bound = #graph.dims<[7]>}> : (i64) -> i64
store %x, %sums[%c] [1] + 0 if %live combine add : f32
store %k, %most[%c] [1] + 0 combine max : i64
}"""
    text = text.replace("%w = load %w[]", "%v = load %w[]").replace("store %w, %o", "store %v, %o")
    kernel = tile.kernel(tile.text(text, "%a: f32, %w: f32, %at: i64, %o: f32, %sums: f32, %most: i64"))
    at = np.random.default_rng(0).integers(0, 7, 300)
    arrays = [
        tr.noise(250),
        np.ones(1, np.float32),
        at,
        np.full(900, 9.0, np.float32),
        np.ones(7, np.float32),
        np.zeros(7, np.int64),
    ]
    _, made = tr.compare(kernel, arrays, rtol=1e-4)
    at[17] = 7
    with pytest.raises(LubanError, match="met an index out of range"):
        launch_interpreted(made, arrays)


def test_scatter_of_scalars_waits_between_store_and_load(tr, tile):
    text = (
        HEAD
        + tr.number("n", 50)
        + """for serial %i = %z to %n {
%k = load %at[%i] [1] + 0 : i64
%x = load %a[%i] [1] + 0 : f32
store %x, %o[%k] [1] + 0 combine mul : f32
}"""
    )
    kernel = tile.kernel(tile.text(text, "%at: i64, %a: f32, %o: f32"))
    at = np.random.default_rng(0).integers(0, 3, 50)
    _, made = tr.compare(
        kernel, [at, np.random.default_rng(1).uniform(0.9, 1.1, 50).astype(np.float32), np.ones(3, np.float32)]
    )
    assert "tl.debug_barrier()" in made.source


def test_vector_loops_within_vector_loops(tr, tile):
    """Only the innermost loop becomes a block; the outer one's iterations become programs."""
    text = HEAD + tr.number("m", 13) + tr.number("n", 90) + tr.number("zero", "0.0", "f32")
    text += """for vector %r = %z to %m {
%t = for vector %i = %z to %n carry %c = %zero combine add : f32 {
%x = load %a[%i, %r] [13, 1] + 0 : f32
%d = "arith.addf"(%c, %x) : (f32, f32) -> f32
yield %d : f32
}
store %t, %o[%r] [1] + 0 : f32
}"""
    _, made = tr.compare(tile.kernel(tile.text(text, "%a: f32, %o: f32")), [tr.noise(1170), np.zeros(13, np.float32)])
    assert made.entries[0].grid == (13,)
