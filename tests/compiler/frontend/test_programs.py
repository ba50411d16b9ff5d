"""Programs as a whole: layouts of inputs and outputs, memory that outputs share, updates in place, constants."""

import torch
import torch.nn as nn
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.torch import import_graph, table
from luban.compiler.ir.text import parse, to_text, verify


def traced(f, *args):
    return make_fx(f, tracing_mode="fake", decomposition_table=table())(*args)


def kinds(program):
    return [entry["kind"] for entry in program.metadata["outputs"]]


def test_metadata_of_a_plain_program():
    gm = traced(lambda x, n, y: (x @ y, None, x.sum()), torch.randn(2, 3), None, torch.randn(4, 3).t())
    found = import_graph(gm, "plain", saved_from=2).metadata
    assert found["inputs"][0] == {"kind": "tensor", "dtype": "float32", "shape": [2, 3], "strides": [3, 1]}
    assert found["inputs"][1:] == [
        {"kind": "none"},
        {"kind": "tensor", "dtype": "float32", "shape": [3, 4], "strides": [1, 3]},
    ]
    assert [e["kind"] for e in found["outputs"]] == ["buffer", "none", "buffer"]
    assert [e["pool"] for e in found["outputs"] if e["kind"] == "buffer"] == ["own", "saved"]
    assert found["symbols"] == [] and found["symbol_sources"] == {} and found["version"] == 1


def test_module_verifies_and_its_text_reads_back():
    gm = traced(
        lambda x, i: (x[i].softmax(-1) * float("inf"), x.to(torch.bfloat16) > 0),
        torch.randn(4, 5),
        torch.tensor([1, 0]),
    )
    module = import_graph(gm, "f").module
    verify(module)
    assert to_text(parse(to_text(module))) == to_text(module)


def test_outputs_share_memory_as_traced(check):
    def f(x):
        y = x * 2
        z = y + 1
        return y, y.clone(), y.t(), x.clone(), x.view(-1), y[1:], z[:, 1:3], z.exp().expand(5, 3, 4), x.expand(2, 3, 4)

    check(f, torch.randn(3, 4))


def test_a_value_and_its_windows_are_one_buffer(interpreted):
    def f(x):
        y = x * 2
        return y, y.t(), y[1:], y.clone(), x.t(), x.clone(), y

    x = torch.randn(3, 4)
    program = interpreted(traced(f, x))
    found = program.metadata["outputs"]
    assert kinds(program) == ["buffer", "alias", "alias", "buffer", "alias", "buffer", "alias"]
    assert found[1] == {"kind": "alias", "output": 0, "shape": [4, 3], "strides": [1, 4], "offset": 0}
    assert found[2]["offset"] == 4 and found[4]["input"] == 0 and found[6]["output"] == 0
    for a, b in zip(program(x), f(x), strict=True):
        torch.testing.assert_close(a, b)


def test_inputs_with_gaps_overlaps_and_permutations(interpreted):
    base = torch.randn(6, 8)
    inputs = [
        base[:, ::2],
        base[1:4, 2:7],
        base.t(),
        torch.randn(3).expand(4, 3),
        base.unfold(0, 3, 1),
        base[:0],
        base[:1, :1],
    ]
    f = lambda *xs: [x * 2 + 1 for x in xs]  # noqa: E731
    program = interpreted(traced(f, *inputs))
    for a, b in zip(program(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_constants_become_inputs(interpreted):
    gm = traced(lambda x: x + 1, torch.randn(2, 3))
    gm.register_buffer("held", torch.full((3,), 5.0))
    add = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_before(add):
        constant = gm.graph.get_attr("held")
    constant.meta["val"] = gm.held
    add.args = (add.args[0], constant)
    program = interpreted(gm)
    assert len(program.imported.constants) == 1
    assert [e.get("constant") for e in program.metadata["inputs"]] == [None, 0]
    x = torch.randn(2, 3)
    torch.testing.assert_close(program(x)[0], x + 5)


def backend(compiler, **options):
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=table(),
        partition_fn=min_cut_rematerialization_partition,
        **options,
    )


def test_arguments_updated_in_place(aot_compiler):
    made = []

    def f(x, n):
        n.add_(x.sum())
        x.mul_(2)
        return x + n

    compiled = torch.compile(f, backend=backend(aot_compiler(made), keep_inference_input_mutations=True))
    ours = (torch.randn(3, 4).t(), torch.zeros(()))
    eager = tuple(t.clone() for t in ours)
    torch.testing.assert_close(compiled(*ours), f(*eager))
    torch.testing.assert_close(ours, eager)
    assert any(op.name == "graph.assign" for op in made[0].function.walk())


def test_training_updates_batch_norm_buffers(aot_compiler):
    def make():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
        ).double()

    ours, eager = make(), make()
    compiled = torch.compile(ours, backend=backend(aot_compiler([])))
    for _ in range(2):
        x = torch.randn(3, 2, 9, 9, dtype=torch.float64)
        a, b = compiled(x), eager(x)
        torch.testing.assert_close(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.compile(ours.eval(), backend=backend(aot_compiler([])))(x), eager.eval()(x))
