"""The plain alternative to fusion: every operation becomes a kernel of its own.

Slow, and useful when a fused program is wrong or is to be compared with something: what differs between the pipelines
`...,fuse` and `...,isolate` was done by fusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from luban.compiler.ir import graph
from luban.compiler.passes.graph.fuse import Plan, group_block
from luban.compiler.passes.registry import register


class _Apart(Plan):
    """A plan in which nothing joins."""

    def add(self, op: Operation) -> None:
        self._place(op)

    def _candidates(self, op: Operation, needs: set[int]) -> list[int]:
        return []


@register
@dataclass(frozen=True)
class Isolate:
    """Wraps each operation in a group of its own."""

    name: ClassVar[str] = "isolate"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                group_block(func.body.block, _Apart)
