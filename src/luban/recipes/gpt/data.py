"""Tokens and batches. A batch depends on the seed and the step alone, so a resumed run sees the same ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from luban.errors import ConfigError
from luban.recipes.gpt import text
from luban.recipes.gpt.options import Options
from luban.recipes.gpt.tokenizer import Tokenizer, learn


@dataclass(frozen=True)
class Corpus:
    """The text in tokens (uint16 arrays). `digest` tells whether it is the same text and tokenizer as another time."""

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int
    digest: str


def load(options: Options) -> Corpus:
    """Reads, splits and tokenizes the text. Raises ConfigError when it cannot be read or is too short."""
    train_text, held_text = text.split(text.documents(options.text))
    tokenizer = learn(train_text, options.vocab) if options.tokenizer == "bpe" else Tokenizer()
    train, held = tokenizer.encode(train_text), tokenizer.encode(held_text)
    needed = options.context + 2
    if min(len(train), len(held)) < needed:
        raise ConfigError(
            f"the text {options.text or 'of the Python library'} is too short: {len(train)} tokens to train on and "
            f"{len(held)} held out, where a context of {options.context} needs {needed} each; "
            "give a longer text or a smaller --context"
        )
    digest = hashlib.sha256(train.tobytes() + held.tobytes()).hexdigest()
    return Corpus(tokenizer, train, held, len(held_text), digest)


def batch(corpus: Corpus, options: Options, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens of a step, int64, shape (batch, context) each."""
    random = np.random.Generator(np.random.Philox(key=[options.seed, step]))
    starts = random.integers(0, len(corpus.train) - options.context - 1, size=options.batch)
    return _windows(corpus.train, starts, options.context)


def held_out_batches(corpus: Corpus, options: Options, windows: int = 128) -> list[tuple[Tensor, Tensor]]:
    """Windows spread evenly over the held-out text, at most `windows` of them, in batches."""
    last = len(corpus.held_out) - options.context - 1
    starts = np.linspace(0, last, num=min(windows, 1 + last // options.context), dtype=np.int64)
    chunks = [starts[i : i + options.batch] for i in range(0, len(starts), options.batch)]
    return [_windows(corpus.held_out, chunk, options.context) for chunk in chunks]


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(np.stack([tokens[s : s + context + 1] for s in starts]).astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
