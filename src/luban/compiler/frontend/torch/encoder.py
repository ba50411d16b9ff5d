"""torch's fused operators of transformer encoders as the layers that they stand for.

In evaluation without gradients, nn.MultiheadAttention and nn.TransformerEncoderLayer call one operator for everything; its
parts have kernels, which the whole would hide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 1  # the kind of mask that has one entry for each key of each sequence; 0 is one for all, 2 one a head


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """aten._native_multi_head_attention: (batch, length, features); True in the mask hides a key."""
    size = embed_dim // num_head
    heads = []
    for x, weight, bias in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3)):
        made = F.linear(x, weight, bias)
        heads.append(made.view(made.shape[0], made.shape[1], num_head, size).transpose(1, 2))
    q, k, v = heads
    if mask is not None and mask_type == PADDING:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1])
    if not need_weights:
        out = F.scaled_dot_product_attention(q, k, v, None if mask is None else ~mask.bool())
        return F.linear(_joined(out), proj_weight, proj_bias), None
    scores = q @ k.transpose(2, 3) * size**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), -torch.inf)
    weights = torch._safe_softmax(scores, -1)
    out = F.linear(_joined(weights @ v), proj_weight, proj_bias)
    return out, weights.mean(1) if average_attn_weights else weights


def encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor,
    norm_weight_2: Tensor, norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor,
    ffn_bias_2: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """aten._transformer_encoder_layer_fwd: attention and two linear layers, each with a sum and a norm."""

    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = src
    y = normed(x, norm_weight_1, norm_bias_1) if norm_first else x
    x = x + multi_head_attention(
        y, y, y, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, mask_type=mask_type
    )[0]  # fmt: skip
    y = normed(x, norm_weight_2, norm_bias_2) if norm_first else normed(x, norm_weight_1, norm_bias_1)
    inner = F.linear(y, ffn_weight_1, ffn_bias_1)
    inner = F.gelu(inner) if use_gelu else F.relu(inner)
    out = F.linear(inner, ffn_weight_2, ffn_bias_2)
    return x + out if norm_first else normed(y + out, norm_weight_2, norm_bias_2)


def _joined(x: Tensor) -> Tensor:
    """Heads put side by side: (batch, heads, length, size) as (batch, length, heads * size)."""
    return x.transpose(1, 2).flatten(2)


OWN = {
    torch.ops.aten._native_multi_head_attention.default: multi_head_attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
}
