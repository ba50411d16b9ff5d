"""The model: a decoder-only transformer in plain torch, pre-norm, tied embedding, no dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from luban.recipes.gpt.options import Options


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> the same shape."""
        x = x + self.out(self._attend(self.norm_attention(x)))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    def _attend(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(b, t, width)


class GPT(nn.Module):
    """Next-token model. With targets it returns the mean cross entropy (nats), without them the logits."""

    def __init__(self, options: Options, vocab: int):
        super().__init__()
        self.bfloat16 = options.dtype == "bfloat16"
        self.embedding = nn.Embedding(vocab, options.width)
        self.position = nn.Parameter(torch.zeros(options.context, options.width))
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self._initialise(options.layers)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets int64 (batch, time) -> loss () float32, or logits (batch, time, vocab) float32."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bfloat16):
            x = self.embedding(tokens) + self.position[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.embedding.weight).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialise(self, layers: int) -> None:
        """Normal weights of 0.02, those that write to the residual stream smaller by the root of their number."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.01)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only. Eager and Inductor get torch's fused update, their fastest one."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=options.backend != "luban")
