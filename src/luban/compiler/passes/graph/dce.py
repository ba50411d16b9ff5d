"""Dead code: operations without used results and operands that no body reads go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block

from luban.compiler.ir import graph
from luban.compiler.passes.graph.cse import is_mergeable, keep_operands
from luban.compiler.passes.registry import register


@register
@dataclass(frozen=True)
class Dce:
    """One walk backwards, so that what only dead operations used is dead by the time it is reached.

    An operation with several results stays as long as one of them is used.
    """

    name: ClassVar[str] = "dce"

    def apply(self, module: ModuleOp) -> None:
        _clean_block(module.body.block)


def _clean_block(block: Block) -> None:
    for op in reversed(list(block.ops)):
        if is_mergeable(op) and not any(r.first_use for r in op.results):
            op.detach()
            op.erase()
            continue
        for region in op.regions:
            for inner in region.blocks:
                _clean_block(inner)
        if isinstance(op, (graph.MapOp, graph.ReduceOp, graph.ScatterOp)):
            keep_operands(op, [i for i, a in enumerate(op.body.block.args) if a.first_use])
