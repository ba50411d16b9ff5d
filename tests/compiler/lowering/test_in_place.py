"""Sums of products share one buffer, and give the same numbers."""

from __future__ import annotations

import pytest
import torch

from luban.compiler.frontend.compile_fx import compile_fx


def compiled(function, args):
    from torch.fx.experimental.proxy_tensor import make_fx

    return compile_fx(make_fx(function, tracing_mode="fake")(*args), "native", "main")


def sums(x, y, z, w):
    """Three products, each added to the last sum; the last one leaves."""
    return ((x @ w).relu() + y @ w + z @ w,)


def read_again(x, y, z, w):
    first = (x @ w).relu()
    return (first + y @ w) @ z.t(), first.sum(0)


def read_elsewhere(x, y, z, w):
    """The product's store reads what it adds at other places than it writes."""
    first = (x @ w).relu()
    return (first.flip(0) + y @ w) @ z.t()[: first.shape[1]], z.sum()


@pytest.mark.parametrize("function", [sums, read_again, read_elsewhere])
@pytest.mark.parametrize("size", [512, 517])
def test_numbers(function, size):
    args = [torch.randn(size + 1, size + 1) for _ in range(4)]
    found, wanted = compiled(function, args)(list(args)), function(*(a.double() for a in args))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_a_sum_takes_the_memory_of_the_last_one():
    args = [torch.randn(600, 600) for _ in range(4)]
    temps = compiled(sums, args).program.metadata["temps"]
    assert sum(t["bytes"] for t in temps) == 600 * 600 * 4  # one buffer; the last sum is the output
