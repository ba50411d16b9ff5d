"""Outputs that replace inputs: written into the input's memory by the program instead of being returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.ir import SSAValue

from luban.compiler.ir import graph
from luban.errors import LubanError


def assign_outputs(module: ModuleOp, metadata: dict[str, Any], assigned: dict[int, int]) -> None:
    """Turns output k into an assignment to input assigned[k]; both the module and the metadata's outputs change."""
    if not assigned:
        return
    func = next(op for op in module.body.block.ops if isinstance(op, graph.FuncOp))
    block = func.body.block
    returned = block.last_op
    assert isinstance(returned, graph.ReturnOp)
    tensors = [i for i, entry in enumerate(metadata["inputs"]) if entry["kind"] in ("tensor", "seed")]
    argument = dict(zip(tensors, block.args))
    values = iter(zip(returned.operands, returned.shapes.data, returned.accesses.data))
    items = [next(values) if entry["kind"] == "buffer" else None for entry in metadata["outputs"]]
    kept: list[Any] = []
    entries: list[dict[str, Any]] = []
    for k, entry in enumerate(metadata["outputs"]):
        if k not in assigned:
            kept += [items[k]] if items[k] is not None else []
            entries.append(entry)
            continue
        target = metadata["inputs"][assigned[k]]
        if entry["kind"] == "alias" and entry.get("input") == assigned[k]:
            continue  # unchanged
        value = _whole_value(entry, items, argument, metadata) if items[k] is None else items[k][0]  # type: ignore[index]
        if value is None or entry["strides"] != target["strides"] or entry["offset"] != 0:
            raise LubanError(
                f"the new value of input {assigned[k]} has strides {entry.get('strides')}, not {target['strides']}; "
                "make the parameter contiguous"
            )
        block.insert_op_before(graph.AssignOp.create(operands=[argument[assigned[k]], value]), returned)
    if any(entry["kind"] == "alias" and "output" in entry for entry in entries):
        raise LubanError("an output of the training step shares memory with another one; return copies of them")
    metadata["outputs"] = entries
    final = graph.ReturnOp.create(
        operands=[v for v, _, _ in kept],
        properties={"shapes": ArrayAttr([s for _, s, _ in kept]), "accesses": ArrayAttr([a for _, _, a in kept])},
    )
    block.insert_op_before(final, returned)
    returned.detach()
    returned.erase()


def _whole_value(
    entry: dict[str, Any], items: Sequence[Any], argument: dict[int, SSAValue], metadata: dict[str, Any]
) -> SSAValue | None:
    """The value that an alias shows, if it shows all of it as it lies in memory; else None."""
    if entry["kind"] != "alias":
        return None
    if "input" in entry:
        source, value = metadata["inputs"][entry["input"]], argument.get(entry["input"])
    else:
        source, item = metadata["outputs"][entry["output"]], items[entry["output"]]
        value = None if item is None else item[0]
    return value if (source["shape"], source["strides"]) == (entry["shape"], entry["strides"]) else None
