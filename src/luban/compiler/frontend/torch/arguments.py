"""Placeholders and constants as function arguments, and what the metadata says about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from xdsl.ir import Block, SSAValue

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch.builder import Meta, meta_of, tensor_type
from luban.compiler.frontend.torch.dtypes import ELEMENT, name
from luban.compiler.frontend.torch.registry import Unsupported
from luban.compiler.frontend.torch.views import View, moved, storage_order
from luban.compiler.ir.attributes import contiguous
from luban.symbolic import Dim, Expr, symbols


@dataclass
class Arguments:
    """The arguments so far: metadata entries, which input an argument is, where symbols come from."""

    block: Block
    entries: list[dict[str, Any]] = field(default_factory=list)
    position: dict[SSAValue, int] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def note_symbols(self, dim: Dim, source: list[Any] | None) -> None:
        """Remembers the symbols of a dim, and `source` if the dim is just a symbol."""
        if isinstance(dim, int):
            return
        for s in sorted(symbols(dim)):
            if s not in self.names:
                self.names.append(s)
        plain = str(dim)
        if source is not None and plain in self.names:
            self.sources.setdefault(plain, source)

    def missing_sources(self) -> list[str]:
        """Symbols that no input gives directly."""
        return [s for s in self.names if s not in self.sources]


def bind(arguments: Arguments, value: Any) -> View | Dim | None:
    """One more input from its fake value. Raises Unsupported after the input has been counted, if it has no form."""
    i = len(arguments.entries)
    if isinstance(value, torch.Tensor):
        arguments.entries.append({"kind": "none"})
        meta = meta_of(value)
        hints = [torch_dims.hint(s) for s in value.stride()]
        view = tensor_argument(arguments, meta, hints)
        arguments.position[view.base] = i
        arguments.entries[i] = describe(meta)
        for d, n in enumerate(meta.shape):
            arguments.note_symbols(n, ["size", i, d])
        for s in meta.strides:
            arguments.note_symbols(s, None)
        return view
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        dim = torch_dims.dim(value)
        symbolic = isinstance(dim, Expr)
        arguments.entries.append({"kind": "symbol", "name": str(dim)} if symbolic else {"kind": "none"})
        arguments.note_symbols(dim, ["input", i])
        return dim
    arguments.entries.append({"kind": "none"})
    if value is None or isinstance(value, (bool, float)):
        return value  # type: ignore[return-value]
    raise Unsupported(f"an input of type {type(value).__name__}")


def tensor_argument(arguments: Arguments, meta: Meta, hints: list[int]) -> View:
    """A new function argument that covers the tensor's memory, seen through the tensor's strides.

    The argument has the tensor's dims in memory order where there are no gaps, and is flat over the extent otherwise.
    """
    shape, strides = meta.shape, meta.strides
    if 0 in shape:
        strides, order = contiguous(shape), tuple(range(len(shape)))
    else:
        order = storage_order(shape, strides, hints)  # type: ignore[assignment]
    if order is not None:
        size = tuple(shape[d] for d in order if shape[d] != 1)
    else:
        extent: Dim = 1
        for n, s in zip(shape, strides):
            extent = extent + (n - 1) * s
        size = (extent,)
    block = arguments.block
    base = block.insert_arg(tensor_type(size, ELEMENT[meta.dtype]), len(block.args))
    return View(base, shape, strides, 0, meta.dtype)


def constant_argument(arguments: Arguments, tensor: torch.Tensor, index: int) -> View:
    """A tensor of the graph module as an input after the placeholders; `index` is its place among the constants."""
    found = bind(arguments, tensor)
    assert isinstance(found, View)
    del arguments.position[found.base]  # an output must never alias a constant
    arguments.entries[-1]["constant"] = index
    return moved(found, found.shape, found.strides)


def describe(meta: Meta) -> dict[str, Any]:
    """The metadata entry of a tensor input."""
    return {"kind": "tensor", "dtype": name(meta.dtype), "shape": plain(meta.shape), "strides": plain(meta.strides)}


def plain(dims: Any) -> list[int | str]:
    """Dims as JSON holds them: numbers, and texts for expressions."""
    return [plain_dim(d) for d in dims]


def plain_dim(dim: Dim) -> int | str:
    """One dim as JSON holds it."""
    return dim if isinstance(dim, int) else str(dim)
