"""The models that are measured, with a batch and a loss each. Imports torch and transformers only when one is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and `loss_of(model, *batch)`, a scalar tensor."""

    model: Any
    batch: tuple
    loss_of: Callable


def make(name: str, quick: bool) -> Workload:
    """The workload of that name; `quick` makes it tiny."""
    return {**TRANSFORMERS, **OWN}[name](quick)


def gpt2(quick: bool) -> Workload:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, vocab = (1, 48, 128) if quick else (6, 384, 8192)
    config = GPT2Config(
        n_layer=layers, n_head=6, n_embd=width, vocab_size=vocab, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    tokens = torch.randint(0, vocab, (2, 16) if quick else (4, 256))
    return Workload(GPT2LMHeadModel(config), (tokens,), _language_loss)


def bert(quick: bool) -> Workload:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    layers, width, vocab = (1, 48, 128) if quick else (6, 384, 8192)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=6, intermediate_size=4 * width, vocab_size=vocab,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=4,
    )  # fmt: skip
    rows, length = (2, 16) if quick else (16, 128)
    batch = torch.randint(0, vocab, (rows, length)), torch.randint(0, 4, (rows,))
    return Workload(BertForSequenceClassification(config), batch, lambda m, x, y: m(input_ids=x, labels=y).loss)


def llama(quick: bool) -> Workload:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, vocab = (1, 48, 128) if quick else (6, 384, 8192)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=8 * width // 3, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=vocab, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, vocab, (2, 16) if quick else (4, 256))
    return Workload(LlamaForCausalLM(config), (tokens,), _language_loss)


def vit(quick: bool) -> Workload:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    layers, width = (1, 48) if quick else (6, 192)
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=width, num_hidden_layers=layers, num_attention_heads=6,
        intermediate_size=4 * width, num_labels=10, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    rows = 2 if quick else 64
    batch = torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))
    return Workload(ViTForImageClassification(config), batch, lambda m, x, y: m(pixel_values=x, labels=y).loss)


def mlp(quick: bool) -> Workload:
    import torch
    from torch import nn

    width, rows = (64, 16) if quick else (1024, 256)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
    batch = torch.randn(rows, width), torch.randint(0, 10, (rows,))
    return Workload(
        nn.Sequential(*layers, nn.Linear(width, 10)), batch, lambda m, x, y: nn.functional.cross_entropy(m(x), y)
    )


def gpt(quick: bool) -> Workload:
    import torch
    from torch import nn

    layers, width, length, vocab = (1, 32, 16, 64) if quick else (6, 384, 256, 8192)
    tokens = torch.randint(0, vocab, (2 if quick else 4, length))

    def loss_of(m: Any, x: Any) -> Any:
        return nn.functional.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return Workload(_plain_gpt(layers, width, length, vocab), (tokens,), loss_of)


def _language_loss(m: Any, x: Any) -> Any:
    return m(input_ids=x, labels=x).loss


def _plain_gpt(layers: int, width: int, length: int, vocab: int) -> Any:
    """A decoder-only transformer of torch's own layers."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, t, w = x.shape
            q, k, v = (p.view(n, t, -1, w // 4).transpose(1, 2) for p in self.qkv(self.a(x)).split(w, 2))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(n, t, w))
            return x + self.down(nn.functional.gelu(self.up(self.b(x)), approximate="tanh"))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(length, width))
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab)

        def forward(self, x: Any) -> Any:
            x = self.tokens(x) + self.places[: x.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Plain()


TRANSFORMERS: dict[str, Callable[[bool], Workload]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "vit": vit}
OWN: dict[str, Callable[[bool], Workload]] = {"mlp": mlp, "gpt": gpt}
