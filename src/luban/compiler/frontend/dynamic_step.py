"""Dimensions that a training step keeps open: those that torch._dynamo.mark_dynamic marked on its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def dynamic_dims(tensor: torch.Tensor) -> frozenset[int]:
    """The dimensions that are marked dynamic."""
    return frozenset(getattr(tensor, "_dynamo_dynamic_indices", ()))


@dataclass(frozen=True)
class Guards:
    """What a traced program took for granted about its sizes: sympy conditions over symbols, and where symbols come from."""

    conditions: tuple[Any, ...]
    sources: dict[Any, tuple[int, int]]  # symbol -> (input, dimension)

    def hold(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the program fits arguments of these sizes."""
        values = {symbol: arguments[i].shape[d] for symbol, (i, d) in self.sources.items()}
        return all(bool(condition.subs(values)) for condition in self.conditions)


def fake_arguments(
    arguments: Sequence[torch.Tensor], marked: Sequence[torch.Tensor]
) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors for tracing; the marked dimensions of the last arguments (the step's inputs) become symbols.

    Equal sizes share a symbol: inputs and targets of one batch stay of one length.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    first = len(arguments) - len(marked)
    fakes = []
    for i, argument in enumerate(arguments):
        dims = dynamic_dims(marked[i - first]) if i >= first else frozenset()
        sizes = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(argument.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * argument.dim())
        fakes.append(mode.from_tensor(argument, symbolic_context=context, source=ConstantSource(f"argument_{i}")))
    return mode, fakes


def guards_of(mode: FakeTensorMode, fakes: Sequence[Any], first: int) -> Guards:
    """What tracing decided about the symbols; the step's inputs begin at argument `first` and are counted from there."""
    sources: dict[Any, tuple[int, int]] = {}
    for i, fake in enumerate(fakes[first:]):
        for d, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                sources.setdefault(size.node.expr, (i, d))
    environment = mode.shape_env
    assert environment is not None
    conditions = tuple(g.expr for g in environment.guards if set(g.expr.free_symbols) <= set(sources))
    return Guards(conditions, sources)
