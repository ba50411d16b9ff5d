"""What goes wrong while a training step is traced, in one sentence each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from luban.errors import ConfigError, LubanError, memory_wanted

EAGER = 'train with torch.compile(model, backend="luban") and an eager update, which runs them in eager'
_TRACERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.proxy_tensor")


@contextlib.contextmanager
def step_errors(inputs: Sequence[Any]) -> Iterator[None]:
    """Refuses inputs that no step can take, and says what torch finds wrong with the others as a ConfigError."""
    _check(inputs)
    try:
        with quiet():
            yield
    except LubanError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if memory_wanted(error) is not None:
            raise
        reason = " ".join(str(error).split("\n")[0].split()).rstrip(".") or type(error).__name__
        shown = ", ".join(map(_described, inputs))
        raise ConfigError(
            f"the model and its loss cannot take a step on ({shown}): {reason}; check shapes and dtypes"
        ) from error


def _check(inputs: Sequence[Any]) -> None:
    if not inputs:
        raise ConfigError("the training step was called without inputs; pass what the model (and the loss) take")
    for i, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor):
            continue
        if x.layout != torch.strided:
            raise ConfigError(
                f"input {i} of the training step is a {str(x.layout)[6:]} tensor; make it dense with .to_dense()"
            )
        if x.device.type != "cpu":
            raise ConfigError(f"input {i} of the training step is on {x.device}; move it to the CPU with .cpu()")


def _described(value: Any) -> str:
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's tracers from logging an error that is about to be raised."""
    loggers = [logging.getLogger(name) for name in _TRACERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
