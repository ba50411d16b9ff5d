"""Scaled dot-product attention and its gradients in float64: what the two attention operations mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def _scores(q: np.ndarray, k: np.ndarray, bias: np.ndarray | None, scale: float, causal: bool) -> np.ndarray:
    scores = scale * (q @ k.swapaxes(-1, -2))
    if bias is not None:
        scores = scores + bias
    if causal:  # query i sees keys 0..i
        seen = np.tri(*scores.shape[-2:]) != 0
        scores = np.where(seen, scores, -np.inf)
    return scores


def attention(arrays: Sequence[np.ndarray], scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """out (batch, head, query, feature) and log-sum-exp (batch, head, query) of float64 q, k, v and an optional bias.

    A query that may see no key gives 0 and a log-sum-exp of -inf.
    """
    q, k, v, *bias = arrays
    with np.errstate(all="ignore"):
        scores = _scores(q, k, bias[0] if bias else None, scale, causal)
        top = np.max(scores, axis=-1, initial=-np.inf, keepdims=True)
        weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
        total = weights.sum(axis=-1, keepdims=True)
        out = np.where(total == 0, 0.0, (weights @ v) / np.where(total == 0, 1.0, total))
        return out, (top + np.log(total))[..., 0]


def attention_backward(
    arrays: Sequence[np.ndarray], scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v from float64 grad_out, q, k, v, out, lse and an optional bias."""
    grad_out, q, k, v, out, lse, *bias = arrays
    with np.errstate(all="ignore"):
        scores = _scores(q, k, bias[0] if bias else None, scale, causal)
        blind = np.isneginf(lse)[..., None]
        weights = np.where(blind, 0.0, np.exp(scores - np.where(blind, 0.0, lse[..., None])))
        delta = (grad_out * out).sum(axis=-1, keepdims=True)
        grad_scores = scale * weights * (grad_out @ v.swapaxes(-1, -2) - delta)
        grad_q = grad_scores @ k
        return grad_q, grad_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad_out
