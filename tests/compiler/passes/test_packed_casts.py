"""Casts to bfloat16 that packing takes over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def names(run):
    return [name.split("_", 1)[1] for name in run.kernels]


@pytest.mark.parametrize("size", [(5, 7, 3), (40, 70, 33), (64, 300, 700), (1, 200, 900), (33, 17, 64)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_is_rounded_where_it_is_packed(machine, size, turned):
    m, n, k = size
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k) if turned else torch.randn(k, n)

    def product(x, w):
        return F.linear(x.bfloat16(), w.bfloat16()) if turned else x.bfloat16() @ w.bfloat16()

    run = machine.check(product, x, w, tolerance=1e-2)
    assert names(run) == ["contract"]
    # the same products as from a weight that was rounded before
    before = machine.check(product, x, w.bfloat16().float(), tolerance=1e-2)
    assert torch.equal(run(x, w)[0], before(x, w.bfloat16().float())[0])


def test_both_sides_and_batches(machine):
    a, b = torch.randn(3, 20, 50), torch.randn(3, 50, 40)
    run = machine.check(lambda a, b: a.bfloat16() @ b.bfloat16(), a, b, tolerance=1e-2)
    assert names(run) == ["contract"]


def test_a_slice_of_a_weight(machine):
    x, w = torch.randn(20, 30).bfloat16(), torch.randn(64, 90)
    run = machine.check(lambda x, w: x.bfloat16() @ w.bfloat16()[4:34, 5:88:2], x, w, tolerance=1e-2)
    assert "contract" in names(run)[-1]


def test_a_cast_with_other_readers_stays(machine):
    x, w = torch.randn(20, 30).bfloat16(), torch.randn(30, 40)

    def both(x, w):
        rounded = w.bfloat16()
        return x.bfloat16() @ rounded, rounded

    run = machine.check(both, x, w, tolerance=1e-2)
    assert len(run.kernels) == 2


def test_nan_and_infinity_are_rounded_as_they_are(machine):
    rows = [[float("nan"), 1.0, 2.0], [float("inf"), -float("inf"), 3.0], [1e-38, 3e38, -1.0]]
    x, w = torch.eye(3).bfloat16()[:1], torch.tensor(rows)
    run = machine.compile(lambda x, w: x @ w.bfloat16(), (x, w))
    (got,) = run(x, w)
    assert torch.isnan(got[0, 0]) and torch.equal(got.isnan(), (x @ w.bfloat16()).isnan())
