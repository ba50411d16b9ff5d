"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import i8
from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.integer_tiles import integer_tile, streaming_integers
from luban.kernels.register_tiles import RegisterTile, fit, register_tile, split_tile, streaming_tile, widest
from luban.kernels.tuning.kept import kept_gemm
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
# Cycles of work below which threads cost more than they bring: two threads are even with one at 64^3 in float32 (2.7 us)
# and at 100^3 on AMX, and every region waits for a core where others run.
SMALL = 8192
TASKS = 4  # most tasks a core
# Cycles that an element of A or B costs where it is packed and where it is read as it lies, and products a cycle of a unit
# (Xeon with AMX, one core; what lies in memory, transposed, takes 1 to 1.6 cycles, what is in the second-level cache 0.3).
PACK, READ = 0.4, 0.05
SPEED = {"fma": 32.0, "bf16_dot": 64.0, "bfdot": 64.0, "amx": 512.0, "amx_int8": 1024.0, "vpdpbusd": 128.0}
# Rows and columns (their harmonic sum) from which an operand pays for being packed where the unit could read it in place:
# with A transposed, k 2048, in float32, 384 x 384 ran at 165 packed at 131 GFLOP/s a core, 768 x 192 at 166 and 120, but
# 3072 x 768 at 142 and 172.
WORTH_PACKING = 375
STREAM_ROWS = 8  # rows of A up to which a product is no more than reading B
# The same for 8-bit integers, whose plain products are slower than packing for a dot unit: 2 x 4096 x 4096 1619 us
# streamed and 1916 packed, 3 rows 2317 and 1919.
STREAM_INTEGERS = 2
# Rows of A up to which C's transpose is computed where B lies as a left operand does. Results then leave row by row of
# C, often pages apart: 12 of them fit the 12 ways of a first-level cache (16 x 1024 x 4096 in int8: 418 us, packed 386;
# 12 rows 268 and 375, 8 rows 241 and 383; 8 x 4096 x 4096 770 and 1384, in bfloat16 3082 and 3989).
TURNED_ROWS = 12
FEW_ROWS = 64  # rows up to which packing B is most of the work: long pieces of its rows, pass by pass over k
ACROSS = 512  # most columns of a block of sums that are built in place
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


@kept_gemm
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
    parallel = batch * _cycles(m, n, k, t, costs) >= SMALL
    share_m, share_n = _shares(target.cores, (batch, m, n, k), t, costs)
    wide, scratch = near // (depth * size), SCRATCH // (deep * size)
    by_rows = m <= FEW_ROWS and shape.b_k != 1 and deep > depth
    order = "rows"
    if _outer_products(target, t, shape, held or (dtype,)) and 1 / share_m + 1 / share_n > 1 / WORTH_PACKING:
        return _in_place(target, t, (batch, m, n, k), parallel)
    if pack_a and not t.whole and isinstance(shape.k, int) and scratch >= share_n > 2 * wide and share_m > FEW_ROWS:
        order, kc, nc = "columns", k, _block(t.nr, share_n, share_n)
        depth, mc = _block_of_a(target, t, share_m, k)
    elif isinstance(shape.k, int) and scratch >= min(share_n, 4 * t.nr) and not by_rows:
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
    return GemmSchedule(t, share_m, share_n, mc, nc, kc, depth, order, pack_a, pack_b, parallel)


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


def _outer_products(target: Target, t: RegisterTile, shape: Shape, held: tuple[Attribute, ...]) -> bool:
    """Whether k is the outer dimension of both operands, as in the gradient of a weight, and the unit reads them in place.

    A block of some values of k is then one piece of memory in each of them.
    """
    if not (t.any_a and t.b_in_place) or set(held) != {t.element} or t.terms > 1 or not isinstance(shape.k, int):
        return False
    size = bytes_of(t.element)
    pages = [isinstance(s, int) and s * size % PAGE == 0 for s in (shape.a_k, shape.b_k)]
    return shape.a_m == 1 and shape.b_n == 1 and not any(pages)


def _in_place(target: Target, t: RegisterTile, sizes: tuple[int, int, int, int], parallel: bool) -> GemmSchedule:
    """Outer products without packing: passes over k as deep as half of the first cache holds of a panel of B, while the
    sums of a block wait in half of the second-level cache.
    """
    k = sizes[3]
    t = widest(t, target, sizes[2])
    share_m, share_n = _shares(target.cores, sizes, t, (READ, READ))
    depth = max(1, (target.l1_bytes or ANY_CACHE) // 2 // (t.nr * bytes_of(t.element)))
    nc = _block(t.nr, share_n, ACROSS)
    mc = _block(t.mr, share_m, (target.l2_bytes or ANY_CACHE) // CACHE_SHARE // bytes_of(t.accumulator) // nc)
    return GemmSchedule(t, share_m, share_n, mc, nc, k, min(depth, k), "rows", False, False, parallel)


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


def _block_of_a(target: Target, t: RegisterTile, share_m: int, k: int) -> tuple[int, int]:
    """Values of k and rows of a packed block of A that stays in three eighths of the second-level cache, so that all of B
    passes by it once: 192 rows of 1024 values of float32 on a Xeon, 768 x 768 x 1024 with A transposed at 162 GFLOP/s a
    core where passes of 256 values reach 155 and A in place 115.
    """
    most = (target.l2_bytes or ANY_CACHE) * 3 // 8 // bytes_of(t.element)
    rows = 24 * t.mr
    passes = -(-k // max(1, most // rows))
    return -(-k // passes // t.k_multiple) * t.k_multiple, _block(t.mr, share_m, max(rows, most // k))


def _packs_a(target: Target, t: RegisterTile, shape: Shape) -> bool:
    """A is packed where the unit cannot read it as it lies, or only slowly.

    Tile loads of rows that start inside a cache line touch two lines each. A panel of a transposed A takes a line for each
    value of k, of which it uses a part, and comes again for each panel of B; lines that lie a page apart share a few sets
    of the first-level cache.
    """
    size = bytes_of(t.element)
    if not t.any_a and shape.a_k != 1:
        return True
    if shape.a_k != 1:
        lines = _known(shape.k, 1024) * target.line_bytes
        again = _known(shape.n, 1024) > 2 * t.nr
        return (again and lines > target.l1_bytes // 2 > 0) or (
            isinstance(shape.a_k, int) and shape.a_k * size % PAGE == 0
        )
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
            cost = -(-tasks // cores) * _cycles(sm * t.mr, sn * t.nr, k, t, costs)
            if cost < best * 0.99:
                best, found = cost, (sm * t.mr, sn * t.nr)
    return found


def _cycles(m: int, n: int, k: int, t: RegisterTile, costs: tuple[float, ...]) -> float:
    """What m x n x k products take on one core, with the packing and reading of A and B."""
    return (m * n * t.terms / SPEED.get(t.unit, SPEED["fma"]) + m * costs[0] + n * costs[1]) * k


def _block(tile: int, share: int, most: int) -> int:
    """Equal blocks of a share, of at most so many rows or columns, in whole register tiles."""
    pieces = -(-share // max(tile, most // tile * tile))
    return -(-share // pieces // tile) * tile


def _known(dim: Dim, otherwise: int) -> int:
    return max(1, dim) if isinstance(dim, int) else otherwise  # an empty matrix takes the schedule of a small one
