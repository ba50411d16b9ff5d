"""luban.train_step beside eager: optimizers, clipping, schedules, buffers, groups, checkpoints, and its messages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import SGD, Adam, AdamW

import luban
from luban.errors import ConfigError, TargetError

mse = F.mse_loss


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(n=6):
    return [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(n)]


def twins(make, optimizer):
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    return model, twin, optimizer(model), optimizer(twin)


def eager_step(model, optimizer, *batch, loss_fn=mse, max_norm=None):
    optimizer.zero_grad()
    loss = model(*batch) if loss_fn is None else loss_fn(model(*batch[:-1]), batch[-1])
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def assert_near(model, twin, tolerance=2e-5):
    for (name, want), ours in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def compare(make, optimizer, data, loss_fn=mse, tolerance=2e-5, max_norm=None, each=lambda i, model, optimizer: None):
    """The same steps in eager and in one program; `each` is called before every step on both."""
    model, twin, ours, theirs = twins(make, optimizer)
    step = luban.train_step(twin, loss_fn, theirs, max_norm=max_norm)
    with luban.report() as report:
        for i, batch in enumerate(data):
            each(i, model, ours)
            each(i, twin, theirs)
            want = eager_step(model, ours, *batch, loss_fn=loss_fn, max_norm=max_norm)
            torch.testing.assert_close(step(*batch).reshape(()), want.reshape(()), rtol=tolerance, atol=tolerance)
    assert_near(model, twin, tolerance)
    return report


SGDS = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}, {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}]  # fmt: skip
ADAMS = [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"betas": (0.5, 0.7), "eps": 1e-3}, {"fused": True}]


@pytest.mark.parametrize("options", SGDS, ids=str)
def test_sgd(options):
    compare(mlp, lambda m: SGD(m.parameters(), lr=0.1, **options), batches())


@pytest.mark.parametrize("options", ADAMS, ids=str)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_and_adamw(kind, options):
    compare(mlp, lambda m: kind(m.parameters(), lr=0.02, **options), batches(), tolerance=2e-4)


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping(max_norm):
    compare(mlp, lambda m: SGD(m.parameters(), lr=0.1), batches(), max_norm=max_norm)


def test_the_learning_rate_is_read_at_each_call():
    def each(i, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    report = compare(mlp, lambda m: AdamW(m.parameters(), lr=1.0), batches(), tolerance=2e-4, each=each)
    assert report.graphs == 1


@pytest.mark.parametrize("kind", [lambda p: SGD(p, 0.01, momentum=0.9, nesterov=True), lambda p: Adam(p, 0.01)])
def test_schedules_of_other_numbers_do_not_compile_again(kind):
    """OneCycleLR moves the momentum, or beta1, beside the learning rate; weight decay changes here too."""
    schedules = {}

    def each(i, model, optimizer):
        if i == 0:
            schedules[optimizer] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (i + 1)
        schedules[optimizer].step()

    report = compare(mlp, lambda m: kind(m.parameters()), batches(), tolerance=2e-4, each=each)
    assert report.graphs == 1


@pytest.mark.filterwarnings("error")
def test_a_schedule_sees_that_the_optimizer_stepped():
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = luban.train_step(model, mse, optimizer)
    step(*batches(1)[0])
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_parameter_groups():
    def make(m):
        slow = {"params": m[0].parameters(), "lr": 0.01, "weight_decay": 0.0}
        return AdamW([slow, {"params": m[2].parameters(), "lr": 0.05, "betas": (0.8, 0.9)}])

    compare(mlp, make, batches(), tolerance=2e-4)


def test_parameters_that_are_frozen_and_thawed():
    def each(i, model, optimizer):
        model[0].weight.requires_grad_(i not in (0, 3, 4))
        model.zero_grad(set_to_none=True)

    compare(mlp, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), batches(), each=each)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(2, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_and_unused_parameters():
    compare(Tied, lambda m: AdamW(m.parameters(), lr=0.02, weight_decay=0.1), batches(), tolerance=2e-4)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_statistics(layout):
    data = [(torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))) for _ in range(4)]
    make = lambda: cnn().to(memory_format=layout)  # noqa: E731
    compare(make, lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9), data, F.cross_entropy, tolerance=1e-4)


def test_modes_of_submodules():
    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))  # noqa: E731
    each = lambda i, model, optimizer: model[1].train(i % 2 == 0)  # noqa: E731
    compare(make, lambda m: SGD(m.parameters(), lr=0.1), batches(), each=each)


class Keeps(nn.Module):
    """A model that does something with its buffers p, q (8 x 6) and s (6 x 6)."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Linear(6, 3), what
        self.register_buffer("p", torch.randn(8, 6))
        self.register_buffer("q", torch.randn(8, 6))
        self.register_buffer("s", torch.randn(6, 6) / 3)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        out = self.layer(x + self.p * 0.1 + self.q * 0.2 + self.s.mean())
        with torch.no_grad():
            self.steps += 1
            UPDATES[self.what](self, x, out)
        return out


def swap(m, x, out):
    p, q = m.p + x * 0.1, m.q.clone()
    m.p.copy_(q)
    m.q.copy_(p)


def rename(m, x, out):
    m.p, m.q = m.q, m.p


def assign(m, x, out):
    m.p, m.q = x * 0.5 + 1, torch.cat([m.q[1:], x[:1]])


def put(m, x, out):
    m.p[2:4] = m.p[5:7]
    m.q.index_add_(0, torch.tensor([1, 2]), x[:2])


UPDATES = {
    "nothing": lambda m, x, out: None,
    "average": lambda m, x, out: m.p.lerp_(x, 0.1),
    "roll": lambda m, x, out: m.p.copy_(m.p.roll(1, 0)),
    "flip": lambda m, x, out: m.p.copy_(m.p.flip(0)),
    "index": lambda m, x, out: m.p.copy_(m.p[torch.arange(7, -1, -1)]),
    "transpose": lambda m, x, out: m.s.copy_(m.s.t().contiguous()),
    "product": lambda m, x, out: m.s.copy_(m.s @ m.s),
    "softmax": lambda m, x, out: m.s.copy_(m.s.softmax(0)),
    "scan": lambda m, x, out: m.p.copy_(m.p.cumsum(0) * 0.1),
    "swap": swap,
    "rename": rename,
    "assign": assign,
    "put": put,
    "input": lambda m, x, out: m.p.copy_(x),
    "input itself": lambda m, x, out: setattr(m, "p", x),
}


@pytest.mark.parametrize("what", UPDATES)
def test_buffers(what):
    """New contents that read the old ones elsewhere must not be computed over them."""
    compare(lambda: Keeps(what), lambda m: SGD(m.parameters(), lr=0.1), batches())


class Reports(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("last", torch.tensor(0.0))

    def forward(self, x, y):
        loss = mse(self.layer(x), y)
        self.last.copy_(loss.detach())
        return loss


def test_a_model_that_returns_its_loss_and_keeps_it():
    compare(Reports, lambda m: SGD(m.parameters(), lr=0.1), batches(), loss_fn=None)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 5e-2), (torch.float64, 1e-9)], ids=str)
def test_parameters_of_other_dtypes(dtype, tolerance):
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches()]
    compare(lambda: mlp().to(dtype), lambda m: AdamW(m.parameters(), lr=0.01), data, tolerance=tolerance)


def test_changing_shapes():
    data = [(x[:n], y[:n]) for (x, y), n in zip(batches(), (8, 5, 1, 8, 3, 2), strict=True)]
    report = compare(mlp, lambda m: SGD(m.parameters(), lr=0.1), data)
    assert report.graphs == 5


def test_autocast_around_the_step():
    model, twin, ours, theirs = twins(mlp, lambda m: SGD(m.parameters(), lr=0.1))
    step = luban.train_step(twin, mse, theirs)
    for i, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 0):
            want, got = eager_step(model, ours, x, y), step(x, y)
        torch.testing.assert_close(got, want, rtol=1e-2 if i % 2 == 0 else 1e-3, atol=1e-3)
    assert_near(model, twin, 1e-2)


def test_dropout_repeats_with_the_seed():
    make = lambda: nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))  # noqa: E731
    (x, y), losses = batches(1)[0], []
    for seed in (1, 1, 2):
        model, _, optimizer, _ = twins(make, lambda m: SGD(m.parameters(), lr=0.1))
        step = luban.train_step(model, mse, optimizer)
        torch.manual_seed(seed)
        losses.append([float(step(x, y)) for _ in range(3)])
    assert losses[0] == losses[1] != losses[2]


OPTIMIZERS = [
    lambda m: Adam(m.parameters(), 0.03, amsgrad=True),
    lambda m: SGD(m.parameters(), 0.03, momentum=0.9, dampening=0.2),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adam", "sgd"])
def test_checkpoints_go_both_ways(optimizer):
    """Saved by a step and continued by a new step or by eager, saved by eager and continued by a step."""
    data = batches()
    model, twin, ours, theirs = twins(mlp, optimizer)
    step = luban.train_step(twin, mse, theirs)
    for batch in data[:3]:
        eager_step(model, ours, *batch)
        step(*batch)

    def resumed(source, state):
        fresh = mlp()
        made = optimizer(fresh)
        early = luban.train_step(fresh, mse, made)  # made before the state is loaded
        fresh.load_state_dict(source.state_dict())
        made.load_state_dict(copy.deepcopy(state.state_dict()))
        return fresh, made, early

    by_step, _, continued = resumed(twin, theirs)
    by_eager, eager_optimizer, _ = resumed(twin, theirs)
    from_eager, made, _ = resumed(model, ours)
    late = luban.train_step(from_eager, mse, made)
    for batch in data[3:]:
        eager_step(model, ours, *batch)
        continued(*batch)
        eager_step(by_eager, eager_optimizer, *batch)
        late(*batch)
    for other in (by_step, by_eager, from_eager):
        assert_near(model, other, 2e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adam", "sgd"])
def test_eager_steps_in_between(optimizer):
    model, twin, ours, theirs = twins(mlp, optimizer)
    step = luban.train_step(twin, mse, theirs)
    for i, batch in enumerate(batches()):
        eager_step(model, ours, *batch)
        step(*batch) if i % 2 else eager_step(twin, theirs, *batch)
    assert_near(model, twin, 2e-4)


def test_a_parameter_that_starts_late_is_refused_by_adam():
    model = mlp()
    model[0].weight.requires_grad_(False)
    step = luban.train_step(model, mse, Adam(model.parameters(), 0.1))
    x, y = batches(1)[0]
    step(x, y)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="0.weight starts training after 1 steps"):
        step(x, y)


def wrong(loss_fn=mse, optimizer=None, **options):
    model = mlp()
    return luban.train_step(
        model, loss_fn, optimizer(model) if optimizer else SGD(model.parameters(), lr=0.1), **options
    )


X, Y = torch.randn(8, 6), torch.randn(8, 3)
MESSAGES = {
    "has no program for the optimizer Rprop": lambda: wrong(optimizer=lambda m: torch.optim.Rprop(m.parameters())),
    r"SGD\(maximize=True\)": lambda: wrong(optimizer=lambda m: SGD(m.parameters(), lr=0.1, maximize=True)),
    "not the model's": lambda: wrong(optimizer=lambda m: SGD(mlp().parameters(), lr=0.1)),
    "takes a torch.nn.Module as the model, not function": lambda: luban.train_step(_shrinking, mse, None),
    "luban.compile takes a model or a function, not int": lambda: luban.compile(3),
    "max_norm=-1 cannot clip": lambda: wrong(max_norm=-1),
    "one loss tensor with a single element": lambda: wrong(lambda o, t: o - t)(X, Y),
    "check shapes and dtypes": lambda: wrong()(torch.randn(3, 5), Y),
    "input 1 of the training step is a list": lambda: wrong(lambda o, t: mse(o, t[0]))(X, [Y]),
    "does not require grad": lambda: wrong(lambda o, t: t.mean())(X, Y),
    "called without inputs": lambda: wrong()(),
    "into its buffer p": lambda: _shrinking()(X, Y),
}


def _shrinking():
    UPDATES["shrink"] = lambda m, x, out: setattr(m, "p", x[0])
    model = Keeps("shrink")
    return luban.train_step(model, mse, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(message):
    with pytest.raises(ConfigError, match=message):
        MESSAGES[message]()


def test_an_unknown_target():
    with pytest.raises(TargetError, match="no target named 'z80'"):
        wrong(target="z80")(X, Y)


def test_a_step_that_fails_changes_nothing():
    model = nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(12, 3))
    optimizer = AdamW(model.parameters(), lr=0.1)
    step = luban.train_step(model, F.cross_entropy, optimizer)
    step(torch.tensor([[0, 1]]), torch.tensor([2]))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(luban.LubanError, match="train_step stopped on bad data: an index is out of range"):
        step(torch.tensor([[0, 9]]), torch.tensor([2]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}
