"""What products' stores compute, what is computed again, and what casts cost: kernels and bytes, and numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from luban.compiler.frontend.torch.importer import import_graph
from luban.compiler.passes.pipeline import bisect, run

torch.manual_seed(0)
PASSES = "simplify,arg_reductions,cse,joins,attention_heads,inline_casts,dce,contract_layout,recompute,fuse"


def fused(machine, f, *args):
    """The groups of a program, each as the names of its operations."""
    module = import_graph(machine.traced(f, args), "main").module
    run(module, PASSES)
    groups = [op for op in module.walk() if op.name == "graph.group"]
    return [[o.name.removeprefix("graph.") for o in g.body.block.ops] for g in groups]


def results(machine, f, *args):
    """For each group that holds a product, how many values its store writes."""
    module = import_graph(machine.traced(f, args), "main").module
    run(module, PASSES)
    return [len(op.results) for op in module.walk() if op.name == "graph.group" and op.label.data == "contract"]


def bytes_moved(compiled):
    return sum(k["bytes"] for k in compiled.program.kernels)


def rms_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_norm_takes_one_kernel_behind_a_product(machine, dtype):
    """The product stores itself; the products with it that only sums want are computed where they are summed."""

    def f(x, w, g, weight):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = rms_norm(x.float(), w).to(x.dtype) @ weight
        return torch.autograd.grad(y, (x, w), g)

    args = [torch.randn(s).to(dtype) for s in [(40, 64), (64,), (40, 32), (64, 32)]]
    compiled = machine.check(f, *args, tolerance=1e-5 if dtype is torch.float32 else 2e-2)
    assert set(results(machine, f, *args)) == {1}
    assert len(compiled.kernels) <= 3


def test_a_square_that_a_norm_wants_is_not_stored(machine):
    def f(a, b, x, w):
        y = x + a @ b
        return y, rms_norm(y, w)

    args = [torch.randn(s) for s in [(40, 16), (16, 64), (40, 64), (64,)]]
    assert results(machine, f, *args) == [1]
    assert len(machine.check(f, *args).kernels) == 2


def test_what_must_be_stored_is_computed_in_the_store(machine):
    """A pre-activation that the caller keeps and an activation that a product reads: both leave the first product."""

    def f(a, b, c, bias):
        h = a @ b + bias
        return h, F.gelu(h) @ c

    args = [torch.randn(s) for s in [(20, 16), (16, 24), (24, 8), (24,)]]
    assert results(machine, f, *args) == [2, 1]
    machine.check(f, *args)


def test_a_single_reader_spares_its_operand(machine):
    f = lambda a, b, bias: (a @ b + bias).sum(0)  # noqa: E731
    args = [torch.randn(s) for s in [(20, 16), (16, 24), (24,)]]
    assert fused(machine, f, *args)[0] == ["contract", "map", "yield"]
    machine.check(f, *args)


def test_an_activation_is_computed_again_for_its_gradient(machine):
    """silu(gate) is wanted before and after a product; the gate is read there anyway."""

    def f(gate, up, g, w):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        y = (F.silu(gate) * up) @ w
        return torch.autograd.grad(y, (gate, up), g)

    args = [torch.randn(s) for s in [(130, 160), (130, 160), (130, 16), (160, 16)]]
    compiled = machine.check(f, *args)
    assert len(compiled.kernels) == 1  # nothing but the product's store
    module = import_graph(machine.traced(f, args), "main").module
    assert bisect(module, PASSES, args) is None


def test_values_that_cost_more_than_memory_are_kept(machine):
    def f(x, g, w):
        x = x.detach().requires_grad_()
        y = torch.erf(torch.sin(x))
        return y, (y @ w).exp() @ w.mT * y

    args = [torch.randn(s) for s in [(130, 160), (130, 160), (160, 160)]]
    groups = fused(machine, f, *args)
    assert sum(g.count("map") for g in groups) <= 4
    machine.check(f, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_a_bias_are_no_kernels(machine, dtype):
    def f(a, b, bias):
        return a.to(dtype) @ b.to(dtype) + bias.to(dtype)

    args = [torch.randn(s) for s in [(20, 16), (16, 24), (24,)]]
    compiled = machine.check(f, *args, tolerance=2e-2)
    packed = dtype == torch.bfloat16  # the product's own packing casts its operands
    assert len(compiled.kernels) == (1 if packed else 3)

    def g(x, bias):
        return (x + bias.to(dtype)).tanh(), x.sum(0) * bias.to(dtype)

    machine.check(g, torch.randn(20, 24).to(dtype), torch.randn(24), tolerance=2e-2)


def test_a_widened_value_is_read_narrow(machine):
    """The sum over the middle dim reads bfloat16; no float32 copy goes through memory."""
    f = lambda a, b: (a @ b).float().view(4, 6, 3, 8).sum(1)  # noqa: E731
    args = [torch.randn(24, 16).bfloat16(), torch.randn(16, 24).bfloat16()]
    compiled = machine.check(f, *args, tolerance=2e-2)
    assert len(compiled.kernels) == 2
    assert bytes_moved(compiled) == 2 * (24 * 16 * 2 + 24 * 24 * 2) + 4 * 96


def test_copies_for_the_caller_stay(machine):
    x = torch.randn(6, 8)
    machine.check(lambda x: (x.clone(), x.clone() + 1, (x * 2).clone(), x * 2), x)


def test_products_of_other_stores_are_no_reason_to_wait(machine):
    """Sums of two products, residual sums in a row, a product of a product's map: every value once."""

    def f(a, b, c, x):
        y = x + a @ b
        z = y + (y.tanh() @ c)
        return z + (z.sigmoid() @ c) * (y @ c)

    args = [torch.randn(s) for s in [(20, 16), (16, 24), (24, 24), (20, 24)]]
    machine.check(f, *args)
    assert bisect(import_graph(machine.traced(f, args), "main").module, PASSES, args) is None


def test_a_store_does_not_take_a_part_of_what_a_loop_makes(machine):
    """tanh is wanted for the activation and for its gradient: one loop makes both, and the product stores itself."""

    def f(h, g, w, v):
        t = torch.tanh(h)
        y, grad = h * (1 + t), (g @ w) * (1 + t + h * (1 - t * t))
        return grad.sum(0), grad @ v, y.mT @ g

    args = [torch.randn(s) for s in [(130, 160), (130, 24), (24, 160), (160, 24)]]
    assert [g for g in fused(machine, f, *args) if g[0] == "contract"] == [["contract", "yield"]] * 3
    machine.check(f, *args)
