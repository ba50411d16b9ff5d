"""Flops and bytes of kernels in reports and spans, where sizes are open too: held to torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import luban
from luban import events


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)


def products(kernels):
    """The flops of matrix products, which is what torch counts."""
    return sum(k.flops for k in kernels if "contract" in k.name)


def counted(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def model():
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 7))


@pytest.mark.parametrize("dynamic", [True, False])
def test_forward_and_backward_of_linear_layers(dynamic):
    m = model()

    def step(f, x):
        f(x).square().sum().backward()

    fast, x = luban.compile(m, fallback="error", dynamic=dynamic), torch.randn(33, 12)
    with luban.report() as r:
        step(fast, x)
    assert products(r.kernels) == counted(step, m, x)
    assert all(k.flops > 0 or k.bytes > 0 for k in r.kernels)


def test_a_program_from_the_cache_counts_the_same():
    m = model()
    found = []
    for rows in (33, 40):
        torch._dynamo.reset()
        with torch.no_grad(), luban.report() as r:
            luban.compile(m, fallback="error", dynamic=True)(torch.randn(rows, 12))
        found.append((r.cache_hits, products(r.kernels)))
        assert products(r.kernels) == counted(m, torch.randn(rows, 12))
    assert found[1][0] == 1


def test_spans_count_at_the_sizes_of_their_own_call(tmp_path):
    m = model()
    fast = luban.compile(m, fallback="error", dynamic=True)
    with torch.no_grad(), events.record(tmp_path / "e"):
        for rows in (33, 5):
            fast(torch.randn(rows, 12))
    spans = [e for e in events.read(tmp_path / "e") if e["cat"] == "kernel" and "contract" in e["name"]]
    assert sum(e["args"]["flops"] for e in spans) == sum(counted(m, torch.randn(rows, 12)) for rows in (33, 5))
    assert all(isinstance(e["args"]["bytes"], int) for e in spans)


def test_attention_with_open_sizes():
    given = [torch.randn(2, 3, 24, 16) for _ in range(3)]
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    fast = luban.compile(nn.functional.scaled_dot_product_attention, fallback="error")
    with torch.no_grad(), luban.report() as r:
        fast(*given)
    (kernel,) = r.kernels
    assert kernel.flops == counted(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *given)
    assert kernel.bytes == 4 * 4 * given[0].numel()


def test_a_whole_step_with_open_sizes():
    m, x, target = model(), torch.randn(33, 12), torch.randn(33, 7)
    for t in (x, target):
        torch._dynamo.mark_dynamic(t, 0)
    step = luban.train_step(m, nn.functional.mse_loss, torch.optim.SGD(m.parameters(), lr=0.1))
    with luban.report() as r:
        step(x, target)
    assert products(r.kernels) == counted(lambda: nn.functional.mse_loss(m(x), target).backward())
