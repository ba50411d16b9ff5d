"""Kernels from PyTorch functions, through fusion and lowering, against torch in float64 and the tile interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from luban import targets
from luban.compiler.codegen.triton import compile_offline
from luban.errors import ConfigError


def leaf(*shape, dtype=torch.float32, seed=0):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return made.to(dtype).requires_grad_()


def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b) ** 2


def batch_norm(x):
    return torch.tanh(F.batch_norm(x, None, None, training=True))  # a square would leave a gradient of rounding errors


CASES = {
    "softmax": (lambda x: F.softmax(x, -1) ** 2, [(70, 300)]),
    "softmax of short rows": (lambda x: F.softmax(x, -1) ** 2, [(9, 5)]),
    "log softmax of an outer dimension": (lambda x: F.log_softmax(x, 0) ** 2, [(12, 40)]),
    "log softmax of a middle dimension": (lambda x: F.log_softmax(x, 1) ** 2, [(5, 40, 48)]),
    "sum of a middle dimension": (lambda x: (x * x).sum(1), [(4, 70, 300)]),
    "sum of columns of short rows": (lambda x: (x * x).sum(0), [(9000, 9)]),
    "norm over a middle dimension": (lambda x: x / (x.exp().sum(1, keepdim=True) + x.exp()), [(3, 9, 70)]),
    "layer norm": (layer_norm, [(90, 384), (384,), (384,)]),
    "layer norm of many rows": (layer_norm, [(200, 64), (64,), (64,)]),
    "gelu": (lambda x, b: F.gelu(x + b) ** 2, [(60, 300), (300,)]),
    "tanh gelu": (lambda x: F.gelu(x, approximate="tanh") ** 2, [(17, 500)]),
    "bias add": (lambda x, b: x + b, [(64, 700), (700,)]),
    "batch norm": (batch_norm, [(4, 8, 50)]),
    "mean": (lambda x: (x * x).mean(), [(50, 1100)]),
    "transposed": (lambda x, y: x.t() * y + 1.0, [(300, 90), (90, 300)]),
    "silu and swish gate": (lambda x, y: F.silu(x) * torch.sigmoid(y), [(20, 600), (20, 600)]),
}


@pytest.mark.parametrize("target", ["sm90", "tiny"])
@pytest.mark.parametrize("name", CASES)
def test_against_torch(tr, name, target):
    fn, shapes = CASES[name]
    args = [leaf(*s, seed=i) for i, s in enumerate(shapes)]
    for program in tr.capture(fn, *args, target=tr.TARGETS[target]):
        got = program.run("triton", tr.TARGETS[target])
        ours = program.run("tile", tr.TARGETS[target])
        for g, o, want in zip(got, ours, program.expected(), strict=True):
            scale = np.abs(want).max()
            np.testing.assert_allclose(g, want, rtol=2e-4, atol=2e-6 * scale)
            np.testing.assert_allclose(g, o, rtol=2e-4, atol=2e-6 * scale)


@pytest.mark.parametrize("name", ["softmax", "log softmax of a middle dimension", "layer norm", "gelu"])
def test_symbolic_sizes(tr, name):
    """Sizes come at launch; rows of unknown length are walked block by block."""
    fn, shapes = CASES[name]
    args = [leaf(*s, seed=i) for i, s in enumerate(shapes)]
    for program in tr.capture(fn, *args, target=tr.TINY, dynamic=True):
        got = program.run("triton", tr.TINY)
        assert any(k.of_kind("symbol") for k in program.sources.values())
        for g, want in zip(got, program.expected(), strict=True):
            np.testing.assert_allclose(g, want, rtol=3e-4, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", ["layer norm", "gelu", "bias add"])
def test_bfloat16_agrees_with_the_tile_interpreter(tr, name):
    fn, shapes = CASES[name]
    args = [leaf(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate(shapes)]
    for program in tr.capture(fn, *args):
        for g, o in zip(program.run("triton", tr.SM90), program.run("tile", tr.SM90), strict=True):
            # one unit in the last place, where a float32 sum falls on the other side of a tie
            np.testing.assert_allclose(g, o, rtol=2**-7, atol=2e-2 * np.abs(o).max())
            assert np.mean(g != o) < 0.05


def test_nan_goes_through_a_maximum(tr):
    x = torch.randn(6, 40)
    x[2, 5] = float("nan")
    (program,) = tr.capture(lambda x: x.amax(-1), x)
    (got,) = program.run("triton", tr.SM90)
    assert np.isnan(got[2]) and np.array_equal(got[[0, 1, 3]], x[[0, 1, 3]].amax(-1).numpy())


def test_a_row_is_read_once_and_stays_in_registers(tr):
    """The textbook kernel: one load of the row for all passes, no scratch memory, no barrier."""
    (program,) = tr.capture(lambda x: F.softmax(x, -1), torch.randn(200, 1000))
    program.run("triton", tr.SM90)
    (kernel,) = program.sources.values()
    assert kernel.entries[0].grid == (200,)
    assert kernel.source.count("tl.load(") == 1
    assert not kernel.of_kind("workspace") and "debug_barrier" not in kernel.source


def test_column_reductions_have_a_second_phase(tr):
    """Chunks of rows in parallel, with block accumulators; then the sums of the chunks."""
    args = [leaf(600, 384), leaf(384, seed=1), leaf(384, seed=2)]
    backward = tr.capture(layer_norm, *args)[1]
    backward.run("triton", tr.SM90)
    kernel = next(k for k in backward.sources.values() if len(k.entries) > 1)
    assert kernel.entries[0].grid[0] > 1 and not kernel.of_kind("workspace")
    assert "kept = tl.full([512], 0.0, tl.float32)" in kernel.source


LIBRARY = {
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(70, 96), (130, 96), (130,)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(1, 2, 40, 32)] * 3),
}


@pytest.mark.parametrize("chip", ["x86-64-avx512", "cuda-sm90"])
@pytest.mark.parametrize("name", LIBRARY)
def test_the_compute_library_scheduled_for_any_chip_runs_on_blocks(tr, name, chip):
    """The same tile programs that become machine code, with a CPU's schedule too: the dialect knows no chip."""
    fn, shapes = LIBRARY[name]
    args = [leaf(*s, seed=i) for i, s in enumerate(shapes)]
    for program in tr.capture(fn, *args, target=targets.get(chip)):
        for got, want in zip(program.run("triton", tr.SM90), program.expected(), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
        for made in program.sources.values():
            assert all("ptx" in stages for stages in compile_offline(made, tr.SM90).values())


@pytest.mark.parametrize("bits", ["float32", "bfloat16"])
def test_attention_scheduled_for_a_matrix_unit_in_many_blocks(tr, bits):
    """Values packed block by block into one piece of scratch, of which products read a part."""
    amx = targets.get("x86-64-amx")
    small = replace(amx, caches=tuple(replace(c, bytes=4096) for c in amx.caches))
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    args = [leaf(1, 1, 70, 40, dtype=getattr(torch, bits), seed=i) for i in range(3)]
    for program in tr.capture(fn, *args, target=small):
        hows = ["tile", "triton"]
        if (
            "tile.pairs" in program.operations()
        ):  # weights written as pairs of bits: no schedule of a Triton target does that
            hows.remove("triton")
            with pytest.raises(ConfigError, match="tile.pairs"):
                program.run("triton", tr.SM90)
        for how in hows:
            for got, want in zip(program.run(how, tr.SM90), program.expected(), strict=True):
                near = 1e-6 if bits == "float32" else 2e-2
                np.testing.assert_allclose(got, want, atol=near * max(1.0, np.abs(want).max()))
