"""Placing operations in one iteration space, the algebra under fusion.

A group's space is a list of dimensions; every member reads and writes through strides over them. An operation may join a
group when its own dimensions can be identified with the group's - splitting either side where sizes nest, in any order -
such that each value it takes from the group is read exactly where it is produced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation

from luban.compiler.ir.attributes import Access, contiguous
from luban.symbolic import Dim, divide_exact


class Axis:
    """One dimension of a group's space; identity, not size, makes it that dimension."""

    __slots__ = ("size",)

    def __init__(self, size: Dim):
        self.size = size

    def __repr__(self) -> str:
        return f"<{self.size}>"


Strides = dict[Axis, Dim]  # an axis that is missing has stride 0


@dataclass(frozen=True)
class Split:
    """`axis` becomes (outer, inner)."""

    axis: Axis
    outer: Axis
    inner: Axis


@dataclass
class Member:
    """An operation placed in a space. `axes[d]` are the space's axes that make up its dimension d, major first."""

    op: Operation
    axes: list[list[Axis]]
    reads: list[tuple[Strides, Dim] | None]  # None for an indirect operand
    writes: Strides
    reduced: list[Axis] = field(default_factory=list)

    def copy(self) -> Member:
        """A copy whose tables can change by themselves."""
        reads = [None if r is None else (dict(r[0]), r[1]) for r in self.reads]
        return Member(self.op, [list(a) for a in self.axes], reads, dict(self.writes), list(self.reduced))

    def apply(self, split: Split) -> None:
        for group in self.axes:
            if split.axis in group:
                at = group.index(split.axis)
                group[at : at + 1] = [split.outer, split.inner]
        for strides in [self.writes, *(r[0] for r in self.reads if r is not None)]:
            split_strides(strides, split)
        if split.axis in self.reduced:
            at = self.reduced.index(split.axis)
            self.reduced[at : at + 1] = [split.outer, split.inner]


def split_strides(strides: Strides, split: Split) -> None:
    """Replaces the split axis in a stride table."""
    if split.axis in strides:
        s = strides.pop(split.axis)
        strides[split.inner] = s
        strides[split.outer] = s * split.inner.size


def domain_of(op: Operation) -> tuple[Dim, ...]:
    """The iteration domain of an operation; a contraction's is that of its result."""
    if op.name == "graph.contract":
        return op.out.type.shape  # type: ignore[attr-defined]
    return op.properties["domain"].data  # type: ignore[union-attr]


def reduced_count(op: Operation) -> int:
    """How many trailing dims of its domain an operation reduces."""
    return op.properties["reduced"].data if op.name == "graph.reduce" else 0  # type: ignore[union-attr]


def accesses_of(op: Operation) -> Sequence[object]:
    """The operands' accesses; none for a contraction, whose operands live in a larger domain."""
    return [] if op.name == "graph.contract" else op.properties["accesses"].data  # type: ignore[union-attr]


def start(op: Operation) -> tuple[list[Axis], Member]:
    """A space made of one operation's own domain."""
    axes = [Axis(n) for n in domain_of(op)]
    return axes, place(op, [[a] for a in axes])


def place(op: Operation, axes: list[list[Axis]]) -> Member:
    """The member for an operation whose dimensions are made up of the given axes."""
    kept = len(axes) - reduced_count(op)
    reads: list[tuple[Strides, Dim] | None] = []
    for access in accesses_of(op):
        reads.append((spread(axes, access.strides), access.offset) if isinstance(access, Access) else None)
    shape = domain_of(op)[:kept]
    return Member(op, axes, reads, spread(axes[:kept], contiguous(shape)), [a for group in axes[kept:] for a in group])


def spread(axes: Sequence[Sequence[Axis]], strides: Sequence[Dim]) -> Strides:
    """Strides over dimensions as strides over the axes that make them up."""
    table: Strides = {}
    for group, stride in zip(axes, strides):
        for axis in reversed(group):
            if stride != 0 and axis.size != 1:
                table[axis] = stride
            stride = stride * axis.size
    return table


def same_place(a: tuple[Strides, Dim], b: tuple[Strides, Dim]) -> bool:
    """Whether two accesses touch the same element everywhere."""
    return a[1] == b[1] and all(a[0].get(x, 0) == b[0].get(x, 0) for x in {*a[0], *b[0]})


class Matcher:
    """Identifies an operation's dimensions with axes of a space; collects the splits that this takes."""

    def __init__(self, axes: Iterable[Axis], reference: Strides):
        self.axes = list(axes)
        self.reference = {a: s for a, s in reference.items() if a.size != 1}
        self.splits: list[Split] = []
        self.used: set[Axis] = set()

    def has_stride(self, stride: Dim) -> bool:
        """Whether a free axis moves the reference value by this stride."""
        return any(s == stride and a not in self.used for a, s in self.reference.items())

    def by_stride(self, size: Dim, stride: Dim) -> list[Axis] | None:
        """The axes that a dimension of this size and stride over the reference value covers, major first."""
        taken: list[Axis] = []
        while size != 1:
            axis = next((a for a, s in self.reference.items() if s == stride and a not in self.used), None)
            got = self._take(axis, size)
            if got is None:
                return None
            inner, size = got
            taken.append(inner)
            stride = stride * inner.size
        return taken[::-1]

    def in_order(self, size: Dim) -> list[Axis] | None:
        """The next free axes, last first, that a broadcast dimension of this size covers, major first."""
        taken: list[Axis] = []
        while size != 1:
            free = [a for a in self.axes if a not in self.used and a not in self.reference and a.size != 1]
            got = self._take(free[-1] if free else None, size)
            if got is None:
                return None
            inner, size = got
            taken.append(inner)
        return taken[::-1]

    def free(self) -> list[Axis]:
        """Axes (of more than one element) that nothing was matched to."""
        return [a for a in self.axes if a not in self.used and a.size != 1]

    def _take(self, axis: Axis | None, size: Dim) -> tuple[Axis, Dim] | None:
        """Takes `axis`, or its inner part, for a dimension of this size; gives what is taken and the size that is left."""
        if axis is None:
            return None
        rest = divide_exact(size, axis.size)
        if rest is None:
            outer_size = divide_exact(axis.size, size)
            if outer_size is None:
                return None
            axis, rest = self._split(axis, outer_size, size), 1
        self.used.add(axis)
        return axis, rest

    def _split(self, axis: Axis, outer_size: Dim, inner_size: Dim) -> Axis:
        split = Split(axis, Axis(outer_size), Axis(inner_size))
        at = self.axes.index(axis)
        self.axes[at : at + 1] = [split.outer, split.inner]
        split_strides(self.reference, split)
        self.splits.append(split)
        return split.inner


def match_dims(op: Operation, matcher: Matcher, access: Access) -> list[list[Axis]] | None:
    """Axes for each dimension of `op`, led by its access to the matcher's reference value; None where that fails.

    Broadcast dimensions that find no free axis open new ones at the end of the space, if they are the last ones.
    """
    domain = domain_of(op)
    result: list[list[Axis] | None] = [[] if n == 1 else None for n in domain]
    moving = [d for d, (n, s) in enumerate(zip(domain, access.strides)) if n != 1 and s != 0]
    while moving:  # splitting for an inner dimension gives the axis that an outer one needs
        ready = next((d for d in reversed(moving) if matcher.has_stride(access.strides[d])), None)
        if ready is None:
            return None
        result[ready] = matcher.by_stride(domain[ready], access.strides[ready])
        if result[ready] is None:
            return None
        moving.remove(ready)
    for d in reversed(range(len(domain))):
        if result[d] is None:
            result[d] = matcher.in_order(domain[d])
        if result[d] is None:
            if matcher.free() or any(domain[e] != 1 and access.strides[e] != 0 for e in range(d + 1, len(domain))):
                return None
            result[d] = [Axis(domain[d])]
            matcher.used.add(result[d][0])  # type: ignore[index]
            matcher.axes.insert(_after_last(matcher, [r for r in result[:d] if r]), result[d][0])  # type: ignore[index]
    return [r or [] for r in result]


def _after_last(matcher: Matcher, outer: list[list[Axis]]) -> int:
    """Where a new axis goes: behind every axis of the dimensions outside it, before those of later dimensions."""
    placed = [matcher.axes.index(a) for group in outer for a in group]
    return max(placed, default=len(matcher.axes) - 1) + 1
