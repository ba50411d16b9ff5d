"""Encoder layers in evaluation: torch's fused operators are compiled from their parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import luban

HIDDEN = torch.tensor([[False, False, False, True, True], [False] * 5])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def agree(model, *args, tolerance=1e-5, **more):
    model.eval()
    with torch.no_grad(), luban.report() as report:
        ours, want = luban.compile(model)(*args, **more), model(*args, **more)
    for got, expected in zip(*((v if isinstance(v, tuple) else (v,)) for v in (ours, want)), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert report.fallbacks == []


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("mask", [None, "attention", "padding", "both"])
def test_layers(options, mask):
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
    x = torch.randn(2, 5, 16, dtype=options.get("dtype", torch.float32))
    more = {}
    if mask in ("attention", "both"):
        more["src_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if mask in ("padding", "both"):
        more["src_key_padding_mask"] = HIDDEN
    agree(layer, x, **more)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_attention_layers(need_weights, average):
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    more = {"need_weights": need_weights, "average_attn_weights": average}
    agree(layer, x, x, x, **more)
    agree(layer, x, x, x, key_padding_mask=HIDDEN, **more)


def test_a_stack_of_layers():
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    agree(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 16))
