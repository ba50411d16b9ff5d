"""What a GEMM schedule is expected to cost: it puts candidates into the order in which they are measured, no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.dot_writer import packed_depth
from luban.kernels.tuning.rules import may_read
from luban.kernels.tuning.workload import Workload
from luban.targets.target import Target

if TYPE_CHECKING:
    from luban.kernels.gemm_schedule import GemmSchedule

# A Xeon with AMX, one core; products and bytes a cycle. Only their proportions matter.
SPEED = {"fma": 32.0, "bf16_dot": 64.0, "bfdot": 64.0, "amx": 512.0}
PACK, READ = 0.2, 0.05  # cycles that an element costs where it is packed, and where it is read as it lies
NEAR, FAR = 48.0, 10.0  # bytes a cycle from the second-level cache, and from behind it
REGION = 8000.0  # a thread region, in cycles
TURN = 12.0  # a register tile: its loop, its first loads and the store


def cost(s: GemmSchedule, target: Target, workload: Workload) -> float:
    """Cycles until the last core has ended."""
    batch, m, n, k = workload.shape
    tasks = batch * -(-m // s.share_m) * -(-n // s.share_n)
    turns = -(-tasks // target.cores) if s.parallel else tasks
    rows, columns = min(s.share_m, -(-m // s.tile.mr) * s.tile.mr), min(s.share_n, -(-n // s.tile.nr) * s.tile.nr)
    task = _products(s, rows, columns, k) + _moved(s, target, workload, (rows, columns, k))
    return turns * task + (REGION if s.parallel else 0.0)


def _products(s: GemmSchedule, rows: int, columns: int, k: int) -> float:
    t = s.tile
    deep = packed_depth(t, k)
    passes = -(-deep // (s.depth or deep))
    tiles = -(-rows // t.mr) * -(-columns // t.nr)
    work = rows * columns * deep / SPEED.get(t.unit, SPEED["fma"])
    if not t.whole:  # every step loads a row of B and mr values of A for mr * nr products
        work *= 1 + 0.25 * (t.mr + t.nr / 16) / (t.mr * t.nr / 16)
    waiting = (passes - 1) * rows * columns * 2 * bytes_of(t.accumulator) / NEAR
    return work + tiles * passes * TURN + waiting


def _moved(s: GemmSchedule, target: Target, workload: Workload, sizes: tuple[int, int, int]) -> float:
    """Packing, and what does not stay in the cache where it is used again."""
    rows, columns, k = sizes
    t, size, deep = s.tile, bytes_of(s.tile.element), min(s.kc, k)
    row_blocks, column_blocks = -(-rows // s.mc), -(-columns // s.nc)
    again = row_blocks if k > s.kc else 1  # pass by pass, B is packed anew for each block of rows
    a_cost, b_cost = (PACK if packed else READ for packed in (s.pack_a, s.pack_b))
    total = t.terms * k * (rows * column_blocks * a_cost + columns * again * b_cost)
    panel = t.mr * (s.depth or deep) * size if s.order == "rows" else t.nr * (s.depth or deep) * size
    first, second = target.l1_bytes or 1 << 15, target.l2_bytes or 1 << 20
    streamed = rows * columns * k * t.terms * size / (t.mr if s.order == "rows" else t.nr)
    held = (s.nc if s.order == "rows" else s.mc) * (s.depth or deep) * size  # what is walked past the panel
    total += 0.2 * streamed / (NEAR if held <= second // 2 else FAR)
    if panel > first * 2 // 3:
        total += 0.2 * streamed / NEAR
    read_b = may_read(t, workload)[1]
    return total if s.pack_b or read_b else total * 2
