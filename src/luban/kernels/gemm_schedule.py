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
    """How a GEMM is cut up.

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


# Packed panels of one operand take at most this part of the second-level cache, so that the other one's fit too.
CACHE_SHARE = 2
ANY_CACHE = 1 << 20  # bytes of a cache of which a target does not say how large it is
# Rows of A in place whose distance is a multiple of this share a few sets of the first-level cache (1,024 bytes apart:
# 16 rows in 4 sets of 12 ways).
ALIASED = 2048
SMALL = 32 * 32 * 64  # products below which threads cost more than they bring


def choose(target: Target, shape: Shape, dtype: Attribute) -> GemmSchedule:
    """The schedule for a shape on a target."""
    m, n, k = _known(shape.m, 1024), _known(shape.n, 1024), _known(shape.k, 1024)
    t = fit(register_tile(target, dtype), target, n)
    batch, size = _known(shape.batch, 1), bytes_of(t.element)
    if m < t.mr and not t.whole:
        t = replace(t, mr=max(1, m))
    depth = _depth(target, t, k)
    pack_a, pack_b = _packs(t, shape, m, n)
    share_m, share_n = _shares(target, (batch, m, n, k), t, pack_a)
    near = (target.l2_bytes or ANY_CACHE) // CACHE_SHARE
    if isinstance(shape.k, int) and _packs_all_of_k(k, depth, share_n, size, near):
        kc, nc = k, _block(t.nr, share_n, near // (k * size))
        rows = share_m if k <= depth else near // 2 // (nc * 4)
        mc = _block(t.mr, share_m, min(rows, near // 2 // (k * size)) if pack_a else rows)
    else:
        kc, nc, mc = depth, _block(t.nr, share_n, near // (depth * size)), share_m
    parallel = batch * m * n * k >= SMALL
    return GemmSchedule(t, share_m, share_n, mc, nc, kc, depth, "rows", pack_a, pack_b, parallel)


def _packs_all_of_k(k: int, depth: int, share_n: int, size: int, near: int) -> bool:
    """Whether B is packed over all of k, not pass by pass.

    Fewer columns fit the cache then and A is read once for each block of them: size bytes a product of `near / (k * size)`
    columns. Packed pass by pass, sums are stored and loaded again: 8 bytes in `depth` products.
    """
    return k <= depth or share_n * k * size <= near or size * size * k / near <= 8 / depth


def _depth(target: Target, t: RegisterTile, k: int) -> int:
    """Values of k of which a panel of A takes two thirds of the first-level cache; passes of equal depth."""
    size = bytes_of(t.element)
    most = max(1, (target.l1_bytes or ANY_CACHE) * 2 // 3 // (t.mr * size) // t.k_multiple) * t.k_multiple
    passes = -(-k // most)
    return -(-k // passes // t.k_multiple) * t.k_multiple


def _packs(t: RegisterTile, shape: Shape, m: int, n: int) -> tuple[bool, bool]:
    """Whether A and B are packed: where the unit cannot read them as they lie, or would not read them fast."""
    size = bytes_of(t.element)
    a_in_place = t.any_a or shape.a_k == 1
    apart = max((s for s in (shape.a_m, shape.a_k) if isinstance(s, int)), default=1) * size
    if a_in_place and apart % ALIASED == 0 and n > 4 * t.nr and m > 1:
        a_in_place = False
    b_in_place = t.b_in_place and shape.b_n == 1 and (m <= 4 * t.mr or t.nr == 1)
    return not a_in_place, not b_in_place and t.nr > 1 or (not t.b_in_place)


def _shares(target: Target, sizes: tuple[int, int, int, int], t: RegisterTile, pack_a: bool) -> tuple[int, int]:
    """Rows and columns of a task such that all cores end together soonest; packing what others pack too costs time."""
    batch, m, n, k = sizes
    tiles_m, tiles_n = -(-m // t.mr), -(-n // t.nr)
    best, found = None, (m, n)
    for pn in range(1, min(tiles_n, 4 * target.cores) + 1):
        for pm in range(1, min(tiles_m, 4 * target.cores) + 1):
            sm, sn = -(-tiles_m // pm) * t.mr, -(-tiles_n // pn) * t.nr
            tasks = batch * -(-tiles_m // (sm // t.mr)) * -(-tiles_n // (sn // t.nr))
            work = sm * sn * k / _speed(t) + (sm * (1.0 if pack_a else 0.5) + sn) * k * PACK
            cost = -(-tasks // target.cores) * work
            if best is None or cost < best * 0.99:
                best, found = cost, (sm, sn)
    return found


PACK = 0.15  # cycles an element


def _speed(t: RegisterTile) -> float:
    """Products a cycle."""
    return 512.0 if t.whole else t.nr * t.mr / 12.0 * (2 if t.kk == 2 else 1)


def _block(tile: int, share: int, most: int) -> int:
    """Equal blocks of a share, of at most so many rows or columns, in whole register tiles."""
    most = max(tile, most // tile * tile)
    pieces = -(-share // most)
    return -(-share // pieces // tile) * tile


def _known(dim: Dim, otherwise: int) -> int:
    return max(1, dim) if isinstance(dim, int) else otherwise  # an empty matrix takes the schedule of a small one
