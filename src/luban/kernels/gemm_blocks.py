"""A GEMM schedule with the cache blocks that a person asks for instead of those derived from the chip."""

from __future__ import annotations

from dataclasses import replace

from luban.kernels.gemm_schedule import GemmSchedule, Shape
from luban.symbolic import Dim


def with_blocks(schedule: GemmSchedule, shape: Shape, tile_size: int) -> GemmSchedule:
    """Blocks of `tile_size` rows, columns and values of k, no larger than the matrix.

    Rows and columns are rounded up to whole register tiles, k to whole groups of the unit. One-column tiles need no
    packing: there is nothing to bring side by side.
    """
    t = schedule.tile
    rows, columns = _block(tile_size, shape.m, t.mr), _block(tile_size, shape.n, t.nr)
    return replace(
        schedule,
        share_m=rows,
        share_n=columns,
        mc=rows,
        nc=columns,
        kc=_block(tile_size, shape.k, t.k_multiple),
        depth=None,
        order="columns",
        pack_b=schedule.pack_b and t.nr > 1,
    )


def _block(tile_size: int, extent: Dim, multiple: int) -> int:
    size = min(tile_size, extent) if isinstance(extent, int) else tile_size
    return -(-max(size, 1) // multiple) * multiple
