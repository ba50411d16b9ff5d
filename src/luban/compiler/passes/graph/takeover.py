"""Values that take over an argument's memory, and the copies that this needs.

An assigned value is computed straight into its target's memory. That is safe where the operation that makes it reads the
target nowhere but at the place that it is about to write. A roll, a transposition or a product of the old contents, and a
value that lives elsewhere already, is computed there, and a copy of it becomes the assigned value.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects.builtin import ArrayAttr
from xdsl.ir import Block, Operation, Region, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, Dims, contiguous
from luban.compiler.passes.graph.placement import same_place, start


def copy_where(block: Block, wanted: Callable[[graph.AssignOp], bool]) -> None:
    """Lets the assignments for which `wanted` says so take a copy of their value."""
    for op in list(block.ops):
        if isinstance(op, graph.AssignOp) and wanted(op):
            made = _copy_of(op.value)
            block.insert_op_before(made, op)
            op.operands[1] = made.results[0]


def needs_copy(assign: graph.AssignOp) -> bool:
    """Whether the value cannot be computed straight into the target's memory."""
    value = assign.value
    if not isinstance(value.owner, Operation):  # an argument
        return True
    uses = [use.operation for use in value.uses]
    others = [op for op in uses if op.name in ("graph.return", "graph.assign") and op is not assign]
    return bool(others) or _reads_elsewhere(assign)


def _reads_elsewhere(assign: graph.AssignOp) -> bool:
    """Whether the operation that makes the value reads its target at any place but the one that it writes."""
    made = assign.value.owner
    if not isinstance(made, Operation) or assign.target not in made.operands:
        return False
    if made.name == "graph.scatter":  # its kernel starts by copying the first operand, element by element
        return assign.target in list(made.operands)[1:]
    if made.name != "graph.map":
        return True
    _, member = start(made)
    reads = [read for operand, read in zip(made.operands, member.reads) if operand is assign.target]
    return any(read is None or not same_place(read, (member.writes, 0)) for read in reads)


def _copy_of(value: SSAValue) -> graph.MapOp:
    kind = value.type
    body = Block(arg_types=[kind.dtype])  # type: ignore[attr-defined]
    body.add_op(graph.YieldOp.create(operands=[body.args[0]]))
    shape = kind.shape  # type: ignore[attr-defined]
    return graph.MapOp.create(
        operands=[value],
        result_types=[kind],
        properties={"domain": Dims(tuple(shape)), "accesses": ArrayAttr([Access.of(contiguous(shape))])},
        regions=[Region(body)],
    )
