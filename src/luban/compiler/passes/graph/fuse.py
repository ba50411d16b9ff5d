"""Decides which operations run in one kernel and wraps each such set in a `graph.group`.

Groups are decided on a plain adjacency first and built once afterwards: rewriting pairs of operations one after another
went quadratic (46 ms an operation at 600 operations).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Block, Operation, Region, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.passes.graph.grouping import LOOPS, MAX_MEMBERS, Group, join, open_group
from luban.compiler.passes.graph.order import Task, order
from luban.compiler.passes.graph.placement import domain_of
from luban.compiler.passes.graph.recompute import LATE
from luban.compiler.passes.graph.stores import choose
from luban.compiler.passes.graph.takeover import copy_where, needs_copy
from luban.compiler.passes.registry import register
from luban.errors import LubanError
from luban.symbolic import evaluate, product, symbols

OUTSIDE = ("graph.return", "graph.assign")  # never inside a kernel of its own


@dataclass
class Plan:
    """Groups in the making. `ancestors[g]` is the set, as bits, of groups that must run before g.

    `targets` maps a value to the argument whose memory it takes over: every reader of the old contents goes before it.
    """

    targets: dict[SSAValue, SSAValue]
    stores: Mapping[Operation, set[Operation]] = field(default_factory=dict)  # what each store may compute
    groups: list[Group] = field(default_factory=list)
    operations: list[list[Operation]] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)
    home: dict[SSAValue, int] = field(default_factory=dict)
    readers: dict[SSAValue, list[int]] = field(default_factory=dict)
    writer: dict[SSAValue, int] = field(default_factory=dict)
    waiting: dict[SSAValue, Operation] = field(default_factory=dict)
    turns: dict[int, set[int]] = field(default_factory=dict)  # groups that hold an operation of a turn

    def add(self, op: Operation) -> None:
        """Places `op`; a map that no group which makes its operands takes in waits until somebody wants its result."""
        if op.name == "graph.map" and not any(r in self.targets for r in op.results):
            if LATE in op.attributes or not self._join_bundle([*self._bundle(op), op], makers_only=True):
                self.waiting.update({r: op for r in op.results})
            return
        self._place_wanted(op)

    def finish(self) -> None:
        """Places what is still waiting: maps that only the caller wants."""
        listed = dict.fromkeys(self.waiting.values())
        for op in listed:
            if not any(use.operation in listed for r in op.results for use in r.uses):
                self._place_wanted(op)

    def _place_wanted(self, op: Operation) -> None:
        """Places `op` and the waiting maps that it needs: all in one group if they fit, else operand by operand."""
        bundle = self._bundle(op)
        if bundle and (self._join_bundle([*bundle, op]) or self._open_bundle([*bundle, op])):
            return
        for v in op.operands:
            if v in self.waiting:
                self._place_wanted(self.waiting[v])
        self._place(op)

    def _bundle(self, op: Operation) -> list[Operation]:
        """The waiting maps that `op` needs, first things first."""
        found: dict[Operation, None] = {}

        def visit(o: Operation) -> None:
            for v in o.operands:
                source = self.waiting.get(v)
                if source is not None and source not in found:
                    visit(source)
                    found[source] = None

        visit(op)
        return list(found)

    def _join_bundle(self, ops: list[Operation], makers_only: bool = False) -> bool:
        """Tries to put an operation and the maps that it waits for into a group that produces or reads their operands."""
        needs = {self.home[v] for op in ops for v in op.operands if v in self.home}
        before = self._before(ops, needs)
        for g in [*sorted(needs, reverse=True), *([] if makers_only else self._alike(ops, needs))]:
            others = self._closure(before - {g})
            if others >> g & 1 or not self._takes(g, ops[-1]):
                continue
            trial = self.groups[g].copy()
            if all(join(trial, op, self.targets, by_shape=True, coming=ops) for op in ops):
                self.groups[g] = trial
                for op in ops:
                    self._settle(op, g, others)
                return True
        return False

    def _alike(self, ops: list[Operation], needs: set[int]) -> list[int]:
        """Groups, the latest first, that walk over an outside value as one of the maps does."""
        found = {g for op in ops for g in self._candidates(op, needs) if g not in needs}
        return [
            g
            for g in sorted(found, reverse=True)[:4]
            if any(join(self.groups[g].copy(), op, self.targets) for op in ops if op.name == "graph.map")
        ]

    def _open_bundle(self, ops: list[Operation]) -> bool:
        """Tries to put an operation and the maps that it waits for into a new group: casts of several operands, say.

        (Each map by itself would open a group for every operand and write it to memory.) The widest maps come first,
        because their dimensions are the group's; then every other one finds its place among them.
        """
        if len(ops) > MAX_MEMBERS or ops[-1].name not in LOOPS:
            return False
        ordered = _widest_first(ops)
        trial = open_group(ordered[0], self.targets)
        if not all(join(trial, op, self.targets, by_shape=True, coming=ordered) for op in ordered[1:]):
            return False
        needs = {self.home[v] for op in ops for v in op.operands if v in self.home}
        before = self._closure(self._before(ops, needs))
        g = self._new_group(trial)
        for op in ordered:
            self._settle(op, g, before)
        return True

    def _before(self, ops: list[Operation], needs: set[int]) -> set[int]:
        """Groups that must run before: producers, readers of what gets overwritten, and all of an earlier turn."""
        overwritten = [self.targets[r] for op in ops for r in op.results if r in self.targets]
        turn = max((_turn(op) for op in ops), default=0)
        earlier = {g for t, groups in self.turns.items() if t < turn for g in groups}
        return needs | earlier | {g for v in overwritten for g in self.readers.get(v, ())}

    def _place(self, op: Operation) -> None:
        """Puts `op` into the first group that takes it, else into a new one."""
        needs = {self.home[v] for v in op.operands if v in self.home}
        before = self._before([op], needs)
        for g in self._candidates(op, needs):
            others = self._closure(before - {g})
            if not others >> g & 1 and self._takes(g, op) and join(self.groups[g], op, self.targets):
                self._settle(op, g, others)
                return
        self._settle(op, self._new_group(open_group(op, self.targets)), self._closure(before))

    def _new_group(self, group: Group) -> int:
        self.groups.append(group)
        self.operations.append([])
        self.ancestors.append(0)
        return len(self.groups) - 1

    def _takes(self, g: int, op: Operation) -> bool:
        """Whether the group's kind can take in `op`: a loop, or a store that shall compute it."""
        group = self.groups[g]
        return group.kind == "loop" or op in self.stores.get(group.members[0].op if group.members else op, ())

    def _closure(self, groups: set[int]) -> int:
        bits = 0
        for n in groups:
            bits |= self.ancestors[n] | (1 << n)
        return bits

    def _candidates(self, op: Operation, needs: set[int]) -> list[int]:
        """Groups that produce an operand, the latest first, then groups that read the same values."""
        siblings = {g for v in op.operands for g in self.readers.get(v, ())} - needs
        return sorted(needs, reverse=True) + sorted(siblings, reverse=True)[:4]

    def _settle(self, op: Operation, g: int, before: int) -> None:
        self.operations[g].append(op)
        if graph.TURN in op.attributes:
            self.turns.setdefault(_turn(op), set()).add(g)
        for result in op.results:
            self.home[result] = g
            self.waiting.pop(result, None)
            if result in self.targets:
                self.writer[self.targets[result]] = g
        for v in op.operands:
            self.readers.setdefault(v, []).append(g)
        self._precede(g, before)
        for v in op.operands:
            writer = self.writer.get(v, g)
            if writer != g:
                if self.ancestors[g] >> writer & 1:
                    raise LubanError(
                        "a value is read after the argument that holds it was overwritten; assign it at the end of the program"
                    )
                self._precede(writer, self.ancestors[g] | (1 << g))

    def _precede(self, g: int, before: int) -> None:
        """Makes the groups in `before` ancestors of g and of all that comes after g."""
        if before & ~self.ancestors[g]:
            self.ancestors[g] |= before
            for other, bits in enumerate(self.ancestors):
                if bits >> g & 1:
                    self.ancestors[other] |= self.ancestors[g]


def _turn(op: Operation) -> int:
    return op.attributes[graph.TURN].data if graph.TURN in op.attributes else 0  # type: ignore[attr-defined]


def _widest_first(ops: list[Operation]) -> list[Operation]:
    """The operations in an order that their values allow, those over the most dimensions first."""
    left, order = list(ops), list[Operation]()
    while left:
        made_later = {r for o in left for r in o.results}
        ready = [o for o in left if not any(v in made_later for v in o.operands)]
        placed = {r for o in order for r in o.results}
        order.append(
            max(ready, key=lambda o: (len([n for n in domain_of(o) if n != 1]), not placed.isdisjoint(o.operands)))
        )
        left.remove(order[-1])
    return order


@register
@dataclass(frozen=True)
class Fuse:
    """Groups operations into kernels. Without it every operation is its own kernel and every value goes through memory."""

    name: ClassVar[str] = "fuse"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                group_block(func.body.block, Plan)


def group_block(block: Block, planner: type[Plan]) -> None:
    """Wraps the operations of a function in groups, as the planner decides."""
    copy_where(block, needs_copy)
    try:
        plan = _decide(block, planner)
    except LubanError:  # two arguments want each other's old contents: both new values wait in memory of their own
        copy_where(block, lambda assign: True)
        plan = _decide(block, planner)
    tail = [op for op in block.ops if op.name in OUTSIDE]
    turns = _order(plan)
    for op in list(block.ops):
        op.detach()
    for g in turns:
        block.add_op(_build(plan.groups[g].kind, plan.operations[g]))
    block.add_ops(tail)


def _decide(block: Block, planner: type[Plan]) -> Plan:
    plan = planner({op.value: op.target for op in block.ops if isinstance(op, graph.AssignOp)}, choose(block))
    for op in block.ops:
        if op.name not in OUTSIDE:
            plan.add(op)
    plan.finish()
    return plan


def _order(plan: Plan) -> list[int]:
    """The groups in the order in which they shall run."""
    homes = {r: g for g, operations in enumerate(plan.operations) for op in operations for r in op.results}
    numbers: dict[SSAValue, int] = {}  # of the temporaries: what other groups read and the caller does not get
    for value, g in homes.items():
        users = [use.operation for use in value.uses]
        if not any(op.name in OUTSIDE for op in users) and any(op not in plan.operations[g] for op in users):
            numbers[value] = len(numbers)
    return order([_task(plan, g, numbers) for g in range(len(plan.groups))])


def _task(plan: Plan, g: int, numbers: dict[SSAValue, int]) -> Task:
    operations = plan.operations[g]
    results = [r for op in operations for r in op.results]
    made = {numbers[r]: _bytes(r) for r in results if r in numbers}
    read = frozenset(numbers[v] for op in operations for v in op.operands if v in numbers) - made.keys()
    return Task(
        plan.ancestors[g],
        made,
        read,
        wanted=any(use.operation.name in OUTSIDE for r in results for use in r.uses),
        fails=any("checked" in inner.properties for op in operations for inner in op.walk()),
        changes=any(r in plan.targets for r in results),
    )


def _bytes(value: SSAValue) -> int:
    """The bytes of a value; an open size counts as 64, about what a batch or a sequence has."""
    elements = product(value.type.shape)  # type: ignore[attr-defined]
    if not isinstance(elements, int):
        elements = evaluate(elements, dict.fromkeys(symbols(elements), 64))
    return elements * bytes_of(value.type.dtype)  # type: ignore[attr-defined]


def _build(kind: str, operations: list[Operation]) -> graph.GroupOp:
    """Wraps the operations; results that are used outside become the group's results."""
    inside = set(operations)
    leaving = [r for op in operations for r in op.results if any(use.operation not in inside for use in r.uses)]
    body = Block()
    group = graph.GroupOp.create(
        result_types=[v.type for v in leaving],
        properties={"label": StringAttr(kind)},
        regions=[Region(body)],
    )
    for value, result in zip(leaving, group.results):
        value.replace_uses_with_if(result, lambda use: use.operation not in inside)
    body.add_ops(operations)
    body.add_op(graph.YieldOp.create(operands=leaving))
    return group
