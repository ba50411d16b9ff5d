"""How attention is cut up for a chip: queries and keys of a block, and the tasks that a head's queries become."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.register_tiles import RegisterTile, fit, register_tile
from luban.symbolic import Dim
from luban.targets.target import Target

# Queries of a forward block: the rows of a matrix unit's register tile. With causality half of a block's square is
# computed for nothing: 64 rows are 13 % slower at 256 positions, 10 % at 1024.
QUERIES = 32
CACHE_PART = 8  # scores, weights, keys and values of a forward block take at most this part of the second-level cache
# The same on a matrix unit, whose weights wait in the first-level cache for two products: 256 keys with 2 MB are 5 %
# faster than 512 at 1024 positions. In float32 blocks of half the size are 2 to 7 % slower.
UNIT_PART = 16
ANY_L1, ANY_L2 = 32 << 10, 1 << 20  # bytes of caches of which a target does not say how large they are
STEP = 32


@dataclass(frozen=True)
class Blocks:
    """Cache blocks of an attention.

    tile           register tile of products with as many columns as features
    score_tile     that of products of queries and keys
    queries, keys  of a block: whole register tiles, and whole panels where they are packed
    """

    tile: RegisterTile
    score_tile: RegisterTile
    queries: int
    keys: int


def forward_blocks(target: Target, dtype: Attribute, queries: Dim, keys: Dim, size: int) -> Blocks:
    """The blocks for so many queries, keys and features; keys are the columns of scores."""
    element = bytes_of(dtype)
    unit = register_tile(target, dtype)
    part = UNIT_PART if unit.whole else CACHE_PART
    room = (target.l2_bytes or ANY_L2) // part // (QUERIES * (4 + element) + 2 * size * element)
    most = max(STEP, 1 << room.bit_length() - 1) if room else STEP
    score_tile, tile = fit(unit, target, _at_most(keys, most)), fit(unit, target, size)
    rows = _even(queries, QUERIES, max(tile.mr, score_tile.mr))
    return Blocks(tile, score_tile, rows, _columns(keys, most, math.lcm(score_tile.nr, tile.k_multiple)))


def backward_blocks(target: Target, dtype: Attribute, queries: Dim, keys: Dim, size: int) -> Blocks:
    """The blocks of the gradients, where queries are the columns of scores: weights and score gradients fill the L1.

    Measured with 48 KB: 96 by 96 in bfloat16 (64 by 64 is 3 % slower), 64 by 64 in float32 (128 by 128 is 10 % slower).
    """
    side = math.isqrt((target.l1_bytes or ANY_L1) // (2 * bytes_of(dtype))) // STEP * STEP
    side = max(STEP, side)
    unit = register_tile(target, dtype)
    score_tile, tile = fit(unit, target, _at_most(queries, side)), fit(unit, target, size)
    columns = _columns(queries, side, math.lcm(score_tile.nr, tile.k_multiple))
    rows = up(side, math.lcm(tile.mr, tile.k_multiple))
    return Blocks(tile, score_tile, columns, _at_most(keys, rows))


def up(size: int, step: int) -> int:
    """The size rounded up to whole steps, at least one."""
    return -(-max(1, size) // step) * step


def _columns(length: Dim, most: int, step: int) -> int:
    """Columns of a block in whole steps, no more than a known length needs."""
    block = max(1, most // step) * step
    return min(block, up(length, step)) if isinstance(length, int) else block


def _at_most(length: Dim, block: int) -> int:
    """The block, or the whole length where it is shorter."""
    return max(1, min(block, length)) if isinstance(length, int) else block


def _even(length: Dim, block: int, step: int) -> int:
    """About `block`, in whole register tiles, such that a known length falls into blocks of one size."""
    if not isinstance(length, int):
        return up(block, step)
    blocks = max(1, round(length / block))
    return min(up(-(-length // blocks), step), max(1, length))


def pieces_of(target: Target, batch: Dim, heads: Dim, blocks: Dim) -> int:
    """Tasks that a head's blocks of queries are dealt out to, such that the cores have about the same to do.

    Each of them packs the head's keys and values anew, hence no more than needed.
    """
    known = [d for d in (batch, heads) if isinstance(d, int)]
    tasks, most = max(1, math.prod(known)), blocks if isinstance(blocks, int) else target.cores
    for pieces in range(1, max(1, most) + 1):
        if tasks * pieces % target.cores == 0 or tasks * pieces >= 4 * target.cores:
            return pieces
    return max(1, most)
