"""Which dot unit a data type uses on a chip, and the register tile that fills its registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import bf16, f16, f32, f64
from xdsl.ir import Attribute

from luban.targets.target import Target

MAX_ROWS = 9  # more row pointers than this spill (measured: 70 to 100 of 117 GFLOP/s)
# high * high + finite * low + low * finite; low * low is less than what rounding leaves
SPLIT = (("high", "finite", "low"), ("high", "low", "finite"))
SPLIT_TERMS = 3
MIN_SUMS = 8  # independent sums that hide the latency of two multiply-adds a cycle
TOLERANCE = 0.02


@dataclass(frozen=True)
class RegisterTile:
    """unit: name of a micro-kernel family; mr x nr results in registers, summed in `accumulator`.

    kk values of k lie side by side in a packed panel of B, a_kk in one of A, and both pad k to `k_multiple`; a panel of B
    has `panel_b` columns, nr where that is 0.
    `any_a` and `b_in_place`: whether the unit reads that operand where it lies (given the layout that it wants).
    `whole`: the unit knows no smaller tile, whatever the matrix. `parts_a`, `parts_b`: what packing takes the operands
    apart into (see tile.PackOp); the products then go over all parts, `terms` times as many. `more_rows`: rows of sums
    that the unit holds besides those of the tile.
    """

    unit: str
    mr: int
    nr: int
    kk: int
    element: Attribute
    any_a: bool
    b_in_place: bool
    accumulator: Attribute = f32
    a_kk: int = 1
    k_multiple: int = 1
    panel_b: int = 0
    whole: bool = False
    parts_a: tuple[str, ...] = ()
    parts_b: tuple[str, ...] = ()
    more_rows: int = 0

    @property
    def terms(self) -> int:
        """Products that stand for one."""
        return max(1, len(self.parts_a))


def split_tile(target: Target, dtype: Attribute, precision: str) -> RegisterTile | None:
    """The tile of a matrix unit for bfloat16 that multiplies wider floats, or None where none is faster than plain fma.

    float16, and float32 whose precision is "high", are sums of two bfloats in three products; float32 of "medium"
    precision is rounded.
    """
    split = dtype == f16 or (dtype == f32 and precision == "high")
    if not split and not (dtype == f32 and precision == "medium"):
        return None
    for unit in target.units("bfloat16"):
        make = _BFLOAT16.get(unit.name)
        tile = make(target) if make and unit.kind == "tile" and unit.rate > (SPLIT_TERMS if split else 1) else None
        if tile is not None:
            return replace(tile, parts_a=SPLIT[0], parts_b=SPLIT[1]) if split else tile
    return None


def register_tile(target: Target, dtype: Attribute) -> RegisterTile:
    """The tile for operands of an element type: that of the fastest unit with a micro-kernel, else the plain fma's."""
    if dtype == bf16:
        for unit in target.units("bfloat16"):
            make = _BFLOAT16.get(unit.name)
            tile = make(target) if make and unit.rate > 1 else None
            if tile is not None:
                return tile
    accumulator = f64 if dtype == f64 else f32
    mr, nv = rows_and_vectors(target)
    lanes = max(1, target.vector_bits // (64 if accumulator == f64 else 32))
    return RegisterTile("fma", mr, nv * lanes, 1, dtype, True, True, accumulator)


def streaming_tile(target: Target, dtype: Attribute, rows: int) -> RegisterTile:
    """A tile of few rows and many columns for products that read B once, from memory, where it lies."""
    accumulator = f64 if dtype == f64 else f32
    lanes = max(1, target.vector_bits // (64 if accumulator == f64 else 32))
    vectors = max(1, min(8, (target.vector_registers - 4) // (rows + 1)))
    return RegisterTile("fma", rows, vectors * lanes, 1, dtype, True, True, accumulator)


def fit(t: RegisterTile, target: Target, n: int) -> RegisterTile:
    """The tile for n columns: the width that leaves fewest lanes idle, of those the one nearest to square.

    With 64 columns a tile of 48 computes 96 of them; 6 x 64 computes 64. Tiles of 8 x 3 and 6 x 4 vectors run alike.
    """
    if t.whole:
        return t
    lanes = max(1, target.vector_bits // (64 if t.accumulator == f64 else 32))
    tiles = [t]
    for nv in range(1, 5):
        mr = min(MAX_ROWS, (target.vector_registers - nv - 1) // nv - t.more_rows)
        if mr * nv >= min(MIN_SUMS, t.mr * t.nr // lanes):
            tiles.append(replace(t, mr=mr, nr=nv * lanes))

    def computed(tile: RegisterTile) -> int:
        return -(-n // tile.nr) * tile.nr

    least = min(map(computed, tiles)) * (1 + TOLERANCE)
    if computed(t) <= least:
        return t
    return max((tile for tile in tiles if computed(tile) <= least), key=lambda tile: tile.mr * tile.nr)


def widest(t: RegisterTile, target: Target, n: int) -> RegisterTile:
    """The tile of four vectors a row, whole lines of a B that is read where it lies, unless that leaves many lanes idle."""
    lanes = max(1, target.vector_bits // (64 if t.accumulator == f64 else 32))
    mr = min(MAX_ROWS, (target.vector_registers - 5) // 4)
    wide = -(-n // (4 * lanes)) * 4 * lanes
    if t.whole or mr * 4 < MIN_SUMS * 2 or t.mr < mr or wide > 1.1 * (-(-n // t.nr) * t.nr):
        return t
    return replace(t, mr=mr, nr=4 * lanes)


def rows_and_vectors(target: Target) -> tuple[int, int]:
    """Rows and vectors a row.

    mr * nv accumulators, nv vectors of B and one broadcast value fill the register file; mr = 8, nv = 3 reaches 117 of
    117 GFLOP/s a core in float32 and 232 of 232 in bfloat16 on 32 AVX-512 registers (Zen 4).
    """
    registers = target.vector_registers
    nv = 3 if registers >= 32 else 2 if registers >= 16 else 1
    return max(1, min(8 if registers >= 32 else 6, (registers - nv - 1) // nv)), nv


def _pairs(unit: str, lanes: int | None = None) -> Callable[[Target], RegisterTile | None]:
    """Tiles of a unit that adds the products of two neighbouring values of k; `lanes` is the only width that it has."""

    def make(target: Target) -> RegisterTile | None:
        width = target.vector_bits // 32
        if lanes not in (None, width):
            return None
        mr, nv = rows_and_vectors(target)
        return RegisterTile(unit, mr, nv * width, 2, bf16, False, False, a_kk=2, k_multiple=2)

    return make


def _amx(target: Target) -> RegisterTile | None:
    """2 x 2 tiles of 16 x 16 sums; rows of A hold 32 values of k, rows of B pairs of them."""
    if target.matrix_unit != "amx" or target.vector_bits != 512:
        return None
    return RegisterTile("amx", 32, 32, 2, bf16, False, False, a_kk=32, k_multiple=32, whole=True, panel_b=16)


# name of a dot unit in a target's data -> the tile of its micro-kernel, or None where the target is unfit for it
_BFLOAT16: dict[str, Callable[[Target], RegisterTile | None]] = {
    "amx.tdpbf16ps": _amx,
    "avx512bf16.vdpbf16ps": _pairs("bf16_dot"),
    "bf16.bfdot": _pairs("bfdot", lanes=4),
}
