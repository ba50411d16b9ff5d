"""One optimizer step on each backend: forward, backward, clipping, update. All compute the same numbers."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from luban.errors import ConfigError
from luban.recipes.gpt.options import Options

Step = Callable[[Tensor, Tensor], Tensor]


def learning_rate(options: Options, step: int) -> float:
    """The rate of step 1, 2, ...: linear up to the peak, then half a cosine down to a tenth of it."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    part = min(1.0, (step - options.warmup) / max(1, options.steps - options.warmup))
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every parameter group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def make(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Step:
    """A function of (tokens, targets) that trains one step and returns the loss before it. Raises ConfigError."""
    return _BACKENDS[options.backend](model, optimizer, options)


def _plain(forward: Any, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> Step:
    parameters = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Step:
    return _plain(model, model, optimizer, options.clip)


def _inductor(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Step:
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise ConfigError(
            "the backend inductor needs a C++ compiler and g++ is not installed; use --backend luban or eager"
        )
    return _plain(torch.compile(model), model, optimizer, options.clip)


def _luban(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Step:
    import luban

    return luban.train_step(
        model,
        None,
        optimizer,
        max_norm=options.clip,
        detect_nan=options.detect_nan,
        fuse_cross_entropy=options.fuse_cross_entropy,
    )


_BACKENDS = {"eager": _eager, "inductor": _inductor, "luban": _luban}
