"""What the choice of a GEMM's schedule rests on: its sizes, its register tile, what is packed, and each thread's part of C."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.gemm_types import Shape
from luban.kernels.register_tiles import RegisterTile
from luban.symbolic import Dim
from luban.targets.target import Target

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


@dataclass(frozen=True)
class Facts:
    """A contraction on a chip.

    held              types in which a and b lie
    batch, m, n, k    sizes, a guess where they are open
    known_k           whether k is
    pack_a, pack_b    whether the unit reads that operand from panels
    share_m, share_n  rows and columns of a task
    parallel          whether threads are worth starting
    """

    target: Target
    shape: Shape
    tile: RegisterTile
    held: tuple[Attribute, ...]
    batch: int
    m: int
    n: int
    k: int
    known_k: bool
    pack_a: bool
    pack_b: bool
    share_m: int
    share_n: int
    parallel: bool

    @property
    def size(self) -> int:
        """Bytes of an element as it is multiplied."""
        return bytes_of(self.tile.element)

    @property
    def near(self) -> int:
        """Bytes of the second-level cache that packed B may take."""
        return (self.target.l2_bytes or ANY_CACHE) // CACHE_SHARE

    @property
    def deep(self) -> int:
        """Values of k as they are packed: of all parts, and padded."""
        return packed_depth(self.tile, self.k)


def facts_of(target: Target, shape: Shape, t: RegisterTile, held: tuple[Attribute, ...]) -> Facts:
    """The facts of a contraction whose operands are multiplied in tiles t and lie in the types `held`."""
    batch, m, n, k = known(shape.batch, 1), known(shape.m, 1024), known(shape.n, 1024), known(shape.k, 1024)
    cast = [t.terms > 1 or ty != t.element for ty in held]
    if m < t.mr and not t.whole:
        t = replace(t, mr=max(1, m))
    pack_a = cast[0] or packs_a(target, t, shape)
    pack_b = cast[1] or _packs_b(target, t, shape, n * k * bytes_of(t.element))
    costs = tuple((PACK if packed else READ) * t.terms for packed in (pack_a, pack_b))
    parallel = batch * _cycles(m, n, k, t, costs) >= SMALL
    share_m, share_n = shares(target.cores, (batch, m, n, k), t, costs)
    known_k = isinstance(shape.k, int)
    return Facts(target, shape, t, held, batch, m, n, k, known_k, pack_a, pack_b, share_m, share_n, parallel)


def packs_a(target: Target, t: RegisterTile, shape: Shape) -> bool:
    """A is packed where the unit cannot read it as it lies, or only slowly.

    Tile loads of rows that start inside a cache line touch two lines each. A panel of a transposed A takes a line for each
    value of k, of which it uses a part, and comes again for each panel of B; lines that lie a page apart share a few sets
    of the first-level cache.
    """
    size = bytes_of(t.element)
    if not t.any_a and shape.a_k != 1:
        return True
    if shape.a_k != 1:
        lines = known(shape.k, 1024) * target.line_bytes
        again = known(shape.n, 1024) > 2 * t.nr
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


def shares(cores: int, sizes: tuple[int, int, int, int], t: RegisterTile, costs: tuple[float, ...]) -> tuple[int, int]:
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


def block(tile: int, share: int, most: int) -> int:
    """Equal blocks of a share, of at most so many rows or columns, in whole register tiles."""
    pieces = -(-share // max(tile, most // tile * tile))
    return -(-share // pieces // tile) * tile


def known(dim: Dim, otherwise: int) -> int:
    return max(1, dim) if isinstance(dim, int) else otherwise  # an empty matrix takes the schedule of a small one
