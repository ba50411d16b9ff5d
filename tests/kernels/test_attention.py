"""Attention and its gradients as machine code, beside the plain formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def formula(q, k, v, bias, causal, scale):
    """Softmax of scaled products times values; a row that sees no key gives zeros."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if bias is not None:
        scores = scores + bias
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ v


def attend(
    machine, b, h, queries, keys, size, dtype, causal=False, bias=None, layout="heads first", scale=None, spread=1.0
):
    """Checks output and gradients; gives the compiled program."""

    def operand(length):
        if layout == "heads first":
            return (torch.randn(b, h, length, size) * spread).to(dtype)
        return (torch.randn(b, length, h, size) * spread).to(dtype).transpose(1, 2)

    args = [operand(queries), operand(keys), operand(keys)]
    if bias is not None:
        args.append(bias.to(dtype))
    weight = torch.randn(b, h, queries, size)

    def f(q, k, v, *mask, plain=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        m = mask[0] if mask else None
        if plain:
            out = formula(q, k, v, m, causal, scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal, scale=scale)
        return out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), (q, k, v))

    run = machine.compile(f, args)
    want = f(*[x.double() for x in args], plain=True)
    for name, g, w in zip(("out", "dq", "dk", "dv"), run(*args), want, strict=True):
        assert g.dtype is dtype
        off = float((g.double() - w).abs().max())  # what should be 0 may be a rounding error
        assert off <= NEAR[dtype] / 4 or machine.error(g, w) <= NEAR[dtype], (
            f"{name} is off by {machine.error(g, w):.3g}"
        )
    assert any("attention_backward" in name for name in run.kernels)
    return run


@FLOATS
@pytest.mark.parametrize("size", [1, 2, 7, 8, 16, 33, 64, 80, 96, 128, 129])
def test_head_sizes(machine, size, dtype):
    attend(machine, 2, 2, 9, 13, size, dtype)


@FLOATS
@pytest.mark.parametrize("layout", ["heads first", "positions first"])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 7), (5, 1), (64, 64), (65, 64), (63, 300), (130, 257), (257, 31)], ids=str
)
def test_lengths_with_and_without_causality(machine, lengths, layout, dtype):
    for causal in (False, True):
        attend(machine, 1, 2, *lengths, 16, dtype, causal, layout=layout)


@FLOATS
@pytest.mark.parametrize("shape", [(2, 3, 20, 30), (20, 30), (2, 1, 1, 30), (1, 3, 20, 1)], ids=str)
def test_bias_that_broadcasts(machine, shape, dtype):
    attend(machine, 2, 3, 20, 30, 16, dtype, bias=torch.randn(shape))


@FLOATS
def test_rows_without_any_visible_key(machine, dtype):
    mask = torch.zeros(20, 30)
    mask[3], mask[:, 5] = float("-inf"), float("-inf")
    attend(machine, 2, 3, 20, 30, 16, dtype, bias=mask)
    late = torch.zeros(2, 1, 70, 300)  # a whole block of keys is hidden before the first visible one
    late[1, :, :, :260] = float("-inf")
    attend(machine, 2, 2, 70, 300, 16, dtype, bias=late)


def test_scale_heads_and_half_precision(machine):
    attend(machine, 3, 4, 70, 70, 64, torch.float32, True, layout="positions first", scale=0.3)
    attend(machine, 2, 2, 9, 13, 16, torch.float16, True)


def test_double_precision_has_no_kernel_and_is_made_of_parts(machine):
    q = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    run = machine.check(F.scaled_dot_product_attention, q, q, q, tolerance=1e-13)
    assert not any("attention" in name for name in run.kernels)


def test_large_scores_do_not_overflow(machine):
    q, k, v = (torch.randn(1, 1, 20, 8) * s for s in (300, 300, 1))
    machine.check(F.scaled_dot_product_attention, q, k, v, tolerance=1e-3)


def test_keys_shared_by_query_heads(machine):
    q, k, v = torch.randn(2, 6, 20, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)

    def f(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))

    machine.check(f, q, k, v, tolerance=2e-5)


def test_maps_join_the_store(machine):
    """The usual transposition and reshape behind attention write from its kernel."""
    x = [torch.randn(2, 4, 20, 16) for _ in range(3)]
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 20, 64) * 2  # noqa: E731
    assert len(machine.check(f, *x, tolerance=1e-5).kernels) == 1


@FLOATS
@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("lengths", [(17, 17), (127, 129), (129, 127), (70, 700), (700, 700), (700, 70)], ids=str)
def test_many_blocks_of_small_and_of_large_scores(machine, lengths, spread, dtype):
    """Small scores in bfloat16 need no running maximum, large ones do; keys take one block or two, the last one ragged."""
    for causal in (False, True):
        run = attend(machine, 1, 1, *lengths, 40, dtype, causal, spread=spread)
    assert run.kernels


@pytest.mark.parametrize("length", [31, 32, 33, 255, 256, 257, 289])
@pytest.mark.parametrize("spread", [1.0, 2.5])
def test_weights_over_their_whole_range(machine, length, spread):
    """Scores from one end of what needs no running maximum to the other (2.5), and keys that fill no tile of pairs."""
    q, k = (torch.full((1, 1, length, 16), 0.25 * spread * sign).bfloat16() for sign in (1, 1))
    k = k * torch.linspace(-1, 1, length)[:, None].bfloat16() * 4
    v = torch.randn(1, 1, length, 16).bfloat16()
    for causal in (False, True):
        f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0)  # noqa: B023, E731
        (out,) = machine.compile(f, (q, k, v))(q, k, v)
        want = formula(*[x.double() for x in (q, k, v)], None, causal, 1.0)
        assert machine.error(out, want) <= NEAR[torch.bfloat16] / 2


@FLOATS
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_queries_of_few_heads_are_dealt_out(machine, heads, dtype):
    attend(machine, 1, heads, 230, 230, 3, dtype, True)


@FLOATS
@pytest.mark.parametrize("scale", [-0.4, 0.0, 2.0])
def test_any_scale(machine, scale, dtype):
    attend(machine, 1, 2, 50, 70, 256, dtype, True, scale=scale, spread=0.3)


@FLOATS
def test_features_that_are_no_neighbours(machine, dtype):
    q, k, v = (torch.randn(1, 2, 24, 70).to(dtype).transpose(2, 3) for _ in range(3))
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    machine.check(f, q, k, v, tolerance=NEAR[dtype])


@FLOATS
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_a_row_that_sees_one_key_gives_its_value(machine, spread, dtype):
    """The weights that are summed are those that are multiplied: nothing is lost where one of them is all."""
    q, k, v = ((torch.randn(1, 2, 70, 64) * spread).to(dtype) for _ in range(3))
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    (out,) = machine.compile(f, (q, k, v))(q, k, v)
    near = 0 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], atol=near, rtol=near)


@FLOATS
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_nan_and_infinity_come_out_as_in_torch(machine, operand, what, dtype):
    for causal in (False, True):
        args = [torch.randn(1, 1, 70, 16).to(dtype) for _ in range(3)]
        args[operand][0, 0, 40, 3] = what
        f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: B023, E731
        (out,) = machine.compile(f, args)(*args)
        want = formula(*[x.double() for x in args], None, causal, None)
        # A weight of 0 times what is hidden is NaN in the formula, here and in torch's kernel only within a block.
        sees = (torch.arange(70) >= (40 if causal and operand else 0))[:, None]
        lost, kept = want.isnan() & sees, want.isfinite()
        assert bool(out[lost].isnan().all())
        assert bool((out.double() == want)[want.isinf()].all())
        torch.testing.assert_close(out[kept].double(), want[kept], atol=NEAR[dtype], rtol=NEAR[dtype])


@FLOATS
def test_gradients_of_shared_keys(machine, dtype):
    """The query heads of a head of keys add to its gradients, over several blocks of both."""
    q, k, v = (torch.randn(1, heads, 210, 24).to(dtype) for heads in (6, 2, 2))
    weight = torch.randn(1, 6, 210, 24)

    def f(q, k, v, plain=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if plain:
            out = formula(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), None, True, None)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), (q, k, v))

    run = machine.compile(f, (q, k, v))
    want = f(q.double(), k.double(), v.double(), plain=True)
    for name, g, w in zip(("out", "dq", "dk", "dv"), run(q, k, v), want, strict=True):
        assert machine.error(g, w) <= NEAR[dtype], f"{name} is off by {machine.error(g, w):.3g}"


def test_the_error_is_not_above_that_of_torch(machine):
    args = [torch.randn(2, 2, 300, 64).bfloat16() for _ in range(3)]
    weight = torch.randn(2, 2, 300, 64).bfloat16()

    def f(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), (q, k, v))

    got, own, want = machine.compile(f, args)(*args), f(*args), f(*[x.double() for x in args])
    for g, o, w in zip(got, own, want, strict=True):
        assert (g.double() - w).square().mean().sqrt() <= 1.1 * (o.double() - w).square().mean().sqrt()


@FLOATS
@pytest.mark.parametrize(
    "chip", ["x86-64-avx2", "x86-64-avx512-bf16", "aarch64-neon", "riscv64-rvv", "loongarch64-lasx"]
)
def test_other_chips_compile(machine, chip, dtype):
    from luban import targets
    from luban.compiler.driver import compile_graph
    from luban.compiler.frontend.torch.importer import import_graph

    def f(q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.detach(), *torch.autograd.grad(out.float().sum(), (q, k, v))

    args = [torch.randn(1, 2, 600, 40).to(dtype) for _ in range(3)]
    imported = import_graph(machine.traced(f, args), "main")
    program = compile_graph(imported.module, imported.metadata, targets.get(chip), "main")
    assert {k["name"] for k in program.kernels}
