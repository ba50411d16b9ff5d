"""Which results of a loop group are written past the caches.

An ordinary store first reads the line that it overwrites; a streaming one does not. A result much larger than a core's
second-level cache will not be there when it is read next, so nothing is lost. Measured on a Xeon (2 MB), one thread, with
cold caches, writing what another buffer holds: 8 MB 0.98 ms instead of 1.33, 16 MB 2.05 instead of 2.64; reading it
afterwards takes the same time. At 2 and 4 MB, read at once, it loses.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.schedule import Passes
from luban.compiler.passes.graph.grouping import Group
from luban.symbolic import product
from luban.targets.target import Target

CACHES = 4  # second-level caches that a result must exceed


def is_large(value: SSAValue, target: Target) -> bool:
    """Whether a value is known to be too large to stay in a second-level cache for its reader."""
    size = product(value.type.shape)  # type: ignore[attr-defined]
    if not isinstance(size, int) or target.l2_bytes == 0:
        return False
    return size * bytes_of(value.type.dtype) >= CACHES * target.l2_bytes  # type: ignore[attr-defined]


def streamed(
    op: graph.GroupOp, group: Group, passes: Passes, leaving: Sequence[SSAValue], target: Target
) -> set[SSAValue]:
    """The values among those that leave whose stores stream: large, written along the lanes, not read in a later pass."""
    results = dict(zip(op.body.block.last_op.operands, op.results, strict=True))  # type: ignore[union-attr]
    inner = passes.lanes or (passes.columns[-1] if passes.columns else None)
    found = set()
    for value in leaving:
        member = group.produced[value]
        last = passes.level.get(id(member)) == passes.count - 1
        if last and inner is not None and member.writes.get(inner) == 1 and is_large(value, target):
            if not is_assigned(results[value]):
                found.add(value)
    return found


def is_assigned(result: SSAValue) -> bool:
    """Whether a result goes into an argument's memory, whose lines its kernel may have read already."""
    return any(isinstance(use.operation, graph.AssignOp) for use in result.uses)
