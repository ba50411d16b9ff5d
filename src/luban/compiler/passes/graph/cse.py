"""Common subexpressions: of equal pure operations in a block the first stays and serves the uses of all."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.traits import Pure

from luban.compiler.ir import graph
from luban.compiler.passes.registry import register

Seen = MutableMapping[Hashable, Operation]


@register
@dataclass(frozen=True)
class Cse:
    """Operations are equal when name, operands, properties, result types and bodies (value-numbered) are.

    Operands that an operation reads twice through the same access become one. Each body is hashed once, so the time is
    linear in the size of the module.
    """

    name: ClassVar[str] = "cse"

    def apply(self, module: ModuleOp) -> None:
        _merge_block(module.body.block, {})


def _merge_block(block: Block, seen: Seen) -> None:
    for op in list(block.ops):
        if isinstance(op, (graph.MapOp, graph.ReduceOp, graph.ScatterOp)):
            _merge_operands(op)
        for region in op.regions:
            for inner in region.blocks:
                # A group may use what was computed before it; other bodies see only scalars of their own.
                _merge_block(inner, ChainMap({}, seen) if isinstance(op, graph.GroupOp) else {})
        if not is_mergeable(op):
            continue
        key = operation_key(op, {})
        first = seen.setdefault(key, op)
        if first is not op and not _both_returned(first, op):
            for old, new in zip(op.results, first.results, strict=False):
                old.replace_all_uses_with(new)
            block.erase_op(op)


def is_mergeable(op: Operation) -> bool:
    """Whether equal operations of this kind give equal results and do nothing else."""
    return bool(op.results) and (
        op.name.startswith(("arith.", "math.")) or isinstance(op, graph.LoadOp) or op.has_trait(Pure)
    )


def operation_key(op: Operation, numbers: dict[SSAValue, int]) -> Hashable:
    """What an operation computes: values inside bodies by number (entered into `numbers`), others by identity."""
    operands = tuple(numbers.get(v, v) for v in op.operands)
    properties = tuple(sorted(op.properties.items())) if op.properties else ()
    bodies = tuple(_body_key(block, numbers) for region in op.regions for block in region.blocks)
    return op.name, operands, properties, tuple(r.type for r in op.results), bodies


def _body_key(block: Block, numbers: dict[SSAValue, int]) -> Hashable:
    for argument in block.args:
        numbers[argument] = len(numbers)
    keys = []
    for op in block.ops:
        keys.append(operation_key(op, numbers))
        for result in op.results:
            numbers[result] = len(numbers)
    return tuple(a.type for a in block.args), tuple(keys)


def _merge_operands(op: graph.MapOp | graph.ReduceOp | graph.ScatterOp) -> None:
    """Operands that are the same value through the same access become one."""
    block = op.body.block
    first: dict[Hashable, int] = {}
    kept: list[int] = []
    for i, (value, access) in enumerate(zip(op.ins, op.accesses, strict=False)):
        j = first.setdefault((value, access), i)
        if j == i:
            kept.append(i)
        else:
            block.args[i].replace_all_uses_with(block.args[j])
    keep_operands(op, kept)


def keep_operands(op: graph.MapOp | graph.ReduceOp | graph.ScatterOp, kept: list[int]) -> None:
    """Drops the operands that are not listed, with their accesses and block arguments (which nothing may use)."""
    if len(kept) == len(op.ins):
        return
    block, values, accesses = op.body.block, list(op.ins), list(op.accesses)
    wanted = set(kept)
    for argument in [a for i, a in enumerate(block.args) if i not in wanted]:
        block.erase_arg(argument)
    leading = list(op.operands[: len(op.operands) - len(values)])  # a scatter's init
    op.operands = [*leading, *(values[i] for i in kept)]
    op.properties["accesses"] = ArrayAttr([accesses[i] for i in kept])


def _both_returned(first: Operation, second: Operation) -> bool:
    """Whether the caller would get one piece of memory where the program promises two."""
    return _is_returned(first) and _is_returned(second)


def _is_returned(op: Operation) -> bool:
    return any(isinstance(use.operation, graph.ReturnOp) for r in op.results for use in r.uses)
