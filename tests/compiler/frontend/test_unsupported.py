"""What cannot be imported: one error that lists everything, with places in the user's source."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from luban.compiler.frontend.torch import import_graph, table, unsupported
from luban.compiler.frontend.torch.registry import RULES
from luban.errors import UnsupportedOperatorError


def many(x):
    a = torch.linalg.qr(x)[0]
    b = torch.linalg.inv_ex(x)[0]
    c = torch.linalg.qr(x + 1)[0]
    return a + b + c, x.exp()


def traced(f, *args):
    return make_fx(f, tracing_mode="fake", decomposition_table=table())(*args)


def compiled(f, *args):
    """The graph that Dynamo and AOTAutograd give, whose nodes know their source."""
    found = []

    def keep(gm, example_inputs):
        found.append(gm)
        return make_boxed_func(gm.forward)

    torch.compile(f, backend=aot_autograd(fw_compiler=keep, decompositions=table()))(*args)
    return found[0]


def test_error_lists_each_operator_once_with_its_place():
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_graph(compiled(many, torch.randn(3, 3)), "f")
    names = [o.split(" (")[0] for o in caught.value.operators]
    assert names == ["aten.linalg_qr.default", "aten.linalg_inv_ex.default"]
    line = many.__code__.co_firstlineno + 1
    assert caught.value.operators[0].endswith(f"test_unsupported.py:{line})")
    assert 'fallback="allow"' in str(caught.value)


def test_nodes_for_partitioning():
    gm = traced(many, torch.randn(3, 3))
    names = [str(n.target) for n in unsupported(gm)]
    assert names == ["aten.linalg_qr.default", "aten.linalg_inv_ex.default", "aten.linalg_qr.default"]
    assert unsupported(traced(lambda x: x + 1, torch.randn(2))) == []


def test_complex_and_arguments_without_a_program_are_named():
    gm = traced(
        lambda x, i: (x.to(torch.complex64).abs(), torch.ops.aten.embedding_dense_backward(x, i, 5, -1, True)),
        torch.randn(3, 3),
        torch.tensor([1, 2, 3]),
    )
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_graph(gm, "f")
    text = str(caught.value)
    assert "complex64" in text and "aten.embedding_dense_backward.default with scale_grad_by_freq=True" in text


def test_sizes_that_only_the_data_tell_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True))
    with mode:
        x = torch.empty(4)
        gm = make_fx(lambda x: torch.ops.aten.nonzero.default(x) + 1)(x)
    with pytest.raises(UnsupportedOperatorError):
        import_graph(gm, "f")


def test_decompositions_are_only_for_operators_without_a_rule():
    found = table()
    assert found and not any(str(operator) in RULES for operator in found)
    assert torch.ops.aten.native_layer_norm.default not in found and torch.ops.aten.std_mean.correction not in found
