"""The option fuse_cross_entropy: what is found in graphs and training steps, and that it changes no number."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import luban

CLASSES, WIDTH = 37, 16
FUSED = "luban.linear_cross_entropy"


class Language(nn.Module):
    """An embedding, a norm and a last layer; `loss(logits, tokens)` is the rest."""

    def __init__(self, loss, bias=True, tied=False, amp=False):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.loss, self.amp = loss, amp

    def forward(self, tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.amp):
            logits = self.head(self.norm(self.tokens(tokens)))
        return self.loss(logits, tokens)


def flat(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def shifted(logits, tokens):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), tokens[:, 1:].reshape(-1))


def as_transformers_does(logits, tokens):
    logits, labels = logits.float(), F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100, reduction="mean")


def module(logits, tokens):
    rows = logits[:, 1:-1].reshape(-1, CLASSES)
    return nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(rows, tokens[:, 1:-1].flatten())


def row_by_row(logits, tokens):
    return (F.cross_entropy(logits[:, -1], tokens[:, -1], reduction="none") * torch.arange(1.0, 4.0)).mean()


def read_twice(logits, tokens):
    return flat(logits, tokens) + logits.square().mean()


def weighted(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), weight=torch.arange(float(CLASSES)))


def classes_second(logits, tokens):
    return F.cross_entropy(logits.transpose(1, 2), tokens)


def scaled(logits, tokens):
    return flat(logits * 0.5, tokens)


def few_classes(logits, tokens):
    return F.cross_entropy(logits[..., : CLASSES - 1].flatten(0, 1), tokens.flatten() % (CLASSES - 1))


FITTING = [flat, shifted, as_transformers_does, module, row_by_row]
OTHERS = [weighted, classes_second, scaled, few_classes]


def tokens(rows=3):
    return torch.randint(0, CLASSES, (rows, 9))


def gradients(model, call, batch):
    """The loss and all gradients of a copy of the model under `call(model)`."""
    copied = copy.deepcopy(model)
    loss = call(copied)(batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in copied.parameters())]


def close(found, wanted, most=1e-5):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype and (a - b).abs().max() <= most * max(1.0, b.abs().max())


def fused_in_compile(function, batch):
    """The number of fused losses in Dynamo's graph after the rewriting."""
    from luban.compiler.frontend.fuse_loss import cast_loss, fuse_losses

    seen = []

    def backend(gm, example_inputs):
        fuse_losses(gm)
        seen.extend(node.target for node in gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(batch)
    return seen.count(cast_loss)


def fused_in_step(model, batch):
    step = luban.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1), fuse_cross_entropy=True)
    return sum(str(node.target).startswith(FUSED) for node in step._trace([batch])[0].graph.nodes)


@pytest.mark.parametrize("loss", FITTING + OTHERS + [read_twice])
@pytest.mark.parametrize("bias, tied", [(True, False), (False, True)])
def test_compile_computes_the_same(loss, bias, tied):
    model, batch = Language(loss, bias, tied), tokens()
    assert fused_in_compile(copy.deepcopy(model), batch) == (loss in FITTING)
    torch._dynamo.reset()
    found = gradients(model, lambda m: luban.compile(m, fuse_cross_entropy=True), batch)
    close(found, gradients(model, lambda m: m, batch))


@pytest.mark.parametrize("loss", FITTING + OTHERS + [read_twice])
@pytest.mark.parametrize("bias, tied", [(True, False), (False, True)])
def test_a_step_computes_the_same(loss, bias, tied):
    model, batch = Language(loss, bias, tied), tokens()
    assert bool(fused_in_step(copy.deepcopy(model), batch)) == (loss in FITTING + [read_twice])
    results = []
    for fuse in (True, False):
        trained = copy.deepcopy(model)
        step = luban.train_step(
            trained, None, torch.optim.SGD(trained.parameters(), 1.0), max_norm=1.0, fuse_cross_entropy=fuse
        )
        losses = torch.stack([step(batch), step(batch)])
        results.append([losses, *(p.detach() for p in trained.parameters())])
    close(*results)


def test_a_loss_function_of_a_step_is_watched_too():
    model, batch = Language(lambda logits, _: logits), tokens()
    both = []
    for fuse in (True, False):
        trained = copy.deepcopy(model)
        step = luban.train_step(trained, flat, torch.optim.SGD(trained.parameters(), 1.0), fuse_cross_entropy=fuse)
        both.append([step(batch, batch), *(p.detach() for p in trained.parameters())])
        fused = [n for n in step._trace([batch, batch])[0].graph.nodes if str(n.target).startswith(FUSED)]
        assert bool(fused) == fuse
    close(*both)


@pytest.mark.parametrize("loss", [as_transformers_does, flat])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_multiplies_in_bfloat16(loss, inside):
    """Within the model or around it; the fused loss does not round its logits, so it is nearer to float64."""
    model, batch = Language(loss, amp=inside), tokens()

    def around(call):
        def run(m):
            fast = call(m)

            def under(x):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                    return fast(x)

            return under

        return run

    eager = gradients(model, around(lambda m: m), batch)
    torch._dynamo.reset()
    close(gradients(model, around(lambda m: luban.compile(m, fuse_cross_entropy=True)), batch), eager, 2e-2)


def test_without_the_option_nothing_is_fused():
    model, batch = Language(flat), tokens()
    step = luban.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1))
    assert not any(str(n.target).startswith(FUSED) for n in step._trace([batch])[0].graph.nodes)


def test_logits_that_the_caller_gets_are_made_once():
    class Both(Language):
        def forward(self, batch):
            logits = self.head(self.norm(self.tokens(batch)))
            return flat(logits, batch), logits

    assert fused_in_compile(Both(flat), tokens()) == 0


def test_without_gradients():
    model, batch = Language(flat), tokens()
    with torch.no_grad():
        close([luban.compile(model, fuse_cross_entropy=True)(batch)], [model(batch)])


def test_open_sizes():
    model = Language(as_transformers_does)
    fast = luban.compile(model, fuse_cross_entropy=True, dynamic=True)
    with luban.report() as report:
        for rows in (3, 5, 2):
            batch = tokens(rows)
            close([fast(batch)], [model(batch)])
    assert report.graphs == 2 and not report.fallbacks  # a forward and a backward


def test_a_wrong_value_of_the_option():
    with pytest.raises(luban.ConfigError, match="fuse_cross_entropy='yes'"):
        luban.compile(Language(flat), fuse_cross_entropy="yes")
