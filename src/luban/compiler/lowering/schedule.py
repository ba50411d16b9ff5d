"""The loops of a fused loop group: which axes are rows, which are columns, what runs in which pass over a row.

A row is visited in passes: a reduction over the columns ends a pass, and what needs its result waits for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from xdsl.ir import SSAValue

from luban.compiler.ir import graph
from luban.compiler.lowering.bodies import is_expensive, uses_index
from luban.compiler.lowering.lanes import lane_axis
from luban.compiler.passes.graph.grouping import Group, join, open_group
from luban.compiler.passes.graph.placement import Axis, Member
from luban.symbolic import product

KEPT_COLUMNS = (
    1024  # elements of a row of which a strip of rows side by side can be kept in scratch (256 KB in float32)
)
MIN_COLUMNS = 512  # fewer elements in a row than this do not pay for a row's bookkeeping


@dataclass
class Passes:
    """Members by role; `level[m]` is the pass in which a full member can first be computed.

    `lanes` is the row axis that runs innermost, as lanes, where there is one: the columns are serial loops then.
    """

    rows: list[Axis]
    columns: list[Axis]
    level: dict[int, int] = field(default_factory=dict)  # id(member) -> pass
    ready: dict[SSAValue, int] = field(
        default_factory=dict
    )  # row value -> the pass after which it is known (-1: before)
    count: int = 1
    buffered: set[SSAValue] = field(default_factory=set)  # full values kept in scratch for later passes
    lanes: Axis | None = None


def place_group(op: graph.GroupOp) -> Group:
    """The group's members placed in their common space (the same way in which fusion placed them)."""
    operations = [o for o in op.body.block.ops if o.name != "graph.yield"]
    group = open_group(operations[0])
    for o in operations[1:]:
        if not join(group, o, by_shape=True, coming=operations):
            raise AssertionError(f"{o.name} does not fit the group that it was fused into")
    return group


def schedule(group: Group, leaving: set[SSAValue]) -> Passes:
    """Merges axes, chooses rows and columns, and orders the members in passes."""
    if group.columns is None:
        _choose_columns(group)
    _merge(group)
    columns = [a for a in group.axes if a in (group.columns or []) and a.size != 1]
    rows = [a for a in group.axes if a not in (group.columns or []) and a.size != 1]
    passes = Passes(rows, columns, lanes=lane_axis(group, rows, columns, leaving))
    _assign_levels(group, passes)
    size = product(a.size for a in columns)
    if passes.lanes is None or (isinstance(size, int) and size <= KEPT_COLUMNS):
        _choose_buffered(group, passes, leaving)
    return passes


def is_row_member(member: Member, columns: list[Axis]) -> bool:
    """A map that has one value a row."""
    return member.op.name == "graph.map" and not any(a in columns for dims in member.axes for a in dims)


def is_full_reduction(member: Member, passes: Passes) -> bool:
    """A reduction over everything, rows included."""
    reduced = {a for a in member.reduced if a.size != 1}
    return bool(passes.rows) and reduced == {*passes.rows, *passes.columns}


def _choose_columns(group: Group) -> None:
    """For a group without reductions: the axis with most unit strides runs innermost, joined by its neighbours."""
    real = [a for a in group.axes if a.size != 1]
    if not real:
        group.columns = []
        return

    points = {id(m): len({a for dims in m.axes for a in dims if a.size != 1}) for m in group.members}
    widest = [m for m in group.members if points[id(m)] == max(points.values())]

    def weight(axis: Axis) -> int:
        """Only members that run at every point count: a value a row is read once a row, wherever it lies."""
        total = 0
        for m in widest:
            total += 2 * (m.writes.get(axis, 0) == 1) + sum(r is not None and r[0].get(axis, 0) == 1 for r in m.reads)
        return total

    best = max(reversed(real), key=weight)
    group.axes = [a for a in group.axes if a is not best] + [best]
    group.columns = [best]


def _widen(group: Group) -> None:
    """After merging: short columns take in the axes before them."""
    rows = [a for a in group.axes if a not in group.columns and a.size != 1]  # type: ignore[operator]
    while rows:
        size = product(a.size for a in group.columns or [])
        if not isinstance(size, int) or size >= MIN_COLUMNS:
            return
        group.columns = [rows.pop(), *(group.columns or [])]


def _merge(group: Group) -> None:
    """Joins neighbouring axes; rows with columns only where nothing tells them apart."""
    reductions = any(m.op.name == "graph.reduce" for m in group.members)
    real = [a for a in group.axes if a.size != 1]
    whole = all(len({a for d in m.axes for a in d if a.size != 1}) == len(real) for m in group.members)
    free = not reductions and whole
    columns = set(group.columns or [])
    merge_axes(group, lambda outer, inner: free or (outer in columns) == (inner in columns))
    if free:
        group.columns = group.axes[-1:]
        _widen(group)


def merge_axes(group: Group, allowed: Callable[[Axis, Axis], bool]) -> None:
    """Joins neighbouring axes that every access walks as one, drops those of size 1; keeps axes whose index a body asks for."""
    pinned = {a for m in group.members if uses_index(m.op) for dims in m.axes for a in dims}
    tables = [t for m in group.members for t in (m.writes, *(r[0] for r in m.reads if r is not None))]
    merged: list[Axis] = []
    for axis in (a for a in group.axes if a.size != 1):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last not in pinned
            and axis not in pinned
            and allowed(last, axis)
            and all(t.get(last, 0) == t.get(axis, 0) * axis.size for t in tables)
        ):
            joined = Axis(last.size * axis.size)
            for t in tables:
                if axis in t:
                    t[joined] = t.pop(axis)
                t.pop(last, None)
            _replace(group, last, axis, joined)
            merged[-1] = joined
        else:
            merged.append(axis)
    group.axes = merged


def _replace(group: Group, outer: Axis, inner: Axis, joined: Axis) -> None:
    for m in group.members:
        for dims in [*m.axes, m.reduced]:
            if outer in dims:
                dims[dims.index(outer)] = joined
            if inner in dims:
                dims.remove(inner) if joined in dims else dims.__setitem__(dims.index(inner), joined)
    if group.columns is not None:
        group.columns = [a for a in (joined if a is inner else a for a in group.columns) if a is not outer]


def _assign_levels(group: Group, passes: Passes) -> None:
    for m in group.members:
        operands = [v for v in m.op.operands if v in group.produced]
        if is_row_member(m, passes.columns):
            for result in m.op.results:
                passes.ready[result] = max([passes.ready[v] for v in operands], default=-1)
            continue
        level = 0
        for v in operands:
            level = max(level, passes.ready[v] + 1 if v in passes.ready else passes.level[id(group.produced[v])])
        passes.level[id(m)] = level
        passes.count = max(passes.count, level + 1)
        if m.op.name == "graph.reduce":
            for result in m.op.results:
                if result not in group.late:
                    passes.ready[result] = level


def _choose_buffered(group: Group, passes: Passes, leaving: set[SSAValue]) -> None:
    """Expensive full values that a later pass needs again are kept in scratch, unless they are stored anyway.

    Cheap ones are computed again, which pulls in what they are made of: hence from the last member to the first.
    """
    by_op = {m.op: m for m in group.members}
    last_need: dict[SSAValue, int] = {}
    for m in reversed(group.members):
        if m.op.name != "graph.map" or id(m) not in passes.level:
            continue
        for v in m.op.results:
            need = -1
            for use in v.uses:
                consumer = by_op.get(use.operation)
                if consumer is None or id(consumer) not in passes.level:
                    continue
                again = [
                    last_need.get(r, -1) for r in consumer.op.results if r not in passes.buffered and r not in leaving
                ]
                need = max([need, passes.level[id(consumer)], *again])
            last_need[v] = need
            if need > passes.level[id(m)] and v not in leaving and is_expensive(m.op):
                passes.buffered.add(v)
