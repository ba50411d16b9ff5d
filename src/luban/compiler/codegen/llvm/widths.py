"""How many lanes a vector loop gets, and how many vectors are in flight."""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import Float64Type

from luban.targets import Target

# Rough cost of an operation in instructions; what is not listed costs 1.
_ELEMENTARY = 12
_COSTS = {"arith.constant": 0, "tile.dim": 0, "tile.yield": 0, "tile.random": 40, "math.absf": 1, "math.sqrt": 1}
_CHEAP_MATH = ("absf", "absi", "ceil", "floor", "trunc", "round", "roundeven", "sqrt", "copysign", "fma", "ctpop")
# weight of a body -> most vectors in flight
_REDUCTION_LIMITS = ((16, 4), (40, 2))
_POINTWISE_LIMITS = ((12, 4), (24, 2))
_POINTWISE_LANES = 32  # lanes in flight beyond which a loop without reductions gains nothing


def choose_width(target: Target, op: Any) -> int:
    """Lanes of one vector: 32 bits each, 64 where the body computes in float64."""
    wide = any(isinstance(result.type, Float64Type) for inner in op.walk() for result in inner.results)
    return max(1, target.vector_bits // (64 if wide else 32))


def choose_copies(op: Any, width: int, trip: int | None, reduces: bool) -> int:
    """Vectors in flight: enough to hide latency for short bodies, one for long ones."""
    inner = list(op.walk())
    if any(o.name == "tile.store" and o.combine.data != "none" for o in inner):
        return 1
    nested = any(o is not op and o.name == "tile.for" for o in inner)
    latency = reduces or nested
    weight = weight_of(op)
    most = next(
        (copies for limit, copies in (_REDUCTION_LIMITS if latency else _POINTWISE_LIMITS) if weight <= limit), 1
    )
    if not latency:
        most = max(1, min(most, _POINTWISE_LANES // width))
    together = [d for d in divisors_of(op) if d % width == 0]
    most = next(copies for copies in range(most, 0, -1) if all(d % (width * copies) == 0 for d in together))
    if trip is None:
        return most
    fitting = [copies for copies in range(most, 0, -1) if trip >= width * copies]
    exact = [copies for copies in fitting if trip % (width * copies) == 0]
    return next(iter(exact or fitting), 1)


def divisors_of(op: Any) -> list[int]:
    """The numbers by which indices are divided inside: lanes in flight that never cross a multiple stay neighbours."""
    found = []
    for inner in op.walk():
        if inner.name in ("arith.divui", "arith.remui"):
            owner = inner.operands[1].owner
            name = getattr(owner, "name", "")
            number = (
                owner.value.value.data if name == "arith.constant" else owner.value.data[0] if name == "tile.dim" else 0
            )
            found += [number] if isinstance(number, int) and number > 0 else []
    return found


def weight_of(op: Any) -> int:
    """The rough number of instructions of an operation and of what lies inside it."""
    return sum(_cost(inner.name) for inner in op.walk())


def _cost(name: str) -> int:
    if name.startswith("math.") and name[5:] not in _CHEAP_MATH:
        return _ELEMENTARY
    return _COSTS.get(name, 1)
