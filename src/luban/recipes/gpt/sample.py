"""Text from a trained model."""

from __future__ import annotations

import torch

from luban.recipes.gpt.model import GPT
from luban.recipes.gpt.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], count: int, seed: int, temperature: float = 0.8
) -> str:
    """`count` tokens after a prompt of at least one token, drawn with a seed of their own; returns prompt and text."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt], dtype=torch.int64)
    context = model.position.shape[0]
    for _ in range(count):
        logits = model(tokens[:, -context:])[0, -1] / temperature
        drawn = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=random)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return tokenizer.decode(tokens[0].tolist())
