"""Attention that no kernel takes (float64, open head sizes): compiled from its parts, forward and backward, as eager has it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import luban


def tensors(*shapes, dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


def agree(f, inputs, *more, tolerance=1e-12, **options):
    """Outputs and gradients of the compiled function beside eager's, with nothing outside Luban. Gives the report."""
    torch._dynamo.reset()
    found = []
    with luban.report() as report:
        for function in (luban.compile(f, **options), f):
            leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
            out = function(*leaves, *more)
            torch.manual_seed(2)
            out.backward(torch.randn_like(out))
            found.append([out.detach(), *(x.grad for x in leaves)])
    for ours, want in zip(*found, strict=True):
        assert ours.dtype is want.dtype and ours.stride() == want.stride()
        torch.testing.assert_close(ours, want, rtol=tolerance, atol=tolerance)
    assert report.fallbacks == [] and report.graphs == 2
    return report


MASKS = {
    "float": lambda q, k: torch.randn(q, k, dtype=torch.float64),
    "a head": lambda q, k: torch.randn(2, 1, q, k, dtype=torch.float64),
    "hidden row": lambda q, k: torch.zeros(q, k, dtype=torch.float64).index_fill_(0, torch.tensor([1]), -math.inf),
    "bool": lambda q, k: torch.rand(q, k) > 0.3,
}


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 4), (2, 1, 33, 20, 16), (2, 2, 1, 1, 1)], ids=str)
def test_float64_with_masks(shape, mask):
    n, h, rows, keys, size = shape
    inputs = tensors((n, h, rows, size), (n, h, keys, size), (n, h, keys, size))
    more = [] if mask is None else [MASKS[mask](max(rows, 2), keys)[..., :rows, :]]
    agree(lambda q, k, v, *m: F.scaled_dot_product_attention(q, k, v, *m), inputs, *more)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [4, 2, 1], ids=["own", "shared by 2", "shared by 4"])
def test_float64_causal_with_shared_heads(heads, scale):
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads != 4)  # noqa: E731
    agree(f, tensors((2, 4, 9, 8), (2, heads, 9, 8), (2, heads, 9, 8)))


def test_float64_through_transposed_memory():
    f = lambda q, k, v: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)  # noqa: E731
    agree(f, tensors(*[(2, 6, 3, 8)] * 3))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_every_size_open(dtype, tolerance):
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    compiled = luban.compile(f, dynamic=True)
    with luban.report() as report:
        for n, h, t, d in ((2, 3, 5, 8), (3, 4, 9, 16), (2, 5, 40, 12)):
            inputs = tensors(*[(n, h, t, d)] * 3, dtype=dtype)
            compiled(*inputs).square().sum().backward()
            ours = [x.grad for x in inputs]
            reference = [x.detach().double().requires_grad_() for x in inputs]
            f(*reference).square().sum().backward()
            for got, want in zip(ours, reference, strict=True):
                torch.testing.assert_close(got.double(), want.grad, rtol=tolerance, atol=tolerance)
    assert report.fallbacks == [] and report.graphs == 2


def test_open_head_counts_that_share():
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        shapes = (2, 6, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)
        agree(f, tensors(*shapes, dtype=dtype), dynamic=True, tolerance=tolerance)


def test_no_keys_and_no_queries():
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    for rows, keys in ((3, 0), (0, 3)):
        q, k, v = (x.detach() for x in tensors((2, 2, rows, 4), (2, 2, keys, 4), (2, 2, keys, 4)))
        torch._dynamo.reset()
        torch.testing.assert_close(luban.compile(f)(q, k, v), f(q, k, v), equal_nan=True)


def test_an_encoder_layer_in_float64():
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True, dtype=torch.float64)
    agree(lambda x: layer(x), tensors((2, 5, 16)), tolerance=1e-10)
