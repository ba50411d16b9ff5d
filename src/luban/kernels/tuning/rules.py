"""What a schedule must keep to give the right result. An entry that breaks a rule is not used, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from luban.compiler.ir.dtypes import bytes_of, from_name
from luban.kernels.dot_writer import packed_depth, panel_elements
from luban.kernels.register_tiles import MAX_ROWS, RegisterTile, register_tile, split_tile, streaming_tile
from luban.kernels.tuning.workload import ATTENTION, Workload, strides_of
from luban.targets.target import Target

if TYPE_CHECKING:
    from luban.kernels.attention_blocks import Blocks
    from luban.kernels.gemm_schedule import GemmSchedule

MAX_SCRATCH = 64 << 20  # bytes that a task may take for packed panels and waiting sums: what a thread's pool can keep
MIN_SUMS = 6  # sums in registers below which a tile only waits for its multiply-adds
FEW_ROWS = 8  # rows up to which a product may read B where it lies, whatever the unit
ORDERS = ("rows", "columns")


def gemm_tiles(target: Target, workload: Workload) -> list[RegisterTile]:
    """The register tiles that may serve a contraction on a chip."""
    dtype, (_, m, _, _) = from_name(workload.dtypes[0]), workload.shape
    first = split_tile(target, dtype, workload.precision) or register_tile(target, dtype)
    tiles = [first] if first.whole else list(_sizes(target, first, m))
    if m <= FEW_ROWS and len(set(workload.dtypes)) == 1 and strides_of(workload)[1][0] == 1:
        widest = streaming_tile(target, dtype, m)
        lanes = _lanes(target, widest)
        tiles += [replace(widest, nr=nr) for nr in range(lanes, widest.nr + 1, lanes)]
    return list(dict.fromkeys(tiles))


def _sizes(target: Target, t: RegisterTile, m: int) -> Iterator[RegisterTile]:
    """The sizes of a tile of vectors whose sums, with a row of B and a value of A, fit the registers."""
    lanes = _lanes(target, t)
    yield t
    for vectors in range(1, 5):
        most = min(MAX_ROWS, (target.vector_registers - vectors - 1) // vectors, m)
        for rows in range(1, most + 1):
            if rows * vectors >= MIN_SUMS or rows == most:
                yield replace(t, mr=rows, nr=vectors * lanes)


def _lanes(target: Target, t: RegisterTile) -> int:
    return max(1, target.vector_bits // (8 * bytes_of(t.accumulator)))


def may_read(t: RegisterTile, workload: Workload) -> tuple[bool, bool]:
    """Whether the unit can read A, and B, where they lie; else they must be packed."""
    (_, a_k), (b_n, _) = strides_of(workload)
    as_is = [t.terms == 1 and from_name(name) == t.element for name in workload.dtypes[1:]]
    return as_is[0] and (t.any_a or a_k == 1), as_is[1] and t.b_in_place and (t.nr == 1 or b_n == 1)


def gemm_holds(s: GemmSchedule, target: Target, workload: Workload) -> bool:
    """Whether a schedule is right for a contraction: whole tiles, packed where it must be, scratch that there is."""
    t, (_, _, _, k) = s.tile, workload.shape
    numbers = (s.share_m, s.share_n, s.mc, s.nc, s.kc, t.k_multiple if s.depth is None else s.depth)
    if not all(type(n) is int and n > 0 for n in numbers) or s.order not in ORDERS:
        return False
    whole = s.share_m % t.mr == s.mc % t.mr == s.share_n % t.nr == s.nc % t.nr == 0
    groups = (s.kc >= k or s.kc % t.k_multiple == 0) and (s.depth is None or s.depth % t.k_multiple == 0)
    read_a, read_b = may_read(t, workload)
    blocks = s.mc <= s.share_m and s.nc <= s.share_n
    fits = scratch_bytes(s, k) <= MAX_SCRATCH
    return whole and groups and blocks and (s.pack_a or read_a) and (s.pack_b or read_b) and fits


def scratch_bytes(s: GemmSchedule, k: int) -> int:
    """Bytes that a task packs into and lets sums wait in."""
    t, deep = s.tile, min(s.kc, k)
    packed = s.pack_a * panel_elements(t, t.mr, s.mc, deep) + s.pack_b * panel_elements(t, t.nr, s.nc, deep)
    waits = k > s.kc or (s.depth is not None and s.depth < packed_depth(t, deep))
    return packed * bytes_of(t.element) + waits * s.mc * s.nc * bytes_of(t.accumulator)


def attention_steps(blocks: Blocks, workload: Workload) -> tuple[int, int]:
    """What the queries and the keys of a block must be multiples of, unless they are all there are."""
    t, s = blocks.tile, blocks.score_tile
    columns = math.lcm(s.nr, t.k_multiple)
    if workload.op == ATTENTION:
        return max(t.mr, s.mr), columns
    return columns, math.lcm(t.mr, t.k_multiple)


def attention_holds(b: Blocks, workload: Workload) -> bool:
    """Whether blocks are right for an attention: whole register tiles, or all there are.

    The side that is packed into panels of columns - keys in the forward kernel, queries in the backward one - is in
    whole panels, however short it is.
    """
    steps, lengths = attention_steps(b, workload), workload.shape[2:4]
    panels = 1 if workload.op == ATTENTION else 0
    for side, (block, step, length) in enumerate(zip((b.queries, b.keys), steps, lengths, strict=True)):
        if type(block) is not int or block < 1:
            return False
        whole, most = block % step == 0, -(-length // step) * step if side == panels else length
        if block > most or not (whole or (side != panels and block == length)):
            return False
    return b.queries * b.keys * 16 <= MAX_SCRATCH  # scores, weights and their gradients
