"""The three steps from tensors to a binary: numbers, the text of every chip's code, and one sentence for wrong input."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from luban import targets
from luban.compiler import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir
from luban.compiler.ir.text import parse, verify
from luban.errors import ConfigError, TargetError, VerificationError

# relative to the largest value of a float64 product: the sum's rounding, and that of the stored result
TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 5e-3, "float16": 1e-3}
SHAPES = [(200, 300, 150), (1, 7, 1), (64, 33, 129)]

# target -> dtype -> an instruction of its vector or matrix unit
INSTRUCTIONS = {
    "x86-64-avx2": {
        "float32": r"vfmadd\d+ps\t.*%ymm",
        "bfloat16": r"vfmadd\d+ps\t.*%ymm",
        "float64": r"vfmadd\d+pd\t.*%ymm",
    },
    "x86-64-avx512": {
        "float32": r"vfmadd\d+ps\t.*%zmm",
        "bfloat16": r"vfmadd\d+ps\t.*%zmm",
        "float64": r"vfmadd\d+pd\t.*%zmm",
    },
    "x86-64-amx": {"float32": r"vfmadd\d+ps\t.*%zmm", "bfloat16": r"tdpbf16ps", "float64": r"vfmadd\d+pd\t.*%zmm"},
    "aarch64-neon": {"float32": r"fmla\tv\d+\.4s", "bfloat16": r"fmla\tv\d+\.4s", "float64": r"fmla\tv\d+\.2d"},
    "aarch64-sve": {
        "float32": r"fm(la|ad)\tz\d+\.s",
        "bfloat16": r"fm(la|ad)\tz\d+\.s",
        "float64": r"fm(la|ad)\tz\d+\.d",
    },
    "kunpeng-920": {"float32": r"fmla\tv\d+\.4s", "bfloat16": r"fmla\tv\d+\.4s", "float64": r"fmla\tv\d+\.2d"},
    "riscv64-rvv": {"float32": r"vfmacc\.v", "bfloat16": r"vfm(acc|add)\.v", "float64": r"vfmacc\.v"},
    "loongarch64-lasx": {"float32": r"xvfmadd\.s", "bfloat16": r"xvfmadd\.s", "float64": r"xvfmadd\.d"},
}


def operands(m, k, n, dtype="float32"):
    generator = torch.Generator().manual_seed(m + k + n)
    kind = getattr(torch, dtype)
    return torch.randn(m, k, generator=generator).to(kind), torch.randn(k, n, generator=generator).to(kind)


def error(c, a, b):
    want = a.double() @ b.double()
    return ((torch.as_tensor(c).double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_the_steps_end_in_a_product(m, k, n, dtype):
    a, b = operands(m, k, n, dtype)
    ir = generate_tiled_ir(a, b, tile_size=64)
    optimized = apply_arch_specific_opts(ir, target="native")
    matmul = compile_to_binary(optimized)
    for made in (ir.interpret(a, b), optimized.interpret(a, b), matmul(a, b), matmul(a.T.contiguous().T, b)):
        assert made.dtype is a.dtype and made.shape == (m, n)
        assert error(made, a, b) < TOLERANCE[dtype]


def test_numpy_arrays_and_described_operands_give_the_same_program():
    a, b = (x.numpy() for x in operands(40, 30, 50))
    ir = generate_tiled_ir(a, b, tile_size=16)
    assert str(ir) == str(generate_tiled_ir(((40, 30), "float32"), ((30, 50), np.float32), tile_size=16))
    matmul = compile_to_binary(apply_arch_specific_opts(ir))
    for made in (matmul(a, b), ir.interpret(a, b)):
        assert isinstance(made, np.ndarray) and made.dtype == np.float32
        assert np.allclose(made, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def test_a_program_takes_only_what_it_was_generated_for():
    a, b = operands(8, 9, 10)
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b)))
    with pytest.raises(ConfigError, match=r"is for \(8, 9\) @ \(9, 10\) in float32, not \(8, 9\) @ \(9, 11\)"):
        matmul(a, torch.randn(9, 11))
    with pytest.raises(ConfigError, match="in float64"):
        matmul(a.double(), b.double())
    with pytest.raises(ConfigError, match="two of a kind"):
        matmul(a, b.numpy())


def variants(x):
    """The same matrix, laid out in every way that an operand may come in."""
    rows, columns = x.shape
    yield "as it is", x
    yield "a transpose", x.t().contiguous().t()
    yield "every other column", torch.stack([x, x], 2).reshape(rows, 2 * columns)[:, ::2]
    yield "part of a larger one", torch.nn.functional.pad(x, (3, 2, 1, 1))[1:-1, 3:-2]
    yield "a parameter", torch.nn.Parameter(x.clone())
    yield "wants a gradient", x.clone().requires_grad_()
    yield "computed from a leaf", x.clone().requires_grad_() * 1
    yield "a lazy negation", torch._neg_view(-x)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n", [5, 150])  # outputs from malloc and from the pool
def test_operands_may_lie_in_any_way(n, turned):
    a, b = operands(n, 7, n)
    b = b.t().contiguous().t() if turned else b
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b)))
    want = matmul(a, b)
    for name, left in variants(a):
        for other, right in variants(b):
            got = matmul(left, right)
            assert torch.equal(got, want), (name, other)
            assert not got.requires_grad and got.is_contiguous()
    assert error(want, a, b) < TOLERANCE["float32"]


def test_overlapping_operands_and_one_operand_twice():
    a = torch.arange(24.0)
    square, rows = a[:16].view(4, 4), a.as_strided((4, 4), (1, 1))
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(square, square)))
    for left, right in ((square, square), (rows, square), (square, rows), (a[:4].expand(4, 4), rows)):
        assert torch.equal(matmul(left, right), left @ right)


@pytest.mark.parametrize(
    "a, b, said",
    [
        (torch.zeros(8, 9), torch.zeros(9, 11), r"not \(8, 9\) @ \(9, 11\)"),
        (torch.zeros(7, 9), torch.zeros(9, 10), r"not \(7, 9\) @ \(9, 10\)"),
        (torch.zeros(0, 9), torch.zeros(9, 10), "at least one row"),
        (torch.zeros(72), torch.zeros(9, 10), "pass a matrix"),
        (torch.zeros(8, 9).bfloat16(), torch.zeros(9, 10).bfloat16(), "in bfloat16"),
        (torch.zeros(8, 9).double(), torch.zeros(9, 10), "A is float64 and B is float32"),
        (torch.zeros(8, 9).to_sparse(), torch.zeros(9, 10), "A is a sparse_coo tensor"),
        (torch.zeros(8, 9, device="meta"), torch.zeros(9, 10), "tensor on meta, not a dense one on the CPU"),
        (None, torch.zeros(9, 10), "A is a NoneType"),
    ],
)
def test_a_program_says_what_is_wrong_with_its_operands(a, b, said):
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(*operands(8, 9, 10))))
    good = operands(8, 9, 10)
    for _ in range(2):  # the first call, and those after it
        with pytest.raises(ConfigError, match=said) as caught:
            matmul(a, b)
        assert "\n" not in str(caught.value)
        assert error(matmul(*good), *good) < TOLERANCE["float32"]


@pytest.mark.parametrize("n", [9, 150])
def test_threads_may_call_one_binary(n):
    a, b = operands(n, 20, n)
    pairs = [(a * k, b) for k in range(1, 5)]
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(*pairs[0])))
    wanted, wrong = [matmul(a, b) for a, b in pairs], []

    def work(k):
        if any(not torch.equal(matmul(*pairs[k]), wanted[k]) for _ in range(300)):
            wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_tile_size_sets_the_blocks():
    described = ((512, 512), "float32"), ((512, 512), "float32")
    for size in (64, 128):
        text = str(generate_tiled_ir(*described, tile_size=size))
        assert f"elements = #graph.dims<[{size * size}]>" in text, "the partial sums of a block"
        assert f"#graph.dims<[{(512 // size) ** 2}]>" in text, "the tasks: blocks of rows by blocks of columns"
    chip = apply_arch_specific_opts(generate_tiled_ir(*described, tile_size=100), "x86-64-avx512")
    dot = next(op for op in chip.tile.walk() if op.name == "tile.dot")
    rows, columns = (-(-100 // n.data) * n.data for n in (dot.rows, dot.columns))
    assert f"#graph.dims<[{rows * columns}]>" in str(chip), "rounded up to register tiles"


def test_generic_ir_knows_no_chip_and_scheduled_ir_does():
    ir = generate_tiled_ir(((256, 256), "bfloat16"), ((256, 256), "bfloat16"))
    assert "tile.pack" not in str(ir) and 'unit = "fma", rows = #builtin.int<1>, columns = #builtin.int<1>' in str(ir)
    amx = str(apply_arch_specific_opts(ir, "x86-64-amx"))
    assert 'unit = "amx", rows = #builtin.int<32>, columns = #builtin.int<32>' in amx and "k_multiple" in amx
    dots = str(apply_arch_specific_opts(ir, "x86-64-avx512-bf16"))
    assert 'unit = "bf16_dot"' in dots and "tile.pack" in dots
    with pytest.raises(ConfigError, match="apply_arch_specific_opts first"):
        compile_to_binary(ir)


def test_texts_parse_back_and_rules_are_checked():
    ir = apply_arch_specific_opts(generate_tiled_ir(((100, 90), "bfloat16"), ((90, 80), "bfloat16")), "x86-64-amx")
    ir.verify()
    for text in (str(ir), ir.graph_text):
        again = parse(text)
        verify(again)
    broken = str(ir).replace("k_multiple = #builtin.int<32>", "k_multiple = #builtin.int<3>")
    with pytest.raises(VerificationError, match="pads k to a multiple of the values that lie side by side"):
        verify(parse(broken))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("target", INSTRUCTIONS)
def test_every_chip_gets_vector_code_and_right_numbers(target, dtype):
    a, b = operands(70, 90, 100, dtype)
    optimized = apply_arch_specific_opts(generate_tiled_ir(a, b, tile_size=64), target)
    optimized.verify()
    assert error(optimized.interpret(a, b), a, b) < TOLERANCE[dtype]
    matmul = compile_to_binary(optimized)
    assert matmul.target == target and matmul.object_code[:4] == b"\x7fELF" and "define" in matmul.llvm_ir
    assert re.search(INSTRUCTIONS[target][dtype], matmul.assembly), f"no {INSTRUCTIONS[target][dtype]}"


@pytest.mark.parametrize("m, k, n", [*SHAPES, (33, 65, 31), (5, 2, 40)])
def test_amx_panels_are_read_as_they_were_packed(m, k, n):
    """The two sides have groups of their own and share the padding of k (A packed: tests/kernels/test_amx.py)."""
    a, b = operands(m, k, n, "bfloat16")
    chip = targets.get("x86-64-amx")
    optimized = apply_arch_specific_opts(generate_tiled_ir(a, b, tile_size=32), chip)
    assert error(optimized.interpret(a, b), a, b) < TOLERANCE["bfloat16"]
    assembly = compile_to_binary(optimized).assembly
    assert "ldtilecfg" in assembly and "tdpbf16ps" in assembly


@pytest.mark.parametrize("target", sorted(set(INSTRUCTIONS) - {"x86-64-avx2", "x86-64-avx512", "x86-64-amx"}))
def test_another_chips_program_is_refused_in_one_sentence(target):
    if targets.get(target).family == targets.get("native").family:
        pytest.skip("this is that chip")
    a, b = operands(8, 8, 8)
    matmul = compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), target))
    with pytest.raises(TargetError, match=rf'this matmul is {target} code.*target="native"'):
        matmul(a, b)


def test_a_missing_matrix_unit_is_refused_too():
    if targets.get("native").family != "x86-64" or targets.get("native").matrix_unit == "amx":
        pytest.skip("needs an x86-64 chip without AMX")
    a, b = operands(8, 8, 8, "bfloat16")
    with pytest.raises(TargetError, match="matmul needs .*amx-tile.*lacks"):
        compile_to_binary(apply_arch_specific_opts(generate_tiled_ir(a, b), "x86-64-amx"))(a, b)


@pytest.mark.parametrize(
    "a, b, said",
    [
        (torch.zeros(3, 4), torch.zeros(5, 6), "A has 4 columns and B has 5 rows"),
        (torch.zeros(3, 4), torch.zeros(4, 6).double(), "A is float32 and B is float64"),
        (
            torch.zeros(3, 4, dtype=torch.complex64),
            torch.zeros(4, 6, dtype=torch.complex64),
            "complex64 matrices has no",
        ),
        (
            torch.zeros(3, 4).to(torch.float8_e4m3fn),
            torch.zeros(4, 4).to(torch.float8_e4m3fn),
            "float8_e4m3fn matrices",
        ),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(4, 6, dtype=torch.int32), "int32 matrices has no kernel"),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3), "A is a sparse_coo tensor; make it dense"),
        (torch.zeros(3), torch.zeros(3, 3), r"A has the shape \(3,\); pass a matrix"),
        (torch.zeros(0, 3), torch.zeros(3, 3), "at least one row"),
        ("A", torch.zeros(3, 3), "A is a str; pass a torch tensor"),
        (torch.zeros(3, 3), ((3, 3), "floaty"), "B has the dtype 'floaty'"),
        (((3, "x"), "float32"), torch.zeros(3, 3), "is not a list of numbers"),
    ],
)
def test_wrong_operands_are_one_sentence(a, b, said):
    with pytest.raises(ConfigError, match=said) as caught:
        generate_tiled_ir(a, b)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "128"])
def test_a_wrong_tile_size_is_one_sentence(size):
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        generate_tiled_ir(torch.zeros(3, 3), torch.zeros(3, 3), tile_size=size)


@pytest.mark.parametrize("step", [apply_arch_specific_opts, compile_to_binary])
def test_what_is_not_ir_is_refused(step):
    with pytest.raises(ConfigError, match="got ndarray in place of tiled IR; pass what generate_tiled_ir returned"):
        step(np.zeros((2, 2)))


def test_wrong_targets_are_one_sentence():
    ir = generate_tiled_ir(torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(TargetError, match="did you mean kunpeng-920"):
        apply_arch_specific_opts(ir, "kunpeng920")
    with pytest.raises(TargetError, match="cuda-sm90 takes Triton source"):
        apply_arch_specific_opts(ir, "cuda-sm90")


def test_the_names_are_lazy():
    script = (
        "import sys, luban.compiler; dir(luban.compiler); assert not {'xdsl', 'llvmlite', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="nonsense"):
        import luban.compiler

        _ = luban.compiler.nonsense
