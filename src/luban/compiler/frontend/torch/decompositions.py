"""The decompositions to trace with: torch's and a few of Luban's, but only for operators that have no import rule.

Each decomposition makes tracing slower and graphs longer, so a rule is always preferred.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from luban.compiler.frontend.torch.encoder import OWN

NAMES = Path(__file__).with_name("rule_names.txt")


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Operator overloads without a rule -> decompositions into others.

    The names of the operators that have one stand in rule_names.txt (`python -m luban.compiler.frontend.torch.decompositions`
    writes it, a test compares it): importing the rules costs 0.3 s, which a start from the cache has no use for.
    """
    ruled = set(NAMES.read_text().split())
    every = {**decomposition_table, **core_aten_decompositions(), **OWN}
    return {
        operator: function
        for operator, function in every.items()
        if isinstance(operator, torch._ops.OpOverload) and str(operator) not in ruled
    }


def rule_names() -> list[str]:
    """The operators that have a rule, from the rules themselves."""
    from luban.compiler.frontend.torch import rules  # noqa: F401  (registers the rules)
    from luban.compiler.frontend.torch.registry import RULES

    return sorted(RULES)


if __name__ == "__main__":
    NAMES.write_text("\n".join(rule_names()) + "\n")
