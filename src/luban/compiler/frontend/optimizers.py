"""Optimizer updates as pure tensor functions, in the order of operations that torch.optim's single-tensor code has.

`Rule.slots` names the per-parameter state, `hyper` computes a step's numbers (float64) on the host from a parameter group
and the step's count, `update` is traced into the program. Every number of a group comes in through `hyper`, since
schedules change not only the learning rate; what decides which operations there are is in `structure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from luban.errors import ConfigError

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """An optimizer that `luban.train_step` can put into its program."""

    slots: Callable[[dict[str, Any]], tuple[str, ...]]
    hyper: Callable[[dict[str, Any], int], list[float]]
    update: Callable[
        [dict[str, Any], torch.Tensor, torch.Tensor, Tensors, Tensors], tuple[torch.Tensor, list[torch.Tensor]]
    ]
    refused: tuple[str, ...] = ("maximize", "differentiable")


RULES: dict[type, Rule] = {}


def structure(group: dict[str, Any]) -> tuple[bool, ...]:
    """The options of a parameter group that decide which operations its update has."""
    names = ("weight_decay", "momentum", "nesterov", "amsgrad", "decoupled_weight_decay")
    return tuple(bool(group.get(name)) for name in names)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule for an optimizer. Raises ConfigError for a class or an option that has none."""
    rule = RULES.get(type(optimizer))
    if rule is None:
        known = ", ".join(sorted(c.__name__ for c in RULES))
        raise ConfigError(
            f"luban.train_step has no program for the optimizer {type(optimizer).__name__}; use {known}, "
            "or torch.compile with an eager update"
        )
    for group in optimizer.param_groups:
        for option in rule.refused:
            if group.get(option):
                raise ConfigError(
                    f"luban.train_step does not support {type(optimizer).__name__}({option}=True); leave the option off"
                )
    return rule


def _sgd_slots(group: dict[str, Any]) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _sgd_hyper(group: dict[str, Any], step: int) -> list[float]:
    first = step == 1  # torch starts the momentum at the plain gradient
    momentum = float(group["momentum"])
    kept, damp = (0.0, 1.0) if first else (momentum, 1.0 - group["dampening"])
    return [float(group["lr"]), kept, damp, momentum, float(group["weight_decay"])]


def _sgd_update(group, p, g, state, hyper):
    lr, kept, damp, momentum, decay = hyper
    if group["weight_decay"]:
        g = g + p * decay
    if not group["momentum"]:
        return p - g * lr, []
    buffer = state[0] * kept + g * damp
    g = g + buffer * momentum if group["nesterov"] else buffer
    return p - g * lr, [buffer]


def _adam_slots(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())


def _adam_hyper(group: dict[str, Any], step: int) -> list[float]:
    beta1, beta2 = (float(b) for b in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    root = (1 - beta2**step) ** 0.5
    return [lr / (1 - beta1**step), root, 1 - lr * decay, decay, 1 - beta1, beta2, 1 - beta2, float(group["eps"])]


def _adam_update(decoupled: bool):
    def update(group, p, g, state, hyper):
        step_size, root_correction, shrink, decay, weight1, beta2, weight2, eps = hyper
        if group["weight_decay"]:
            if decoupled or group.get("decoupled_weight_decay"):
                p = p * shrink
            else:
                g = g + p * decay
        m = state[0] + (g - state[0]) * weight1
        v = state[1] * beta2 + g * g * weight2
        new = [m, v]
        top = v
        if group["amsgrad"]:
            top = torch.maximum(state[2], v)
            new.append(top)
        denominator = top.sqrt() / root_correction + eps
        return p - step_size * (m / denominator), new

    return update


RULES[torch.optim.SGD] = Rule(_sgd_slots, _sgd_hyper, _sgd_update)
RULES[torch.optim.Adam] = Rule(_adam_slots, _adam_hyper, _adam_update(decoupled=False))
RULES[torch.optim.AdamW] = Rule(_adam_slots, _adam_hyper, _adam_update(decoupled=True))
