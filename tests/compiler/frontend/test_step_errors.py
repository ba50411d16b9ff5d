"""What a person sees who gives a training step or a compiled function what it cannot take: one sentence of Luban's."""

from __future__ import annotations

import logging

import pytest
import torch

import luban
from luban.errors import ConfigError, UnsupportedOperatorError

mse = torch.nn.functional.mse_loss


def step_of(model, loss=mse):
    return luban.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    "loss, inputs, said",
    [
        (
            mse,
            (torch.zeros(3, 5), torch.zeros(3, 4)),
            r"cannot take a step on \(float32\[3, 5\], float32\[3, 4\]\): .*dim",
        ),
        (mse, (torch.zeros(3, 4), torch.zeros(2, 7)), r"cannot take a step on .*float32\[2, 7\]\): .*7.*check shapes"),
        (lambda o, t: o - t, (torch.zeros(3, 4), torch.zeros(3, 4)), "must return one loss tensor"),
        (mse, (torch.eye(4).to_sparse(), torch.zeros(4, 4)), "input 0 of the training step is a sparse_coo tensor"),
        (mse, (torch.zeros(3, 4), torch.zeros(3, 4, device="meta")), r"input 1 of the training step is on meta; move"),
        (mse, (), "called without inputs"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_inputs_that_do_not_fit(loss, inputs, said, caplog, capfd):
    step = step_of(torch.nn.Linear(4, 4), loss)
    with caplog.at_level(logging.ERROR), pytest.raises(ConfigError, match=said) as caught:
        step(*inputs)
    assert "\n" not in str(caught.value)
    logged = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert not logged and capfd.readouterr().err == "", "torch's tracer logs what is raised anyway"
    assert step.steps == 0


@pytest.mark.parametrize(
    "model, inputs, operator",
    [
        (torch.nn.Linear(4, 4, dtype=torch.complex64), (torch.zeros(3, 4, dtype=torch.complex64),) * 2, "complex64"),
        (torch.nn.Linear(4, 4), (torch.zeros(3, 4), torch.zeros(3, 4).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
        (torch.nn.Embedding(4, 4, sparse=True), (torch.tensor([1, 2]), torch.zeros(2, 4)), "sparse_coo"),
    ],
)
def test_dtypes_without_kernels_are_listed_with_the_way_out_of_a_step(model, inputs, operator):
    def loss(out, target):
        return (out - target.to(out.dtype)).abs().mean()

    with pytest.raises(UnsupportedOperatorError, match=f"{operator}.*torch.compile") as caught:
        step_of(model, loss)(*inputs)
    assert 'fallback="allow"' not in str(caught.value) and "\n" not in str(caught.value)


class Spectral(torch.nn.Module):
    """Two operators without kernels, and a buffer that its forward changes when asked to."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        if self.counts:
            self.calls.add_(1)
        return torch.linalg.svdvals(x * self.weight) + torch.linalg.eigvalsh(x)


@pytest.mark.parametrize("counts", [False, True])
def test_operators_without_kernels_are_listed_with_their_line(counts):
    with pytest.raises(UnsupportedOperatorError) as caught:
        step_of(Spectral(counts))(torch.eye(4), torch.zeros(4))
    first = Spectral.forward.__code__.co_firstlineno
    svd, eigh = caught.value.operators
    assert svd == f"aten._linalg_svd.default ({__file__}:{first + 3})"
    assert eigh == f"aten._linalg_eigh.default ({__file__}:{first + 3})"


def test_operators_in_the_loss_are_listed_with_their_line():
    def rank(y):
        return torch.linalg.svdvals(y)

    def loss(y, target):
        return rank(y).sum() + torch.linalg.cholesky(y @ y.mT + target).sum()

    with pytest.raises(UnsupportedOperatorError) as caught:
        step_of(torch.nn.Linear(4, 4), loss)(torch.eye(4), torch.eye(4))
    first = rank.__code__.co_firstlineno
    assert f"aten._linalg_svd.default ({__file__}:{first + 1})" in caught.value.operators
    assert f"aten.linalg_cholesky_ex.default ({__file__}:{first + 4})" in caught.value.operators


def test_a_layer_or_loss_of_torchs_is_placed_where_the_user_calls_it():
    class Rank(torch.nn.Module):
        def forward(self, y, target):
            return torch.linalg.svdvals(y).sum()

    Rank.forward.__code__ = Rank.forward.__code__.replace(co_filename=torch.nn.Module.forward.__globals__["__file__"])
    with pytest.raises(UnsupportedOperatorError) as caught:
        step_of(torch.nn.Linear(4, 4), Rank())(torch.eye(4), torch.eye(4))
    here = test_a_layer_or_loss_of_torchs_is_placed_where_the_user_calls_it.__code__.co_firstlineno
    assert f"aten._linalg_svd.default ({__file__}:{here + 7})" in caught.value.operators


def test_a_fault_of_the_compiler_is_not_blamed_on_the_inputs(monkeypatch):
    def broken(*_, **__):
        raise TypeError("lower() got an unexpected argument")

    monkeypatch.setattr("luban.compiler.frontend.whole_step.compile_fx", broken)
    with pytest.raises(TypeError, match="unexpected argument"):
        step_of(torch.nn.Linear(4, 4))(torch.eye(4), torch.eye(4))


@pytest.mark.parametrize(
    "function, dtype, operator",
    [
        (lambda x: x * 2 + 1, torch.complex64, "aten.mul.Tensor with dtype complex64"),
        (lambda x: x.float() + 1, torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_a_compiled_function_raises_lubans_own_error(function, dtype, operator):
    torch._dynamo.reset()
    x = torch.zeros(4, 4).to(dtype)
    with pytest.raises(UnsupportedOperatorError, match=operator) as caught:
        luban.compile(function)(x)
    assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed), "for code that waits for Dynamo's"
    assert "\n" not in str(caught.value) and caught.value.operators
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="in eager"):
        assert torch.equal(luban.compile(function, fallback="allow")(x), function(x))


def test_an_index_out_of_range_is_said_and_the_step_does_not_count():
    step = step_of(torch.nn.Embedding(4, 4))
    with pytest.raises(luban.LubanError, match="an index is out of range"):
        step(torch.tensor([1, 9]), torch.zeros(2, 4))
    assert step.steps == 0
