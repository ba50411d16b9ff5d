"""The GEMM schedules near one: each differs in one choice, made consistent with the others.

A search that goes from the best of them to its neighbours reaches every combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.register_tiles import RegisterTile
from luban.kernels.tuning import rules
from luban.kernels.tuning.gemm_cost import cost
from luban.kernels.tuning.workload import Workload
from luban.targets.target import Target

if TYPE_CHECKING:
    from luban.kernels.gemm_schedule import GemmSchedule

TASKS = 4  # most tasks a core
PASSES = 8  # most equal passes over k
BLOCKS = (1, 2, 3, 4, 6, 8, 12, 16)  # equal blocks that a task's rows or columns fall into
SMALL = 1 << 22  # products up to which one thread may be faster than all


def near(s: GemmSchedule, target: Target, workload: Workload) -> list[GemmSchedule]:
    """The neighbours of a schedule that are right, the one expected to be fastest first."""
    found = {c: cost(c, target, workload) for c in _near(s, target, workload) if rules.gemm_holds(c, target, workload)}
    found.pop(s, None)
    return sorted(found, key=lambda c: found[c])


def _near(s: GemmSchedule, target: Target, workload: Workload) -> Iterator[GemmSchedule]:
    _, m, n, k = workload.shape
    for t in rules.gemm_tiles(target, workload):
        yield _with_tile(s, t, workload)
    yield from _shares(s, target.cores, m, n)
    yield from _passes(s, k)
    for count in BLOCKS:
        yield replace(s, mc=_block(s.share_m, count, s.tile.mr))
        yield replace(s, nc=_block(s.share_n, count, s.tile.nr))
    yield from _with_order(s, target, workload)
    for a, b in ((not s.pack_a, s.pack_b), (s.pack_a, not s.pack_b)):
        yield replace(s, pack_a=a, pack_b=b)
    if m * n * k * workload.shape[0] <= SMALL and target.cores > 1:
        whole = replace(s, share_m=_up(m, s.tile.mr), share_n=_up(n, s.tile.nr))
        yield replace(whole, parallel=not s.parallel)
        yield replace(s, parallel=not s.parallel)


def _with_tile(s: GemmSchedule, t: RegisterTile, workload: Workload) -> GemmSchedule:
    """The same cuts in whole tiles of another size."""
    share_m, share_n = _up(s.share_m, t.mr), _up(s.share_n, t.nr)
    read_a, read_b = rules.may_read(t, workload)
    depth = None if s.depth is None else _up(s.depth, t.k_multiple)
    kc = s.kc if s.kc >= workload.shape[3] else _up(s.kc, t.k_multiple)
    return replace(
        s,
        tile=t,
        share_m=share_m,
        share_n=share_n,
        mc=min(_up(s.mc, t.mr), share_m),
        nc=min(_up(s.nc, t.nr), share_n),
        kc=kc,
        depth=depth,
        pack_a=s.pack_a or not read_a,
        pack_b=s.pack_b or not read_b,
    )


def _shares(s: GemmSchedule, cores: int, m: int, n: int) -> Iterator[GemmSchedule]:
    """C dealt out to so many tasks across and down; the blocks keep about their size."""
    t, most = s.tile, TASKS * cores
    for across in range(1, most + 1):
        for down in range(1, most // across + 1):
            share_m, share_n = _block(m, down, t.mr), _block(n, across, t.nr)
            mc, nc = (_block(share, max(1, round(share / old)), tile) for share, old, tile in (
                (share_m, s.mc, t.mr), (share_n, s.nc, t.nr)))  # fmt: skip
            yield replace(s, share_m=share_m, share_n=share_n, mc=mc, nc=nc)


def _passes(s: GemmSchedule, k: int) -> Iterator[GemmSchedule]:
    """k in equal passes: packed at once and worked through, or packed pass by pass. A row of B at a time, where it lies."""
    t = s.tile
    deep = packed_depth(t, k)
    for count in range(1, PASSES + 1):
        depth = _block(deep, count, t.k_multiple)
        yield replace(s, kc=k, depth=depth)
        if t.terms == 1:
            yield replace(s, kc=_block(k, count, t.k_multiple), depth=_block(k, count, t.k_multiple))
    if not s.pack_b:
        for rows in (4, 8, 16, 32):
            yield replace(s, kc=k, depth=_up(rows, t.k_multiple))


def _with_order(s: GemmSchedule, target: Target, workload: Workload) -> Iterator[GemmSchedule]:
    """The other operand's panel stays in the first-level cache; what walks past it fits the second."""
    for order in rules.ORDERS:
        if order != s.order:
            turned = replace(s, order=order)
            yield turned
            deep = min(s.depth or s.kc, workload.shape[3])
            room = (target.l2_bytes or 1 << 20) // 2 // max(1, deep * bytes_of(s.tile.element))
            if order == "columns":
                yield replace(turned, mc=_block(s.share_m, -(-s.share_m // max(1, room)), s.tile.mr))
            else:
                yield replace(turned, nc=_block(s.share_n, -(-s.share_n // max(1, room)), s.tile.nr))


def _block(size: int, count: int, step: int) -> int:
    """The size of `count` equal blocks in whole steps."""
    return _up(-(-size // max(1, count)), step)


def _up(size: int, step: int) -> int:
    return -(-max(1, size) // step) * step
