"""Which FX operator is imported by which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


class Unsupported(Exception):
    """Raised by a rule for arguments it has no program for; the importer collects these and names the operator."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers `f(cx, node, *args, **kwargs)` for operators such as "aten.add.Tensor".

    Tensor arguments arrive as Views, symbolic ints as dims, everything else as FX holds it; the rule returns a View, a
    dim, or a tuple of them and None.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two import rules for {name}; keep one")
            RULES[name] = function
        return function

    return register
