"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.register_tiles import RegisterTile, register_tile
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


KC = 768  # values of k in a pass; passes of 256 to 768 measured alike, one pass is best while a panel of B stays in L2
ONE_PASS = 1152
COLUMN_PANELS = 8
MIN_ROWS = 64


def choose(target: Target, shape: Shape, dtype: Attribute) -> GemmSchedule:
    """The schedule for a shape on a target."""
    t = register_tile(target, dtype)
    m, n, k = _known(shape.m, 1024), _known(shape.n, 1024), _known(shape.k, 1024)
    batch, size = _known(shape.batch, 1), bytes_of(t.element)
    if m < t.mr and not t.whole:
        t = replace(t, mr=max(1, m))
    nc = t.nr * min(COLUMN_PANELS, -(-n // t.nr))
    one_pass = isinstance(shape.k, int) and (t.kk > 1 or k <= ONE_PASS) and k * nc * size <= 2 * target.l2_bytes
    kc = max(1, k) if one_pass else KC
    mc = _rows(target.cores, batch * -(-n // nc), m, t.mr, None if one_pass else target.l2_bytes // (8 * nc))
    b_in_place = t.b_in_place and shape.b_n == 1 and k <= ONE_PASS and n <= 4 * nc
    a_in_place = t.any_a or shape.a_k == 1
    return GemmSchedule(t, mc, nc, kc, not a_in_place, not b_in_place, batch * m * n * k >= 32 * 32 * 64)


def _rows(cores: int, blocks: int, m: int, mr: int, most: int | None) -> int:
    """Rows a task takes: as many as fit, such that every core gets as many tasks as the others."""
    pieces = 1 if most is None else max(1, -(-m // max(most, mr)))
    while (blocks * pieces) % cores and blocks * pieces < 8 * cores and m // (pieces + 1) >= MIN_ROWS:
        pieces += 1
    return -(-(-(-m // pieces)) // mr) * mr


def _known(dim: Dim, otherwise: int) -> int:
    return dim if isinstance(dim, int) else otherwise
