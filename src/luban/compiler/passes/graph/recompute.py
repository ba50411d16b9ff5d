"""Cheap maps that are computed again where they are wanted, instead of going through memory.

A kernel that depends on a later contraction cannot be the one that first makes a value: between the two the value is
written and read. Where what it is made of is read there anyway, a copy of the map costs a few instructions and moves
nothing. (A normalisation's x * rstd, wanted again by its gradient; the SiLU of a gate.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access
from luban.compiler.lowering.bodies import is_expensive
from luban.compiler.passes.graph.expressions import is_cheap_map
from luban.compiler.passes.graph.stores import depths, size
from luban.compiler.passes.registry import register

SMALLEST = 1 << 16  # bytes of a value below which its way through memory does not matter
DEAR = ("erf", "tanh", "pow", "log", "sin", "cos", "random", "load", "sqrt")  # cost more than a trip through memory
LONGEST = 16  # operations of a body that holds an exponential or a division
LOOPS = ("graph.map", "graph.reduce")
LATE = "late"  # an attribute of copies: fusion keeps them for their readers, away from what makes their operands

Place = int  # the contractions and attentions that an operation depends on: kernels differ at least where these do


@register
@dataclass(frozen=True)
class Recompute:
    """See the module. Runs last before fusion: equal operations would be merged again."""

    name: ClassVar[str] = "recompute"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                _Function(func.body.block).rewrite()


@dataclass
class _Function:
    block: Block
    place: dict[Operation, Place] = field(default_factory=dict)
    order: dict[Operation, float] = field(default_factory=dict)
    reads: dict[Place, dict[SSAValue, int]] = field(default_factory=dict)  # by how many loops at a place

    def rewrite(self) -> None:
        """From the last map to the first: what a copy reads may be copied in turn."""
        known = depths(self.block)
        self.place = dict(known.bits)
        self.order = dict(known.order)  # type: ignore[arg-type]
        for op in self.block.ops:
            if op.name in LOOPS:
                self._count(op, self.place[op], 1)
        for op in reversed(list(self.block.ops)):
            if _may_repeat(op):
                self._spread(op)

    def _count(self, op: Operation, place: Place, by: int) -> None:
        table = self.reads.setdefault(place, {})
        for v in op.operands:
            table[v] = table.get(v, 0) + by

    def _spread(self, op: Operation) -> None:
        """Gives a map's readers at other places copies of their own, if that moves less."""
        bytes_ = size(op.results[0])
        readers: dict[Place, list[Operation]] = {}
        for use in op.results[0].uses:
            if use.operation.name not in LOOPS:
                return  # in memory anyway
            readers.setdefault(self.place[use.operation], []).append(use.operation)
        others = [p for p in readers if p != self.place[op]]
        if bytes_ is None or bytes_ < SMALLEST or not others:
            return
        extra = {p: self._extra(op, p) for p in others}
        if is_expensive(op):
            others = [p for p in others if extra[p] == 0]
        elif sum(extra.values()) + self._kept_for(op) > 3 * bytes_ * (1 + len(others)) // 4:
            return
        for p in others:
            self._copy(op, p, readers[p])
        if not op.results[0].first_use:
            self._count(op, self.place[op], -1)
            op.detach()
            op.erase()

    def _extra(self, op: Operation, place: Place) -> int:
        """Bytes that a copy would read and nobody else at its place does."""
        table = self.reads.get(place, {})
        return sum(size(v) or 1 << 60 for v in op.operands if not table.get(v))

    def _kept_for(self, op: Operation) -> int:
        """Bytes that only copies would keep in memory: operands that nothing but this map reads."""
        return sum(
            size(v) or 1 << 60
            for v in op.operands
            if isinstance(v.owner, Operation) and all(use.operation is op for use in v.uses)
        )

    def _copy(self, op: Operation, place: Place, readers: list[Operation]) -> None:
        first = min(readers, key=lambda o: self.order[o])
        copy = op.clone()
        copy.attributes[LATE] = UnitAttr()
        self.block.insert_op_before(copy, first)
        self.place[copy], self.order[copy] = place, self.order[first] - 0.5
        self._count(copy, place, 1)
        for reader in dict.fromkeys(readers):
            for i, v in enumerate(reader.operands):
                if v is op.results[0]:
                    reader.operands[i] = copy.results[0]


def _may_repeat(op: Operation) -> bool:
    """Whether a map is worth repeating: cheap, or short with nothing dearer than an exponential and a division."""
    if is_cheap_map(op):
        return True
    if op.name != "graph.map" or len(op.results) != 1:
        return False
    if not all(isinstance(a, Access) for a in op.properties["accesses"].data):  # type: ignore[union-attr]
        return False
    names = [inner.name.rpartition(".")[2] for inner in op.regions[0].block.ops]
    return len(names) <= LONGEST and "index" not in names and not any(n.startswith(DEAR) for n in names)
