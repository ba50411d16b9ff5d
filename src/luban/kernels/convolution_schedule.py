"""How a convolution is cut up for a chip: its register tile and the blocks that stay in the second-level cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.dialects.builtin import f32, f64
from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.gemm_facts import ANY_CACHE, SMALL
from luban.kernels.register_tiles import MAX_ROWS, RegisterTile, register_tile
from luban.symbolic import Dim
from luban.targets.target import Target

DEPTH = 768  # rows of patches in a pass: a panel of the weights for them takes half of the first-level cache
UNKNOWN = 1024  # what a size that nobody knows is taken for


@dataclass(frozen=True)
class Blocks:
    """share_m, share_n are rows and points of a task, nc the points that are copied at a time, and `channels` those of the
    image that are copied at a time: more of them are worked through in passes, between which the sums wait.
    """

    tile: RegisterTile
    share_m: int
    share_n: int
    nc: int
    channels: int
    parallel: bool


def blocks_of(target: Target, element: Attribute, sizes: tuple[Dim, Dim, Dim], taps: tuple[int, int]) -> Blocks:
    """The blocks for (batch, m, n), and for channels with so many taps each."""
    batch, m, n = (max(1, size) if isinstance(size, int) else UNKNOWN for size in sizes)
    channels, each = taps
    t = tile_of(target, element, m, n)
    passes = -(-channels // max(1, DEPTH // each))
    together = -(-channels // passes)
    rows = together * each
    size, near = bytes_of(t.element), (target.l2_bytes or ANY_CACHE) // 2
    tasks_m, tasks_n = _tasks(target.cores, batch, -(-m // t.mr), -(-n // t.nr))
    share_m, share_n = _share(m, t.mr, tasks_m), _share(n, t.nr, tasks_n)
    waiting = share_m if passes > 1 else 0
    most = max(t.nr, near // ((rows + waiting) * size) // t.nr * t.nr)
    nc = _share(share_n, t.nr, -(-share_n // most))
    parallel = batch * m * n * channels * each >= SMALL * 32
    return Blocks(t, share_m, share_n, nc, together, parallel)


def _share(size: int, tile: int, pieces: int) -> int:
    """The size of equal pieces in whole tiles."""
    tiles = -(-size // tile)
    return -(-tiles // pieces) * tile


def plain_tile(target: Target, element: Attribute) -> RegisterTile:
    """The tile of multiply-adds, which read floats of any type as they are copied."""
    return replace(register_tile(target, element if element == f64 else f32), element=element)


def tile_of(target: Target, element: Attribute, m: int, n: int) -> RegisterTile:
    """The register tile that takes the fewest cycles.

    A step of k takes as many cycles as its multiply-adds or its loads, two of either a cycle; tiles of one vector a row
    ran at 0.65 of what that says (9 x 16 at 104, 8 x 48 at 158 GFLOP/s on a Xeon).
    """
    t = plain_tile(target, element)
    lanes = max(1, target.vector_bits // (64 if bytes_of(t.accumulator) == 8 else 32))
    found = [t]
    for nv in range(1, 5):
        mr = min(MAX_ROWS, (target.vector_registers - nv - 1) // nv, max(1, m))
        found += [replace(t, mr=mr, nr=nv * lanes)] if mr > 0 else []
    t = replace(t, mr=min(t.mr, max(1, m)))

    def cycles(tile: RegisterTile) -> float:
        vectors = tile.nr // lanes
        step = max(tile.mr * vectors, tile.mr + vectors, 8) / (0.65 if vectors == 1 else 1.0)
        return -(-n // tile.nr) * -(-m // tile.mr) * step

    return min([t, *found[1:]], key=cycles)


def _tasks(cores: int, batch: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """Blocks of rows and of points such that all cores have work, points first: patches are then copied once."""
    wanted = -(-4 * cores // batch) if cores > 1 else 1
    across = min(tiles_n, wanted)
    return min(tiles_m, max(1, -(-cores // (batch * across)))), across
