"""The decompositions to trace with: torch's own, but only for operators that have no import rule.

Each decomposition makes tracing slower and graphs longer, so a rule is always preferred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from luban.compiler.frontend.torch import rules  # noqa: F401  (registers the rules)
from luban.compiler.frontend.torch.registry import RULES


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Operator overloads without a rule -> torch's decompositions into others."""
    every = {**decomposition_table, **core_aten_decompositions()}
    return {
        operator: function
        for operator, function in every.items()
        if isinstance(operator, torch._ops.OpOverload) and str(operator) not in RULES
    }


