"""Verifier rules that operations of both dialects share; every message names the operation and the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects.builtin import ArrayAttr
from xdsl.ir import Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from luban.compiler.ir.attributes import Access, Dims, Indirect, TensorType


def require(op: Operation, holds: bool, rule: str) -> None:
    """Raises VerifyException naming the operation and the rule unless it holds."""
    if not holds:
        raise VerifyException(f"{op.name} breaks its rule: it {rule}")


def require_signs(op: Any) -> None:
    """`unsigned`, where it is given, names one operand or both."""
    require(op, op.unsigned is None or op.unsigned.data in ("a", "b", "ab"), "names its unsigned operands a, b or ab")


def verify_accesses(op: Operation, operands: Sequence[SSAValue], accesses: ArrayAttr, domain: Dims) -> None:
    """One access for each operand, one stride for each dim of the domain, and no read outside the tensor."""
    require(op, len(operands) == len(accesses), "has one access for each operand")
    for operand, access in zip(operands, accesses, strict=True):
        if isinstance(access, Indirect):
            continue
        require(op, isinstance(access, Access), "reads operands through #graph.access or #graph.indirect")
        require(op, isinstance(operand.type, TensorType), "reads tensors")
        require(
            op, len(access.strides) == len(domain.data), "has one stride for each dim of its domain in every access"
        )
        verify_bounds(op, operand, access, domain)


def verify_bounds(op: Operation, operand: SSAValue, access: Access, domain: Dims) -> None:
    """Where everything is a number: the lowest and highest element that is read lie inside the tensor."""
    assert isinstance(operand.type, TensorType)
    numbers = (*access.strides, access.offset, *domain.data, *operand.type.shape)
    if not all(isinstance(n, int) for n in numbers) or 0 in domain.data:
        return
    ends = [s * (n - 1) for s, n in zip(access.strides, domain.data, strict=False)]
    low: Any = access.offset + sum(e for e in ends if e < 0)
    high: Any = access.offset + sum(e for e in ends if e > 0)
    size: Any = 1
    for d in operand.type.shape:
        size *= d
    require(op, 0 <= low and high < size, f"stays inside its operand (reads elements {low} to {high} of {size})")


def verify_body(op: Operation, operands: Sequence[SSAValue], accesses: ArrayAttr) -> None:
    """The body receives one scalar for each linear operand and the whole tensor for each indirect one."""
    block = op.regions[0].block
    require(op, len(block.args) == len(operands), "passes each operand to its body")
    for arg, operand, access in zip(block.args, operands, accesses, strict=True):
        require(op, isinstance(operand.type, TensorType), "reads tensors")
        assert isinstance(operand.type, TensorType)
        want = operand.type if isinstance(access, Indirect) else operand.type.dtype
        require(
            op, arg.type == want, f"passes operands to its body by their element type (got {arg.type}, want {want})"
        )


def verify_results(op: Operation, shape: Sequence[Any], types: Sequence[Any]) -> None:
    """Results have the domain's shape and the yielded element types."""
    require(op, len(op.results) == len(types), "yields one value for each result")
    for result, dtype in zip(op.results, types, strict=False):
        assert isinstance(result.type, TensorType)
        require(op, result.type.shape == tuple(shape), f"gives results of its domain's shape {list(shape)}")
        require(op, result.type.dtype == dtype, f"gives results of the type that its body yields ({dtype})")


def verify_window(op: Operation, window: ArrayAttr, most: int) -> None:
    """Four lists of numbers, one for each of at most `most` spatial dims."""
    lists = [entry.data for entry in window.data if isinstance(entry, Dims)]
    ranks = {len(numbers) for numbers in lists}
    numbers = all(isinstance(n, int) for entry in lists for n in entry)
    whole = len(window) == len(lists) == 4 and len(ranks) == 1 and numbers
    require(op, whole and min(ranks) <= most, "has a window of four lists of numbers, one for each of its last dims")
