"""Simplifies scalar bodies: constants are folded, operations that change nothing go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.passes.graph.folds import FOLDS, fold_constants
from luban.compiler.passes.registry import register


@register
@dataclass(frozen=True)
class Simplify:
    """One walk in program order: an operation's operands are simplified before the operation is looked at.

    keep_rounding=false also drops a rounding to a narrower float that is undone at once (extf of truncf), as autocast
    leaves them inside a fused body; this changes results by the narrower type's precision.
    """

    name: ClassVar[str] = "simplify"
    keep_rounding: bool = True

    def apply(self, module: ModuleOp) -> None:
        _simplify_block(module.body.block, self.keep_rounding)


def _simplify_block(block: Block, keep_rounding: bool) -> None:
    for op in list(block.ops):
        for region in op.regions:
            for inner in region.blocks:
                _simplify_block(inner, keep_rounding)
        replacement = _folded(op, keep_rounding)
        if replacement is not None:
            op.results[0].replace_all_uses_with(replacement)
            block.erase_op(op)


def _folded(op: Operation, keep_rounding: bool) -> SSAValue | None:
    """The simplest value that equals the operation's result, or None when it stays."""
    replacement = _fold_once(op, keep_rounding)
    if replacement is None:
        return None
    made = replacement.owner
    # A rule may have made an operation that folds further, e.g. an absolute value of a constant.
    if isinstance(made, Operation) and made.next_op is op and not replacement.first_use:
        again = _folded(made, keep_rounding)
        if again is not None:
            made.detach()
            made.erase()
            return again
    return replacement


def _fold_once(op: Operation, keep_rounding: bool) -> SSAValue | None:
    for rule in FOLDS.get(op.name, ()):
        found = rule(op)
        if found is not None:
            return found
    if not keep_rounding and op.name == "arith.extf":
        inner = op.operands[0].owner
        if (
            isinstance(inner, Operation)
            and inner.name == "arith.truncf"
            and inner.operands[0].type == op.results[0].type
        ):
            return inner.operands[0]
    return fold_constants(op)
