"""The generated file itself: its subset of Triton, that it runs alone, that it compiles for chips, and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from luban import targets
from luban.compiler.codegen.triton import check_subset, compile_offline, generate, launch_interpreted
from luban.compiler.codegen.triton.blocks import blocks_of
from luban.errors import ConfigError, LubanError, TargetError

HEAD = '%z = "arith.constant"() <{value = 0 : i64}> : () -> i64\n'
GPUS = ["cuda-sm80", "cuda-sm90", "hip-gfx942"]
COPY = "for parallel %i = %z to %n {\n%x = load %a[%i] [1] + 0 : f32\nstore %x, %o[%i] [1] + 0 : f32\n}"


def fused(tr, fn, *shapes, target):
    args = [torch.randn(*s, generator=torch.Generator().manual_seed(i)).requires_grad_() for i, s in enumerate(shapes)]
    programs = tr.capture(fn, *args, target=target)
    return [generate(low.kernel, target) for p in programs for low in p.kernels.unique.values()]


def gemm(tr, tile, ty="bf16"):
    body = "store %acc, %c[%i, %j] [128, 1] + 0 : f32"
    sizes = HEAD + tr.number("m", 256) + tr.number("n", 128) + tr.number("k", 512)
    return tile.kernel(
        tile.text(
            sizes + tr.dot("%a", "%b", "%m, %n, %k", "512, 1", "1, 128", body, ty), f"%a: {ty}, %b: {ty}, %c: f32"
        )
    )


# ---- compiled for chips that are not here

_MATRIX = {"cuda-sm80": ("ptx", "mma.sync"), "cuda-sm90": ("ptx", "wgmma"), "hip-gfx942": ("amdgcn", "mfma")}


@pytest.mark.parametrize("name", GPUS)
def test_a_dot_becomes_matrix_instructions(tr, tile, name):
    stage, instruction = _MATRIX[name]
    made = generate(gemm(tr, tile), targets.get(name))
    assert instruction in compile_offline(made, targets.get(name))["k"][stage]


@pytest.mark.parametrize("name", GPUS[1:])
def test_pointwise_and_reductions_compile(tr, name):
    target = targets.get(name)
    stage = _MATRIX[name][0]
    layer_norm = fused(tr, lambda x, w: F.layer_norm(x, (384,), w) ** 2, (600, 384), (384,), target=target)
    gelu = fused(tr, lambda x, b: F.gelu(x + b, approximate="tanh"), (40, 300), (300,), target=target)
    for made in (*layer_norm, *gelu, *fused(tr, lambda x: F.softmax(x, -1), (64, 20000), target=target)):
        for entry, stages in compile_offline(made, target).items():
            assert entry in stages[stage]


def test_workspaces_symbols_and_helpers_compile(tr, tile):
    text = HEAD + tr.size("n", "s0") + tr.number("big", "0xff800000", "f32")
    text += """%t = for vector %i = %z to %n carry %c = %big combine max : f32 {
%x = load %a[%i] [1] + 0 : f32
%d = "arith.maximumf"(%c, %x) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
yield %d : f32
}
for vector %j = %z to %n {
%u = "tile.random"(%z, %j) <{kind = "normal"}> : (i64, i64) -> f32
%q = "arith.mulf"(%u, %t) : (f32, f32) -> f32
%w = "math.powf"(%q, %t) <{fastmath = #arith.fastmath<none>}> : (f32, f32) -> f32
store %w, %o[%j] [1] + 0 : f32
}"""
    made = generate(tile.kernel(tile.text(text, "%a: f32, %o: f32", "s0")), tr.SM90)
    assert made.of_kind("workspace") and set(compile_offline(made, tr.SM90)) == {"k_0", "k_1"}


def test_targets_without_a_compiler_here_are_named(tr, tile):
    ascend = targets.get("ascend-910b")
    with pytest.raises(TargetError, match="no compiler for ascend-910b"):
        compile_offline(generate(gemm(tr, tile), ascend), ascend)


# ---- blocks are the target's data


def test_blocks_follow_the_memory_of_a_core(tr, tile):
    rows = {name: blocks_of(targets.get(name)).row for name in [*GPUS, "ascend-910b"]}
    assert rows["hip-gfx942"] < rows["cuda-sm90"]  # 64 KiB against 228
    assert blocks_of(tr.TINY).lanes == 64
    kernels = {name: generate(gemm(tr, tile), targets.get(name)).source for name in ("cuda-sm90", "hip-gfx942")}
    assert "tl.zeros([128, 128]" in kernels["cuda-sm90"] and "tl.zeros([64, 64]" in kernels["hip-gfx942"]


# ---- the file


def test_the_file_runs_alone(tr, tmp_path):
    """With Triton and torch only: Luban is not imported."""
    (made, *_) = fused(tr, lambda x: F.softmax(x, -1), (5, 70), target=tr.TINY)
    use = "import sys\nx = torch.randn(350)\nouts = [torch.empty(350) for _ in range(COUNT)]\nlaunch(x, *outs)\n"
    use += "print(float((outs[0].view(5, 70) - x.view(5, 70).softmax(-1)).abs().max()), 'luban' in sys.modules)"
    text = made.source.replace("import triton\n", "import torch\nimport triton\n", 1) + use.replace(
        "COUNT", str(len(made.of_kind("buffer")) - 1)
    )
    (tmp_path / "softmax.py").write_text(text)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "softmax.py")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    error, loaded = done.stdout.split()
    assert float(error) < 1e-6 and loaded == "False"


def test_source_tells_what_it_takes(tr, tile):
    text = HEAD + tr.size("n", "s0") + COPY
    made = generate(tile.kernel(tile.text(text, "%a: f32, %o: f32", "s0")), tr.SM90)
    assert made.source.startswith('"""k: a Luban tile kernel')
    assert "def launch(in0, out1, s0):" in made.source and [a.kind for a in made.arguments] == [
        "buffer",
        "buffer",
        "symbol",
    ]
    assert max(len(line) for line in made.source.splitlines()) < 120


@pytest.mark.parametrize(
    "line",
    [
        "x = tl.make_block_ptr(a)",
        "x = tl.load(a, cache_modifier='.cg')",
        "x = tl.dot(a, b, allow_tf32=True)",
        "x = a.sum()",
        "x = tl.extra.libdevice.tanh(a)",
        "x = [i for i in a]",
        "x = print(a)",
        "x = tl.sum(a, axis=0, dtype=tl.float32)",
        "x = tl.range(0, 4)",
    ],
)
def test_what_lies_outside_the_subset_is_refused(line):
    source = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef f(a, b):\n    {line}\n"
    with pytest.raises(ConfigError, match="line 7 uses .*outside the Triton that versions 3.0 to 3.6 share"):
        check_subset(source)
    check_subset(source.replace(line, "x = tl.load(a, mask=b, other=0.0).to(tl.float32)"))
    with pytest.raises(ConfigError, match="import numpy"):
        check_subset("import numpy\n")


# ---- errors


def raises(tr, tile, text: str, buffers: str, message: str, symbols: str = "", target=None):
    with pytest.raises(LubanError, match=message):
        generate(tile.kernel(tile.text(HEAD + text, buffers, symbols)), target or tr.SM90)


def test_errors_say_what_to_do(tr, tile):
    n = tr.number("n", 40)
    raises(tr, tile, n + COPY, "%a: f32, %o: f32", "x86-64-avx2 takes machine code", target=targets.get("x86-64-avx2"))
    data = "%m = load %at[] [] + 0 : i64\n" + COPY.replace("%n", "%m")
    raises(tr, tile, data, "%a: f32, %o: f32, %at: i64", "bounds of a parallel loop in kernel k depend on data")
    cbrt = '%y = "math.cbrt"(%x) <{fastmath = #arith.fastmath<none>}> : (f32) -> f32\nstore %y'
    op = COPY.replace("parallel", "vector").replace("store %x", cbrt)
    raises(tr, tile, n + op, "%a: f32, %o: f32", r"no rule for math.cbrt \(kernel k\)")
    many = "for vector %i = %z to %n {\n%x = load %a[%i] [1] + 0 : f32\nstore %x, %o[] [] + 0 : f32\n}"
    raises(tr, tile, n + many, "%a: f32, %o: f32", "writes differing lanes to one place")
    raises(
        tr,
        tile,
        n + many.replace("+ 0 : f32\n}", "+ 0 combine mul : f32\n}"),
        "%a: f32, %o: f32",
        "no atomic for; make its loop serial",
    )
    dot = tr.dot("%a", "%b", "%n, %n, %n", "40, 1", "40, 1", "store %acc, %c[%i, %j] [40, 1] + 0 : f32", "f64")
    raises(tr, tile, n + dot, "%a: f64, %b: f64, %c: f32", "tile.dot multiplies f64, which tl.dot does not take")
    raises(tr, tile, n, "%a: f32", "kernel k does nothing")
    raises(tr, tile, tr.size("n", "tl") + COPY, "%a: f32, %o: f32", "the symbol tl of kernel k", "tl")


def test_buffers_that_do_not_fit(tr, tile):
    made = generate(tile.kernel(tile.text(HEAD + tr.size("n", "s0") + COPY, "%a: f32, %o: f32", "s0")), tr.SM90)
    a = np.zeros(4, np.float32)
    for buffers, symbols, message in [
        ([a], {"s0": 4}, "takes 2 buffers, got 1"),
        ([a, a.astype(np.float64)], {"s0": 4}, "out1 of k has to be a flat contiguous array of float32"),
        ([a, a.reshape(2, 2)], {"s0": 4}, "flat contiguous"),
        ([a, a], {}, "needs a value for the symbol s0"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            launch_interpreted(made, buffers, symbols)
