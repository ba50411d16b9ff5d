"""Keys and values shared by groups of query heads: rewriting, the kernels, the reference interpreter, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from luban.compiler.frontend.torch.importer import import_graph
from luban.compiler.ir import graph
from luban.compiler.passes.pipeline import bisect, run

torch.manual_seed(0)
PASSES = "simplify,arg_reductions,cse,joins,attention_heads,inline_casts,dce,contract_layout,recompute,fuse"
SHAPES = [
    (2, 6, 2, 9, 9, 8),
    (1, 4, 4, 5, 5, 16),
    (3, 8, 2, 33, 70, 32),
    (4, 4, 1, 17, 17, 8),
]  # batch, heads, key heads


def repeated(x, heads):
    n, h, t, d = x.shape
    return x[:, :, None].expand(n, h, heads // h, t, d).reshape(n, heads, t, d)


def attention(q, k, v, causal=False, mask=None):
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def operands(shape, dtype=torch.float32):
    n, h, kh, rows, keys, d = shape
    q = torch.randn(n, rows, h, d).transpose(1, 2)
    k, v = (torch.randn(n, keys, kh, d).transpose(1, 2) for _ in range(2))
    return [x.to(dtype) for x in (q, k, v, torch.randn(n, h, rows, d))]


def step(causal, mask=None):
    def f(q, k, v, g):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attention(q, k, v, causal, mask)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), g)

    return f


def shared(module):
    return [graph.shared_heads(op) for op in module.walk() if "attention" in op.name]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_heads_and_their_gradients(machine, shape, causal):
    args = operands(shape)
    causal = causal and shape[3] == shape[4]
    compiled = machine.check(step(causal), *args, tolerance=1e-5)
    assert not [k for k in compiled.kernels if "sum" in k]
    module = import_graph(machine.traced(step(causal), args), "main").module
    run(module, "simplify,cse,attention_heads")
    assert shared(module) == [shape[1] // shape[2]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_heads_in_small_floats(machine, dtype):
    """Eager rounds each head's share of a gradient before the sum; the kernel rounds the sum."""
    args = operands((2, 6, 2, 19, 19, 16), dtype)
    machine.check(step(False), *args, tolerance=2e-2)


def test_a_mask_still_belongs_to_the_query_heads(machine):
    args = operands((2, 6, 2, 9, 12, 8))
    mask = torch.randn(2, 6, 9, 12)

    def f(q, k, v, mask):
        return attention(q, k, v, mask=mask)

    machine.check(f, *args[:3], mask)


def test_keys_that_are_cast_after_they_are_repeated(machine):
    """As autocast writes it: the cast moves before the repetition, its gradient behind the sum."""

    def f(q, k, v, g):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        wide = [repeated(x, q.shape[1]).bfloat16() for x in (k, v)]
        out = F.scaled_dot_product_attention(q.bfloat16(), *wide)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), g.bfloat16())

    args = operands((2, 6, 2, 9, 9, 8))
    module = import_graph(machine.traced(f, args), "main").module
    run(module, "simplify,cse,attention_heads")
    assert shared(module) == [3, 3]
    machine.check(f, *args, tolerance=2e-2)


def test_keys_that_others_read_stay_as_they_are(machine):
    """Repeated keys that the caller gets, and gradients that are not summed."""

    def f(q, k, v, g):
        wide = [repeated(x, q.shape[1]).detach().requires_grad_() for x in (k, v)]
        out = F.scaled_dot_product_attention(q, *wide)
        return out.detach(), *torch.autograd.grad(out, wide, g)

    args = operands((2, 6, 2, 9, 9, 8))
    module = import_graph(machine.traced(f, args), "main").module
    run(module, "simplify,cse,attention_heads")
    assert sorted(shared(module)) == [1, 3]
    machine.check(f, *args)


def test_heads_repeated_as_a_whole_are_not_shared(machine):
    """cat(k, k, k): query head i meets key head i mod h, which is another sharing."""

    def f(q, k, v):
        n, h, t, d = k.shape
        wide = [x[:, None].expand(n, 3, h, t, d).reshape(n, 3 * h, t, d) for x in (k, v)]
        return F.scaled_dot_product_attention(q, *wide)

    args = operands((2, 6, 2, 9, 9, 8))[:3]
    module = import_graph(machine.traced(f, args), "main").module
    run(module, "simplify,cse,attention_heads")
    assert shared(module) == [1]
    machine.check(f, *args)


@pytest.mark.parametrize("causal", [False, True])
def test_no_pass_changes_shared_heads(machine, causal):
    args = [x.contiguous() for x in operands((2, 4, 2, 5, 5, 4))]
    module = import_graph(machine.traced(step(causal), args), "main").module
    assert bisect(module, PASSES, args) is None
