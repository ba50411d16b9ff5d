"""What is known of index values before a kernel runs: dims, bounds of trip counts, signs."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.ir import tile
from luban.symbolic import Dim, floordiv, maximum, minimum, mod, symbol

_DIMS: dict[str, Callable[[Dim, Dim], Dim]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divui": floordiv,
    "arith.divsi": floordiv,
    "arith.floordivsi": floordiv,
    "arith.remui": mod,
    "arith.minsi": minimum,
    "arith.maxsi": maximum,
}
_KEEP_SIGN = {"arith.addi", "arith.muli", "arith.divui", "arith.divsi", "arith.remui", "arith.minsi", "arith.maxsi"}


def as_dim(value: SSAValue) -> Dim | None:
    """An index value as a dim in the kernel's symbols; None where it depends on more than sizes."""
    owner = value.owner
    if isinstance(owner, Block):
        kernel = owner.parent_op()
        if not isinstance(kernel, tile.KernelOp):
            return None
        first = len(owner.args) - len(kernel.symbols)
        place = list(owner.args).index(value) - first  # type: ignore[arg-type]
        return symbol(kernel.symbols.data[place].data) if place >= 0 else None  # type: ignore[attr-defined]
    if isinstance(owner, tile.DimOp):
        return owner.value.data[0]
    if owner.name == "arith.constant":
        number = getattr(owner.properties["value"], "value", None)
        return number.data if number is not None and isinstance(number.data, int) else None
    if owner.name not in _DIMS:
        return None
    a, b = (as_dim(v) for v in owner.operands)
    divides = owner.name.startswith(("arith.div", "arith.floordiv", "arith.rem"))
    if a is None or b is None or (divides and b == 0):
        return None
    return _DIMS[owner.name](a, b)


def exact_trip(lower: SSAValue, upper: SSAValue) -> Dim | None:
    """upper - lower as a dim, where that is known."""
    low, high = as_dim(lower), as_dim(upper)
    return None if low is None or high is None else high - low


def trip_bound(lower: SSAValue, upper: SSAValue) -> int | None:
    """A number that upper - lower never exceeds; None where there is none to be seen."""
    exact = exact_trip(lower, upper)
    if isinstance(exact, int):
        return max(exact, 0)
    owner = upper.owner
    if isinstance(owner, Operation) and owner.name == "arith.minsi":
        found = [n for n in (trip_bound(lower, v) for v in owner.operands) if n is not None]
        return min(found) if found else None
    if isinstance(owner, Operation) and owner.name == "arith.addi" and lower in owner.operands:
        step = as_dim(owner.operands[1] if owner.operands[0] is lower else owner.operands[0])
        return step if isinstance(step, int) else None
    return None


def upper_bound(value: SSAValue) -> Dim | None:
    """A dim that an index value never exceeds: itself, or the known side of a minimum."""
    dim = as_dim(value)
    owner = value.owner
    if dim is not None or not isinstance(owner, Operation):
        return dim
    if owner.name == "arith.minsi":
        found = [d for d in (upper_bound(v) for v in owner.operands) if d is not None]
        return next((d for d in found if isinstance(d, int)), found[0] if found else None)
    if owner.name == "arith.subi":
        return trip_bound(owner.operands[1], owner.operands[0])
    return None


def is_nonnegative(value: SSAValue) -> bool:
    """Whether an index value is surely not negative: sizes, loop indices from such a start, and sums of these."""
    dim = as_dim(value)
    if dim is not None:
        return not isinstance(dim, int) or dim >= 0
    owner = value.owner
    if isinstance(owner, Block):
        loop = owner.parent_op()
        if isinstance(loop, tile.DotOp):
            return value in owner.args[1:]
        return isinstance(loop, tile.ForOp) and value is owner.args[0] and is_nonnegative(loop.lower)
    return owner.name in _KEEP_SIGN and all(is_nonnegative(v) for v in owner.operands)
