"""Entries, random numbers, index checks, and the same kernels compiled for other chips."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from luban import targets
from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.codegen.llvm.dims import emit_dim
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.program import Call, emit_entry
from luban.errors import ConfigError, LubanError
from luban.symbolic import evaluate, parse, symbol

HEAD = """
%z = "arith.constant"() <{value = 0 : i64}> : () -> i64
%n = "tile.dim"() <{value = #graph.dims<[s0]>}> : () -> i64
"""


def philox(seed: np.ndarray, counter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two words of Philox4x32-10, after the paper's description."""
    mask = np.uint64(0xFFFFFFFF)
    key = [seed & mask, seed >> np.uint64(32)]
    words = [counter & mask, counter >> np.uint64(32), np.zeros_like(counter), np.zeros_like(counter)]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ key[0], second & mask,
            (first >> np.uint64(32)) ^ words[3] ^ key[1], first & mask,
        ]  # fmt: skip
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return words[0], words[1]


def test_the_philox_of_this_test_is_the_published_one():
    """Known answers of Random123: counter and key zero, and all bits set in what we use of them."""
    zero = np.zeros(1, np.uint64)
    assert [int(w[0]) for w in philox(zero, zero)] == [0x6627E8D5, 0xE169C58D]


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_random_numbers(tile, target):
    body = """
%s = load %seed[%z] [1] + 0 : i64
%base = load %seed[%z] [1] + 1 : i64
for vector %i = %z to %n {
%c = "arith.addi"(%base, %i) : (i64, i64) -> i64
%u = "tile.random"(%s, %c) <{kind = "uniform"}> : (i64, i64) -> f32
%g = "tile.random"(%s, %c) <{kind = "normal"}> : (i64, i64) -> f32
%b = "tile.random"(%s, %c) <{kind = "bits"}> : (i64, i64) -> i64
store %u, %o[%i] [1] + 0 : f32
store %g, %p[%i] [1] + 0 : f32
store %b, %q[%i] [1] + 0 : i64
}
"""
    kernel = tile.load(tile.text(HEAD + body, "%seed: i64, %o: f32, %p: f32, %q: i64", "s0"), target)
    for seed, base in ((0, 0), (123456789012345, 2**32 - 20), (-5, 2**40)):
        n = 1000
        out, normal, bits = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.int64)
        kernel(np.array([seed, base]), out, normal, bits, symbols=(n,))
        key = np.full(n, seed, np.int64).view(np.uint64)
        first, second = philox(key, np.arange(base, base + n, dtype=np.int64).view(np.uint64))
        assert np.array_equal(bits, first.astype(np.int64))
        assert np.array_equal(out, ((first >> np.uint64(8)) * 2.0**-24).astype(np.float32))
        u1, u2 = ((first >> np.uint64(8)) + np.uint64(1)) * 2.0**-24, (second >> np.uint64(8)) * 2.0**-24
        assert np.allclose(normal, np.sqrt(-2 * np.log(u1)) * np.cos(2 * math.pi * u2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_an_index_out_of_range_reads_zero_and_marks_the_run(tile, target):
    body = """
for vector %i = %z to %n {
%at = load %index[%i] [1] + 0 : i64
%safe = "tile.check"(%at) <{bound = #graph.dims<["s0*2"]>}> : (i64) -> i64
%x = load %a[%safe] [1] + 0 : f32
store %x, %o[%i] [1] + 0 : f32
}
%at = load %index[%z] [1] + 0 : i64
%safe = "tile.check"(%at) <{bound = #graph.dims<["s0*2"]>}> : (i64) -> i64
%x = load %a[%safe] [1] + 0 : f32
store %x, %o[%n] [1] + 0 : f32
"""
    kernel = tile.load(tile.text(HEAD + body, "%a: f32, %index: i64, %o: f32", "s0"), target)
    n = 37
    a, index = np.arange(2 * n, dtype=np.float32) + 1, np.random.default_rng(0).integers(0, 2 * n, n)
    out = np.zeros(n + 1, np.float32)
    kernel(a, index, out, symbols=(n,))
    assert kernel.status == 0 and np.array_equal(out[:n], a[index]) and out[n] == a[index[0]]
    for place in (0, 5, n - 1):
        for wrong in (-1, 2 * n, 2**40):
            broken = index.copy()
            broken[place] = wrong
            kernel(a, broken, out, symbols=(n,))
            want = a[index]
            want[place] = a[0]
            assert kernel.status == 1 and np.array_equal(out[:n], want)


@pytest.mark.parametrize("columns", [64, 40])
def test_rows_of_a_checked_table_are_read_as_vectors(tile, columns):
    body = f"""
%d = "arith.constant"() <{{value = {columns} : i64}}> : () -> i64
for serial %t = %z to %n {{
%row = load %index[%t] [1] + 0 : i64
%start = "arith.muli"(%row, %d) : (i64, i64) -> i64
for vector %j = %z to %d {{
%at = "arith.addi"(%start, %j) : (i64, i64) -> i64
%safe = "tile.check"(%at) <{{bound = #graph.dims<[{9 * columns}]>}}> : (i64) -> i64
%x = load %a[%safe] [1] + 0 : f32
store %x, %o[%t, %j] [{columns}, 1] + 0 : f32
}}
}}
"""
    kernel = tile.load(tile.text(HEAD + body, "%a: f32, %index: i64, %o: f32", "s0"))
    table, index = np.arange(9 * columns, dtype=np.float32).reshape(9, columns), np.array([8, 0, 3, 3, 7])
    out = np.zeros((5, columns), np.float32)
    kernel(table, index, out, symbols=(5,))
    assert kernel.status == 0 and np.array_equal(out, table[index])
    assert ("gather" in kernel.compiled.assembly) == (columns % 16 != 0)
    for wrong in (9, -1, 2**40):
        index[2] = wrong
        kernel(table, index, out, symbols=(5,))
        assert kernel.status == 1 and np.array_equal(out[[0, 1, 3, 4]], table[index[[0, 1, 3, 4]]])


COPY = (
    HEAD
    + """
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : f32
%y = "arith.addf"(%x, %x) : (f32, f32) -> f32
store %y, %o[%i] [1] + 0 : f32
}
"""
)


def test_calls_pass_arguments_temporaries_offsets_and_dims(tile):
    half = parse("floordiv(s0, 2)")
    calls = [
        Call("k", (("arg", 0, 0), ("temp", 1, 64)), (symbol("s0"),)),
        Call("k", (("temp", 1, half * 4 + 64), ("arg", 1, 8)), (half,)),
    ]
    kernel = tile.load(tile.text(COPY, "%a: f32, %o: f32", "s0"), calls=calls)
    for n in (2, 10, 71):
        a, out = np.arange(n, dtype=np.float32), np.full(n + 2, -1, np.float32)
        kernel(a, out, symbols=(n,), temps=(0, 4096))
        want = np.full(n + 2, -1, np.float32)
        want[2 : 2 + n // 2] = 4 * a[n // 2 : n // 2 + n // 2]
        assert np.array_equal(out, want)


def test_stamps_are_written_only_when_asked_for(tile):
    calls = [Call("k", (("arg", 0, 0), ("arg", 1, 0)), (symbol("s0"),))] * 2
    kernel = tile.load(tile.text(COPY, "%a: f32, %o: f32", "s0"), calls=calls)
    a, out, stamps = np.zeros(5, np.float32), np.zeros(5, np.float32), np.zeros(4, np.int64)
    kernel(a, out, symbols=(5,))
    kernel(a, out, symbols=(5,), stamps=stamps)
    assert (stamps > 0).all() and (np.diff(stamps) >= 0).all() and stamps[-1] - stamps[0] < 10**9


def test_dims_are_computed_as_python_computes_them():
    import ctypes

    from luban.runtime import elf, externals

    dims = [
        "s0*4 + s1*-3 + 7",
        "floordiv(s0, 3)",
        "mod(s0, 5)",
        "max(s0, s1) + min(s0, 4)",
        "s0*s1",
        "floordiv(s0 + s1*-9, 4)",
    ]
    dims += ["mod(s0 + s1*-9, 4)", "12", "floordiv(s0*s1, 7)*2 + mod(s1, 3)"]
    module = Module()
    fn = Function(module, "luban_entry", "void", [("ptr", "syms"), ("ptr", "out")])
    values = {
        name: fn.op(f"load i64, ptr {fn.op(f'getelementptr i64, ptr %syms, i64 {i}')}")
        for i, name in enumerate(["s0", "s1"])
    }
    for i, dim in enumerate(dims):
        fn.emit(f"store i64 {emit_dim(fn, parse(dim), values)}, ptr {fn.op(f'getelementptr i64, ptr %out, i64 {i}')}")
    fn.emit("ret void")
    module.add(fn)
    image = elf.load(compile_module(module.text(), targets.get("native")).object, externals.resolve)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(image.lookup("luban_entry"))
    for s0, s1 in ((1, 1), (17, 4), (5, 12), (100, 3)):
        symbols, out = np.array([s0, s1]), np.zeros(len(dims), np.int64)
        entry(symbols.ctypes.data, out.ctypes.data)
        assert out.tolist() == [evaluate(parse(d), {"s0": s0, "s1": s1}) for d in dims]
    with pytest.raises(ConfigError, match="symbol s9"):
        emit_dim(fn, parse("s9 + 1"), values)


def test_only_the_entry_and_its_call_from_python_are_visible(tile):
    text = tile.llvm(tile.text(COPY, "%a: f32, %o: f32", "s0"), targets.get("native"))
    assert re.findall(r"^define (?!internal).*?@([\w.]+)", text, re.M) == ["luban_entry", "luban_call"]


def test_unknown_operations_and_broken_text_say_so(tile):
    body = HEAD + '%x = "arith.addui_extended"(%z, %n) : (i64, i64) -> (i64, i1)\n'
    with pytest.raises(ConfigError, match="addui_extended"):
        tile.llvm(tile.text(body.replace("%x =", "%x:2 ="), "%a: f32", "s0"), targets.get("native"))
    with pytest.raises(LubanError, match="LLVM rejects"):
        compile_module("define nonsense", targets.get("native"))


def test_an_empty_program_has_an_entry():
    module = Module()
    emit_entry(module, [], [])
    assert "luban_entry" in compile_module(module.text(), targets.get("native")).assembly


# -- other chips: what a vector instruction looks like in each one's assembly

FUSED = (
    HEAD
    + """
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : f32
%y = load %b[%i] [1] + 0 : f32
%p = "arith.mulf"(%x, %y) : (f32, f32) -> f32
%s = "arith.addf"(%p, %x) : (f32, f32) -> f32
%e = "math.exp"(%s) : (f32) -> f32
store %e, %o[%i] [1] + 0 : f32
}
%r = for vector %i = %z to %n carry %acc = %zero combine add : f32 {
%x = load %a[%i] [1] + 0 : f32
%next = "arith.addf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
store %r, %o[%n] [1] + 0 : f32
"""
)
VECTOR = {
    "aarch64-neon": (r"fmla\tv\d+\.4s", r"fadd\tv\d+\.4s"),
    "kunpeng-920": (r"fmla\tv\d+\.4s", r"fadd\tv\d+\.4s"),
    "aarch64-sve": (r"fm(la|ad)\tz\d+\.s, p\d", r"ld1w\t\{ z\d+\.s \}, p\d", r"fadd\tz\d+\.s"),
    "riscv64-rvv": (r"vfm(acc|add)\.v[vf]", r"vle32\.v", r"vfadd\.vv"),
    "loongarch64-lasx": (r"xvfmadd\.s", r"xvfadd\.s"),
    "x86-64-avx2": (r"vfmadd\d+ps\t.*%ymm", r"vaddps\t.*%ymm"),
    "x86-64-avx512": (r"vfmadd\d+ps\t.*%zmm", r"vaddps\t.*%zmm", r"\{%k\d\} \{z\}"),
}


@pytest.mark.parametrize("target", sorted(VECTOR))
def test_other_chips_get_vector_instructions(tile, target):
    chip = targets.get(target)
    compiled = compile_module(tile.llvm(tile.text(FUSED, "%a: f32, %b: f32, %o: f32", "s0"), chip), chip)
    assert compiled.object[:4] == b"\x7fELF"
    for pattern in VECTOR[target]:
        assert re.search(pattern, compiled.assembly), (target, pattern)
    assert not re.search(r"__(trunc|extend)|expf@|\bbl\t(exp|fma)f?\b", compiled.assembly)


SMALL = (
    HEAD
    + """
for vector %i = %z to %n {
%x = load %a[%i] [1] + 0 : bf16
%y = load %b[%i] [1] + 0 : f16
%wx = "arith.extf"(%x) : (bf16) -> f32
%wy = "arith.extf"(%y) : (f16) -> f32
%s = "arith.addf"(%wx, %wy) : (f32, f32) -> f32
%t = "arith.truncf"(%s) : (f32) -> bf16
%h = "arith.truncf"(%s) : (f32) -> f16
store %t, %a[%i] [1] + 0 : bf16
store %h, %b[%i] [1] + 0 : f16
}
"""
)


@pytest.mark.parametrize("target", sorted(VECTOR))
def test_no_chip_calls_a_library_to_convert_small_floats(tile, target):
    chip = targets.get(target)
    compiled = compile_module(tile.llvm(tile.text(SMALL, "%a: bf16, %b: f16", "s0"), chip), chip)
    assert not re.search(r"__\w+f2", compiled.assembly)
