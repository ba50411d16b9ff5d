"""luban.kernels.linear_cross_entropy beside float64 and torch: values, gradients, edges, memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import luban
from luban.compiler.frontend import linear_loss
from luban.compiler.frontend.torch.rules import linear_loss as rules

FEATURES = 24


@pytest.fixture
def few_rows(monkeypatch, tmp_path):
    """Parts of seven rows, and programs that know it."""
    monkeypatch.setattr(rules, "FEWEST", 7)
    monkeypatch.setattr(rules, "SCRATCH", 0)
    monkeypatch.setattr(linear_loss, "_programs", {})
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path))


def inputs(rows, classes, dtype=torch.float32, bias=True, ignored=True):
    """hidden, weight, bias or None, target; some targets are ignored."""
    hidden = torch.randn(rows, FEATURES, dtype=dtype, requires_grad=True)
    weight = (torch.randn(classes, FEATURES) / FEATURES**0.5).to(dtype).requires_grad_()
    offset = torch.randn(classes).to(dtype).requires_grad_() if bias else None
    target = torch.randint(0, classes, (rows,))
    if ignored:
        target[::3] = -100
    return hidden, weight, offset, target


def unfused(hidden, weight, target, bias=None, softcap=None, **options):
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target, **options)


def with_gradients(function, tensors, target, upstream=None, **options):
    """The loss and its gradients for the float tensors (hidden, weight, bias or None)."""
    hidden, weight, bias = tensors
    loss = function(hidden, weight, target, bias, **options)
    leaves = [t for t in tensors if t is not None]
    return [loss, *torch.autograd.grad(loss, leaves, None if upstream is None else upstream.to(loss.dtype))]


def in_float64(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def error(found, wanted):
    """The largest difference over the largest value."""
    if not wanted.numel():
        assert found.shape == wanted.shape
        return 0.0
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()


def compare(hidden, weight, bias, target, most, **options):
    """Asserts that errors are within `most`, or within twice torch's in the same dtype."""
    tensors = [hidden, weight, bias]
    upstream = torch.randn(target.shape if options.get("reduction") == "none" else (), dtype=torch.float64)
    found = with_gradients(luban.kernels.linear_cross_entropy, tensors, target, upstream, **options)
    wanted = with_gradients(unfused, in_float64(tensors), target, upstream, **options)
    theirs = with_gradients(unfused, tensors, target, upstream, **options)
    for ours, torchs, exact, held in zip(found, theirs, wanted, [None, *(t for t in tensors if t is not None)]):
        assert held is None or ours.dtype is held.dtype
        assert error(ours, exact) <= max(most, 2 * error(torchs, exact))


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "reduction": "none"},
    {"softcap": 2.0},
    {"softcap": 2.0, "label_smoothing": 1.0, "reduction": "sum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_of_many_parts(few_rows, options, bias):
    compare(*inputs(31, 53, bias=bias), 2e-6, **options)


@pytest.mark.parametrize("rows, classes", list(itertools.product([1, 7, 8, 14], [1, 2, 17, 64, 130])))
def test_sizes_around_the_edges_of_parts_and_blocks(few_rows, rows, classes):
    compare(*inputs(rows, classes, ignored=False), 2e-6)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3), (torch.float64, 1e-13)])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_dtypes(few_rows, dtype, most, options):
    compare(*inputs(31, 53, dtype), most, **options)


def test_a_real_vocabulary_in_its_natural_parts():
    compare(*inputs(600, 50257), 4e-6)


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32(few_rows):
    hidden, weight, bias, target = inputs(64, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(luban.kernels.linear_cross_entropy, (hidden, weight, bias), target)
    rounded = [hidden.detach().bfloat16(), weight.detach().bfloat16(), bias.detach()]
    wanted = with_gradients(unfused, in_float64(rounded), target)
    assert [f.dtype for f in found] == [torch.float32] * 4
    assert error(found[0], wanted[0]) < 1e-6  # the logits are not rounded
    assert all(error(f, w) < 5e-3 for f, w in zip(found[1:], wanted[1:]))


def test_gradients_that_nobody_wants_are_not_computed(few_rows):
    hidden, weight, bias, target = inputs(20, 30)
    loss = luban.kernels.linear_cross_entropy(hidden.detach(), weight, target, bias.detach())
    assert torch.autograd.grad(loss, weight)[0].shape == weight.shape
    with torch.no_grad():
        assert not luban.kernels.linear_cross_entropy(hidden, weight, target).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction):
    hidden, weight, bias, target = inputs(0, 9)
    found = with_gradients(
        luban.kernels.linear_cross_entropy, (hidden, weight, bias), target, torch.ones(0 if reduction == "none" else ()),
        reduction=reduction,
    )  # fmt: skip
    if reduction == "mean":
        assert found[0].isnan()
    else:
        assert found[0].shape == ((0,) if reduction == "none" else ()) and not found[0].sum()
    assert not any(g.abs().sum() for g in found[1:])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(few_rows, reduction):
    hidden, weight, bias, target = inputs(20, 9)
    target.fill_(-100)
    upstream = torch.ones(20 if reduction == "none" else ())
    both = [
        with_gradients(f, (hidden, weight, bias), target, upstream, reduction=reduction)
        for f in (luban.kernels.linear_cross_entropy, unfused)
    ]
    for found, wanted in zip(*both):
        torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38, -3e38])
@pytest.mark.parametrize("where", ["hidden", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_infinite_and_nan_logits_come_out_as_torch_has_them(few_rows, value, where, reduction):
    hidden, weight, bias, target = inputs(20, 30)
    with torch.no_grad():
        (hidden[3, 0:1] if where == "hidden" else bias[4:5]).fill_(value)
    upstream = torch.ones(20 if reduction == "none" else ())
    both = [
        with_gradients(f, (hidden, weight, bias), target, upstream, reduction=reduction)
        for f in (luban.kernels.linear_cross_entropy, unfused)
    ]
    for found, wanted in zip(*both):
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_large_logits_lose_no_digits(few_rows):
    hidden, weight, bias, target = inputs(31, 53)
    compare(hidden.detach().mul(300).requires_grad_(), weight, bias, target, 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_layouts(few_rows, reduction):
    """Leading dims, transposed and strided inputs, int32 targets, an ignored class of one's own."""
    hidden = torch.randn(FEATURES, 5, 6).permute(2, 1, 0).requires_grad_()
    weight = torch.randn(FEATURES, 40).t()[::2].requires_grad_()
    target = torch.randint(0, 20, (5, 6), dtype=torch.int32).t()
    found = luban.kernels.linear_cross_entropy(hidden, weight, target, ignore_index=7, reduction=reduction)
    wanted = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), target.flatten().long(), ignore_index=7, reduction=reduction
    )
    assert found.shape == (target.shape if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), wanted.flatten())
    for a, b in zip(*(torch.autograd.grad(x.sum(), (hidden, weight)) for x in (found, wanted))):
        torch.testing.assert_close(a, b)


def test_weight_of_the_embedding(few_rows):
    """Both uses of a tied weight add to its gradient."""
    weight, tokens = torch.randn(30, FEATURES, requires_grad=True), torch.randint(0, 30, (20,))
    both = [f(F.embedding(tokens, weight), weight, tokens) for f in (luban.kernels.linear_cross_entropy, unfused)]
    torch.testing.assert_close(*[torch.autograd.grad(loss, weight)[0] for loss in both])


def test_a_class_that_does_not_exist(few_rows):
    hidden, weight, _, target = inputs(20, 30)
    target[5] = 30
    with pytest.raises(luban.LubanError, match="index is out of range"):
        luban.kernels.linear_cross_entropy(hidden, weight, target)


def test_second_derivatives_are_refused(few_rows):
    hidden, weight, _, target = inputs(20, 30)
    for reduction in ("mean", "none"):
        loss = luban.kernels.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(luban.ConfigError, match="second derivative"):
            first.square().sum().backward()


BAD = [
    ({"reduction": "avg"}, "reduction='avg'"),
    ({"label_smoothing": 1.5}, "between 0 and 1"),
    ({"softcap": 0.0}, "above 0"),
    ({"target": torch.zeros(5, dtype=torch.int64)}, "one class for each"),
    ({"target": torch.zeros(4)}, "classes as integers"),
    ({"weight": torch.randn(9, 3)}, "do not fit"),
    ({"bias": torch.randn(3)}, "one entry"),
    ({"weight": torch.randn(9, FEATURES).double()}, "one float dtype"),
]


@pytest.mark.parametrize("changed, message", BAD, ids=[m for _, m in BAD])
def test_bad_arguments(changed, message):
    given = {"hidden": torch.randn(4, FEATURES), "weight": torch.randn(9, FEATURES), "target": torch.zeros(4).long()}
    with pytest.raises(luban.ConfigError, match=message):
        luban.kernels.linear_cross_entropy(**{**given, **changed})


def test_open_sizes(few_rows):
    """One program for all lengths, cut into as many parts as the first one needed."""
    _, weight, bias, _ = inputs(1, 30)
    fast = luban.compile(lambda h, t: luban.kernels.linear_cross_entropy(h, weight, t, bias), dynamic=True)
    with luban.report() as report:
        for rows in (31, 40, 16, 3, 100):
            hidden, *_, target = inputs(rows, 30)
            found, wanted = fast(hidden, target), unfused(hidden, weight, target, bias)
            torch.testing.assert_close(found, wanted)
            for a, b in zip(*(torch.autograd.grad(x, (hidden, weight, bias)) for x in (found, wanted))):
                torch.testing.assert_close(a, b)
    assert report.graphs <= 2 and not report.fallbacks


def test_the_logits_never_exist_as_a_whole():
    """4,096 rows of 50,257 float32 logits are 785 MiB; here are some parts of them and the weight's gradient."""
    model = torch.nn.Embedding(50257, 8)
    step = luban.train_step(
        model,
        lambda h, t: luban.kernels.linear_cross_entropy(h, model.weight, t),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    tokens = torch.randint(0, 50257, (4096,))
    program = step._program([tokens, tokens])[1].program
    assert program.metadata["arena"]["bytes"] < 300 << 20
