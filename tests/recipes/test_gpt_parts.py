"""Text, tokens, batches, schedule and model of the GPT recipe."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luban import recipes
from luban.errors import ConfigError
from luban.recipes.gpt import data, nan, options, sample, steps, text
from luban.recipes.gpt.model import GPT, make_optimizer
from luban.recipes.gpt.tokenizer import Tokenizer, learn

TINY = options.Options(
    run_dir="unused", backend="eager", layers=2, heads=2, width=16, context=16, batch=4, steps=8, lr=1e-2,
    warmup=2, eval_every=4, checkpoint_every=4,
)  # fmt: skip


def parsed(*argv):
    parser = argparse.ArgumentParser()
    recipes.common_arguments(parser)
    options.configure(parser)
    return options.resolve(parser.parse_args(argv))


def test_the_library_is_text_enough():
    found = text.documents(None)
    train, held = text.split(found)
    assert len(found) > 300 and len(train) > 3e6 and 0.02 < len(held) / len(train) < 0.5
    assert found == text.documents(None), "the order is fixed"


def test_a_folder_is_read_in_order_without_what_is_not_text(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\0")
    (tmp_path / ".hidden").write_text("no")
    assert text.documents(str(tmp_path)) == [b"first", b"second"]


def test_unreadable_text_is_one_sentence(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"abc\xff")
    for path, said in (
        (tmp_path / "x.bin", "byte 3"),
        (tmp_path / "absent", "No such file"),
        (tmp_path, "no UTF-8 text"),
    ):
        with pytest.raises(ConfigError, match=said):
            text.documents(str(path))


def test_split_holds_out_text_that_is_not_trained_on():
    few = [bytes([65 + i]) * 100 for i in range(3)]
    train, held = text.split(few)
    assert train + held == b"\n".join(few) and 25 <= len(held) <= 35
    many = [b"%04d" % i for i in range(40)]
    train, held = text.split(many)
    assert held.split(b"\n") == [b"0009", b"0019", b"0029", b"0039"] and len(train.split(b"\n")) == 36


SAMPLE = b"def f(self, x):\n    return self.value + x\n\n\ndef g(self):\n    return self.value\n" * 20


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=80))
def test_byte_pairs_give_every_text_back(string):
    tokenizer = learn(SAMPLE, 300)
    assert tokenizer.decode(tokenizer.encode(string.encode())) == string


def test_byte_pairs_are_the_most_frequent_ones():
    tokenizer = learn(b"abab abab abab xy", 259)
    assert tokenizer.merges[0] == (97, 98), "ab occurs six times"
    assert learn(SAMPLE, 300) == learn(SAMPLE, 300)
    assert len(learn(SAMPLE, 300).encode(SAMPLE)) < len(SAMPLE) / 2


def brute_force_merges(words: list[bytes], count: int) -> list[tuple[int, int]]:
    """Byte-pair encoding as it is defined: count all pairs anew each time."""
    tokens, merges = [list(w) for w in words], []
    for k in range(count):
        pairs: dict[tuple[int, int], int] = {}
        for w in tokens:
            for p in zip(w, w[1:], strict=False):
                pairs[p] = pairs.get(p, 0) + 1
        best = min(pairs, key=lambda p: (-pairs[p], p), default=None)
        if best is None or pairs[best] < 2:
            break
        merges.append(best)
        for w in tokens:
            i = 0
            while i + 1 < len(w):
                if (w[i], w[i + 1]) == best:
                    w[i : i + 2] = [256 + k]
                i += 1
    return merges


def test_byte_pairs_equal_the_definition():
    words = [b" banana", b" bandana", b" an", b" ananas", b" bab", b" aaaa", b" aaaaa"] * 3
    assert list(learn(b"".join(words), 256 + 12).merges) == brute_force_merges(words, 12)


def corpus(length=4000):
    tokens = np.random.default_rng(0).integers(0, 256, length).astype(np.uint16)
    return data.Corpus(Tokenizer(), tokens, tokens[:500], 500, "digest")


def test_a_batch_depends_on_seed_and_step_alone():
    c = corpus()
    x, y = data.batch(c, TINY, 3)
    again, _ = data.batch(c, TINY, 3)
    other, _ = data.batch(c, TINY, 4)
    assert x.shape == y.shape == (4, 16) and x.dtype == torch.int64
    assert torch.equal(x, again) and not torch.equal(x, other)
    assert torch.equal(x[:, 1:], y[:, :-1]), "targets are the next tokens"


def test_held_out_windows_cover_the_text_in_order():
    batches = data.held_out_batches(corpus(), TINY, windows=10)
    assert sum(len(x) for x, _ in batches) == 10 and all(len(x) <= 4 for x, _ in batches)


def test_too_short_a_text(tmp_path):
    (tmp_path / "short.txt").write_text("only this")
    with pytest.raises(ConfigError, match="too short"):
        data.load(options.Options(**{**TINY.__dict__, "text": str(tmp_path / "short.txt")}))


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    rates = [steps.learning_rate(TINY, i) for i in range(1, 9)]
    assert rates[0] == pytest.approx(5e-3) and rates[1] == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-3)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_the_model_starts_near_chance_and_looks_back_only():
    torch.manual_seed(0)
    model = GPT(TINY, 256)
    tokens, targets = torch.randint(0, 256, (2, 2, 16))
    assert model(tokens, targets).item() == pytest.approx(math.log(256), abs=0.2)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10]) and not torch.equal(a[:, 10:], b[:, 10:])


def test_only_matrices_decay_and_every_parameter_is_trained_once():
    model = GPT(TINY, 256)
    optimizer = make_optimizer(model, TINY)
    decayed, plain = optimizer.param_groups
    assert all(p.dim() >= 2 for p in decayed["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_a_sample_is_reproducible():
    torch.manual_seed(0)
    model = GPT(TINY, 256)
    first = sample.generate(model, Tokenizer(), [100, 101], 30, seed=3)
    assert first == sample.generate(model, Tokenizer(), [100, 101], 30, seed=3) and first.startswith("de")
    assert first != sample.generate(model, Tokenizer(), [100, 101], 30, seed=4)


def test_the_source_of_a_nan_is_named():
    torch.manual_seed(0)
    model = GPT(TINY, 256)
    tokens = torch.randint(0, 256, (2, 16))
    before = nan.snapshot(model)
    assert "finite up to the update" in nan.locate(model, before, tokens, tokens)
    with torch.no_grad():
        model.blocks[1].up.bias[:] = 3e38
        model.blocks[1].up.weight[:] = 3e38
    assert nan.locate(model, nan.snapshot(model), tokens, tokens).startswith("blocks.1.up is the first")
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    assert "norm.weight was not finite" in nan.locate(model, nan.snapshot(model), tokens, tokens)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--workers", "2"], "data-parallel"),
        (["--steps", "0"], "--steps must be above 0"),
        (["--lr", "nan"], "--lr must be above 0 and finite, not nan"),
        (["--clip", "inf"], "--clip must be above 0 and finite, not inf"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--width", "100", "--heads", "3"], "not a multiple"),
        (["--tokenizer", "bpe", "--vocab", "100"], "--vocab"),
        (["--resume", "--out", "/nonexistent"], "no run to resume"),
        (["--batch", "99999999999"], "--batch 99999999999 is too large; 2147483647 is the most"),
        (["--seed", "9" * 30], "--seed must fit 64 bits"),
        (["--seed", "-" + "9" * 30], "--seed must fit 64 bits"),
        (["--text", ""], "--text is empty; name a path"),
        (["--out", ""], "--out is empty; name a path"),
    ],
)
def test_a_choice_that_cannot_work(argv, said):
    with pytest.raises(ConfigError, match=said):
        parsed("--quick", *argv)


def test_given_options_win_over_the_size_and_a_resumed_run_keeps_its_own(tmp_path):
    chosen = parsed("--quick", "--steps", "7", "--out", str(tmp_path))
    assert (chosen.steps, chosen.width, chosen.backend, chosen.run_dir) == (7, 192, "luban", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(chosen.__dict__))
    resumed = parsed("--resume", "--out", str(tmp_path), "--backend", "eager")
    assert (resumed.steps, resumed.width, resumed.backend, resumed.resume) == (7, 192, "eager", True)
    with pytest.raises(ConfigError, match="started with width 192, not 64"):
        parsed("--resume", "--out", str(tmp_path), "--width", "64")
    for damaged, said in (
        ('{"unknown": 1}', "not of this recipe"),
        (json.dumps({**chosen.__dict__, "layers": "two"}), "not of this recipe"),
        ("[]", "holds no JSON object; put it right"),
        ("{", "cannot read .*; put it right"),
    ):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ConfigError, match=said):
            parsed("--resume", "--out", str(tmp_path))
