"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import i8
from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.integer_tiles import integer_tile, streaming_integers
from luban.kernels.register_tiles import RegisterTile, fit, register_tile, split_tile, streaming_tile
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


PAGE = 4096
CACHE_SHARE = 2  # packed B takes at most this part of the second-level cache: A, sums and results pass through it too
ANY_CACHE = 1 << 20  # bytes of a cache of which a target does not say how large it is
SMALL = 32 * 32 * 64  # products below which threads cost more than they bring
TASKS = 4  # most tasks a core
# Cycles that an element of A or B costs where it is packed and where it is read as it lies, and products a cycle of a unit
# (Xeon with AMX, one core).
PACK, READ = 0.2, 0.05
SPEED = {"fma": 32.0, "bf16_dot": 64.0, "bfdot": 64.0, "amx": 512.0, "amx_int8": 1024.0, "vpdpbusd": 128.0}
STREAM_ROWS = 8  # rows of A up to which a product is no more than reading B
# The same for 8-bit integers, whose plain products are slower than packing for a dot unit: 2 x 4096 x 4096 1619 us
# streamed and 1916 packed, 3 rows 2317 and 1919.
STREAM_INTEGERS = 2
# Rows of A up to which C's transpose is computed where B lies as a left operand does. Results then leave row by row of
# C, often pages apart: 12 of them fit the 12 ways of a first-level cache (16 x 1024 x 4096 in int8: 418 us, packed 386;
# 12 rows 268 and 375, 8 rows 241 and 383; 8 x 4096 x 4096 770 and 1384, in bfloat16 3082 and 3989).
TURNED_ROWS = 12
FEW_ROWS = 64  # rows up to which packing B is most of the work: long pieces of its rows, pass by pass over k
STREAMS = 8  # rows of B read side by side: the prefetchers follow as many streams
# Bytes that packed B takes at most: what is beyond the second-level cache is read again for each block of rows.
SCRATCH = 16 << 20


def turns(target: Target, shape: Shape, tile: RegisterTile, held: tuple[Attribute, ...]) -> bool:
    """Whether the transpose of C is computed: A has few rows, and B lies as the unit reads a left operand.

    B is then read once, in place; packed it would be read, written and read again.
    """
    m, n, k, b_n = shape.m, shape.n, shape.k, shape.b_n
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int) and isinstance(b_n, int)):
        return False
    size, readable = bytes_of(tile.element), tile.whole and tile.terms == 1 and set(held) == {tile.element}
    small = m <= TURNED_ROWS and m * k * size <= target.l2_bytes // 4 and n * k * size > target.l2_bytes
    return readable and small and shape.b_k == 1 and not _packs_a(target, tile, shape.turned)


def choose(
    target: Target,
    shape: Shape,
    dtype: Attribute,
    held: tuple[Attribute, ...] | None = None,
    precision: str = "highest",
    unsigned: tuple[bool, bool] = (False, False),
) -> GemmSchedule:
    """The schedule for a shape on a target.

    dtype is the type in which the operands are multiplied, `held` the types in which they lie: an operand of another type
    than the unit's is converted when it is packed. `unsigned`: which of two 8-bit integer operands have no sign.
    """
    m, n, k = _known(shape.m, 1024), _known(shape.n, 1024), _known(shape.k, 1024)
    t = fit(tile_of(target, dtype, precision, unsigned), target, n)
    batch, size = _known(shape.batch, 1), bytes_of(t.element)
    cast = [t.terms > 1 or ty != t.element for ty in held or (dtype, dtype)]
    if m < t.mr and not t.whole:
        t = replace(t, mr=max(1, m))
    known = isinstance(shape.m, int) and isinstance(shape.k, int)
    as_it_lies = known and set(held or (dtype,)) == {dtype}
    if (
        as_it_lies
        and m <= (STREAM_INTEGERS if dtype == i8 else STREAM_ROWS)
        and shape.b_n == 1
        and n * k * bytes_of(dtype) > target.l2_bytes > 0
    ):
        return _streaming(target, dtype, (batch, m, n, k))
    near = (target.l2_bytes or ANY_CACHE) // CACHE_SHARE
    deep = packed_depth(t, k)
    depth = _depth(target, t, deep if t.terms > 1 else k, near)
    pack_a = cast[0] or _packs_a(target, t, shape)
    pack_b = cast[1] or _packs_b(target, t, shape, n * k * size)
    costs = tuple((PACK if packed else READ) * t.terms for packed in (pack_a, pack_b))
    share_m, share_n = _shares(target.cores, (batch, m, n, k), t, costs)
    wide, scratch = near // (depth * size), SCRATCH // (deep * size)
    by_rows = m <= FEW_ROWS and shape.b_k != 1 and deep > depth
    if isinstance(shape.k, int) and scratch >= min(share_n, 4 * t.nr) and not by_rows:
        all_rows = t.whole and share_m * deep * size <= near
        if (all_rows or (t.whole and n <= t.nr)) and deep > depth:
            # All of A, or of B, stays in the second-level cache: no sums wait, and what is packed is used while it is near
            # (128 x 4096 x 4096 with B transposed: int8 1,600 instead of 1,190, bfloat16 650 instead of 510).
            depth, wide = deep, near // 2 // (deep * size)
        passes = deep > depth
        nc = _block(t.nr, share_n, min(wide, scratch, math.isqrt(near // 4)) if passes else min(wide, scratch))
        few = near // 8 // nc if passes else near // 2 // (deep * size)
        mc = _block(t.mr, share_m, few if passes or (pack_a and not all_rows) else share_m)
        kc = k
    else:
        kc, mc, nc = depth, share_m, _block(t.nr, share_n, near // (packed_depth(t, depth) * size))
    parallel = batch * m * n * k >= SMALL
    return GemmSchedule(t, share_m, share_n, mc, nc, kc, depth, "rows", pack_a, pack_b, parallel)


def tile_of(target: Target, dtype: Attribute, precision: str, unsigned: tuple[bool, bool]) -> RegisterTile:
    """The register tile of the unit that multiplies such operands."""
    if dtype == i8:
        return integer_tile(target, unsigned)
    return split_tile(target, dtype, precision) or register_tile(target, dtype)


def _streaming(target: Target, dtype: Attribute, sizes: tuple[int, int, int, int]) -> GemmSchedule:
    """Few rows: B is read once, some of its rows side by side from end to end, while the sums wait in the first cache."""
    m, k = sizes[1], sizes[3]
    t = streaming_integers(target, m) if dtype == i8 else streaming_tile(target, dtype, m)
    _, share_n = _shares(target.cores, sizes, t, (READ, READ))
    return GemmSchedule(t, m, share_n, m, share_n, k, STREAMS, "rows", False, False, True)


def _depth(target: Target, t: RegisterTile, k: int, near: int) -> int:
    """Values of k in a pass: all where a panel of A takes up to two thirds of the first-level cache, else equal passes
    with panels of up to a third (Xeon with AMX: k = 768 in passes of 192 ran at 1,363, of 384 at 1,274 GFLOP/s a core, but
    k = 384 in one pass at 1,223, in two at 1,169). Four panels of B fit the second-level cache.
    """
    size = bytes_of(t.element)
    third = (target.l1_bytes or ANY_CACHE) // 3 // (t.mr * size)
    most = min(2 * third if k <= 2 * third else third, near // (4 * t.nr * size))
    passes = -(-k // (max(1, most // t.k_multiple) * t.k_multiple))
    return -(-k // passes // t.k_multiple) * t.k_multiple


def _packs_a(target: Target, t: RegisterTile, shape: Shape) -> bool:
    """A is packed where the unit cannot read it as it lies, or only slowly.

    Tile loads of rows that start inside a cache line touch two lines each. Values of k that lie a page apart, in a
    transposed A, share a few sets of the first-level cache.
    """
    size = bytes_of(t.element)
    if not t.any_a and shape.a_k != 1:
        return True
    if shape.a_k != 1:
        return isinstance(shape.a_k, int) and shape.a_k * size % PAGE == 0
    aligned = isinstance(shape.a_m, int) and shape.a_m * size % target.line_bytes == 0
    return t.whole and not aligned


def _packs_b(target: Target, t: RegisterTile, shape: Shape, footprint: int) -> bool:
    """B is read in place where the unit can and where all of it fits the first-level cache, or in one-column tiles."""
    if not t.b_in_place:
        return True
    return t.nr > 1 and (shape.b_n != 1 or footprint > target.l1_bytes // 2)


def _shares(cores: int, sizes: tuple[int, int, int, int], t: RegisterTile, costs: tuple[float, ...]) -> tuple[int, int]:
    """Rows and columns of a task such that all cores end together soonest; packing what others pack too costs time."""
    batch, m, n, k = sizes
    tiles_m, tiles_n = -(-m // t.mr), -(-n // t.nr)
    best, found = float("inf"), (tiles_m * t.mr, tiles_n * t.nr)
    for across in range(1, min(tiles_n, TASKS * cores) + 1):
        for down in range(1, min(tiles_m, max(1, TASKS * cores // across)) + 1):
            sm, sn = -(-tiles_m // down), -(-tiles_n // across)
            tasks = batch * -(-tiles_m // sm) * -(-tiles_n // sn)
            moved = sm * t.mr * costs[0] + sn * t.nr * costs[1]
            work = (sm * t.mr * sn * t.nr * t.terms / SPEED.get(t.unit, SPEED["fma"]) + moved) * k
            cost = -(-tasks // cores) * work
            if cost < best * 0.99:
                best, found = cost, (sm * t.mr, sn * t.nr)
    return found


def _block(tile: int, share: int, most: int) -> int:
    """Equal blocks of a share, of at most so many rows or columns, in whole register tiles."""
    pieces = -(-share // max(tile, most // tile * tile))
    return -(-share // pieces // tile) * tile


def _known(dim: Dim, otherwise: int) -> int:
    return max(1, dim) if isinstance(dim, int) else otherwise  # an empty matrix takes the schedule of a small one
