"""Heads of keys and values that several query heads share are read once, where they are, and their gradients summed there.

Models repeat keys and values for every query head (grouped-query attention). The attention kernels take `shared` heads
instead: nothing is repeated in memory, and the backward kernel adds up what a group of heads gives to its keys. In a
training step of a small Llama (three heads a group) the repeats and sums moved 150 MB of 2.2 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, Dims, TensorType, contiguous
from luban.compiler.passes.graph.compose import through
from luban.compiler.passes.graph.expressions import Expression, Leaf, Node, is_cheap_map, leaves, write
from luban.compiler.passes.graph.inline_casts import is_conversion
from luban.compiler.passes.registry import register
from luban.symbolic import Dim, product

KEYS = {"graph.attention": (1, 2), "graph.attention_backward": (2, 3)}  # the operands that are keys and values
MIN_TASKS = 4  # heads of keys, batch entries counted, below which the backward keeps a task for each query head
MEMBER = 2  # the dim of (batch, head of keys, member of its group, position, feature) that counts members


@register
@dataclass(frozen=True)
class AttentionHeads:
    """See the module."""

    name: ClassVar[str] = "attention_heads"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                for op in list(func.body.block.ops):
                    if op.name in KEYS and graph.shared_heads(op) == 1:
                        _share(op)


def _share(op: Operation) -> None:
    """Rewrites an attention whose keys and values are repeated for groups of heads."""
    keys = [_repeats(op, i) for i in KEYS[op.name]]
    shared = next((s for s in keys[0] if all(s in k for k in keys)), None)
    if shared is None:
        return
    sums: list[list[_Sum]] = []
    batch, heads = op.properties["domain"].data[:2]  # type: ignore[union-attr]
    if op.name == "graph.attention_backward" and isinstance(batch, int) and batch * (heads // shared) < MIN_TASKS:
        return
    for gradient in op.results[1:] if op.name == "graph.attention_backward" else ():
        found = _sums(gradient, op, shared, [])
        if found is None:
            return
        sums.append(found)
    _rebuild(op, shared, [k[shared] for k in keys], sums)


# ---- keys and values


def _repeats(op: Operation, operand: int) -> dict[int, Expression]:
    """Group sizes with which the operand repeats heads, and what a head of its own is then."""
    batch, heads, _, positions, size = op.properties["domain"].data  # type: ignore[union-attr]
    access, value = op.properties["accesses"].data[operand], op.operands[operand]  # type: ignore[union-attr]
    found: dict[int, Expression] = {}
    whole = [heads] if isinstance(heads, int) and heads > 1 and access.strides[1] == 0 else []
    for shared in (*whole, *_group_sizes(value, heads)):
        domain = (batch, heads // shared, shared, positions, size)
        strides = access.strides
        wide = Access.of([strides[0], strides[1] * shared, *strides[1:]], access.offset)
        tree = _unrepeated(value, wide, domain)
        if tree is not None:
            found[shared] = tree
    return found


def _group_sizes(value: SSAValue, heads: Dim) -> list[int]:
    """Sizes of the dims along which the maps behind a value repeat what they read, if they divide the heads."""
    sizes: list[int] = []
    while isinstance(value.owner, Operation) and is_cheap_map(value.owner) and len(value.owner.operands) == 1:
        op = value.owner
        access = op.properties["accesses"].data[0]  # type: ignore[union-attr]
        sizes += [
            n
            for n, s in zip(op.properties["domain"].data, access.strides, strict=True)  # type: ignore[union-attr]
            if s == 0 and isinstance(n, int) and n > 1 and isinstance(heads, int) and heads % n == 0
        ]
        value = op.operands[0]
    return sizes


def _unrepeated(value: SSAValue, access: Access, domain: Sequence[Dim]) -> Expression | None:
    """The value as an expression that does not move along the members of a group."""
    if access.strides[MEMBER] == 0:
        return Leaf(value, access)
    op = value.owner
    if not isinstance(op, Operation) or not is_cheap_map(op) or len(op.operands) != 1:
        return None
    made, inner = op.properties["domain"].data, op.properties["accesses"].data[0]  # type: ignore[union-attr]
    seen = through(access, domain, made, inner)
    tree = None if seen is None else _unrepeated(op.operands[0], seen, domain)
    if tree is None:
        return None
    return tree if _is_copy(op) else Node(op, (tree,))


def _is_copy(op: Operation) -> bool:
    block = op.regions[0].block
    return len(list(block.ops)) == 1 and block.last_op is not None and block.last_op.operands[0] is block.args[0]


# ---- gradients


@dataclass(frozen=True)
class _Sum:
    """A reduction over the members of each group, and the maps between it and the gradient."""

    reduce: Operation
    path: tuple[Operation, ...]


def _sums(value: SSAValue, op: Operation, shared: int, path: list[Operation]) -> list[_Sum] | None:
    """The reductions that use a gradient, or None where something else does."""
    found: list[_Sum] = []
    for use in value.uses:
        reader = use.operation
        if reader.name == "graph.reduce" and _is_group_sum(reader, op, shared, path):
            found.append(_Sum(reader, tuple(path)))
        elif reader.name == "graph.map" and len(reader.operands) == 1 and (_is_copy(reader) or is_conversion(reader)):
            further = _sums(reader.results[0], op, shared, [*path, reader])
            if further is None:
                return None
            found += further
        else:
            return None
    return found


def _is_group_sum(reader: Operation, op: Operation, shared: int, path: Sequence[Operation]) -> bool:
    batch, heads, _, positions, size = op.properties["domain"].data  # type: ignore[union-attr]
    domain = reader.properties["domain"].data  # type: ignore[union-attr]
    if len(reader.operands) != 1 or len(reader.results) != 1 or not (_is_copy(reader) or is_conversion(reader)):
        return False
    kinds, reduced = reader.properties["kinds"].data, reader.properties["reduced"].data  # type: ignore[union-attr]
    access = reader.properties["accesses"].data[0]  # type: ignore[union-attr]
    if [k.data for k in kinds] != ["add"] or product(domain[len(domain) - reduced :]) != shared:
        return False
    for made in reversed(path):
        if not isinstance(access, Access):
            return False
        access = through(access, domain, made.properties["domain"].data, made.properties["accesses"].data[0])  # type: ignore[union-attr]
    if not isinstance(access, Access) or access.offset != 0:
        return False
    strides = contiguous((batch, heads, positions, size))
    wanted = zip(
        (batch, heads // shared, positions, size, shared),
        (strides[0], strides[1] * shared, strides[2], strides[3], strides[1]),
        strict=True,
    )
    found = zip(domain, access.strides, strict=True)
    return [(n, s) for n, s in wanted if n != 1] == [(n, s) for n, s in found if n != 1]


# ---- the new operation


def _rebuild(op: Operation, shared: int, keys: Sequence[Expression], sums: Sequence[Sequence[_Sum]]) -> None:
    block = op.parent
    assert block is not None
    batch, heads, _, positions, size = op.properties["domain"].data  # type: ignore[union-attr]
    domain = (batch, heads // shared, positions, size)
    operands, accesses = list(op.operands), list(op.properties["accesses"].data)  # type: ignore[union-attr]
    for i, tree in zip(KEYS[op.name], keys, strict=True):
        operands[i], accesses[i] = _materialised(tree, domain, op)
    types = list(r.type for r in op.results)
    if op.name == "graph.attention_backward":
        types[1:] = [TensorType.of(domain, t.dtype) for t in types[1:]]  # type: ignore[attr-defined]
    new = type(op).create(
        operands=operands,
        result_types=types,
        properties={**op.properties, "accesses": ArrayAttr(accesses), "shared": IntAttr(shared)},
    )
    block.insert_op_before(new, op)
    for result, found in zip(new.results[1:], sums):
        for s in found:
            s.reduce.results[0].replace_all_uses_with(_converted(result, s, domain))
    kept = 1 if sums else len(op.results)
    for old, result in list(zip(op.results, new.results, strict=True))[:kept]:
        old.replace_all_uses_with(result)
    for s in (s for found in sums for s in found):
        for dead in (s.reduce, *reversed(s.path)):
            if dead.parent is not None and not any(r.first_use for r in dead.results):
                dead.detach()
                dead.erase()
    op.detach()
    op.erase()


def _materialised(tree: Expression, domain: Sequence[Dim], before: Operation) -> tuple[SSAValue, Access]:
    """What the kernel reads for an expression over (batch, head of keys, member, position, feature)."""
    if isinstance(tree, Leaf):
        return tree.value, _without_member(tree.access)
    leaf = leaves(tree)[0]
    body = Block(arg_types=[leaf.value.type.dtype])  # type: ignore[attr-defined]
    value = write(body, tree, lambda _: body.args[0])
    body.add_op(graph.YieldOp.create(operands=[value]))
    made = _map(leaf.value, _without_member(leaf.access), domain, value.type, body)
    before.parent.insert_op_before(made, before)  # type: ignore[union-attr]
    return made.results[0], Access.of(contiguous(domain))


def _without_member(access: Access) -> Access:
    return Access.of([*access.strides[:MEMBER], *access.strides[MEMBER + 1 :]], access.offset)


def _converted(value: SSAValue, found: _Sum, domain: Sequence[Dim]) -> SSAValue:
    """The sum that the kernel made, in the type that the program summed in."""
    body = Block(arg_types=[value.type.dtype])  # type: ignore[attr-defined]
    got: SSAValue = body.args[0]
    for op in (*found.path, found.reduce):
        if not _is_copy(op):
            inner = op.regions[0].block
            copy = inner.first_op.clone({inner.args[0]: got})  # type: ignore[union-attr]
            body.add_op(copy)
            got = copy.results[0]
    if got is body.args[0]:
        return value
    body.add_op(graph.YieldOp.create(operands=[got]))
    made = _map(value, Access.of(contiguous(domain)), domain, got.type, body)
    found.reduce.parent.insert_op_before(made, found.reduce)  # type: ignore[union-attr]
    return made.results[0]


def _map(value: SSAValue, access: Access, domain: Sequence[Dim], dtype, body: Block) -> graph.MapOp:
    return graph.MapOp.create(
        operands=[value],
        result_types=[TensorType.of(domain, dtype)],
        properties={"domain": Dims(tuple(domain)), "accesses": ArrayAttr([access])},
        regions=[Region(body)],
    )
