"""The sizes of a GEMM and how it is cut up."""

from __future__ import annotations

from dataclasses import dataclass

from luban.kernels.register_tiles import RegisterTile
from luban.symbolic import Dim


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

    @property
    def turned(self) -> Shape:
        """That of the transposed product."""
        return Shape(self.batch, self.n, self.m, self.k, self.b_n, self.b_k, self.a_m, self.a_k)


@dataclass(frozen=True)
class GemmSchedule:
    """How a GEMM is cut up.

    Where sums wait between passes over k, a block of them takes a quarter of the second-level cache and has twice as many
    columns as rows: 256 x 512 on a Xeon with AMX, where 1024 x 384 x 8192 in bfloat16 ran at 1,060 GFLOP/s a core against
    590 with all rows at once, and 4096 x 768 x 768 with A transposed at 1,160 against 740.

    share_m, share_n  rows and columns of a task, which is one thread's part of C
    mc, nc            rows of A and columns of B that are packed, or walked, at a time
    kc                values of k packed at a time; more of them are worked through in passes
    depth             values of k that a register tile sums up before the next tile, None for all that are packed
    order             which panel stays in the first cache: that of B ("columns") or that of A ("rows")
    """

    tile: RegisterTile
    share_m: int
    share_n: int
    mc: int
    nc: int
    kc: int
    depth: int | None
    order: str
    pack_a: bool
    pack_b: bool
    parallel: bool
