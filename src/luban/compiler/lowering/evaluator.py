"""Evaluates members of a placed group at the current point of a kernel's loops."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.bodies import copy_body
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.passes.graph.grouping import Group
from luban.compiler.passes.graph.placement import Axis, Member, Strides
from luban.symbolic import Dim, product

BIG = 1 << 20  # bytes of a value that is not near when its kernel starts


def is_big(value: SSAValue) -> bool:
    """Whether a value has to come from far: of 1 MB and more, or of a size that nobody knows."""
    size = product(value.type.shape)  # type: ignore[attr-defined]
    return not isinstance(size, int) or size * bytes_of(value.type.dtype) >= BIG  # type: ignore[attr-defined]


class Evaluator:
    """Values of a group where the loops stand.

    `index` holds the current loop index of each axis and `buffer` the memory of each value from outside or for outside.
    `cache` remembers what was computed at this point; `saved` says where values of earlier passes can be read back.
    With `fetches` the loops walk over outside values from one end to the other, so that fetching ahead pays.
    """

    fetches = False

    def __init__(self, b: KernelBuilder, group: Group, buffer: dict[SSAValue, SSAValue]):
        self.b, self.group, self.buffer = b, group, buffer
        self.index: dict[Axis, SSAValue] = {}
        self.saved: dict[SSAValue, tuple[SSAValue, Strides]] = {}
        self.cache: dict[object, SSAValue] = {}
        self.fetched: set[SSAValue] = set()  # outside values that an earlier load of this row or block brought near

    def member(self, value: SSAValue) -> Member:
        """The member that produces a value of the group."""
        return self.group.produced[value]

    def address(self, strides: Strides) -> tuple[list[SSAValue], list[Dim]]:
        """Indices and strides for a load or a store."""
        return [self.index[a] for a in strides], list(strides.values())

    def value(self, value: SSAValue) -> SSAValue:
        """A value of the group at the current point: computed, remembered or read back."""
        if value in self.cache:
            return self.cache[value]
        if value in self.saved:
            buffer, strides = self.saved[value]
            self.cache[value] = self.b.load(buffer, *self.address(strides))
        else:
            member = self.member(value)
            for result, got in zip(member.op.results, self.compute(member)):
                self.cache[result] = got
        return self.cache[value]

    def compute(self, member: Member) -> list[SSAValue]:
        args = [self._operand(v, read) for v, read in zip(member.op.operands, member.reads)]
        return copy_body(self.b, member.op, args, lambda d: self._dimension_index(member, d))

    def store_values(self, values: Iterable[SSAValue]) -> None:
        """Stores values of the group at the current point: all are computed before the first store, which may overwrite
        what another one reads."""
        for value, got in [(v, self.value(v)) for v in values]:
            self.b.store(got, self.buffer[value], *self.address(self.member(value).writes))

    def contribution(self, member: Member) -> list[SSAValue]:
        """What a reduction adds at the current point."""
        key = ("contribution", id(member))
        if key not in self.cache:
            self.cache[key] = self.compute(member)  # type: ignore[assignment]
        return self.cache[key]  # type: ignore[return-value]

    def _operand(self, value: SSAValue, read: tuple[Strides, Dim] | None) -> SSAValue:
        if value in self.group.produced:
            return self.value(value)
        if read is None:
            return self.buffer[value]
        key = self.operand_key(value, read)
        if key not in self.cache:
            first = self.fetches and value not in self.fetched and is_big(value)
            self.fetched.add(value)
            self.cache[key] = self.b.load(self.buffer[value], *self.address(read[0]), read[1], ahead=first)
        return self.cache[key]

    @staticmethod
    def operand_key(value: SSAValue, read: tuple[Strides, Dim]) -> object:
        """Under what the cache keeps an element of an outside value."""
        return value, frozenset((id(a), s) for a, s in read[0].items()), read[1]

    def constants(self) -> dict[object, SSAValue]:
        """Operands that are one number, read before the loops: LLVM cannot move the loads past stores that may alias."""
        found: dict[object, SSAValue] = {}
        if any(a.size == 0 for a in self.group.axes):
            return found  # nothing runs, and the operands may have no memory
        for m in self.group.members:
            for v, read in zip(m.op.operands, m.reads):
                if v not in self.group.produced and read is not None and not read[0]:
                    found[self.operand_key(v, read)] = self.b.load(self.buffer[v], [], [], read[1])
        return found

    def _dimension_index(self, member: Member, d: int) -> SSAValue:
        index = None
        for axis in member.axes[d]:
            if axis.size == 1:
                continue
            index = (
                self.index[axis]
                if index is None
                else self.b.add(self.b.mul(index, self.b.dim(axis.size)), self.index[axis])
            )
        return self.b.dim(0) if index is None else index
