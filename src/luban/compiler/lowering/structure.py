"""A key that equal groups share, so that equal kernels are compiled once."""

from __future__ import annotations

from collections.abc import Hashable

from xdsl.ir import Block, SSAValue

from luban.compiler.ir.graph import GroupOp


def structural_key(group: GroupOp) -> Hashable:
    """Operations, types, accesses and how values flow; names of outside values do not count, but which are the same does."""
    numbers: dict[SSAValue, int] = {}
    return (group.label.data, _block_key(group.body.block, numbers))


def _block_key(block: Block, numbers: dict[SSAValue, int]) -> Hashable:
    parts: list[Hashable] = []
    for arg in block.args:
        numbers[arg] = len(numbers)
        parts.append(arg.type)
    for op in block.ops:
        operands = []
        for v in op.operands:
            new = v not in numbers
            number = numbers.setdefault(v, len(numbers))
            operands.append((number, v.type) if new else number)
        for r in op.results:
            numbers[r] = len(numbers)
        properties = tuple(sorted(op.properties.items(), key=lambda item: item[0]))
        regions = tuple(_block_key(region.block, numbers) for region in op.regions)
        parts.append((op.name, tuple(operands), tuple(r.type for r in op.results), properties, regions))
    return tuple(parts)
