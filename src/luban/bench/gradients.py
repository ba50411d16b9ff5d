"""A function and its gradients as calls to be timed, and how far they are from float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from luban.bench.beside import relative_error


def leaves(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of the inputs; those of floating point ask for gradients."""
    return tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs)


def forward(function: Callable, inputs: Sequence[Any]) -> Callable[[], Any]:
    """A call without gradients."""
    import torch

    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def with_backward(function: Callable, inputs: Sequence[Any], weights: Any) -> Callable[[], tuple[Any, ...]]:
    """A call that gives the output and the gradients of all inputs for the output's gradient `weights`."""
    import torch

    wanted = [t for t in inputs if t.requires_grad]

    def call() -> tuple[Any, ...]:
        out = function(*inputs)
        return out, *torch.autograd.grad(out, wanted, weights)

    return call


def errors(ours: Sequence[Any], theirs: Sequence[Any], reference: Sequence[Any]) -> tuple[float, float]:
    """The largest relative error of ours and of theirs among outputs and gradients."""
    pairs = [(relative_error(o, r), relative_error(t, r)) for o, t, r in zip(ours, theirs, reference, strict=True)]
    return max(o for o, _ in pairs), max(t for _, t in pairs)


def wide(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same values in float64."""
    import torch

    return leaves([t.double() if t.is_floating_point() and t.dtype != torch.float64 else t for t in inputs])
