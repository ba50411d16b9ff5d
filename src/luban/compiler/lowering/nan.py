"""What a program compiled with `detect_nan` searches for NaNs, and what its metadata says about each search.

The program's float inputs are searched first, then every float output of every kernel right after it ran; the program
stops at the first NaN. An infinity is no finding: masks and log-sum-exps hold them by right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xdsl.ir import Attribute, SSAValue

from luban.compiler.codegen.llvm.nan_checks import NanCheck
from luban.compiler.codegen.llvm.values import scalar_type
from luban.compiler.ir import graph
from luban.compiler.ir.dtypes import is_float
from luban.symbolic import Dim, parse, product


class NanChecks:
    """Hands out checks and keeps a description of each: kernel (by position of its call, -1: before all) and value."""

    def __init__(self, places: Mapping[Any, Any], wanted: bool):
        self._places, self._wanted = places, wanted
        self.described: list[dict[str, Any]] = []

    def of_inputs(self, func: graph.FuncOp, metadata: dict[str, Any]) -> tuple[NanCheck, ...]:
        """Checks of the inputs. One with gaps in its memory is left out: nobody answers for what lies there."""
        entries = ((i, e) for i, e in enumerate(metadata["inputs"]) if e["kind"] == "tensor")
        made = []
        for (position, entry), value in zip(entries, func.body.block.args):
            dense = product(value.type.shape) == product(parse(d) for d in entry["shape"])  # type: ignore[attr-defined]
            made += self._check(value, -1, position) if dense else []
        return tuple(made)

    def of_call(self, number: int, outputs: Sequence[SSAValue]) -> tuple[NanCheck, ...]:
        """Checks of what a call writes."""
        return tuple(check for j, value in enumerate(outputs) for check in self._check(value, number, j))

    def _check(self, value: SSAValue, call: int, position: int) -> list[NanCheck]:
        element: Attribute = value.type.dtype  # type: ignore[attr-defined]
        if not self._wanted or not is_float(element):
            return []
        shape: tuple[Dim, ...] = value.type.shape  # type: ignore[attr-defined]
        self.described.append(
            {"call": call, "position": position, "type": str(element), "shape": [_plain(d) for d in shape]}
        )
        return [NanCheck(len(self.described) - 1, scalar_type(element), self._places[value], product(shape))]


def _plain(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)
