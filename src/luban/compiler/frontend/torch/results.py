"""Graph outputs: which are new buffers, which are windows on inputs or on other outputs, and in which layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from xdsl.dialects.builtin import ArrayAttr
from xdsl.ir import Operation, SSAValue

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch.arguments import Arguments, plain, plain_dim
from luban.compiler.frontend.torch.builder import Builder, meta_of
from luban.compiler.frontend.torch.dtypes import name
from luban.compiler.frontend.torch.views import View, expand, moved, same_layout, storage_order
from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Dims
from luban.symbolic import Dim, product


@dataclass
class Results:
    """The outputs so far. `owner`: the output that holds a value's buffer, with the clone by which it got there."""

    cx: Builder
    arguments: Arguments
    entries: list[dict[str, Any]] = field(default_factory=list)
    returned: list[View] = field(default_factory=list)
    owner: dict[SSAValue, tuple[int, int]] = field(default_factory=dict)

    def add(self, value: Any, fake: Any, pool: str) -> None:
        """One more output. `fake` is what tracing says of it; pool is "own" or "saved"."""
        if isinstance(value, View):
            self._add_tensor(in_layout(self.cx, value, fake), pool)
        elif value is None:
            self.entries.append({"kind": "none"})
        else:
            self.entries.append({"kind": "symbol", "expr": plain_dim(value)})

    def _add_tensor(self, view: View, pool: str) -> None:
        window = {"shape": plain(view.shape), "strides": plain(view.strides), "offset": plain_dim(view.offset)}
        position = self.arguments.position.get(view.base)
        if position is not None and view.copy == 0:
            self.entries.append({"kind": "alias", "input": position, **window})
            return
        held = self.owner.get(view.base)
        if held is not None and held[1] == view.copy:
            self.entries.append({"kind": "alias", "output": held[0], **window})
            return
        if held is not None or not isinstance(view.base.owner, Operation):
            view = fresh(self.cx, view)
            window["offset"] = 0
        self.owner[view.base] = (len(self.entries), view.copy)
        size = plain_dim(product(view.base.type.shape))  # type: ignore[attr-defined]
        self.entries.append({"kind": "buffer", "dtype": name(view.dtype), **window, "size": size, "pool": pool})
        self.returned.append(view)

    def finish(self) -> None:
        """Ends the function with the new buffers, in order."""
        self.cx.add(
            graph.ReturnOp.create(
                operands=[v.base for v in self.returned],
                properties={
                    "shapes": ArrayAttr([Dims(v.shape) for v in self.returned]),
                    "accesses": ArrayAttr([v.access for v in self.returned]),
                },
            )
        )


def in_layout(cx: Builder, view: View, fake: torch.Tensor) -> View:
    """The value with the strides that tracing promises, copied only where they differ.

    Promised strides with gaps that the value does not have already (not even by expansion) become row-major.
    """
    meta = meta_of(fake)
    if 0 in view.shape:
        return moved(view, view.shape, meta.strides, 0)
    if same_layout(view.shape, view.strides, meta.strides):
        return moved(view, view.shape, meta.strides)
    hints = [torch_dims.hint(s) for s in fake.stride()]
    small = [1 if s == 0 else n for n, s in zip(view.shape, meta.strides)]
    order = storage_order(small, meta.strides, hints)
    made = cx.dense(moved(view, small, view.strides), order or tuple(range(len(small))))
    return expand_known(made, view.shape)


def expand_known(view: View, shape: tuple[Dim, ...]) -> View:
    """`expand` that keeps the strides of dims of size 1."""
    wide = expand(view, shape)
    return moved(wide, shape, [0 if n != 1 and m == 1 else s for n, m, s in zip(shape, view.shape, wide.strides)])


def fresh(cx: Builder, view: View) -> View:
    """A copy in memory of its own, with the same strides where they have no gaps."""
    hints = [s if isinstance(s, int) else 1 << 40 for s in view.strides]
    small = [1 if s == 0 else n for n, s in zip(view.shape, view.strides)]
    order = storage_order(small, view.strides, hints)
    made = cx.dense(moved(view, small, view.strides), order or tuple(range(len(small))))
    return expand_known(made, view.shape)
