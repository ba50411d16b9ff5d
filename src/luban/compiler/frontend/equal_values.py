"""Equal values of a joint graph computed once, before it is split into forward and backward.

Without it a value and its twin are both kept. torch's partitioner does the same, but its duplicate removal imports
Inductor's lowerings (12 MB resident in the training process, for nothing else).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

aten = torch.ops.aten
_UNDEFINED = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip


def merge_equal_values(graph: Graph) -> None:
    """Replaces every pure call by an earlier call of the same function on the same values.

    Tensors that share memory with an output stay: two outputs that are equal are two tensors for the caller.
    """
    returned = _storages(graph)
    found: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if _writes(node):
            found.clear()  # what is read after a write is not what was read before it
            continue
        key = None if _storage(node) in returned else _key(node)
        if key is None:
            continue
        before = found.setdefault(key, node)
        if before is not node:
            node.replace_all_uses_with(before)
            graph.erase_node(node)


def _storages(graph: Graph) -> set[StorageWeakRef]:
    """The storages of the graph's outputs."""
    [output] = graph.find_nodes(op="output")
    return {storage for node in output.all_input_nodes if (storage := _storage(node)) is not None}


def _storage(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:  # torch's answer for a tensor without memory of its own, such as a sparse one
        return None


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _key(node: Node) -> Hashable | None:
    """What equal calls have in common; None for a call that gives another value each time, or that is no plain operator."""
    target = node.target
    if target is not operator.getitem and not isinstance(target, torch._ops.OpOverload):
        return None
    if isinstance(target, torch._ops.OpOverload) and (
        target in _UNDEFINED
        or torch.Tag.nondeterministic_seeded in target.tags
        or target is aten._local_scalar_dense.default  # each makes a symbol of its own
    ):
        return None
    try:
        key = target, _frozen(node.args), _frozen(node.kwargs)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """Arguments as a key. Types count (1 is not 1.0 nor True), and so does the sign of zero."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in sorted(value.items()))
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value
