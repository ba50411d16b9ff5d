"""The ways to cut up a GEMM, the special ones first; each takes the contractions that it is for and leaves the others."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.dialects.builtin import i8

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.gemm_facts import ANY_CACHE, PAGE, READ, Facts, block, shares
from luban.kernels.gemm_types import GemmSchedule
from luban.kernels.integer_tiles import streaming_integers
from luban.kernels.register_tiles import streaming_tile, widest

# Rows and columns (their harmonic sum) from which an operand pays for being packed where the unit could read it in place:
# with A transposed, k 2048, in float32, 384 x 384 ran at 165 packed at 131 GFLOP/s a core, 768 x 192 at 166 and 120, but
# 3072 x 768 at 142 and 172.
WORTH_PACKING = 375
STREAM_ROWS = 8  # rows of A up to which a product is no more than reading B
# The same for 8-bit integers, whose plain products are slower than packing for a dot unit: 2 x 4096 x 4096 1619 us
# streamed and 1916 packed, 3 rows 2317 and 1919.
STREAM_INTEGERS = 2
STREAMS = 8  # rows of B read side by side: the prefetchers follow as many streams
FEW_ROWS = 64  # rows up to which packing B is most of the work: long pieces of its rows, pass by pass over k
# Rows of a block of A that a matrix unit packs at a time, where its sums wait and where they do not, and the columns that it
# then meets: with k 1024 to 2048 and A transposed, blocks of 128 x 768 ran 9 % faster than of 256 x 512, with k 384 blocks
# of 256 rows 35 % faster than all 1024 (bfloat16, Xeon with AMX, one core).
PACKED_ROWS, WIDE = (128, 256), 768
ACROSS = 512  # most columns of a block of sums that are built in place
# Bytes that packed B takes at most: what is beyond the second-level cache is read again for each block of rows.
SCRATCH = 16 << 20


def streamed(f: Facts) -> GemmSchedule | None:
    """Few rows: B is read once, some of its rows side by side from end to end, while the sums wait in the first cache."""
    dtype = f.held[0]
    as_it_lies = f.known_k and isinstance(f.shape.m, int) and set(f.held) == {dtype} and f.shape.b_n == 1
    few = f.m <= (STREAM_INTEGERS if dtype == i8 else STREAM_ROWS)
    if not (as_it_lies and few and f.n * f.k * bytes_of(dtype) > f.target.l2_bytes > 0):
        return None
    t = streaming_integers(f.target, f.m) if dtype == i8 else streaming_tile(f.target, dtype, f.m)
    _, share_n = shares(f.target.cores, (f.batch, f.m, f.n, f.k), t, (READ, READ))
    return GemmSchedule(t, f.m, share_n, f.m, share_n, f.k, STREAMS, "rows", False, False, True)


def outer_products(f: Facts) -> GemmSchedule | None:
    """k is the outer dimension of both operands, as in the gradient of a weight, and packing would cost more than it brings.

    A block of some values of k is then one piece of memory in each operand, read in place: passes as deep as half of the
    first cache holds of a panel of B, while the sums of a block wait in half of the second-level cache.
    """
    t = f.tile
    in_place = t.any_a and t.b_in_place and set(f.held) == {t.element} and t.terms == 1 and f.known_k
    pages = [isinstance(s, int) and s * f.size % PAGE == 0 for s in (f.shape.a_k, f.shape.b_k)]
    outer = f.shape.a_m == 1 and f.shape.b_n == 1 and not any(pages)
    if not (in_place and outer and 1 / f.share_m + 1 / f.share_n > 1 / WORTH_PACKING):
        return None
    t = widest(t, f.target, f.n)
    share_m, share_n = shares(f.target.cores, (f.batch, f.m, f.n, f.k), t, (READ, READ))
    depth = max(1, (f.target.l1_bytes or ANY_CACHE) // 2 // (t.nr * f.size))
    nc = block(t.nr, share_n, ACROSS)
    mc = block(t.mr, share_m, f.near // bytes_of(t.accumulator) // nc)
    return GemmSchedule(t, share_m, share_n, mc, nc, f.k, min(depth, f.k), "rows", False, False, f.parallel)


def blocks_of_a(f: Facts) -> GemmSchedule | None:
    """A block of A is packed once and stays in three eighths of the second-level cache while all of packed B passes by.

    192 rows of 1024 values of float32 on a Xeon: 768 x 768 x 1024 with A transposed at 162 GFLOP/s a core, where passes of
    256 values reach 155 and A in place 115.
    """
    t, wide = f.tile, f.near // (_depth(f) * f.size)
    if not (f.pack_a and not t.whole and _fits(f, f.share_n) and f.share_n > 2 * wide and f.share_m > FEW_ROWS):
        return None
    most, rows = (f.target.l2_bytes or ANY_CACHE) * 3 // 8 // f.size, 24 * t.mr
    depth = _equal(f.k, max(1, most // rows), t.k_multiple)
    mc, nc = block(t.mr, f.share_m, max(rows, most // f.k)), block(t.nr, f.share_n, f.share_n)
    return _packed(f, mc, nc, f.k, depth, "columns")


def tiles_of_packed_a(f: Facts) -> GemmSchedule | None:
    """The same for a matrix unit: few rows of A at a time, so that many columns of B meet them before the next ones."""
    t = f.tile
    if not (f.pack_a and t.whole and _fits(f, f.share_n) and f.share_m > PACKED_ROWS[1]):
        return None
    depth = _depth(f)
    return _packed(f, block(t.mr, f.share_m, PACKED_ROWS[f.deep <= depth]), block(t.nr, f.share_n, WIDE), f.k, depth)


def one_side_near(f: Facts) -> GemmSchedule | None:
    """On a matrix unit all of A, or of B, stays in the second-level cache: no sums wait, and what is packed is used near.

    128 x 4096 x 4096 with B transposed: int8 1,600 instead of 1,190, bfloat16 650 instead of 510.
    """
    t, all_rows = f.tile, f.share_m * f.deep * f.size <= f.near
    if not (t.whole and (all_rows or f.n <= t.nr) and _packs_all_of_k(f) and f.deep > _depth(f)):
        return None
    lines = f.near // 2 // (f.deep * f.size)
    nc = block(t.nr, f.share_n, min(lines, SCRATCH // (f.deep * f.size)))
    mc = block(t.mr, f.share_m, lines if f.pack_a and not all_rows else f.share_m)
    return _packed(f, mc, nc, f.k, f.deep)


def blocks_of_b(f: Facts) -> GemmSchedule | None:
    """A block of B is packed over all of k and walked through in passes, between which the sums of a block wait."""
    if not _packs_all_of_k(f):
        return None
    t, depth = f.tile, _depth(f)
    most = min(f.near // (depth * f.size), SCRATCH // (f.deep * f.size))
    if f.deep > depth:
        nc = block(t.nr, f.share_n, min(most, math.isqrt(f.near // 4)))
        return _packed(f, block(t.mr, f.share_m, f.near // 8 // nc), nc, f.k, depth)
    rows = f.near // 2 // (f.deep * f.size) if f.pack_a else f.share_m
    return _packed(f, block(t.mr, f.share_m, rows), block(t.nr, f.share_n, most), f.k, depth)


def pass_by_pass(f: Facts) -> GemmSchedule:
    """What is packed at a time are some values of k: where k is open or long, or rows are few."""
    t, depth = f.tile, _depth(f)
    nc = block(t.nr, f.share_n, f.near // (packed_depth(t, depth) * f.size))
    return _packed(f, f.share_m, nc, depth, depth)


# the last one takes all that is left
RULES: tuple[Callable[[Facts], GemmSchedule | None], ...] = (
    streamed,
    outer_products,
    blocks_of_a,
    tiles_of_packed_a,
    one_side_near,
    blocks_of_b,
    pass_by_pass,
)


def _packed(f: Facts, mc: int, nc: int, kc: int, depth: int, order: str = "rows") -> GemmSchedule:
    return GemmSchedule(f.tile, f.share_m, f.share_n, mc, nc, kc, depth, order, f.pack_a, f.pack_b, f.parallel)


def _fits(f: Facts, columns: int) -> bool:
    """Whether so many columns of B, packed over all of k, fit a task's scratch."""
    return f.known_k and SCRATCH // (f.deep * f.size) >= columns


def _packs_all_of_k(f: Facts) -> bool:
    few_rows = f.m <= FEW_ROWS and f.shape.b_k != 1 and f.deep > _depth(f)
    return _fits(f, min(f.share_n, 4 * f.tile.nr)) and not few_rows


def _depth(f: Facts) -> int:
    """Values of k in a pass: all where a panel of A takes up to two thirds of the first-level cache, else equal passes
    with panels of up to a third (Xeon with AMX: k = 768 in passes of 192 ran at 1,363, of 384 at 1,274 GFLOP/s a core, but
    k = 384 in one pass at 1,223, in two at 1,169). Four panels of B fit the second-level cache.
    """
    t = f.tile
    k = f.deep if t.terms > 1 else f.k
    third = (f.target.l1_bytes or ANY_CACHE) // 3 // (t.mr * f.size)
    most = min(2 * third if k <= 2 * third else third, f.near // (4 * t.nr * f.size))
    return _equal(k, max(1, most // t.k_multiple) * t.k_multiple, t.k_multiple)


def _equal(k: int, most: int, multiple: int) -> int:
    """The largest of equal passes over k."""
    return -(-k // -(-k // most) // multiple) * multiple
