"""`luban.compile` and `luban.train_step`."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from luban.compiler.frontend.dynamo import luban_backend, read_options
from luban.compiler.frontend.whole_step import TrainStep
from luban.errors import ConfigError


def compile(
    model: Callable,
    target: str = "native",
    fallback: str = "error",
    dynamic: bool | None = None,
    fuse_cross_entropy: bool = False,
) -> Callable:
    """The model or function compiled for a target.

    fallback: "error" raises UnsupportedOperatorError listing every operator without a kernel; "allow" runs those in
    eager and counts them in `luban.report()`. dynamic: True compiles once for all sizes, False once for each; None decides
    as torch.compile does, after the first change. fuse_cross_entropy: True computes the loss of a last linear layer without
    ever writing its results, with exact gradients (see `luban.kernels.linear_cross_entropy`).
    """
    options = read_options({"fallback": fallback, "target": target, "fuse_cross_entropy": fuse_cross_entropy})
    if not callable(model):
        raise ConfigError(f"luban.compile takes a model or a function, not {type(model).__name__}")
    if fallback == "error" and (os.environ.get("TORCHDYNAMO_DISABLE") == "1" or torch._dynamo.config.disable):
        raise ConfigError(
            "torch.compile is turned off (TORCHDYNAMO_DISABLE=1 or torch._dynamo.config.disable), so that everything "
            'would run in eager; turn it on, or pass fallback="allow"'
        )
    torch._dynamo.config.allow_rnn = True  # else Dynamo runs nn.LSTM and nn.GRU in eager without saying so
    return torch.compile(model, backend=luban_backend, options=options, dynamic=dynamic)


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable | None,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    target: str = "native",
    detect_nan: bool = False,
    fuse_cross_entropy: bool = False,
) -> TrainStep:
    """One program for forward, backward and update: `loss = step(*inputs, target)`, or `step(*inputs)` with loss_fn None.

    Parameters, buffers and the optimizer's state are updated in place. The learning rate is read from
    `optimizer.param_groups` at each call; gradients are clipped to the total norm `max_norm` if it is given.
    detect_nan: a step that meets a NaN stops there and raises NanError naming the first kernel that made one.
    fuse_cross_entropy: as in `luban.compile`.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"luban.train_step takes a torch.nn.Module as the model, not {type(model).__name__}")
    return TrainStep(
        model,
        loss_fn,
        optimizer,
        max_norm=max_norm,
        target=target,
        detect_nan=detect_nan,
        fuse_cross_entropy=fuse_cross_entropy,
    )
