"""tile.dot and tile.pack of generated code against float64 NumPy: layouts, ragged sizes, epilogues, element types."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from luban import targets
from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.codegen.llvm.dots import PANELS
from luban.errors import ConfigError

HEAD = """
%z = "arith.constant"() <{value = 0 : i64}> : () -> i64
%m = "tile.dim"() <{value = #graph.dims<[s0]>}> : () -> i64
%n = "tile.dim"() <{value = #graph.dims<[s1]>}> : () -> i64
%k = "tile.dim"() <{value = #graph.dims<[s2]>}> : () -> i64
"""
BIAS_RELU = """
%bias = load %c[%j] [1] + 0 : f32
%sum = "arith.addf"(%acc, %bias) : (f32, f32) -> f32
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
%r = "arith.maximumf"(%sum, %zero) : (f32, f32) -> f32
store %r, %o[%i, %j] ["s1", 1] + 0 : f32
"""
STORE = 'store %acc, %o[%i, %j] ["s1", 1] + 0 : f32'


def dot_text(tile, body, a, b, ty="f32", unit="fma", rows=14, columns=32, kk=1, pad="") -> str:
    """A kernel o = a @ b; a and b are "packed" or pairs of strides (outer, k)."""
    lines, operands, props = [HEAD], {}, {}
    source = "f32" if ty == "f32" else "bf16"
    for name, layout, panel, outer in (("a", a, rows, "m"), ("b", b, PANELS[unit].b_columns or columns, "n")):
        if isinstance(layout, str):
            strides = layout.removeprefix("packed ")
            lines.append(f'%p{name} = "tile.alloc"() <{{elements = #graph.dims<[40000]>}}> : () -> !tile.buf<{ty}>')
            lines.append(
                f'"tile.pack"(%{name}, %z, %{outer}, %k, %p{name}) <{{strides = #graph.dims<[{strides}]>, '
                f"panel = #builtin.int<{panel}>, kk = #builtin.int<{kk}>{pad}}}> : "
                f"(!tile.buf<{source}>, i64, i64, i64, !tile.buf<{ty}>) -> ()"
            )
            operands[name], props[name] = f"%p{name}", ("0, 0", panel)
        else:
            operands[name], props[name] = f"%{name}", (", ".join(layout), 0)
    inner = "\n".join(tile.expand(body).splitlines())
    lines.append(
        f'"tile.dot"({operands["a"]}, %z, {operands["b"]}, %z, %m, %n, %k) '
        f"<{{a_strides = #graph.dims<[{props['a'][0]}]>, b_strides = #graph.dims<[{props['b'][0]}]>, "
        f"a_panel = #builtin.int<{props['a'][1]}>, b_panel = #builtin.int<{props['b'][1]}>, kk = #builtin.int<{kk}>{pad}, "
        f'unit = "{unit}", rows = #builtin.int<{rows}>, columns = #builtin.int<{columns}>}}> ({{\n'
        f'^bb0(%acc: f32, %i: i64, %j: i64):\n{inner}\n"tile.yield"() : () -> ()\n}}) : '
        f"(!tile.buf<{ty}>, i64, !tile.buf<{ty}>, i64, i64, i64, i64) -> ()"
    )
    return tile.text("\n".join(lines), f"%a: {ty}, %b: {ty}, %c: f32, %o: f32", "s0, s1, s2")


SIZES = [(1, 1, 1), (14, 32, 40), (15, 33, 7), (37, 70, 100), (3, 100, 1), (30, 5, 64), (5, 4, 0)]
LAYOUTS = [
    (("s2", "1"), ("1", "s1"), False, False),
    (("1", "s0"), ("1", "s1"), True, False),
    ("packed s2, 1", "packed 1, s1", False, False),
    (("s2", "1"), "packed s2, 1", False, True),
    ("packed 1, s0", "packed s2, 1", True, True),
]


@pytest.mark.parametrize("target, columns, rows", [("native", 32, 14), ("x86-64-avx2", 16, 6)])
@pytest.mark.parametrize("a, b, a_turned, b_turned", LAYOUTS)
@pytest.mark.parametrize("body", [STORE, BIAS_RELU])
def test_float32(tile, target, columns, rows, a, b, a_turned, b_turned, body):
    kernel = tile.load(dot_text(tile, body, a, b, rows=rows, columns=columns), target)
    rng = np.random.default_rng(0)
    for m, n, k in SIZES:
        left, right = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        bias, out = rng.standard_normal(n).astype(np.float32), np.full((m + 1, n), 7, np.float32)
        given = [
            np.ascontiguousarray(left.T if a_turned else left),
            np.ascontiguousarray(right.T if b_turned else right),
        ]
        kernel(*given, bias, out, symbols=(m, n, k))
        want = left.astype(np.float64) @ right.astype(np.float64)
        want = np.maximum(want + bias, 0) if body is BIAS_RELU else want
        assert np.allclose(out[:m], want, rtol=1e-5, atol=1e-5) and (out[m] == 7).all(), (m, n, k)


def test_an_epilogue_of_many_operations_captures_what_lies_outside(tile):
    """Scale from memory outside of the dot, a mask on rows and columns, and an elementary function."""
    body = """
%d = "arith.cmpi"(%i, %j) <{predicate = 5 : i64}> : (i64, i64) -> i1
%x = load %c[%i, %j] ["s1", 1] + 1 if %d : f32
%y = "math.tanh"(%acc) : (f32) -> f32
%t = "arith.mulf"(%y, %scale) : (f32, f32) -> f32
%u = "arith.addf"(%t, %x) : (f32, f32) -> f32
store %u, %o[%j, %i] ["s0", 1] + 0 : f32
"""
    text = dot_text(tile, body, ("s2", "1"), ("1", "s1"))
    load = tile.expand("%scale = load %c[%z] [1] + 0 : f32")
    kernel = tile.load(text.replace('"tile.dot"', load + '\n"tile.dot"'))
    rng = np.random.default_rng(0)
    for m, n, k in SIZES:
        a, b = rng.standard_normal((m, k)).astype(np.float32) / 4, rng.standard_normal((k, n)).astype(np.float32) / 4
        c, out = rng.standard_normal(m * n + 1).astype(np.float32), np.zeros((n, m), np.float32)
        kernel(a, b, c, out, symbols=(m, n, k))
        extra = np.where(np.arange(m)[:, None] >= np.arange(n), c[1:].reshape(m, n), 0)
        want = np.tanh(a.astype(np.float64) @ b.astype(np.float64)) * c[0] + extra
        assert np.allclose(out.T, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not targets.get("native").has("avx512bf16"), reason="the chip has no vdpbf16ps")
@pytest.mark.parametrize("a, b, a_turned, b_turned", LAYOUTS)
def test_bfloat16(tile, a, b, a_turned, b_turned):
    kernel = tile.load(dot_text(tile, BIAS_RELU, a, b, ty="bf16", unit="bf16_dot", kk=2))
    generator = torch.Generator().manual_seed(0)
    for m, n, k in SIZES:
        left, right = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((m, k), (k, n)))
        bias, out = torch.randn(n, generator=generator), torch.zeros(m, n)
        given = [(left.T if a_turned else left).contiguous(), (right.T if b_turned else right).contiguous()]
        kernel(*(t.view(torch.int16).numpy() for t in given), bias.numpy(), out.numpy(), symbols=(m, n, k))
        want = (left.double() @ right.double() + bias).clamp_min(0)
        assert torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5)


def test_the_interpreter_agrees(tile):
    text = dot_text(tile, BIAS_RELU, ("s2", "1"), "packed 1, s1")
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(count).astype(np.float32) for count in (15 * 9, 9 * 40, 40))
    ours, theirs = np.zeros(15 * 40, np.float32), np.zeros(15 * 40, np.float32)
    tile.load(text)(a, b, c, ours, symbols=(15, 40, 9))
    tile.interpret(text, a, b, c, theirs, s0=15, s1=40, s2=9)
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "target, columns, rows, pattern",
    [
        ("aarch64-neon", 8, 8, r"fmla\tv\d+\.4s"),
        ("aarch64-sve", 16, 8, r"fm(la|ad)\tz"),
        ("riscv64-rvv", 16, 6, r"vfmacc\.v"),
    ]
    + [("loongarch64-lasx", 16, 6, r"xvfmadd\.s"), ("x86-64-avx512", 32, 14, r"vfmadd\d+ps\t.*zmm")],
)
def test_other_chips_multiply_vectors(tile, target, columns, rows, pattern):
    chip = targets.get(target)
    text = tile.llvm(dot_text(tile, BIAS_RELU, ("s2", "1"), "packed 1, s1", rows=rows, columns=columns), chip)
    assert re.search(pattern, compile_module(text, chip).assembly)


def test_amx_configures_its_tiles(tile):
    chip = targets.get("x86-64-amx")
    layouts = (("s2", "1"), "packed s2, 1")
    form = dict(ty="bf16", unit="amx", kk=2, rows=32, columns=32)
    text = dot_text(tile, BIAS_RELU, *layouts, **form, pad=", k_multiple = #builtin.int<32>")
    assembly = compile_module(tile.llvm(text, chip), chip).assembly
    assert "ldtilecfg" in assembly and "tdpbf16ps" in assembly
    with pytest.raises(ConfigError, match="needs 2 and 32"):
        tile.llvm(dot_text(tile, BIAS_RELU, *layouts, **form), chip)


def test_what_a_micro_kernel_cannot_read_is_refused(tile):
    with pytest.raises(ConfigError, match="pack it first"):
        tile.llvm(dot_text(tile, STORE, ("s2", "1"), ("s2", "1")), targets.get("native"))
    with pytest.raises(ConfigError, match="no multiple"):
        tile.llvm(dot_text(tile, STORE, ("s2", "1"), ("1", "s1"), columns=20), targets.get("native"))
