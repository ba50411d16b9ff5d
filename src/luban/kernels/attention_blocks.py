"""How attention is cut up for a chip: queries and keys of a block, and the tasks that a head's queries become."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from xdsl.ir import Attribute

from luban.kernels.register_tiles import RegisterTile, fit, register_tile
from luban.symbolic import Dim
from luban.targets.target import Target

QUERY_BLOCK = int(os.environ.get("QB", 32))
KEY_BLOCK = int(os.environ.get("KB", 256))


@dataclass(frozen=True)
class Blocks:
    """Cache blocks of an attention.

    tile          register tile of products with as many columns as features
    score_tile    that of products of queries and keys
    queries, keys of a block: whole register tiles, and whole panels of packed keys
    """

    tile: RegisterTile
    score_tile: RegisterTile
    queries: int
    keys: int


def blocks_of(target: Target, dtype: Attribute, queries: Dim, keys: Dim, size: int) -> Blocks:
    """The blocks for so many queries, keys and features."""
    tile = register_tile(target, dtype)
    score_tile = fit(tile, target, _at_most(keys, KEY_BLOCK))
    tile = fit(tile, target, size)
    step = math.lcm(score_tile.nr, tile.k_multiple)
    block = max(1, KEY_BLOCK // step) * step
    if isinstance(keys, int):
        block = min(block, up(keys, step))
    return Blocks(tile, score_tile, _even(queries, QUERY_BLOCK, max(tile.mr, score_tile.mr)), block)


def backward_blocks(target: Target, dtype: Attribute, queries: Dim, keys: Dim, size: int) -> Blocks:
    """The blocks of the gradients, where queries are the columns of scores."""
    tile = register_tile(target, dtype)
    score_tile = fit(tile, target, _at_most(queries, BQ))
    tile = fit(tile, target, size)
    step = math.lcm(score_tile.nr, tile.k_multiple)
    block = max(1, BQ // step) * step
    if isinstance(queries, int):
        block = min(block, up(queries, step))
    rows = up(BK, math.lcm(tile.mr, tile.k_multiple))
    return Blocks(tile, score_tile, block, min(rows, max(1, keys)) if isinstance(keys, int) else rows)


BQ = int(os.environ.get("BQ", 128))
BK = int(os.environ.get("BK", 128))


def up(size: int, step: int) -> int:
    return -(-max(1, size) // step) * step


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
