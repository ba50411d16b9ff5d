"""Local folds of scalar operations: each rule looks at one operation and gives the value that replaces it, or None.

Every fold keeps the result bit for bit (up to the payload of a NaN), so x + 0.0 stays (it turns -0.0 into 0.0) while
x + -0.0 and x - 0.0 go. Rules may make new operations: `fresh` puts one before the operation that is folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from xdsl.dialects import arith
from xdsl.dialects import math as math_dialect
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, i1
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir import scalar_semantics
from luban.compiler.ir.numeric_types import is_float

Fold = Callable[[Operation], "SSAValue | None"]
FOLDS: dict[str, list[Fold]] = {}


def fold(*names: str) -> Callable[[Fold], Fold]:
    """Registers a rule for operations of these names; the first rule that answers wins."""

    def register(rule: Fold) -> Fold:
        for name in names:
            FOLDS.setdefault(name, []).append(rule)
        return rule

    return register


def fresh(before: Operation, op: Operation) -> SSAValue:
    """Inserts a new operation before another and gives its result."""
    block = before.parent
    assert block is not None
    block.insert_op_before(op, before)
    return op.results[0]


def number(value: SSAValue) -> float | int | None:
    """The number of a constant scalar (i1 as 0 or 1), else None."""
    op = value.owner
    if not isinstance(op, arith.ConstantOp) or not isinstance(op.value, (FloatAttr, IntegerAttr)):
        return None
    data = op.value.value.data
    return data & 1 if value.type == i1 and isinstance(data, int) else data


def constant(before: Operation, value: Any, ty: Attribute) -> SSAValue:
    """A constant of a scalar type placed before an operation."""
    attribute = FloatAttr(float(value), ty) if is_float(ty) else IntegerAttr(int(value), ty)
    return fresh(before, arith.ConstantOp.create(properties={"value": attribute}, result_types=[ty]))


def fold_constants(op: Operation) -> SSAValue | None:
    """An operation on constants only, computed now. Results that are not finite are left for the program to compute."""
    if op.name not in scalar_semantics.FUNCTIONS or len(op.results) != 1 or not op.operands:
        return None
    if any(number(v) is None for v in op.operands):
        return None
    operands = [scalar_semantics.evaluate(v.owner, [])[0] for v in op.operands]
    if op.name.startswith(("arith.div", "arith.rem", "arith.floordiv", "arith.ceildiv")) and not is_float(
        op.results[0].type
    ):
        if not operands[1]:
            return None
    result = scalar_semantics.evaluate(op, operands)[0]
    return constant(op, result.item(), op.results[0].type) if np.isfinite(result) else None


def _same(value: float | int | None, wanted: float) -> bool:
    """Equal including the sign of zero."""
    return value is not None and value == wanted and math.copysign(1.0, value) == math.copysign(1.0, wanted)


# Operation -> (number that changes nothing on the right, whether also on the left).
_UNITS: dict[str, tuple[float, bool]] = {
    "arith.addf": (-0.0, True), "arith.subf": (0.0, False), "arith.mulf": (1.0, True), "arith.divf": (1.0, False),
    "math.powf": (1.0, False),
    "arith.addi": (0, True), "arith.subi": (0, False), "arith.muli": (1, True), "arith.divsi": (1, False),
    "arith.divui": (1, False), "arith.floordivsi": (1, False), "arith.ceildivsi": (1, False),
    "arith.ceildivui": (1, False),
    "arith.ori": (0, True), "arith.xori": (0, True), "arith.andi": (-1, True), "arith.shli": (0, False),
    "arith.shrsi": (0, False), "arith.shrui": (0, False),
}  # fmt: skip


@fold(*_UNITS)
def _unit(op: Operation) -> SSAValue | None:
    unit, both = _UNITS[op.name]
    a, b = op.operands
    if a.type == i1:  # the number of an i1 is 0 or 1, and -1 and 1 are the same bit
        if op.name not in ("arith.andi", "arith.ori", "arith.xori", "arith.muli"):
            return None
        unit = abs(unit)
    if _same(number(b), unit):
        return a
    return b if both and _same(number(a), unit) else None


@fold("arith.muli", "arith.andi")
def _zero(op: Operation) -> SSAValue | None:
    return next((v for v in op.operands if number(v) == 0), None)


@fold("arith.subi", "arith.xori")
def _cancel(op: Operation) -> SSAValue | None:
    return constant(op, 0, op.results[0].type) if op.operands[0] is op.operands[1] else None


@fold(
    "arith.andi", "arith.ori", "arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui",
    "arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf",
)  # fmt: skip
def _idempotent(op: Operation) -> SSAValue | None:
    return op.operands[0] if op.operands[0] is op.operands[1] else None


@fold("arith.xori")
def _double_not(op: Operation) -> SSAValue | None:
    """xor(xor(x, c), c) is x; with i1 and true this is a double negation."""
    inner = op.operands[0].owner
    if isinstance(inner, arith.XOrIOp) and number(op.operands[1]) is not None:
        return inner.operands[0] if number(inner.operands[1]) == number(op.operands[1]) else None
    return None


@fold("arith.negf")
def _double_negation(op: Operation) -> SSAValue | None:
    inner = op.operands[0].owner
    return inner.operands[0] if isinstance(inner, arith.NegfOp) else None


@fold("math.absf")
def _absolute(op: Operation) -> SSAValue | None:
    """|-x| is |x|, and an absolute value is its own."""
    inner = op.operands[0].owner
    if isinstance(inner, math_dialect.AbsFOp):
        return inner.results[0]
    if isinstance(inner, arith.NegfOp):
        return fresh(op, math_dialect.AbsFOp.create(operands=list(inner.operands), result_types=[op.results[0].type]))
    return None


@fold("math.powf")
def _square(op: Operation) -> SSAValue | None:
    """x to the 0 is 1 even for NaN; x to the 2 is x * x."""
    x, exponent = op.operands
    if number(exponent) == 0:
        return constant(op, 1.0, x.type)
    if number(exponent) == 2:
        return fresh(op, arith.MulfOp.create(operands=[x, x], result_types=[x.type]))
    return None


@fold("arith.select")
def _select(op: Operation) -> SSAValue | None:
    condition, a, b = op.operands
    if a is b:
        return a
    known = number(condition)
    if known is not None:
        return a if known else b
    if a.type == i1 and number(a) == 1 and number(b) == 0:
        return condition
    return None


@fold("arith.cmpi")
def _compare_with_itself(op: Operation) -> SSAValue | None:
    if op.operands[0] is not op.operands[1]:
        return None
    predicate = arith.CMPI_COMPARISON_OPERATIONS[op.properties["predicate"].value.data]
    return constant(op, int(predicate[-2:] in ("eq", "le", "ge")), op.results[0].type)


@fold("arith.extf", "arith.extsi", "arith.extui")
def _widen_twice(op: Operation) -> SSAValue | None:
    """An extension of the same kind of extension is one extension."""
    inner = op.operands[0].owner
    if isinstance(inner, Operation) and inner.name == op.name:
        return fresh(op, type(op).create(operands=list(inner.operands), result_types=[op.results[0].type]))
    return None


_NARROWING = {"arith.truncf": ("arith.extf",), "arith.trunci": ("arith.extsi", "arith.extui")}


@fold(*_NARROWING)
def _narrow_what_was_widened(op: Operation) -> SSAValue | None:
    """Back to the type before an extension: the value itself."""
    inner = op.operands[0].owner
    if (
        isinstance(inner, Operation)
        and inner.name in _NARROWING[op.name]
        and inner.operands[0].type == op.results[0].type
    ):
        return inner.operands[0]
    return None


@fold("graph.dim", "tile.dim")
def _known_dim(op: Operation) -> SSAValue | None:
    """A dim that is a number is a constant."""
    value = op.properties["value"].data[0]
    return constant(op, value, op.results[0].type) if isinstance(value, int) else None


@fold("graph.index")
def _only_index(op: Operation) -> SSAValue | None:
    """The index along a dim of extent 1 is 0."""
    parent = op.parent_op()
    domain = parent.properties.get("domain") if parent is not None else None
    d = op.properties["dim"].data
    return constant(op, 0, op.results[0].type) if domain is not None and domain.data[d] == 1 else None
