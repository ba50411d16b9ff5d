"""Views: every FX tensor is a strided window on a dense SSA tensor, so that views cost no operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from xdsl.ir import SSAValue

from luban.compiler.ir.attributes import Access, contiguous
from luban.symbolic import Dim, product


@dataclass(frozen=True, slots=True)
class View:
    """Element (i0, i1, ...) is element offset + sum(stride * i) of the dense tensor `base`.

    `fill` is the value when all elements are known to equal it. `copy` names the clone that the value passed through:
    an output must not share memory with an input or output that went another way.
    """

    base: SSAValue
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim
    dtype: torch.dtype
    fill: bool | int | float | None = None
    copy: int = 0

    @property
    def access(self) -> Access:
        return Access.of(self.strides, self.offset)

    @property
    def numel(self) -> Dim:
        return product(self.shape)


def dense(base: SSAValue, shape: Sequence[Dim], dtype: torch.dtype) -> View:
    """The whole of a row-major tensor under a shape with as many elements."""
    return View(base, tuple(shape), contiguous(shape), 0, dtype)


def moved(view: View, shape: Sequence[Dim], strides: Sequence[Dim], offset: Dim | None = None) -> View:
    """The same base through another window."""
    return View(
        view.base,
        tuple(shape),
        tuple(strides),
        view.offset if offset is None else offset,
        view.dtype,
        view.fill,
        view.copy,
    )


def same_layout(shape: Sequence[Dim], a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two stride tuples reach the same elements (strides of size-1 dims do not count)."""
    return tuple(a) == tuple(b) or all(x == y or n == 1 for n, x, y in zip(shape, a, b))


def is_dense(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Row-major without gaps."""
    return same_layout(shape, strides, contiguous(shape))


def storage_order(shape: Sequence[Dim], strides: Sequence[Dim], hints: Sequence[int]) -> tuple[int, ...] | None:
    """The permutation of dims under which the layout is row-major without gaps, or None.

    hints: numbers that order the strides (the strides themselves where they are numbers).
    """
    n = len(shape)
    if is_dense(shape, strides):
        return tuple(range(n))
    order = sorted(range(n), key=lambda i: (-hints[i], shape[i] == 1, i))
    if is_dense([shape[i] for i in order], [strides[i] for i in order]):
        return tuple(order)
    return None


def permute(view: View, order: Sequence[int]) -> View:
    """Dim i of the result is dim order[i]."""
    n = len(view.shape)
    order = [d % n for d in order]
    return moved(view, [view.shape[d] for d in order], [view.strides[d] for d in order])


def expand(view: View, shape: Sequence[Dim]) -> View:
    """Broadcasts to a shape (dims are aligned at the right)."""
    shape = tuple(shape)
    if view.shape == shape:
        return view
    missing = len(shape) - len(view.shape)
    strides: list[Dim] = [0] * missing
    for n, want, s in zip(view.shape, shape[missing:], view.strides):
        strides.append(0 if n == 1 and want != 1 else s)
    return moved(view, shape, strides)


def slice_dim(view: View, d: int, start: Dim, length: Dim, step: int = 1) -> View:
    """`length` elements along dim d from `start`, `step` apart."""
    shape, strides = list(view.shape), list(view.strides)
    offset = view.offset + start * strides[d]
    shape[d], strides[d] = length, strides[d] * step
    return moved(view, shape, strides, offset)


def select(view: View, d: int, index: Dim) -> View:
    """The window with dim d fixed at `index` (not negative)."""
    offset = view.offset + index * view.strides[d]
    return moved(view, view.shape[:d] + view.shape[d + 1 :], view.strides[:d] + view.strides[d + 1 :], offset)


def unsqueeze(view: View, d: int) -> View:
    """A new dim of size 1 at position d."""
    return moved(view, (*view.shape[:d], 1, *view.shape[d:]), (*view.strides[:d], 0, *view.strides[d:]))


def squeeze(view: View, dims: Sequence[int]) -> View:
    """Drops those of the given dims that have size 1."""
    gone = {d for d in dims if view.shape[d] == 1}
    keep = [d for d in range(len(view.shape)) if d not in gone]
    return moved(view, [view.shape[d] for d in keep], [view.strides[d] for d in keep])


def flip(view: View, dims: Sequence[int]) -> View:
    """Dims walked backwards, by negative strides."""
    strides, offset = list(view.strides), view.offset
    for d in dims:
        offset = offset + (view.shape[d] - 1) * strides[d]
        strides[d] = strides[d] * -1
    return moved(view, view.shape, strides, offset)


def diagonal(view: View, offset: int, d1: int, d2: int, length: Dim) -> View:
    """The `length` elements (i, i + offset) of dims d1 and d2, as a last dim."""
    rest = [d for d in range(len(view.shape)) if d not in (d1, d2)]
    start = offset * view.strides[d2] if offset >= 0 else -offset * view.strides[d1]
    strides = [view.strides[d] for d in rest] + [view.strides[d1] + view.strides[d2]]
    return moved(view, [*(view.shape[d] for d in rest), length], strides, view.offset + start)


def try_reshape(view: View, shape: Sequence[Dim]) -> View | None:
    """The same elements in row-major order under another shape, if strides can say it, else None."""
    shape = tuple(shape)
    if view.fill is not None or 0 in shape:
        return moved(view, shape, (0,) * len(shape) if view.fill is not None else contiguous(shape))
    if is_dense(view.shape, view.strides):
        return moved(view, shape, contiguous(shape))
    new: list[Dim] = [0] * len(shape)
    at = len(shape) - 1
    for size, stride in reversed(_merged(view)):
        running: Dim = 1
        while running != size:
            if at < 0 or (isinstance(size, int) and isinstance(running, int) and running > size):
                return None
            new[at] = stride * running
            running = running * shape[at]
            at -= 1
    if any(d != 1 for d in shape[: at + 1]):
        return None
    return moved(view, shape, new)


def _merged(view: View) -> list[tuple[Dim, Dim]]:
    """(size, stride) of dims, neighbours that continue each other merged, size-1 dims dropped."""
    merged: list[tuple[Dim, Dim]] = []
    for n, s in zip(view.shape, view.strides):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    return merged


def as_copy(view: View, token: int) -> View:
    """The same value, marked as having passed through the clone `token`."""
    return replace(view, copy=token)
