"""View algebra against torch's own strides, and views through whole programs."""

import random

import pytest
import torch
from xdsl.dialects.builtin import f32
from xdsl.ir import Block

from luban import symbolic
from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.builder import tensor_type
from luban.compiler.frontend.torch.views import View, dense, try_reshape


def of(tensor):
    """A View with the geometry of a torch tensor."""
    base = Block(arg_types=[tensor_type((tensor.untyped_storage().nbytes() // 4,), f32)]).args[0]
    return View(base, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)


def values(view, storage):
    """What a View sees, index by index."""
    positions = torch.full(view.shape, view.offset, dtype=torch.int64)
    for d, (n, s) in enumerate(zip(view.shape, view.strides, strict=True)):
        positions += (torch.arange(n) * s).reshape([-1 if i == d else 1 for i in range(len(view.shape))])
    return storage[positions]


STORAGE = torch.arange(360.0)


def random_step(rng, tensor, view):
    """One view operation on both sides."""
    n = tensor.dim()
    kind = rng.choice(["permute", "slice", "select", "unsqueeze", "squeeze", "flip", "expand", "reshape", "diagonal"])
    d = rng.randrange(n) if n else 0
    if kind == "permute":
        order = rng.sample(range(n), n)
        return tensor.permute(order), views.permute(view, order)
    if kind == "slice" and n and tensor.shape[d] > 1:
        start, step = rng.randrange(tensor.shape[d] - 1), rng.choice([1, 1, 2])
        cut = tensor[(slice(None),) * d + (slice(start, None, step),)]
        return cut, views.slice_dim(view, d, start, cut.shape[d], step)
    if kind == "select" and n and tensor.shape[d]:
        index = rng.randrange(tensor.shape[d])
        return tensor.select(d, index), views.select(view, d, index)
    if kind == "unsqueeze" and n < 5:
        return tensor.unsqueeze(d), views.unsqueeze(view, d)
    if kind == "squeeze" and n:
        return tensor.squeeze(d), views.squeeze(view, [d])
    if kind == "flip" and n:
        return tensor.flip(d), views.flip(view, [d])
    if kind == "expand":
        shape = (2, *[3 if s == 1 else s for s in tensor.shape])
        return (tensor.expand(shape), views.expand(view, shape)) if tensor.numel() < 100 and n < 5 else (tensor, view)
    if kind == "diagonal" and n > 1:
        offset = rng.choice([-1, 0, 1])
        found = tensor.diagonal(offset, 0, n - 1)
        return (found, views.diagonal(view, offset, 0, n - 1, found.shape[-1])) if found.numel() else (tensor, view)
    if kind == "reshape" and tensor.numel():
        shape = factors(rng, tensor.numel())
        return tensor.reshape(shape), try_reshape(view, shape)
    return tensor, view


def factors(rng, n):
    shape = []
    while n > 1:
        f = rng.choice([k for k in range(2, n + 1) if n % k == 0])
        shape.append(f)
        n //= f
    shape.insert(rng.randrange(len(shape) + 1), 1)
    return shape


@pytest.mark.parametrize("seed", range(60))
def test_chains_of_views_see_what_torch_sees(seed):
    rng = random.Random(seed)
    tensor = STORAGE.as_strided((4, 3, 5), (60, 1, 7), 9) if seed % 2 else STORAGE.reshape(3, 8, 15)
    view = of(tensor)
    for _ in range(6):
        after, seen = random_step(rng, tensor, view)
        if seen is None:  # a reshape that needs a copy: torch must have needed one too, unless strides were negative
            assert after.data_ptr() != tensor.data_ptr() or any(s < 0 for s in view.strides)
            break
        tensor, view = after, seen
        assert view.shape == tuple(tensor.shape)
        torch.testing.assert_close(values(view, STORAGE), tensor, rtol=0, atol=0)


def test_reshape_of_symbolic_sizes_needs_no_copy():
    s = symbolic.symbol("s0")
    base = Block(arg_types=[tensor_type((s, 12), f32)]).args[0]
    whole = dense(base, (s, 12), torch.float32)
    split = try_reshape(views.slice_dim(whole, 1, 4, 8), (s, 2, 4))
    assert split is not None and split.strides == (12, 4, 1) and split.offset == 4
    turned = views.permute(split, [1, 0, 2])
    assert try_reshape(turned, (2, s * 4)) is None
    flat = try_reshape(whole, (s * 12,))
    assert flat is not None and flat.strides == (1,)
    plus = dense(base, (s + 1, 3, 4), torch.float32)
    merged = try_reshape(plus, ((s + 1) * 12,))
    assert merged is not None and try_reshape(merged, (s + 1, 12)).strides == (12, 1)


def test_storage_order_finds_permutations_and_refuses_gaps():
    assert views.storage_order((2, 3, 4), (12, 4, 1), (12, 4, 1)) == (0, 1, 2)
    assert views.storage_order((2, 3, 4), (1, 8, 2), (1, 8, 2)) == (1, 2, 0)
    assert views.storage_order((2, 1, 4), (4, 99, 1), (4, 99, 1)) is not None
    assert views.storage_order((2, 3), (4, 1), (4, 1)) is None
    assert views.storage_order((2, 3), (0, 1), (0, 1)) is None


def test_view_operators(check):
    def f(x):
        a, b = x.split([3, 1], 1)
        c = torch.stack(x.unbind(2)).movedim(0, -1)
        return (
            a.transpose(0, 2).reshape(-1, 3).sum(0),
            b.squeeze(1) + x[:, -1, ::2].repeat(1, 2)[:, :6],
            c.flip(0, 2) * x.permute(1, 0, 2)[:1].expand(4, 2, 6).transpose(0, 1),
            x.diagonal(0, 1, 2) + x.unfold(2, 3, 1).sum((-1, -2)),
            x.narrow(1, 1, 2).flatten(1).t() * 2,
            x.as_strided((2, 3), (1, 2), 1) * 1.0,
            x[..., None].squeeze() + x.chunk(2, -1)[0].tile(2),
        )

    check(f, torch.randn(2, 4, 6, requires_grad=True))


def test_view_operators_on_permuted_input(check):
    x = torch.randn(6, 2, 4).permute(1, 2, 0).detach().requires_grad_()
    check(lambda x: (x.reshape(8, 6).sum(1), x.view(2, 4, 2, 3).mean(3), x.contiguous() * 2, x.clone()), x)
