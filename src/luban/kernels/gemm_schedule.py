"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

from dataclasses import dataclass

from luban.symbolic import Dim
from luban.targets.target import Target


@dataclass(frozen=True)
class Shape:
    """Sizes and element strides of a contraction: a over (m, k), b over (n, k)."""

    batch: Dim
    m: Dim
    n: Dim
    k: Dim
    a_m: Dim
    a_k: Dim
    b_n: Dim
    b_k: Dim


@dataclass(frozen=True)
class GemmSchedule:
    """unit and register tile (mr x nr), cache blocks (mc, nc, kc), k values side by side in a panel (kk), what is packed."""

    unit: str
    mr: int
    nr: int
    mc: int
    nc: int
    kc: int
    kk: int
    k_multiple: int
    pack_a: bool
    pack_b: bool
    parallel: bool


def choose(target: Target, shape: Shape, dtype: str) -> GemmSchedule:
    """The schedule for a shape on a target."""
    lanes = target.vector_bits // 32
    dot = dtype == "bf16" and any(u.name == "bf16_dot" for u in target.dot_units)
    kk = 2 if dot else 1
    mr, nv = 14, 2
    nr = nv * lanes
    small = _known(shape.batch, 1) * _known(shape.m, 1024) * _known(shape.n, 1024) * _known(shape.k, 1024) < 32 * 32 * 64
    return GemmSchedule("bf16_dot" if dot else "fma", mr, nr, 16 * mr, 6 * nr, 1024, kk, kk, False, True, not small)


def _known(dim: Dim, otherwise: int) -> int:
    return dim if isinstance(dim, int) else otherwise
