"""Where a contraction's second operand ends: the window of a convolution, outside of which it reads zeros.

Along each spatial dim a position is n_step * (index along an n dim) + k_step * (index along a k dim) - pad; what lies
outside [0, extent) counts as 0. The spatial dims are the last ones of n and the last ones of k, in the same order: a
convolution has its space in n and its taps in k, the gradient of its weights the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ArrayAttr

from luban.compiler.ir.attributes import Dims


@dataclass(frozen=True)
class Window:
    """Numbers of each spatial dim; see the module."""

    extent: tuple[int, ...]
    n_step: tuple[int, ...]
    k_step: tuple[int, ...]
    pad: tuple[int, ...]

    @property
    def rank(self) -> int:
        """How many spatial dims there are."""
        return len(self.extent)

    @property
    def attribute(self) -> ArrayAttr:
        """As a property of graph.contract."""
        return ArrayAttr([Dims(v) for v in (self.extent, self.n_step, self.k_step, self.pad)])


def window_of(attribute: ArrayAttr) -> Window:
    """The window that `Window.attribute` wrote."""
    return Window(*(d.data for d in attribute.data))  # type: ignore[attr-defined]


def points_in_n(domain: Sequence[Any], counts: Sequence[int], window: Window) -> bool:
    """Whether a convolution's space lies in n and its taps in k: n has more of the window's positions than k."""
    last_n = sum(counts[:3])
    n, k = domain[last_n - window.rank : last_n], domain[len(domain) - window.rank :]
    return math.prod(n) >= math.prod(k)


def inside(window: Window, n: Sequence[int], k: Sequence[int]) -> np.ndarray:
    """Which positions lie inside, over (n, k): an array of bools with one dim for each dim of n and of k."""
    nn, nk, r = len(n), len(k), window.rank
    result = np.ones((*n, *k), bool)
    for d in range(r):
        at = np.arange(n[nn - r + d]) * window.n_step[d]
        tap = np.arange(k[nk - r + d]) * window.k_step[d] - window.pad[d]
        shape_n, shape_k = [1] * (nn + nk), [1] * (nn + nk)
        shape_n[nn - r + d], shape_k[nn + nk - r + d] = len(at), len(tap)
        position = at.reshape(shape_n) + tap.reshape(shape_k)
        result &= (position >= 0) & (position < window.extent[d])
    return result
