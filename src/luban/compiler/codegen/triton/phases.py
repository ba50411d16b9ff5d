"""A kernel's top level cut into phases: each becomes an entry of its own, launched after those before it.

A parallel loop deals its iterations out to programs, a vector loop that carries nothing its blocks, a lone dot or pack
its tiles; everything else between these runs in one program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

from luban.compiler.codegen.triton.extents import exact_trip, upper_bound
from luban.compiler.codegen.triton.loops import holds_blocks
from luban.compiler.ir import tile

_PURE = ("tile.dim", "tile.random", "tile.alloc")


@dataclass(frozen=True)
class Phase:
    """kind: "parallel", "lanes", "tiles" or "single"; `head` are the operations around it that it needs, in order.

    `loads` are values of earlier phases that come back through memory. With `dot` set, its tiles are the grid's axes 1
    and 2.
    """

    kind: str
    operations: tuple[Operation, ...]
    head: tuple[Operation, ...]
    loads: tuple[SSAValue, ...]
    dot: Operation | None = None


def is_pure(op: Operation) -> bool:
    """Whether an operation can be written again in every entry that needs its result."""
    return op.name in _PURE or op.name.split(".")[0] in ("arith", "math")


def split(kernel: tile.KernelOp, skip: frozenset[Operation], sources: dict) -> list[Phase]:
    """The phases of a kernel, in order; `skip` become nothing, `sources` are what dots read instead."""
    groups: list[tuple[str, list[Operation]]] = []
    for op in kernel.body.block.ops:
        if op in skip or is_pure(op):
            continue
        kind = _kind(op)
        if kind == "single" and groups and groups[-1][0] == "single":
            groups[-1][1].append(op)
        else:
            groups.append((kind, [op]))
    return [_phase(kernel, kind, operations, skip, sources) for kind, operations in groups]


def _kind(op: Operation) -> str:
    if op.name in ("tile.dot", "tile.pack"):
        return "tiles"
    if not isinstance(op, tile.ForOp):
        return "single"
    if op.role.data == "parallel":
        return "parallel"
    free = op.role.data == "vector" and not op.outs and exact_trip(op.lower, op.upper) is not None
    return "single" if not free else "parallel" if holds_blocks(op) else "lanes"


def _phase(
    kernel: tile.KernelOp, kind: str, operations: list[Operation], skip: frozenset[Operation], sources: dict
) -> Phase:
    own = set(operations)
    head: set[Operation] = set()
    loads: dict[SSAValue, None] = {}
    waiting = list(_operands(operations, sources))
    while waiting:
        value = waiting.pop()
        owner = value.owner
        if (
            not isinstance(owner, Operation)
            or owner.parent_op() is not kernel
            or owner in own
            or owner in head
            or owner in skip
        ):
            continue
        if is_pure(owner):
            head.add(owner)
            waiting.extend(owner.operands)
        else:
            loads[value] = None
    ordered = tuple(op for op in kernel.body.block.ops if op in head)
    return Phase(kind, tuple(operations), ordered, tuple(loads), _lone_dot(kind, operations[0], skip))


def _operands(operations: Iterable[Operation], sources: dict) -> Iterable[SSAValue]:
    for top in operations:
        for op in top.walk():
            yield from op.operands
            for side in ("a", "b"):
                pack = sources.get((op, side))
                if pack is not None:
                    yield from (pack.source, pack.base, pack.outer)


def _lone_dot(kind: str, op: Operation, skip: frozenset[Operation]) -> Operation | None:
    """The dot or pack whose tiles can be programs: nothing else of the phase has an effect."""
    if kind == "tiles":
        found = op
    elif kind == "parallel" and isinstance(op, tile.ForOp):
        rest = [
            o
            for o in op.body.block.ops
            if o not in skip and not is_pure(o) and o.name not in ("tile.yield", "tile.load")
        ]
        if (
            len(rest) != 1
            or rest[0].name != "tile.dot"
            or any(o.name == "tile.alloc" and o not in skip for o in op.body.block.ops)
        ):
            return None
        found = rest[0]
    else:
        return None
    sizes = (found.m, found.n) if isinstance(found, tile.DotOp) else (found.outer, found.k)  # type: ignore[attr-defined]
    bounded = all(upper_bound(v) is not None for v in sizes)
    return found if bounded else None
