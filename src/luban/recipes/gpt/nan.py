"""Where the first number that is not finite comes from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from luban.recipes.gpt.model import GPT


def finite(model: nn.Module) -> bool:
    """Whether every parameter is finite."""
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def snapshot(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def locate(model: GPT, before: list[Tensor], tokens: Tensor, targets: Tensor) -> str:
    """Repeats a step in eager from the parameters `before` it and says what was the first not to be finite."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the parameter {name} was not finite before the step"
    first: list[str] = []
    hooks = [m.register_forward_hook(_watch(name or "the model", first)) for name, m in model.named_modules()]
    try:
        loss = model(tokens, targets)
    finally:
        for hook in hooks:
            hook.remove()
    if first:
        return f"{first[0]} is the first module whose output is not finite"
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        if not torch.isfinite(gradient).all():
            return f"the gradient of {name} is not finite although the loss is"
    return "the same step in eager is finite up to the update of the parameters"


def _watch(name: str, first: list[str]):
    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not torch.isfinite(output).all():
            first.append(name)

    return hook
