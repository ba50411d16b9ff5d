"""Which row axis becomes the lanes of a kernel whose reduced axes lie apart in memory.

A sum over the middle of (64, 128, 768) reads neighbours along the last axis, which it keeps. With the reduced axis as
lanes every load would be a gather; with the last axis as lanes it is a vector, and each lane adds up a row of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.passes.graph.grouping import Group
from luban.compiler.passes.graph.placement import Axis, Member
from luban.symbolic import Dim

FEW = 32  # rows side by side that fill but two vectors
LIGHT = 8  # operations of a point beyond which there is enough to do between two additions
LEAST = 4  # rows side by side below which most lanes of a vector would idle
NEAR = (-1, 0, 1, 2)  # elements from lane to lane that whole vectors serve
MOST = 256  # rows that a thread takes at once
STRIP = 64  # rows a thread takes where it keeps values of theirs, and what whole strips of vectors divide


def lane_axis(
    group: Group, rows: Sequence[Axis], columns: Sequence[Axis], leaving: Collection[SSAValue]
) -> Axis | None:
    """The row axis along which a point has fewer gathers than along the axis that lanes take otherwise, if any has."""
    if not columns or group.late or not any(m.op.name == "graph.reduce" for m in group.members):
        return None
    fitting = [a for a in rows if not isinstance(a.size, int) or a.size >= LEAST]
    inside = [m for m in group.members if any(a in columns for dims in m.axes for a in dims)]
    best = min(reversed(fitting), key=lambda a: _gathers(group, inside, a, leaving), default=None)
    if best is None or _gathers(group, inside, best, leaving) >= _gathers(group, inside, columns[-1], leaving):
        return None
    return best


def block_of(size: Dim, keeps: bool) -> Dim:
    """How many rows a thread takes at once: all, or as many whole strips as divide them, or the most."""
    most = STRIP if keeps else MOST
    if not isinstance(size, int):
        return most
    if size <= most:
        return size
    return next((n for n in range(most, 0, -STRIP) if size % n == 0), most)


def sums_together(axis: Axis, members: Sequence[Member]) -> int:
    """How many sums a lane keeps (a power of two): where lanes fill few vectors, additions would wait for each other."""
    light = sum(len(list(m.op.regions[0].block.ops)) for m in members) <= LIGHT
    if not light or not isinstance(axis.size, int) or axis.size > FEW:
        return 1
    return 4 if axis.size <= FEW // 2 else 2


def _gathers(group: Group, members: Sequence[Member], axis: Axis, leaving: Collection[SSAValue]) -> int:
    """How many loads and stores of a point are of elements that lie apart along the axis."""
    steps = [
        read[0].get(axis, 0)
        for m in members
        for v, read in zip(m.op.operands, m.reads, strict=True)
        if read is not None and v not in group.produced
    ]
    steps += [m.writes.get(axis, 0) for m in members if m.op.name == "graph.map" for r in m.op.results if r in leaving]
    loads = [
        slope(m, inner.operands[1], axis)
        for m in members
        for inner in m.op.regions[0].block.ops
        if inner.name == "graph.load"
    ]
    return sum(step not in NEAR for step in [*steps, *loads])


def slope(member: Member, value: SSAValue, axis: Axis) -> Dim | None:
    """By how much an integer of a member's body grows along an axis; None where nobody knows."""
    owner = value.owner
    if isinstance(owner, Block):
        read = member.reads[list(owner.args).index(value)]  # type: ignore[arg-type]
        return 0 if read is not None and not read[0].get(axis, 0) else None
    if owner.name == "graph.index":
        return _step(member.axes[owner.properties["dim"].data], axis)  # type: ignore[union-attr]
    if owner.name == "graph.load":
        return 0 if slope(member, owner.operands[1], axis) == 0 else None
    slopes = [slope(member, v, axis) for v in owner.operands]
    if all(s == 0 for s in slopes):
        return 0
    known = [s for s in slopes if s is not None]
    if len(known) < len(slopes):
        return None
    if owner.name == "arith.addi":
        return known[0] + known[1]
    return _scaled(owner, known) if owner.name == "arith.muli" else None


def _scaled(owner: Operation, slopes: Sequence[Dim]) -> Dim | None:
    """The slope of a product with a constant."""
    for number, moving in ((0, 1), (1, 0)):
        constant = owner.operands[number].owner
        if getattr(constant, "name", "") == "arith.constant":
            return slopes[moving] * constant.properties["value"].value.data  # type: ignore[union-attr]
    return None


def _step(axes: Sequence[Axis], axis: Axis) -> Dim:
    """By how much a dimension's index grows along one of the axes that make it up."""
    step: Dim = 1
    for inner in reversed(axes):
        if inner is axis:
            return step
        step = step * inner.size
    return 0
