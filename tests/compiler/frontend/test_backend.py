"""torch.compile with the backend "luban": training, inference, buffers, randomness, memory, dynamic shapes, errors."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import luban
from luban.errors import ConfigError, LubanError, TargetError
from luban.runtime import pools


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


def wide():
    """Large enough that outputs and gradients come from the pool of output memory."""
    return nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 300))


def worst(a, b):
    """The largest difference between two lists of tensors."""
    return max(
        float((x.detach().double() - y.detach().double()).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()
    )


def states(model):
    return list(model.state_dict().values())


def gradients(model):
    return [p.grad for p in model.parameters()]


def pair(make, **options):
    """An eager model, an equal one, and the second one compiled."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    return model, twin, luban.compile(twin, **options)


def train(make, batches, loss_of):
    eager, twin, compiled = pair(make)
    makers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (eager, twin)]
    with luban.report() as report:
        for x, y in batches:
            losses = []
            for model, optimizer in zip((eager, compiled), makers, strict=True):
                optimizer.zero_grad()
                losses.append(loss_of(model(x), y))
                losses[-1].backward()
                optimizer.step()
            assert float((losses[0] - losses[1]).detach().abs()) < 1e-5
    assert report.graphs == 2 and not report.fallbacks
    assert worst(states(eager), states(twin)) < 1e-5


def test_an_mlp_trains_as_in_eager():
    train(mlp, [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(5)], F.mse_loss)


def test_a_cnn_trains_and_keeps_its_statistics():
    train(cnn, [(torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))) for _ in range(5)], F.cross_entropy)


def test_evaluation_after_training_reads_the_statistics():
    eager, twin, compiled = pair(cnn)
    x = torch.randn(6, 3, 8, 8)
    for model in (eager, compiled):
        model(x)
        model.eval()
    assert worst([eager(x)], [compiled(x)]) < 1e-5 and worst(states(eager), states(twin)) < 1e-6


def test_dropout_repeats_with_the_seed():
    compiled, x = luban.compile(lambda x: F.dropout(x, 0.5)), torch.ones(1000, requires_grad=True)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(compiled(x))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert set(seen[0].tolist()) == {0.0, 2.0} and 0.9 < float(seen[0].detach().mean()) < 1.1
    seen[2].sum().backward()
    assert torch.equal(x.grad, seen[2].detach())  # the backward has the forward's mask


def test_autocast():
    eager, twin, compiled = pair(mlp)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    outs = []
    for model in (eager, compiled):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(model(x))
        F.mse_loss(outs[-1].float(), y).backward()
    assert outs[1].dtype is outs[0].dtype and worst(outs[:1], outs[1:]) < 2e-2
    assert all(g.dtype is torch.float32 for g in gradients(twin))
    assert worst(gradients(eager), gradients(twin)) < 2e-2


def test_graph_breaks():
    def f(x):
        y = x * 2 + 1
        return y.relu() if y.sum().item() > 0 else y.sin()

    compiled, x = luban.compile(f), torch.rand(10)
    with luban.report() as report:
        assert worst([compiled(x), compiled(-x)], [f(x), f(-x)]) < 1e-6
    assert report.graphs >= 3 and not report.fallbacks


@pytest.mark.parametrize("mark", [False, True], ids=["dynamic=True", "mark_dynamic"])
def test_another_batch_size_does_not_compile_again(mark):
    eager, twin, compiled = pair(mlp, dynamic=None if mark else True)
    with luban.report() as report:
        for n in (8, 5, 33, 2, 100):
            x = torch.randn(n, 6)
            if mark:
                torch._dynamo.mark_dynamic(x, 0)
            for model in (eager, compiled):
                model.zero_grad()
                model(x).square().mean().backward()
            assert worst(gradients(eager), gradients(twin)) < 1e-6
    assert report.graphs == 2  # one forward, one backward


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.table(tokens)
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, 16))


def test_another_sequence_length_does_not_compile_again():
    eager, twin, compiled = pair(Attends)
    with luban.report() as report:
        for n in (8, 5, 33, 70):
            tokens = torch.randint(0, 50, (3, n))
            torch._dynamo.mark_dynamic(tokens, 1)
            for model in (eager, compiled):
                model.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            assert worst(gradients(eager), gradients(twin)) < 1e-6
    assert report.graphs == 2


def test_a_cnn_with_any_batch_size():
    eager, twin, compiled = pair(cnn)
    with luban.report() as report:
        for n in (6, 3, 9):
            x = torch.randn(n, 3, 8, 8)
            torch._dynamo.mark_dynamic(x, 0)
            for model in (eager, compiled):
                model.zero_grad()
                model(x).square().mean().backward()
            assert worst(gradients(eager), gradients(twin)) < 1e-5
    assert report.graphs == 2


def test_outputs_that_are_windows_on_inputs():
    f = lambda x: (x, x.t(), x[1:], x.view(-1), x + 1, (x + 1).t())  # noqa: E731
    x = torch.randn(4, 5)
    ours, want = luban.compile(f)(x), f(x)
    assert worst(ours, want) == 0 and [o.stride() for o in ours] == [w.stride() for w in want]
    assert [o.data_ptr() - x.data_ptr() for o in ours[:4]] == [0, 0, 20, 0]


def test_inputs_changed_in_place():
    def f(x, y, z):
        x.add_(y)
        x[0] = 7
        z[:, 1:3].mul_(3)
        z.t()[0] += 1
        return x.sum(0), y.mul_(2).relu_(), z * 2

    compiled, seen = luban.compile(f), []
    for function in (f, compiled):
        torch.manual_seed(3)
        inputs = torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 8)[:, ::2]
        outputs = function(*inputs)
        assert outputs[1].data_ptr() == inputs[1].data_ptr()
        seen.append([*inputs, *outputs])
    assert worst(*seen) < 1e-6


def test_sizes_numbers_and_nothing_as_outputs():
    f = lambda x, n: (x.argmax(1), x.shape[0], None, n + 1, x > 0, x.long().sum())  # noqa: E731
    x = torch.randn(4, 5) * 3
    for ours, want in zip(luban.compile(f)(x, 3), f(x, 3), strict=True):
        assert torch.equal(ours, want) if isinstance(want, torch.Tensor) else ours == want


def test_empty_batches():
    f = lambda x: (x * 2, x.sum(), x.sum(0), x @ x.t(), x.t() @ x)  # noqa: E731
    x = torch.randn(0, 5)
    for ours, want in zip(luban.compile(f)(x), f(x), strict=True):
        assert torch.equal(ours, want)


def test_inference_without_gradients():
    eager, _, compiled = pair(mlp)
    x = torch.randn(8, 6)
    with torch.no_grad():
        out = compiled(x)
    assert not out.requires_grad and worst([out], [eager(x)]) < 1e-6
    with torch.inference_mode():
        assert worst([compiled(x)], [eager(x)]) < 1e-6


def test_gradients_kept_over_steps_are_not_overwritten():
    eager, twin, compiled = pair(wide)
    batches = [torch.randn(64, 300) for _ in range(5)]
    for x in batches:  # accumulation
        for model in (eager, compiled):
            model(x).square().mean().backward()
    assert worst(gradients(eager), gradients(twin)) < 1e-7
    kept = []
    for x in batches:  # new gradients, the old ones held by the user
        for model in (eager, compiled):
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
        kept.append((gradients(eager), gradients(twin)))
    assert max(worst(a, b) for a, b in kept) < 1e-7


def test_outputs_kept_over_calls_are_not_overwritten():
    f = lambda x: (x * 2 + 1).t()  # noqa: E731
    compiled, inputs = luban.compile(f), [torch.randn(300, 300) for _ in range(5)]
    whole = [compiled(x) for x in inputs]
    rows = [compiled(x)[3] for x in inputs]
    arrays = [compiled(x).numpy() for x in inputs]
    gc.collect()
    for x, a, b, c in zip(inputs, whole, rows, arrays, strict=True):
        want = f(x)
        assert torch.equal(a, want) and torch.equal(b, want[3]) and torch.equal(torch.from_numpy(c), want)


def test_several_forwards_before_a_backward():
    eager, twin, compiled = pair(wide)
    inputs = [torch.randn(64, 300) for _ in range(3)]
    for _ in range(2):
        for model in (eager, compiled):
            model.zero_grad()
            sum(model(x).square().mean() for x in inputs).backward()
        assert worst(gradients(eager), gradients(twin)) < 1e-7


def test_retain_graph_and_double_backward():
    compiled, x = luban.compile(lambda x: (x.sin() * x).sum()), torch.randn(10, requires_grad=True)
    y = compiled(x)
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert worst([x.grad], [2 * once]) < 1e-6
    (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(g.sum(), x)


def test_frozen_parameters_get_no_gradient():
    eager, twin, compiled = pair(mlp)
    for model in (eager, twin):
        model[0].weight.requires_grad_(False)
    x = torch.randn(8, 6)
    eager(x).sum().backward()
    compiled(x).sum().backward()
    assert twin[0].weight.grad is None
    assert worst(gradients(eager)[1:], gradients(twin)[1:]) < 1e-5


def test_activation_checkpoints():
    from torch.utils.checkpoint import checkpoint

    eager, twin, _ = pair(mlp)
    compiled, x = luban.compile(lambda x: checkpoint(twin, x, use_reentrant=False)), torch.randn(8, 6)
    eager(x).square().sum().backward()
    compiled(x).square().sum().backward()
    assert worst(gradients(eager), gradients(twin)) < 2e-5


def test_an_lstm_is_compiled():
    eager, twin, compiled = pair(lambda: nn.LSTM(5, 7, 2, batch_first=True))
    x = torch.randn(3, 6, 5)
    with luban.report() as report:
        for model in (eager, compiled):
            model(x)[0].square().sum().backward()
    assert report.graphs == 2 and worst(gradients(eager), gradients(twin)) < 1e-5


def test_calls_from_several_threads():
    eager, _, compiled = pair(wide)
    inputs = [torch.randn(64, 300) for _ in range(4)]
    with torch.no_grad():
        want = [eager(x) for x in inputs]
        compiled(inputs[0])
    found: list[float] = []

    def run(i):
        with torch.no_grad():
            found.append(max(worst([compiled(inputs[i])], [want[i]]) for _ in range(10)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and max(found) < 1e-5


def test_the_backend_is_known_by_name():
    x = torch.randn(5)
    assert worst([torch.compile(lambda x: x * 2, backend="luban")(x)], [x * 2]) == 0


def test_a_second_process_state_hits_the_cache():
    x, f = torch.randn(7, 5), lambda x: (x * 3).exp().sum(1)
    luban.compile(f)(x)
    torch._dynamo.reset()
    with luban.report() as report:
        assert worst([luban.compile(f)(x)], [f(x)]) < 1e-5
    assert report.cache_hits == 1 and report.graphs == 1


def test_a_dump_is_written_for_a_program_that_is_in_the_cache(tmp_path, monkeypatch):
    x, f = torch.randn(7, 6), lambda x: (x * 5).exp().sum(1)
    luban.compile(f)(x)
    torch._dynamo.reset()
    monkeypatch.setenv("LUBAN_DUMP", str(tmp_path))
    with luban.report() as report:
        assert worst([luban.compile(f)(x)], [f(x)]) < 1e-5
    assert report.cache_hits == 0 and (tmp_path / "00-input.mlir").exists()


def test_bad_options_and_bad_data():
    x = torch.randn(5, 3)
    with pytest.raises(ConfigError, match="fallback=\"?'?no"):
        luban.compile(mlp(), fallback="no")
    with pytest.raises(ConfigError, match="no option 'falback'"):
        torch.compile(lambda x: x + 1, backend="luban", options={"falback": "error"})(x)
    with pytest.raises(TargetError, match="no target named 'z80'"):
        luban.compile(lambda x: x + 2, target="z80")(x)
    with pytest.raises(TargetError, match="this chip lacks"):
        luban.compile(lambda x: x + 3, target="loongarch64-lasx")(x)
    with pytest.raises(LubanError, match="out of range"):
        luban.compile(lambda x, i: x[i])(x, torch.tensor([1, 9]))


def test_a_compilation_starts_without_idle_memory():
    _, twin, compiled = pair(wide)
    x = torch.randn(64, 300)
    compiled(x).sum().backward()
    twin.zero_grad()
    held = compiled(x)
    want = held.detach().clone()
    assert pools.outputs.bytes() > pools.outputs.bytes(held=True) > 0
    luban.compile(lambda x: x * 2 - 1)(x)
    assert pools.outputs.bytes() <= pools.outputs.bytes(held=True) + pools.size_class(x.nbytes)
    assert torch.equal(held, want)
    held.sum().backward()
