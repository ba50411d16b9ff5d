"""What a convolution's kernel computes: one matrix in memory, and one whose elements are patches of a padded image.

The image is read over points (positions of the output, or of its gradient) and taps (channels and places in the kernel).
Forward and the gradient of the input have the points as columns n and sum over the taps; the gradient of the weights sums
over the points and has the taps as columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir.attributes import Access
from luban.compiler.ir.window import Window, points_in_n, window_of
from luban.symbolic import Dim, product


@dataclass(frozen=True)
class Side:
    """Dims of the image with their sizes and element strides."""

    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]

    @property
    def count(self) -> Dim:
        """How many there are of them."""
        return product(self.sizes)


@dataclass(frozen=True)
class Convolution:
    """A normalised contraction with a window.

    batch            sizes; a_batch and b_batch are the strides of both operands along them
    m, a_outer       rows of the matrix and their stride
    a_k              strides of the matrix along the dims of k
    points, taps     dims of the image; `points_are_n` says which of them are columns
    window           with n_step for the points and k_step for the taps
    """

    batch: tuple[Dim, ...]
    a_batch: tuple[Dim, ...]
    b_batch: tuple[Dim, ...]
    m: Dim
    a: SSAValue
    a_outer: Dim
    a_k: tuple[Dim, ...]
    a_offset: Dim
    b: SSAValue
    b_offset: Dim
    points: Side
    taps: Side
    points_are_n: bool
    window: Window
    element: Attribute
    precision: str


def convolution_of(op: Operation) -> Convolution:
    """The problem of a contraction with a window, as contract_layout leaves it."""
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    counts = [c.data for c in op.properties["counts"].data]  # type: ignore[union-attr]
    a, b = op.properties["accesses"].data  # type: ignore[union-attr]
    window = window_of(op.properties["window"])  # type: ignore[arg-type]
    nb, _, nn, _ = counts
    n, k = slice(nb + 1, nb + 1 + nn), slice(nb + 1 + nn, None)
    as_n = points_in_n(domain, counts, window)
    precision = op.properties.get("precision")
    return Convolution(
        batch=tuple(domain[:nb]),
        a_batch=tuple(a.strides[:nb]),
        b_batch=tuple(b.strides[:nb]),
        m=domain[nb],
        a=op.operands[0],
        a_outer=a.strides[nb],
        a_k=tuple(a.strides[k]),
        a_offset=a.offset,
        b=op.operands[1],
        b_offset=b.offset,
        points=_side(domain, b, n if as_n else k),
        taps=_side(domain, b, k if as_n else n),
        points_are_n=as_n,
        window=window if as_n else Window(window.extent, window.k_step, window.n_step, window.pad),
        element=op.multiplied,  # type: ignore[attr-defined]
        precision="highest" if precision is None else precision.data,  # type: ignore[attr-defined]
    )


def _side(domain: tuple[Dim, ...], access: Access, dims: slice) -> Side:
    return Side(tuple(domain[dims]), tuple(access.strides[dims]))
