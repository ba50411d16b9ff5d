"""Contractions read what a cast to bfloat16 reads: packing rounds it on the way.

Autocast casts every weight before its products, forward and again in the backward: a kernel of its own that reads four
bytes and writes two, which packing reads again. A cast with any other reader stays, and what is cast stays cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, ModuleOp, bf16, f32
from xdsl.ir import Operation, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access
from luban.compiler.passes.graph.compose import through
from luban.compiler.passes.graph.inline_casts import is_conversion
from luban.compiler.passes.registry import register


@register
@dataclass(frozen=True)
class PackedCasts:
    """See the module. Runs on contractions of one m, n and k dimension."""

    name: ClassVar[str] = "packed_casts"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                for op in list(func.body.block.ops):
                    if op.name == "graph.map" and is_conversion(op) and _rounds(op):
                        _fold(op)


def _rounds(cast: Operation) -> bool:
    types = (cast.operands[0].type, cast.results[0].type)
    return tuple(t.dtype for t in types) == (f32, bf16)  # type: ignore[attr-defined]


def _fold(cast: Operation) -> None:
    """Lets all readers of the cast read its source, if all of them can."""
    uses = list(cast.results[0].uses)
    places = [(use.operation, use.index, _place(cast, use.operation, use.index)) for use in uses]
    if any(place is None for *_, place in places):
        return
    for reader, operand, place in places:
        accesses = list(reader.properties["accesses"].data)  # type: ignore[union-attr]
        accesses[operand] = place
        reader.properties["accesses"] = ArrayAttr(accesses)
        reader.properties["element"] = bf16
        reader.operands[operand] = cast.operands[0]
    cast.detach()
    cast.erase()


def _place(cast: Operation, reader: Operation, operand: int) -> Access | None:
    """How a contraction would read the cast's source, or None where it cannot."""
    if not isinstance(reader, graph.ContractOp) or not _others_are(reader, cast.results[0]):
        return None
    access = reader.accesses.data[operand]
    return through(access, reader.domain.data, cast.properties["domain"].data, cast.properties["accesses"].data[0])  # type: ignore[union-attr]


def _others_are(contract: graph.ContractOp, rounded: SSAValue) -> bool:
    """Whether both operands are bfloat16 when they are multiplied."""
    return all(v is rounded or v.type.dtype == bf16 or contract.element == bf16 for v in (contract.a, contract.b))  # type: ignore[attr-defined]
