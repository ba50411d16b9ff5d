"""fallback="allow": operators without a kernel run in eager, counted; everything between them is compiled."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from luban.compiler.frontend.compile_fx import compile_fx
from luban.errors import UnsupportedOperatorError
from luban.runtime import report


def compile_with_fallback(gm: GraphModule, target: str, name: str, saved_from: int | None = None) -> Callable:
    """Like compile_fx, but never refuses an operator that eager can run."""
    try:
        return compile_fx(gm, target, name, saved_from)
    except UnsupportedOperatorError:
        return _compile_split(gm, target, name)


def _compile_split(gm: GraphModule, target: str, name: str) -> Callable:
    from luban.compiler.frontend.torch.importer import operator_name, unsupported

    outside = set(unsupported(gm))
    names = sorted({operator_name(node) for node in outside})
    for each in names:
        report.add_fallback(each)
    listed = ", ".join(names)
    warnings.warn(f"Luban runs these operators in eager, having no kernels for them: {listed}", stacklevel=2)
    parts = _split_points(gm, outside)
    split = split_module(gm, None, lambda node: parts[node], keep_original_order=True)  # type: ignore[arg-type]
    eager = {parts[node] for node in outside}
    for child, module in split.named_children():
        number = int(child.rpartition("_")[2]) if child.startswith("submod_") else None
        if number is not None and number not in eager and isinstance(module, GraphModule):
            setattr(split, child, _Part(compile_fx(module, target, f"{name}_{number}")))

    def run(args: list):
        inputs = list(args)
        args.clear()
        return split(*inputs)

    return run


def _split_points(gm: GraphModule, outside: set[Node]) -> dict[Node, int]:
    """A number for every node: runs of supported nodes alternate with runs of unsupported ones.

    What takes a tuple apart stays with the operator that made it, so that only tensors and sizes go from part to part.
    """
    number, last = 0, False
    parts: dict[Node, int] = {}
    away = set(outside)
    for node in gm.graph.nodes:
        if node.target is operator.getitem and node.args[0] in away:
            away.add(node)
            parts[node] = parts[node.args[0]]
            continue
        if node.op == "call_function" and (node in away) != last:
            number, last = number + 1, node in away
        parts[node] = number
    return parts


class _Part(torch.nn.Module):
    """A compiled part as the submodule that split_module calls."""

    def __init__(self, compiled: Callable):
        super().__init__()
        self._compiled = compiled

    def forward(self, *args):
        result = self._compiled(list(args))
        return result[0] if len(result) == 1 else tuple(result)
