"""Groups of operations that one kernel can run, and the rules by which an operation joins one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from xdsl.ir import Operation, SSAValue

from luban.compiler.ir.attributes import Access, contiguous
from luban.compiler.passes.graph.placement import (
    Axis,
    Matcher,
    Member,
    Strides,
    domain_of,
    match_dims,
    place,
    same_place,
    split_strides,
    spread,
    start,
)
from luban.symbolic import Dim, divide_exact, product

MAX_MEMBERS = 48  # beyond this, live scalars outgrow the registers of every target
MANY_ROWS = 1024  # rows that keep threads busy; where fewer are as long as this, their elements are cut into chunks
MANY_BLOCKS = 16  # blocks of rows side by side that keep threads busy, however few rows they hold
MAX_COLUMN_ELEMENTS = 16384  # a column accumulator a chunk must stay in a first- or second-level cache
LOOPS = ("graph.map", "graph.reduce")
ATTENTION = ("graph.attention", "graph.attention_backward")
STORES = (
    "contract",
    "attention",
    "attention_backward",
)  # kinds whose kernels take maps of their results into the store


@dataclass
class Group:
    """Members that share a space. `columns` are the axes that row reductions run over (None: not decided yet)."""

    kind: str  # "loop", "contract" or the name of a lone operation
    axes: list[Axis] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    columns: list[Axis] | None = None
    produced: dict[SSAValue, Member] = field(default_factory=dict)
    late: set[SSAValue] = field(default_factory=set)  # column and whole reductions: known only after the loop
    replaced: dict[SSAValue, SSAValue] = field(default_factory=dict)  # argument -> the value that takes over its memory

    def copy(self) -> Group:
        """A copy that can be tried and thrown away (axes are shared, they never change)."""
        members = [m.copy() for m in self.members]
        by_op = {m.op: m for m in members}
        produced = {v: by_op[m.op] for v, m in self.produced.items()}
        columns = None if self.columns is None else list(self.columns)
        return Group(self.kind, list(self.axes), members, columns, produced, set(self.late), dict(self.replaced))


def open_group(op: Operation, targets: Mapping[SSAValue, SSAValue] = MappingProxyType({})) -> Group:
    """A group with one operation."""
    if op.name in ATTENTION:
        return _open_attention(op)
    if op.name not in LOOPS and op.name != "graph.contract":
        return Group(op.name)
    axes, member = start(op)
    group = Group("contract" if op.name == "graph.contract" else "loop", axes)
    if op.name == "graph.reduce":
        _decide_columns(group, member)
    _admit(group, member)
    group.replaced.update({targets[r]: r for r in op.results if r in targets})
    return group


def _open_attention(op: Operation) -> Group:
    """A group around an attention: maps may take the result over (batch, head, position, feature) into their own layout.

    The log-sum-exp has no features and stays outside; gradients join where queries and keys are as long as each other.
    """
    shape = op.results[0].type.shape  # type: ignore[attr-defined]
    axes = [Axis(n) for n in shape]
    member = Member(op, [[a] for a in axes], [None] * len(op.operands), spread([[a] for a in axes], contiguous(shape)))
    group = Group(op.name.partition(".")[2], axes, [member])
    group.produced.update({r: member for r in op.results if r.type.shape == shape})  # type: ignore[attr-defined]
    return group


def source_of(group: Group, value: SSAValue) -> SSAValue:
    """The result of a group's first operation that a value of the group was computed from."""
    member = group.produced[value]
    while member is not group.members[0]:
        value = next(v for v in member.op.operands if v in group.produced)
        member = group.produced[value]
    return value


def join(
    group: Group,
    op: Operation,
    targets: Mapping[SSAValue, SSAValue] = MappingProxyType({}),
    by_shape: bool = False,
    coming: Collection[Operation] = (),
) -> bool:
    """Adds `op` to the group if it can run in the group's loops; says whether it did.

    `by_shape` lets in an operation that shares nothing with the group yet, placed where one of the `coming` operations
    will read its result beside a value of the group's, or its dimensions matched in order. `targets`
    maps values to the arguments whose memory they take over: nobody in the group may read such an argument at any place
    but the one that is about to be overwritten.
    """
    if op.name not in LOOPS or len(group.members) >= MAX_MEMBERS or group.kind not in ("loop", *STORES):
        return False
    if group.kind in STORES and op.name != "graph.map":
        return False
    if group.kind in STORES[1:] and len({id(source_of(group, v)) for v in op.operands if v in group.produced}) != 1:
        return False  # the results of an attention are stored one after the other
    if 0 in domain_of(op) or any(a.size == 0 for a in group.axes):
        return False  # loops that never run would leave what has fewer dims, a scalar say, without a value
    leads = _leads(group, op, by_shape)
    if by_shape and len(leads) > 0 and not any(v in group.produced for v in op.operands):
        leads[-1:-1] = _coming_leads(group, op, coming)
    placed = next(filter(None, (_fit(group, op, lead) for lead in leads)), None)
    if placed is None:
        return False
    member, matcher = placed
    if not _in_place_holds(group, member, matcher, targets):
        return False
    for split in matcher.splits:
        _apply(group, split)
    group.axes = matcher.axes
    if member.op.name == "graph.reduce" and group.columns is None:
        _decide_columns(group, member)
    elif group.columns is None and _is_tail(group.axes, matcher.free()):
        group.columns = matcher.free()
    _admit(group, member)
    group.replaced.update({targets[r]: r for r in op.results if r in targets})
    return True


Lead = tuple[Access, Strides, Dim]  # how `op` reads a value, and how the group does


def _leads(group: Group, op: Operation, by_shape: bool) -> list[Lead]:
    """What may tie `op` to the group: a value produced there (the widest), else one that both read alike.

    A value read along every axis says where everything belongs. With `by_shape` one read along some axes will do (a
    value a row), and failing that as many elements as there are rows, or the dimensions in order.
    """
    accesses = op.properties["accesses"].data  # type: ignore[union-attr]
    inside = [(v, a) for v, a in zip(op.operands, accesses) if v in group.produced]
    if inside:
        return _produced_lead(group, inside)
    if group.kind in STORES:
        return [_in_order(op)] if by_shape else []
    best = _shared_lead(group, op, accesses)
    if not by_shape:
        return [best] if best and len(best[1]) == len([a for a in group.axes if a.size != 1]) else []
    return [*([best] if best else []), *_as_rows(group, op), _in_order(op)]


def _as_rows(group: Group, op: Operation) -> list[Lead]:
    """The op's elements, in order, as one a row of the group."""
    rows = [a for a in group.axes if a not in (group.columns or ())]
    if group.columns is None or product(domain_of(op)) != product(a.size for a in rows):
        return []
    strides = contiguous([a.size for a in rows])
    return [(Access.of(contiguous(domain_of(op))), {a: s for a, s in zip(rows, strides) if a.size != 1}, 0)]


def _in_order(op: Operation) -> Lead:
    return Access.of([0] * len(domain_of(op))), {}, 0


def _produced_lead(group: Group, inside: Sequence[tuple[SSAValue, object]]) -> list[Lead]:
    best: Lead | None = None
    for value, access in inside:
        if value in group.late or not isinstance(access, Access):
            return []
        writes = group.produced[value].writes
        if best is None or len(writes) > len(best[1]):
            best = (access, writes, 0)
    return [best] if best else []


def _shared_lead(group: Group, op: Operation, accesses: Sequence[object]) -> Lead | None:
    """The operand from outside that the group reads along most axes."""
    best: Lead | None = None
    for operand, access in zip(op.operands, accesses):
        if not isinstance(access, Access):
            continue
        for member in group.members:
            for other, read in zip(member.op.operands, member.reads):
                if other is operand and read is not None and (best is None or len(read[0]) > len(best[1])):
                    best = (access, *read)
    return best


def _coming_leads(group: Group, op: Operation, coming: Collection[Operation]) -> list[Lead]:
    """Where operations to come will read what `op` makes, beside a value of the group's: its dimensions belong there."""
    found: list[Lead] = []
    for use in (use for result in op.results for use in result.uses):
        reader = use.operation
        if reader not in coming or reader.name not in LOOPS:  # a join, say, has no domain to place it by
            continue
        beside = any(v in group.produced for v in reader.operands)
        leads = _leads(group, reader, False) if beside else _coming_leads(group, reader, coming)
        placed = next(filter(None, (_fit(group, reader, lead) for lead in leads)), None)
        if placed is None or len(placed[1].axes) != len(group.axes):
            continue
        reads = placed[0].reads  # a scatter's do not count what it starts from, and the place of a read is another
        read = reads[use.index] if len(reads) == len(reader.operands) else None
        if read is not None and read[1] == 0:
            found.append((Access.of(contiguous(domain_of(op))), read[0], 0))
    return found


def _fit(group: Group, op: Operation, lead: Lead) -> tuple[Member, Matcher] | None:
    """`op` placed as the lead says; None where it does not fit the group's loops."""
    access, reference, offset = lead
    if access.offset != offset:
        return None
    matcher = Matcher(group.axes, reference)
    axes = match_dims(op, matcher, access)
    if axes is None:
        return None
    member = place(op, axes)
    return (member, matcher) if _edges_hold(group, op, member, matcher) and _role_fits(group, member, matcher) else None


def _edges_hold(group: Group, op: Operation, member: Member, matcher: Matcher) -> bool:
    """Whether every value from the group is read where it is written."""
    for operand, read in zip(op.operands, member.reads):
        producer = group.produced.get(operand)
        if producer is None:
            continue
        if read is None or operand in group.late:
            return False
        writes = dict(producer.writes)
        for split in matcher.splits:
            split_strides(writes, split)
        if not same_place(read, (writes, 0)):
            return False
    return True


def _in_place_holds(group: Group, member: Member, matcher: Matcher, targets: Mapping[SSAValue, SSAValue]) -> bool:
    """Whether arguments that the group overwrites are read only where, and in the pass in which, they are overwritten."""
    writes = {targets[r]: member.writes for r in member.op.results if r in targets}
    for argument, value in group.replaced.items():
        old = dict(group.produced[value].writes)
        for split in matcher.splits:
            split_strides(old, split)
        writes[argument] = old
    if not writes:
        return True
    reduces = any(m.op.name == "graph.reduce" for m in (*group.members, member))
    for m in (*group.members, member):
        for operand, read in zip(m.op.operands, m.reads if m.reads else [None] * len(m.op.operands)):
            if operand not in writes:
                continue
            if read is None or reduces:
                return False
            strides = dict(read[0])
            if m is not member:
                for split in matcher.splits:
                    split_strides(strides, split)
            if not same_place((strides, read[1]), (writes[operand], 0)):
                return False
    return True


def _role_fits(group: Group, member: Member, matcher: Matcher) -> bool:
    """Whether the member is a full, row or reducing operation of the group's rows and columns."""
    columns = group.columns
    if columns is not None:
        columns = _split_list(columns, matcher)
    covered = {a for dims in member.axes for a in dims}
    missing = [a for a in matcher.axes if a not in covered and a.size != 1]
    if group.kind in STORES:
        return not missing and len(matcher.axes) == len([a for a in group.axes]) + len(matcher.splits)
    opened = [a for a in matcher.axes if a.size != 1 and a not in _split_list(group.axes, matcher)]
    if opened and (columns is not None or any(m.op.name == "graph.reduce" for m in group.members)):
        return False
    if missing and columns is not None:
        return set(missing) == set(a for a in columns if a.size != 1) and member.op.name == "graph.map"
    if missing:
        return member.op.name == "graph.map" and all(m.op.name == "graph.map" for m in group.members)
    if member.op.name != "graph.reduce":
        return True
    reduced = {a for a in member.reduced if a.size != 1}
    if columns is None:
        return _column_size_fits(matcher.axes, member)
    inner = {a for a in columns if a.size != 1}
    outer = {a for a in matcher.axes if a.size != 1} - inner
    if reduced == inner:
        return True
    by_rows = [m for m in group.members if m.op.name == "graph.reduce" and m.op.results[0] not in group.late]
    if any(_keeps_neighbours(m) for m in by_rows):
        return False  # rows lie side by side as lanes, which leaves no place to add up columns
    argument = any(k.data.startswith("arg") for k in member.op.properties["kinds"].data)  # type: ignore[union-attr]
    return not argument and reduced in (outer, inner | outer) and _small(inner)


def _is_tail(axes: list[Axis], free: list[Axis]) -> bool:
    """Whether a map that leaves these axes out has a value a row; one that leaves out the first ones is a row itself."""
    real = [a for a in axes if a.size != 1]
    return bool(free) and len(free) < len(real) and real[-len(free) :] == free


def _column_size_fits(axes: list[Axis], member: Member) -> bool:
    kept = [a for a in axes if a not in member.reduced]
    return _is_row_reduction(axes, member) or _small(set(kept))


def _small(axes: set[Axis]) -> bool:
    size = product(a.size for a in axes)
    return isinstance(size, int) and size <= MAX_COLUMN_ELEMENTS


def _is_row_reduction(axes: list[Axis], member: Member) -> bool:
    """Whether each row is reduced by itself: its elements are neighbours in memory, or there are rows enough around them.

    What remains is a column reduction, which adds up whole rows: there the outermost axis is reduced.
    """
    table = _neighbourly(member)
    if table is None:
        return bool(axes) and axes[-1] in member.reduced
    return not _keeps_neighbours(member) or _has_rows_around(member, table)


def _neighbourly(member: Member) -> Strides | None:
    """The first read along some axis of which elements are neighbours."""
    return next((r[0] for r in member.reads if r is not None and 1 in r[0].values()), None)


def _keeps_neighbours(member: Member) -> bool:
    """Whether the axis along which a reduction's data are contiguous is one that it keeps."""
    table = _neighbourly(member)
    return table is not None and next(a for a, s in table.items() if s == 1) not in member.reduced


def _has_rows_around(member: Member, table: Strides) -> bool:
    """Whether a kept axis lies outside of a reduced one, with rows enough to keep threads busy, or too many."""
    kept = [a for dims in member.axes for a in dims if a not in member.reduced and a.size != 1]
    rows, length = product(a.size for a in kept), product(a.size for a in member.reduced)
    if isinstance(rows, int) and rows > MAX_COLUMN_ELEMENTS:
        return True  # a row of sums would not stay in a cache
    outer = product(a.size for a in kept if table.get(a, 0) != 1)
    few = isinstance(rows, int) and isinstance(outer, int) and rows < MANY_ROWS and outer < MANY_BLOCKS
    few = few and not (isinstance(length, int) and length < MANY_ROWS)
    inner = [table[r] for r in member.reduced if r in table]
    return not few and any(_is_longer(table[k], step) for k in kept if k in table for step in inner)


def _is_longer(a: Dim, b: Dim) -> bool:
    """Whether one step through memory is known to be longer than another."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) > abs(b)
    return a != b and divide_exact(a, b) is not None


def _decide_columns(group: Group, member: Member) -> None:
    """Chooses rows and columns from the first reduction of a group."""
    kept = [a for a in group.axes if a not in member.reduced]
    if all(a.size == 1 for a in kept):
        group.columns = _innermost(group, member)
    elif _is_row_reduction(group.axes, member):
        group.columns = list(member.reduced)
    else:
        group.columns = kept


def _innermost(group: Group, member: Member) -> list[Axis]:
    """For a reduction of everything: the last axis as columns, so that the others can be spread over threads."""
    real = [a for a in group.axes if a.size != 1]
    return real[-1:]


def _split_list(axes: list[Axis], matcher: Matcher) -> list[Axis]:
    result = list(axes)
    for split in matcher.splits:
        if split.axis in result:
            at = result.index(split.axis)
            result[at : at + 1] = [split.outer, split.inner]
    return result


def _apply(group: Group, split) -> None:
    for member in group.members:
        member.apply(split)
    if group.columns is not None and split.axis in group.columns:
        at = group.columns.index(split.axis)
        group.columns[at : at + 1] = [split.outer, split.inner]


def _admit(group: Group, member: Member) -> None:
    group.members.append(member)
    inner = {a for a in group.columns or [] if a.size != 1}
    late = member.op.name == "graph.reduce" and {a for a in member.reduced if a.size != 1} != inner
    for result in member.op.results:
        group.produced[result] = member
        if late:
            group.late.add(result)


def elements(op: Operation) -> Dim:
    """How many points the operation's domain has."""
    return product(domain_of(op))
