"""Random operators: distributions, independence of operators, and a seed that the caller gives."""

import torch
import torch.nn.functional as F
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.torch import table


def run(interpreted, f, *args):
    program = interpreted(make_fx(functionalize(f), tracing_mode="fake", decomposition_table=table())(*args))
    assert program.metadata["inputs"][-1] == {"kind": "seed"}
    return program(*args)


def test_distributions(interpreted):
    def f(x):
        return (
            torch.rand(20000),
            torch.randn(100, 200),
            torch.randint(3, 9, (20000,)),
            torch.bernoulli(torch.full((20000,), 0.3)),
            torch.rand_like(x),
            F.dropout(x, 0.25),
            torch.empty(20000).uniform_(-2, 4),
            torch.empty(20000).normal_(5, 2),
        )

    uniform, normal, whole, coin, like, dropped, spread, shifted = run(
        interpreted, f, torch.ones(20000, dtype=torch.bfloat16)
    )
    assert (
        0 <= uniform.min()
        and uniform.max() < 1
        and abs(uniform.mean() - 0.5) < 0.01
        and abs(uniform.var() - 1 / 12) < 0.003
    )
    assert abs(normal.mean()) < 0.03 and abs(normal.std() - 1) < 0.02 and normal.shape == (100, 200)
    assert set(whole.tolist()) == set(range(3, 9)) and abs(whole.float().mean() - 5.5) < 0.1
    assert abs(coin.mean() - 0.3) < 0.02 and set(coin.tolist()) == {0.0, 1.0}
    assert like.dtype is torch.bfloat16 and dropped.dtype is torch.bfloat16
    assert set(dropped.float().unique().tolist()) == {0.0, torch.tensor(4 / 3).bfloat16().item()}
    assert abs((dropped == 0).float().mean() - 0.25) < 0.02
    assert -2 <= spread.min() and spread.max() < 4 and abs(shifted.mean() - 5) < 0.1 and abs(shifted.std() - 2) < 0.1


def test_operators_draw_different_numbers_and_repeat_with_the_seed(interpreted):
    f = lambda x: (torch.rand(64), torch.rand(64), torch.randn(4, 16))  # noqa: E731
    first, second = run(interpreted, f, torch.ones(1)), run(interpreted, f, torch.ones(1))
    assert not torch.equal(first[0], first[1])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_dropout_gradient_uses_the_mask_of_the_forward(aot_compiler):
    from functorch.compile import aot_function, min_cut_rematerialization_partition

    x = torch.ones(400, requires_grad=True)
    f = aot_function(
        lambda x: F.dropout(x, 0.5),
        fw_compiler=aot_compiler([]),
        bw_compiler=aot_compiler([]),
        decompositions=table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    y = f(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 100 < (y == 0).sum() < 300
