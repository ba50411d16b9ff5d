"""Reading through what an operation did: an access to its result as an access to what the result was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luban.compiler.ir.attributes import Access, contiguous
from luban.symbolic import Dim, divide_exact


@dataclass(frozen=True)
class Window:
    """An access spread over the dims of the tensor that it reads: where it starts, and its steps along each dim.

    `steps[i]` maps a dim of the reader's domain to how far dim i moves with it.
    """

    start: tuple[Dim, ...]
    steps: tuple[dict[int, Dim], ...]

    def ends(self, i: int, domain: Sequence[Dim]) -> tuple[int, int] | None:
        """The first and last index along dim i that the reader meets; None where a size is symbolic."""
        low = high = self.start[i]
        for d, step in self.steps[i].items():
            n = domain[d]
            if not isinstance(n, int) or not isinstance(step, int) or not isinstance(low, int):
                return None
            low, high = low + min(0, step * (n - 1)), high + max(0, step * (n - 1))  # type: ignore[operator]
        return (low, high) if isinstance(low, int) and isinstance(high, int) else None


def window(access: Access, domain: Sequence[Dim], shape: Sequence[Dim]) -> Window | None:
    """The access (over `domain`, to a dense tensor of this shape) dim by dim, or None where it crosses dims' ends.

    Digits that stay within their dims say the access exactly, however they were found.
    """
    weights = contiguous(shape)
    start = _digits(access.offset, shape, weights)
    if start is None:
        return None
    steps: list[dict[int, Dim]] = [{} for _ in shape]
    for d, (n, stride) in enumerate(zip(domain, access.strides, strict=True)):
        if n == 1 or stride == 0:
            continue
        found = _moving(stride, shape, weights)
        if found is None:
            return None
        steps[found[0]][d] = found[1]
    made = Window(tuple(start), tuple(steps))
    return made if all(_inside(made, i, domain, n) for i, n in enumerate(shape)) else None


def _digits(offset: Dim, shape: Sequence[Dim], weights: Sequence[Dim]) -> list[Dim] | None:
    if offset == 0:
        return [0] * len(shape)
    if not isinstance(offset, int) or offset < 0 or not all(isinstance(w, int) and w > 0 for w in weights):
        return None
    digits: list[Dim] = []
    for w in weights:
        digits.append(offset // w)  # type: ignore[operator]
        offset %= w  # type: ignore[operator]
    return digits


def _moving(stride: Dim, shape: Sequence[Dim], weights: Sequence[Dim]) -> tuple[int, Dim] | None:
    """The outermost dim that a stride moves along, and by how much."""
    for i, (n, w) in enumerate(zip(shape, weights, strict=True)):
        if n == 1 or w == 0:
            continue
        if isinstance(stride, int) and isinstance(w, int):
            if stride % w == 0:
                return i, stride // w
        elif (step := divide_exact(stride, w)) is not None and isinstance(step, int):
            return i, step
    return None


def _inside(made: Window, i: int, domain: Sequence[Dim], size: Dim) -> bool:
    ends = made.ends(i, domain)
    if ends is not None and isinstance(size, int):
        return 0 <= ends[0] and ends[1] < size
    terms = made.steps[i]
    return made.start[i] == 0 and (not terms or [(domain[d], t) for d, t in terms.items()] == [(size, 1)])


def through(access: Access, domain: Sequence[Dim], made: Sequence[Dim], inner: Access) -> Access | None:
    """`access` (over `domain`) to a result over the domain `made`, as an access to what `inner` reads there.

    None where strides cannot say it. Neighbouring dims that `inner` walks as one count as one: what was reshaped on the
    way can be read through.
    """
    for sizes, strides in ((list(made), list(inner.strides)), _joined(made, inner.strides)):
        seen = window(access, domain, sizes)
        if seen is not None:
            return _composed(seen, len(domain), strides, inner.offset)
    return None


def _composed(seen: Window, rank: int, strides: Sequence[Dim], offset: Dim) -> Access:
    found: list[Dim] = [0] * rank
    for start, steps, stride in zip(seen.start, seen.steps, strides, strict=True):
        offset = offset + start * stride
        for d, step in steps.items():
            found[d] = found[d] + step * stride
    return Access.of(found, offset)


def _joined(sizes: Sequence[Dim], strides: Sequence[Dim]) -> tuple[list[Dim], list[Dim]]:
    made: list[tuple[Dim, Dim]] = []
    for n, s in zip(sizes, strides, strict=True):
        if n == 1:
            continue
        if made and made[-1][1] == s * n:
            made[-1] = (made[-1][0] * n, s)
        else:
            made.append((n, s))
    return [n for n, _ in made], [s for _, s in made]
