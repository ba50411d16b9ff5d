"""Equal values of a joint graph: merged where torch's own pass merges them, and nowhere else."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.equal_values import merge_equal_values

STEP = """
import sys, torch, luban
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
luban.compile(net, fallback="error")(torch.randn(4, 8)).sum().backward()
assert all(p.grad is not None for p in net.parameters())
heavy = ("torch._inductor.pattern_matcher", "torch._inductor.lowering", "torch._inductor.ir")
print([name for name in sys.modules if name in heavy])
"""


def twice(f):
    return lambda x: f(x) * 2 + f(x) * 3


FUNCTIONS = {
    "pointwise": twice(torch.exp),
    "chain": twice(lambda x: torch.tanh(x.t() @ x).sum(0)),
    "several results": twice(lambda x: torch.max(x, 1)[0] + x.topk(1, 1)[1][:, 0]),
    "lists": twice(lambda x: torch.cat([x, x.exp()], 1)),
    "int or float": lambda x: x.long() * 1 + x.long() * 1.0 + x.long() * True,
    "random": twice(lambda x: torch.rand_like(x) + torch.nn.functional.dropout(x)),
    "returned twice": lambda x: (x.exp(), x.exp(), x.exp() + 1),
    "windows of what is returned": lambda x: (x.exp(), x.exp().t(), x.exp().t() + 1),
    "written": lambda x: (x.exp(), x.add_(1), x.exp()),
    "keywords": twice(lambda x: x.sum(1, keepdim=True, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_merges_as_torch_does(name):
    def traced():
        return make_fx(FUNCTIONS[name], tracing_mode="fake")(torch.rand(3, 3))

    ours = traced().graph
    merge_equal_values(ours)
    ours.lint()
    theirs = fx_graph_cse(traced().graph)
    assert [str(node.target) for node in ours.nodes] == [str(node.target) for node in theirs.nodes]


def test_the_sign_of_zero_counts():
    def f(x):
        return torch.copysign(x, 0.0) + torch.copysign(x, -0.0), torch.full_like(x, math.nan) + torch.full_like(
            x, math.nan
        )

    x = torch.tensor([1.0, -2.0])
    graph = make_fx(f, tracing_mode="fake")(x)
    merge_equal_values(graph.graph)
    graph.recompile()
    assert graph(x)[0].tolist() == [0.0, 0.0]
    assert sum(node.target is torch.ops.aten.full_like.default for node in graph.graph.nodes) == 1


def test_a_step_imports_no_lowerings_of_inductor():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nested_arguments_and_breaks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, pair):
            y = self.a(pair["x"])
            torch._dynamo.graph_break()
            return self.a(y).exp() + pair["y"].exp()

    net = Net()
    given = {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    net(given).sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch.compile(net, backend="luban", options={"fallback": "error"})(given).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], want)
