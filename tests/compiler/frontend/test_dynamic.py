"""Symbolic sizes: one import serves every size, and the metadata says where sizes come from."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from luban.compiler.frontend.torch import table


def block(x, w, v):
    n, t, c = x.shape
    q, k, u = (x @ w).split(c, 2)
    q, k, u = (y.view(n, t, 2, c // 2).transpose(1, 2) for y in (q, k, u))
    y = F.scaled_dot_product_attention(q, k, u, is_causal=True).transpose(1, 2).reshape(n, t, c)
    y = F.layer_norm(y + x, (c,), v)
    return torch.cat([y[:, 1:], y[:, :1]], 1).softmax(-1).mean(0) * t


def one_graph(f, args_of, sizes, aot_compiler, dynamic=(0, 1)):
    """Compiles f once with the given dims of its first argument dynamic, and runs it with arguments of every size."""
    made = []
    backend = aot_autograd(
        fw_compiler=aot_compiler(made),
        bw_compiler=aot_compiler(made),
        decompositions=table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(f, backend=backend)
    for size in sizes:
        args = args_of(*size)
        ours = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        for d in dynamic:
            torch._dynamo.mark_dynamic(ours[0], d)
        a, b = compiled(*ours), f(*args)
        torch.testing.assert_close(a, b)
        if b.requires_grad:
            a.square().sum().backward()
            b.square().sum().backward()
            for p, q in zip(ours, args, strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)  # attention keeps float32 sums
    return made


def test_attention_block_serves_all_sizes(aot_compiler):
    def args_of(n, t):
        shapes = ((n, t, 8), (8, 24), (8,))
        return [torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes]

    made = one_graph(block, args_of, [(3, 5), (2, 7), (6, 4)], aot_compiler)
    assert len(made) == 2
    forward, backward = made
    assert len(forward.metadata["symbols"]) == 2
    assert all(source[0] in ("size", "input") for source in forward.metadata["symbol_sources"].values())
    assert {e["kind"] for e in backward.metadata["inputs"]} >= {"tensor"}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.view(-1, 4).sum(0) + x.numel(),
        lambda x: x.flatten().cumsum(0)[: x.shape[0]],
        lambda x: x[:, : x.shape[1] // 2].repeat(1, 2) + torch.arange(x.shape[0])[:, None],
        lambda x: F.pad(x, (1, 2)).unfold(1, 3, 1).mean(-1).t().reshape(-1),
        lambda x: torch.stack([x, x.flip(0)]).transpose(0, 1).reshape(x.shape[0], -1).var(1),
        lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % 4),
        lambda x: torch.full((x.shape[0], 3), 1.5) + torch.eye(x.shape[0])[:, :1] + x.new_zeros(x.shape[0], 1),
        lambda x: x.index_select(0, torch.arange(x.shape[0] - 1)).tril() @ x.t(),
    ],
)
def test_operators_on_symbolic_sizes(f, aot_compiler):
    made = one_graph(f, lambda n, m: [torch.randn(n, 4 * m)], [(5, 2), (7, 3)], aot_compiler)
    assert len(made) == 1


def test_batch_of_convolutions(aot_compiler):
    def f(x, w):
        return F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2).flatten(1).sum(1)

    def args_of(n):
        return [
            torch.randn(n, 2, 6, 6, dtype=torch.float64),
            torch.randn(3, 2, 3, 3, dtype=torch.float64).requires_grad_(),
        ]

    assert len(one_graph(f, args_of, [(3,), (5,)], aot_compiler, dynamic=(0,))) == 2
