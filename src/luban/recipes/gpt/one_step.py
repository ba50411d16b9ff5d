"""One training step of the recipe on random tokens, without a run: what a tuner needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def step(dtype: str, quick: bool) -> Callable[[], Any]:
    """A function that makes a step of the recipe's default size, or of the quick one, through Luban."""
    import torch

    from luban.recipes.gpt import options, steps
    from luban.recipes.gpt.model import GPT, make_optimizer
    from luban.recipes.gpt.tokenizer import Tokenizer

    chosen = options.of_size(quick, dtype=dtype)
    torch.manual_seed(0)
    vocab = Tokenizer().size
    model = GPT(chosen, vocab)
    train = steps.make(model, make_optimizer(model, chosen), chosen)
    tokens = torch.randint(0, vocab, (chosen.batch, chosen.context))
    return lambda: train(tokens, tokens)
