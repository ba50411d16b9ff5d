"""Torch's symbolic integers as `luban.symbolic` dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from luban import symbolic
from luban.compiler.frontend.torch.registry import Unsupported
from luban.symbolic import Dim

_cache: dict[Any, Dim] = {}


def dim(value: Any) -> Dim:
    """An int, SymInt or dim as a dim. Raises Unsupported for an expression that dims cannot say."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, symbolic.Expr):
        return value
    expression = value.node.expr
    found = _cache.get(expression)
    if found is None:
        if len(_cache) > 4096:
            _cache.clear()
        found = _cache[expression] = from_sympy(expression)
    return found


def dims(values: Any) -> tuple[Dim, ...]:
    """Sizes or strides as dims."""
    return tuple(v if type(v) is int else dim(v) for v in values)


def from_sympy(e: Any) -> Dim:
    """A sympy expression of Dynamo's (sums, products, powers, FloorDiv, Mod, Max, Min) as a dim."""
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        if str(e).startswith("u"):  # Dynamo's name for a size that only the data tell
            raise Unsupported(f"the data-dependent size {e}")
        return symbolic.symbol(str(e))
    kind = type(e).__name__
    if kind == "Pow" and e.args[1].is_Integer and int(e.args[1]) > 0:
        return symbolic.product([from_sympy(e.args[0])] * int(e.args[1]))
    if kind not in _BUILDERS:
        raise Unsupported(f"the symbolic size {e}")
    values = [from_sympy(a) for a in e.args]
    result = values[0]
    for v in values[1:]:
        result = _BUILDERS[kind](result, v)
    return result


_BUILDERS: dict[str, Callable[..., Dim]] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": symbolic.floordiv,
    "CleanDiv": symbolic.floordiv,
    "IntTrueDiv": symbolic.floordiv,
    "CeilDiv": lambda a, b: symbolic.floordiv(a + b - 1, b),
    "CeilToInt": lambda a: a,
    "Mod": symbolic.mod,
    "PythonMod": symbolic.mod,
    "Max": symbolic.maximum,
    "Min": symbolic.minimum,
}


def hint(value: Any) -> int:
    """The size that a symbolic int had while it was traced (for choices that any answer keeps correct)."""
    if isinstance(value, torch.SymInt):
        found = value.node.hint
        return int(found) if found is not None else 64
    return int(value)
