"""Which unit multiplies 8-bit integers on a chip, summing in 32 bits, and its register tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xdsl.dialects.builtin import i8, i16, i32

from luban.kernels.register_tiles import RegisterTile, rows_and_vectors, streaming_tile
from luban.targets.target import Target

Signs = tuple[bool, bool]  # whether the integers of A and of B have no sign


def integer_tile(target: Target, unsigned: Signs = (False, False)) -> RegisterTile:
    """The tile of the fastest unit that takes operands of these signs, else that of plain widening multiplications."""
    offered = [unit for dtype in ("int8", "uint8", "int16") for unit in target.units(dtype)]
    for unit in sorted(offered, key=lambda u: -u.rate):
        make = _UNITS.get(unit.name)
        tile = make(target, unsigned) if make else None
        if tile is not None:
            return tile
    mr, columns = _registers(target)
    return RegisterTile("imul", mr, columns, 1, i8, True, True, i32)


def streaming_integers(target: Target, rows: int) -> RegisterTile:
    """A tile of few rows and many columns for products that read B once, from memory, where it lies."""
    return replace(streaming_tile(target, i8, rows), unit="imul", accumulator=i32)


def _registers(target: Target, more_rows: int = 0) -> tuple[int, int]:
    """Rows and columns of sums that fill the registers, with `more_rows` of them for the unit itself."""
    mr, nv = rows_and_vectors(target)
    if more_rows:
        mr = max(1, min(mr, (target.vector_registers - 2 * nv - 2) // nv))
    return mr, nv * max(1, target.vector_bits // 32)


def _amx(target: Target, _unsigned: Signs) -> RegisterTile | None:
    """2 x 2 tiles of 16 x 16 sums; rows of A hold 64 values of k, rows of B groups of four."""
    if target.matrix_unit != "amx" or target.vector_bits != 512:
        return None
    return RegisterTile(
        "amx_int8", 32, 32, 4, i8, False, False, i32, a_kk=64, k_multiple=64, whole=True, panel_b=16
    )  # fmt: skip


def _unsigned_by_signed(target: Target, unsigned: Signs) -> RegisterTile | None:
    """vpdpbusd. Of two signed operands A is moved up by 128, and 128 times the sums of B are held besides."""
    if unsigned == (True, True):
        return None
    more = int(unsigned == (False, False))
    mr, columns = _registers(target, more)
    return RegisterTile(
        "vpdpbusd", mr, columns, 4, i8, False, False, i32, a_kk=4, k_multiple=4, more_rows=more
    )  # fmt: skip


def _equal_signs(target: Target, unsigned: Signs) -> RegisterTile | None:
    return _groups(target) if unsigned[0] == unsigned[1] else None


def _mixed_signs(target: Target, unsigned: Signs) -> RegisterTile | None:
    return _groups(target) if unsigned[0] != unsigned[1] else None


def _groups(target: Target) -> RegisterTile:
    """sdot, udot and usdot, which the code generator tells apart by the signs."""
    mr, columns = _registers(target)
    return RegisterTile("sdot", mr, columns, 4, i8, False, False, i32, a_kk=4, k_multiple=4)


def _words(unit: str) -> Callable[[Target, Signs], RegisterTile]:
    """Pairs of 16-bit integers, to which packing extends the operands: exact for all signs."""

    def make(target: Target, _unsigned: Signs) -> RegisterTile:
        mr, columns = _registers(target)
        return RegisterTile(unit, mr, columns, 2, i16, False, False, i32, a_kk=2, k_multiple=2)

    return make


# name of a dot unit in a target's data -> the tile of its micro-kernel, or None where it does not take the operands
_UNITS: dict[str, Callable[[Target, Signs], RegisterTile | None]] = {
    "amx.tdpbssd": _amx,
    "avx512vnni.vpdpbusd": _unsigned_by_signed,
    "avxvnni.vpdpbusd": _unsigned_by_signed,
    "avx512vnni.vpdpwssd": _words("vpdpwssd"),
    "avxvnni.vpdpwssd": _words("vpdpwssd"),
    "avx2.vpmaddwd": _words("vpmaddwd"),
    "dotprod.sdot": _equal_signs,
    "i8mm.usdot": _mixed_signs,
}
