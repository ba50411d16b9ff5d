"""Gradients of outputs that nobody differentiates: zeros that take no memory.

A model returns its logits beside the loss, and only the loss is differentiated. torch fills a tensor with zeros for the
logits at every step (32 MB on a Llama of 6 layers, at the very moment when everything else is alive). Here the backward
reads pages that were never written instead: the system shows one page of zeros in all their places.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.fx import GraphModule

from luban.compiler.frontend.compile_fx import CompiledGraph

NODE = "CompiledFunctionBackward"  # the class of AOTAutograd's nodes
Missing = dict[int, Callable[[], torch.Tensor]]  # input of the backward -> what it gets where torch gives nothing


class Tangents:
    """What the forward and the backward of one compilation tell each other: whether the backward takes None."""

    def __init__(self) -> None:
        self.may_be_none = False

    def backward(self, gm: GraphModule, compiled: Callable[[list], Sequence[Any]]) -> Callable[[list], Sequence[Any]]:
        """The backward, which takes None for a tangent."""
        missing = _missing(gm, compiled)
        if missing is None:
            return compiled
        self.may_be_none = True

        def call(args: list) -> Sequence[Any]:
            if None in map(_none_or_something, args):
                for i, make in missing.items():
                    if args[i] is None:
                        args[i] = make()
            return compiled(args)

        return call

    def forward(self, compiled: Callable) -> Callable:
        """AOTAutograd's function; torch makes no zeros for the gradients of its outputs.

        The backward is compiled when it is first wanted, after the first call of this.
        """

        def call(*args: Any) -> Any:
            results = compiled(*args)
            if not self.may_be_none:
                return results
            for result in results if isinstance(results, (tuple, list)) else (results,):
                node: Any = getattr(result, "grad_fn", None)
                if type(node).__name__ == NODE and not any(result is given for given in args):
                    node.set_materialize_grads(False)
                    break  # the outputs of a graph have one node; an input that is returned has that of another
            return results

        skip_code(call.__code__)  # Dynamo shall not trace it
        return call


def _none_or_something(value: Any) -> int | None:
    """None for None: comparing a tensor with None would ask torch."""
    return None if value is None else 0


def _missing(gm: GraphModule, compiled: Any) -> Missing | None:
    """How to make each tangent; None where a size is open, as nothing tells it when the tangent is not there."""
    found: Missing = {}
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("val")
        if "tangent" not in node.name or not isinstance(value, torch.Tensor):
            continue
        sizes, strides = tuple(value.shape), value.stride()
        if any(type(n) is not int for n in (*sizes, *strides)) or type(value).__mro__[1] is not torch.Tensor:
            return None
        found[i] = _maker(sizes, strides, value.dtype, shared=_only_reads(compiled, i))
    return found or None


def _only_reads(compiled: Any, i: int) -> bool:
    """Whether no output is a window on input i. (Its holder could write into it, as sums of gradients do.)"""
    if not isinstance(compiled, CompiledGraph):
        return False
    return not any(entry.get("input") == i for entry in compiled.program.metadata["outputs"])


def _maker(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, shared: bool
) -> Callable[[], torch.Tensor]:
    if shared:
        return lambda: zeros(sizes, strides, dtype)
    return lambda: torch.empty_strided(sizes, strides, dtype=dtype).zero_()


_pages: list[torch.Tensor] = []


def zeros(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that must not be written: all of them show the same pages, which the system lets nobody write."""
    extent = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    length = extent * dtype.itemsize
    with torch.inference_mode(False):
        if not _pages or _pages[0].numel() < length:
            _pages[:] = [_never_written(max(length, mmap.PAGESIZE))]
        return _pages[0][:length].view(dtype).as_strided(sizes, strides)


def _never_written(length: int) -> torch.Tensor:
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it could write, which nobody does
        return torch.frombuffer(pages, dtype=torch.uint8)
