"""Scalar expressions over tensor reads: what a value is at the places that a reader visits, as far as cheap maps made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.ir.attributes import Access
from luban.compiler.lowering.bodies import is_expensive, uses_index
from luban.compiler.passes.graph.compose import through
from luban.symbolic import Dim

MAX_OPERATIONS = (
    12  # scalar operations, constants included, that are cheaper to repeat than a value is to store and load
)
TRAPS = tuple(f"arith.{n}" for n in ("divsi", "divui", "remsi", "remui", "ceildivsi", "ceildivui", "floordivsi"))


@dataclass(frozen=True)
class Leaf:
    """An element of a tensor."""

    value: SSAValue
    access: Access


@dataclass(frozen=True)
class Node:
    """The body of a map, over what it reads."""

    op: Operation
    parts: tuple[Leaf | Node, ...]


Expression = Leaf | Node


def expression(
    value: SSAValue, access: Access, domain: Sequence[Dim], opens: Callable[[Operation], bool]
) -> Expression:
    """`value` at `access` over `domain`, through the maps that `opens` lets it look into."""
    op = value.owner
    if not isinstance(op, Operation) or not is_cheap_map(op) or not opens(op):
        return Leaf(value, access)
    made = op.properties["domain"].data  # type: ignore[union-attr]
    parts = []
    for operand, inner in zip(op.operands, op.properties["accesses"].data, strict=True):  # type: ignore[union-attr]
        seen = through(access, domain, made, inner)
        if seen is None:
            return Leaf(value, access)
        parts.append(expression(operand, seen, domain, opens))
    return Node(op, tuple(parts))


def is_cheap_map(op: Operation) -> bool:
    """Whether a map gives one value, of few plain operations on elements alone."""
    if op.name != "graph.map" or len(op.results) != 1 or uses_index(op) or is_expensive(op):
        return False
    if not all(isinstance(a, Access) for a in op.properties["accesses"].data):  # type: ignore[union-attr]
        return False
    names = [inner.name for inner in op.regions[0].block.ops]
    return len(names) - 1 <= MAX_OPERATIONS and not any(n in TRAPS for n in names)


def leaves(tree: Expression) -> list[Leaf]:
    """The tensor reads of an expression, from left to right."""
    return [tree] if isinstance(tree, Leaf) else [leaf for part in tree.parts for leaf in leaves(part)]


def write(block: Block, tree: Expression, read: Callable[[Leaf], SSAValue]) -> SSAValue:
    """Adds the expression's operations to a block; gives its scalar."""
    if isinstance(tree, Leaf):
        return read(tree)
    body = tree.op.regions[0].block
    values: dict[SSAValue, SSAValue] = {
        arg: write(block, part, read) for arg, part in zip(body.args, tree.parts, strict=True)
    }
    for op in body.ops:
        if op.name == "graph.yield":
            return values[op.operands[0]]
        copy = op.clone(values)
        block.add_op(copy)
        values.update(zip(op.results, copy.results, strict=True))
    raise AssertionError(f"the body of {tree.op.name} has no graph.yield")
