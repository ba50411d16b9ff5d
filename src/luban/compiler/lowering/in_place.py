"""Which results of a product's kernel take the memory of a value that the kernel is the last to read.

A sum of products, `before + a @ b`, is computed in the product's store, which reads `before` only where it is about to
write: so both may be one buffer. The gradient of a weight of 50,257 x 384, summed over parts of the rows, takes 74 MiB in
this way and not 147, and no line is fetched only to be overwritten.
"""

from __future__ import annotations

from collections.abc import Collection

from xdsl.ir import SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.schedule import place_group
from luban.compiler.passes.graph.grouping import Group
from luban.compiler.passes.graph.placement import same_place
from luban.symbolic import product

SMALLEST = 1 << 20  # bytes below which a buffer is not worth looking for


def take_over(op: graph.GroupOp, dying: Collection[SSAValue]) -> dict[SSAValue, SSAValue]:
    """For results of a group, the outside values whose memory they take; nobody reads `dying` ones afterwards."""
    if op.label.data != "contract":
        return {}
    wanted = {r: [v for v in dying if _is_alike(v, r)] for r in op.results if _size(r) >= SMALLEST}
    if not any(wanted.values()):
        return {}
    group = place_group(op)
    inner = dict(zip(op.results, op.body.block.last_op.operands, strict=True))  # type: ignore[union-attr]
    found: dict[SSAValue, SSAValue] = {}
    for result, candidates in wanted.items():
        fitting = [v for v in candidates if v not in found.values() and _is_read_in_place(group, v, inner[result])]
        if fitting:
            found[result] = fitting[0]
    return found


def _size(value: SSAValue) -> int:
    size = product(value.type.shape)  # type: ignore[attr-defined]
    return size * bytes_of(value.type.dtype) if isinstance(size, int) else 0  # type: ignore[attr-defined]


def _is_alike(a: SSAValue, b: SSAValue) -> bool:
    """Whether two values hold as many elements of one type (their dims of size 1 may differ)."""
    return a.type.dtype == b.type.dtype and _size(a) == _size(b)  # type: ignore[attr-defined]


def _is_read_in_place(group: Group, value: SSAValue, result: SSAValue) -> bool:
    """Whether the group reads a value nowhere but at the place where it writes the result."""
    writes = group.produced[result].writes
    for member in group.members:
        reads = member.reads or [None] * len(member.op.operands)  # a product's own operands are read all over
        for operand, read in zip(member.op.operands, reads, strict=True):
            if operand is value and (read is None or not same_place(read, (writes, 0))):
                return False
    return True
