"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.register_tiles import RegisterTile, fit, register_tile
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
    """Register tile, cache blocks (mc rows, nc columns, kc values of k), which operands are packed, threads or not."""

    tile: RegisterTile
    mc: int
    nc: int
    kc: int
    pack_a: bool
    pack_b: bool
    parallel: bool


# One pass over k is best as long as a panel of B streams from the second-level cache (109 against 105 of 117 GFLOP/s at
# k = 1536); beyond that passes of 256 to 768 measured alike.
ONE_PASS = 2048
KC = 768
# Rows of a transposed A that lie a multiple of the page size apart share one set of the first-level cache (88 against 105).
PAGE = 4096
KC_ALIASED = 256
COLUMN_PANELS = 8
MIN_ROWS = 64


def choose(target: Target, shape: Shape, dtype: Attribute) -> GemmSchedule:
    """The schedule for a shape on a target."""
    m, n, k = _known(shape.m, 1024), _known(shape.n, 1024), _known(shape.k, 1024)
    t = fit(register_tile(target, dtype), target, n)
    batch, size = _known(shape.batch, 1), bytes_of(t.element)
    if m < t.mr and not t.whole:
        t = replace(t, mr=max(1, m))
    nc = t.nr * min(COLUMN_PANELS, -(-n // t.nr))
    a_in_place = t.any_a or shape.a_k == 1
    aliased = a_in_place and isinstance(shape.a_k, int) and shape.a_k != 1 and shape.a_k * size % PAGE == 0
    kc = KC_ALIASED if aliased and k > KC_ALIASED else k if isinstance(shape.k, int) and k <= ONE_PASS else KC
    one_pass = kc >= k and isinstance(shape.k, int)
    mc = _rows(target.cores, batch * -(-n // nc), m, t.mr, None if one_pass else target.l2_bytes // (8 * nc))
    b_in_place = t.b_in_place and shape.b_n == 1 and n <= 4 * nc
    return GemmSchedule(t, mc, nc, max(1, kc), not a_in_place, not b_in_place, batch * m * n * k >= 32 * 32 * 64)


def _rows(cores: int, blocks: int, m: int, mr: int, most: int | None) -> int:
    """Rows a task takes: as many as fit, such that every core gets as many tasks as the others."""
    pieces = 1 if most is None else max(1, -(-m // max(most, mr)))
    while (blocks * pieces) % cores and blocks * pieces < 8 * cores and m // (pieces + 1) >= MIN_ROWS:
        pieces += 1
    rows = -(-m // pieces)
    return -(-rows // mr) * mr


def _known(dim: Dim, otherwise: int) -> int:
    return max(1, dim) if isinstance(dim, int) else otherwise  # an empty matrix takes the schedule of a small one
