"""Gradients in the memory of kept values: right results, and only where nobody else can see that memory."""

import gc

import pytest
import torch
from torch import nn

import luban
from luban.runtime import donation, pools

WIDTH, ROWS = 512, 512


class Deep(nn.Module):
    """Layers whose kept values are some MB: enough for blocks of their own."""

    def __init__(self, depth=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture
def moved(monkeypatch):
    """How many results each call placed into memory that was given to it."""
    counts = []
    places = donation.Donation.places

    def counted(self, inputs):
        found = places(self, inputs)
        counts.append(len(found))
        return found

    monkeypatch.setattr(donation.Donation, "places", counted)
    return counts


def models():
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, twin = Deep(), Deep()
    twin.load_state_dict(eager.state_dict())
    return eager, twin, luban.compile(twin, fallback="error")


def check(eager, twin):
    for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


def test_gradients_are_right_and_move(moved):
    eager, twin, compiled = models()
    for step in range(4):
        x = torch.randn(ROWS, WIDTH)
        for model in (eager, twin):
            model.zero_grad()
        eager(x).backward()
        compiled(x).backward()
        check(eager, twin)
        assert moved[step] > 0


def test_held_gradients_stay_what_they_are(moved):
    eager, twin, compiled = models()
    held = []
    for _ in range(4):
        x = torch.randn(ROWS, WIDTH)
        for model in (eager, twin):
            model.zero_grad()
        eager(x).backward()
        compiled(x).backward()
        held.append(([p.grad for p in eager.parameters()], [p.grad for p in twin.parameters()]))
    assert all(moved)
    for want, got in held:
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_gradients_accumulate(moved):
    eager, twin, compiled = models()
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        eager(x).backward()
        compiled(x).backward()
    check(eager, twin)


def test_several_forwards_then_their_backwards(moved):
    eager, twin, compiled = models()
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    for model in (eager, compiled):
        losses = [model(x) for x in inputs]
        for loss in losses:
            loss.backward()
    check(eager, twin)
    assert all(moved)


@pytest.mark.parametrize("kept_first", [False, True])
def test_a_kept_graph_gives_nothing_away(moved, kept_first):
    eager, twin, compiled = models()
    for keep in (True, False) if kept_first else (False, True, True, False):
        x = torch.randn(ROWS, WIDTH)
        for loss in (eager(x), compiled(x)):
            loss.backward(retain_graph=keep)
            if keep:
                loss.backward()
        check(eager, twin)


def test_a_backward_after_one_that_kept_the_graph_moves_its_results(moved):
    eager, twin, compiled = models()
    x = torch.randn(ROWS, WIDTH)
    compiled(x).backward()  # compiled for graphs that are not kept
    twin.zero_grad()
    loss = compiled(x)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        eager(x).backward()
    check(eager, twin)
    assert moved[0] > 0 and moved[1] == 0 and moved[2] > 0


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t.detach(), lambda t: t.numpy(force=True), lambda t: t[:1]])
def test_what_a_hook_or_a_reader_keeps_is_not_written(moved, keep):
    eager, twin, compiled = models()
    compiled(torch.randn(ROWS, WIDTH)).backward()
    twin.zero_grad()
    assert moved.pop() > 0
    held = []

    def pack(tensor):
        held.append(keep(tensor))
        return tensor

    x = torch.randn(ROWS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(x)
    before = [torch.as_tensor(item).clone() for item in held]
    loss.backward()
    eager(x).backward()
    check(eager, twin)
    assert len(held) > 0
    assert all(torch.equal(torch.as_tensor(item), old) for item, old in zip(held, before, strict=True))


def test_saved_tensors_read_from_the_node(moved):
    eager, twin, compiled = models()
    x = torch.randn(ROWS, WIDTH)
    compiled(x).backward()
    twin.zero_grad()
    loss = compiled(x)
    held = [*loss.grad_fn.saved_tensors, *(getattr(loss.grad_fn, "_tensors_no_vc_check", None) or ())]
    before = [t.detach().clone() for t in held]
    loss.backward()
    eager(x).backward()
    check(eager, twin)
    assert moved[1] == 0
    assert all(torch.equal(t, old) for t, old in zip(held, before, strict=True))


def test_outputs_and_inputs_that_are_kept_stay(moved):
    """A value that the caller sees is no block of kept values, or the block is not given away."""

    class Shown(Deep):
        def forward(self, x):
            hidden = []
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
                hidden.append(x)
            return x.square().mean(), hidden[1], hidden[2].t(), x[:3]

    torch._dynamo.reset()
    net = Shown()
    compiled = luban.compile(net, fallback="error")
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with torch.no_grad():
            want = net(x)
        loss, *shown = compiled(x)
        given = x.detach().clone()
        loss.backward()
        for got, right in zip(shown, want[1:], strict=True):
            torch.testing.assert_close(got.detach(), right.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(x.detach(), given)


def test_memory_does_not_grow(moved):
    """The pool holds no more after many steps than after two, whenever the gradients are dropped."""
    for late in (False, True):
        _, twin, compiled = models()
        sizes = []
        for _ in range(6):
            loss = compiled(torch.randn(ROWS, WIDTH))
            if late:
                twin.zero_grad()
            loss.backward()
            del loss
            if not late:
                twin.zero_grad()
            gc.collect()
            sizes.append(pools.outputs.bytes())
        assert sizes[-1] <= sizes[2]


def test_open_sizes(moved):
    eager, twin, _ = models()
    compiled = luban.compile(twin, fallback="error", dynamic=True)
    for rows in (ROWS, ROWS + 77, 3 * ROWS, 5, ROWS):
        x = torch.randn(rows, WIDTH)
        for model in (eager, twin):
            model.zero_grad()
        eager(x).backward()
        compiled(x).backward()
        check(eager, twin)


def test_no_result_lies_over_a_value_that_is_read_later():
    """The choice of places against brute force, on random lives."""
    generator = torch.Generator().manual_seed(0)

    def number(below):
        return int(torch.randint(below, (), generator=generator))

    for _ in range(200):
        plan = _Lives(number)
        chooser = plan.donation()
        chosen = list(chooser._choose(plan.layout))
        spans = [(p.block, p.at, p.at + plan.results[p.output][1], plan.results[p.output][0]) for p in chosen]
        for n, (block, start, end, first) in enumerate(spans):
            assert 0 <= start and end <= plan.layout[block][0] and start % 64 == 0
            for i, at in plan.layout[block][1]:
                size, last = plan.kept[i]
                assert last < first or at >= end or at + size <= start
            assert not any(b == block and s < end and start < e for b, s, e, _ in spans[:n])


class _Lives:
    def __init__(self, number):
        self.kept, layout = {}, []
        for _ in range(1 + number(4)):
            at, given = 0, []
            for _ in range(1 + number(5)):
                size = 1 + number(200_000)
                given.append((len(self.kept), at))
                self.kept[len(self.kept)] = (size, number(20) - 1)
                at += -(-size // 64) * 64
            layout.append((at, tuple(given)))
        self.layout = tuple(layout)
        self.results = {n: (number(22), pools.SMALL + number(200_000)) for n in range(1 + number(12))}

    def donation(self):
        made = object.__new__(donation.Donation)
        made._inputs = self.kept
        made._outputs = sorted((first, n, size) for n, (first, size) in self.results.items())
        made._chosen = {}
        return made
