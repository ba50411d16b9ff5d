"""Buffers that take over each other's old values in one step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import luban


class Shift(nn.Module):
    """`a` takes new values, `b` what `a` held; they are declared and assigned in either order."""

    def __init__(self, names, shape, a_first):
        super().__init__()
        self.weight, self.a_first = nn.Parameter(torch.ones(shape)), a_first
        for name in names:
            self.register_buffer(name, torch.randn(shape))

    def forward(self, x):
        new, old = x * 2, self.a.clone() + x
        if self.a_first:
            self.a.copy_(new)
        self.b.copy_(old)
        if not self.a_first:
            self.a.copy_(new)
        return (self.weight * x).sum()


class Products(Shift):
    """As `Shift`, with values that the store of a product computes."""

    def forward(self, x):
        product = x @ x
        old = self.a.clone() + product
        self.a.copy_(product.relu())
        self.b.copy_(old)
        return (self.weight * x).sum()


class Convolutions(Shift):
    """As `Products`, with the store of a convolution; `depthwise` has a kernel of its own."""

    groups = 1

    def __init__(self, names, shape, a_first):
        super().__init__(names, shape, a_first)
        self.register_buffer("filter", torch.randn(shape[1], shape[1] // self.groups, 3, 3))

    def forward(self, x):
        product = nn.functional.conv2d(x, self.filter, padding=1, groups=self.groups)
        old = self.a.clone() + product
        self.a.copy_(product.relu())
        self.b.copy_(old)
        return (self.weight * x).sum()


class Depthwise(Convolutions):
    groups = 4


IMAGES = (2, 4, 12, 12)
KINDS = [(Shift, (64,)), (Shift, (7, 33)), (Products, (48, 48)), (Convolutions, IMAGES), (Depthwise, IMAGES)]


@pytest.mark.parametrize("kind, shape", KINDS)
@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("a_first", [True, False])
def test_every_old_value_is_read_before_it_is_overwritten(kind, shape, names, a_first):
    model = kind(names, shape, a_first)
    eager = copy.deepcopy(model)
    step = luban.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        x = torch.randn(shape)
        step(x)
        eager(x)
        torch.testing.assert_close(model.a, eager.a, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(model.b, eager.b, rtol=1e-5, atol=1e-4)
