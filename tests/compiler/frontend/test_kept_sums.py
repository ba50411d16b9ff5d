"""What the forward keeps where sums follow each other: the sums, not the products that go into them."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition

from luban.compiler.frontend.dynamo import _partition
from luban.compiler.frontend.kept_sums import keep_sums

SIDE = 32


def parts(function, inputs, partition):
    """The forward and the backward graph of a function."""
    found = []

    def keep(gm, _):
        found.append(gm)
        return make_boxed_func(gm.forward)

    out = aot_function(function, fw_compiler=keep, bw_compiler=keep, partition_fn=partition)(*inputs)
    out.sum().backward()
    return found


def kept_bytes(forward):
    """Bytes of the values that only the backward reads, parameters and inputs left out."""
    kept = forward.graph.output_node().args[0][1:]
    return sum(n.meta["val"].nbytes for n in kept if n.op != "placeholder" and hasattr(n.meta["val"], "nbytes"))


def residual_path(x, *weights):
    for w in weights:
        x = x + (x.tanh() @ w).view(x.shape)
    return x.square()


def inputs(count=6):
    gen = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=gen).requires_grad_()  # noqa: E731
    return [make(64, SIDE), *(make(SIDE, SIDE) for _ in range(count))]


def test_a_residual_path_is_not_computed_again():
    given = inputs()
    want = torch.autograd.grad(residual_path(*given).sum(), given)
    forward, backward = parts(residual_path, given, _partition)
    for a, b in zip(want, [x.grad for x in given], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    kept = {n for n in backward.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")}
    again = [
        n for n in backward.graph.nodes if n.target is torch.ops.aten.add.Tensor and kept.issuperset(n.all_input_nodes)
    ]
    assert not again
    free, _ = parts(residual_path, inputs(), min_cut_rematerialization_partition)
    assert kept_bytes(forward) <= kept_bytes(free)


@pytest.mark.parametrize(
    ("function", "marked"),
    [
        (lambda x, w: x + x @ w, 1),
        (lambda x, w: x @ w + x, 1),
        (lambda x, w: x + (x @ w).view(8, 8, SIDE).view(64, SIDE), 1),
        (lambda x, w: x + (x @ w).to(torch.float64), 1),
        (lambda x, w: x + torch.dropout(x @ w, 0.0, True), 1),
        (lambda x, w: x + torch.native_dropout((x @ w).view(8, 8, SIDE), 0.5, True)[0].view(64, SIDE), 1),
        (lambda x, w: x + torch.native_dropout(x @ w, 0.5, True)[1], 0),
        (lambda x, w: x + (x @ w).clone(), 1),
        (lambda x, w: x + (x @ w) * x, 1),
        (lambda x, w: x + (x @ w) * 0.5, 1),
        (lambda x, w: x + x.sin() * x, 0),
        (lambda x, w: x + 1.0, 0),  # no second term
        (lambda x, w: x + w[0], 0),  # a term of another shape
        (lambda x, w: x + x.sin(), 0),  # no product
        (lambda x, w: (p := x @ w).sin() + p, 0),  # the product is read elsewhere too
    ],
)
def test_which_sums_are_marked(function, marked):
    graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*(x.detach() for x in inputs(1)))
    keep_sums(graph.graph)
    assert sum("recompute" in n.meta for n in graph.graph.nodes) == marked
