"""How a GEMM is cut up for a chip, derived from the chip's data."""

from __future__ import annotations

from xdsl.dialects.builtin import i8
from xdsl.ir import Attribute

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.gemm_facts import facts_of, known, packs_a
from luban.kernels.gemm_rules import RULES
from luban.kernels.gemm_types import GemmSchedule, Shape
from luban.kernels.integer_tiles import integer_tile
from luban.kernels.register_tiles import RegisterTile, fit, register_tile, split_tile
from luban.kernels.tuning.kept import kept_gemm
from luban.targets.target import Target

# Rows of A up to which C's transpose is computed where B lies as a left operand does. Results then leave row by row of
# C, often pages apart: 12 of them fit the 12 ways of a first-level cache (16 x 1024 x 4096 in int8: 418 us, packed 386;
# 12 rows 268 and 375, 8 rows 241 and 383; 8 x 4096 x 4096 770 and 1384, in bfloat16 3082 and 3989).
TURNED_ROWS = 12


def turns(target: Target, shape: Shape, tile: RegisterTile, held: tuple[Attribute, ...]) -> bool:
    """Whether the transpose of C is computed: A has few rows, and B lies as the unit reads a left operand.

    B is then read once, in place; packed it would be read, written and read again.
    """
    m, n, k, b_n = shape.m, shape.n, shape.k, shape.b_n
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int) and isinstance(b_n, int)):
        return False
    size, readable = bytes_of(tile.element), tile.whole and tile.terms == 1 and set(held) == {tile.element}
    small = m <= TURNED_ROWS and m * k * size <= target.l2_bytes // 4 and n * k * size > target.l2_bytes
    return readable and small and shape.b_k == 1 and not packs_a(target, tile, shape.turned)


@kept_gemm
def choose(
    target: Target,
    shape: Shape,
    dtype: Attribute,
    held: tuple[Attribute, ...] | None = None,
    precision: str = "highest",
    unsigned: tuple[bool, bool] = (False, False),
) -> GemmSchedule:
    """The schedule for a shape on a target.

    dtype is the type in which the operands are multiplied, `held` the types in which they lie: an operand of another type
    than the unit's is converted when it is packed. `unsigned`: which of two 8-bit integer operands have no sign.
    """
    tile = fit(tile_of(target, dtype, precision, unsigned), target, known(shape.n, 1024))
    facts = facts_of(target, shape, tile, held or (dtype, dtype))
    return next(found for rule in RULES if (found := rule(facts)) is not None)


def tile_of(target: Target, dtype: Attribute, precision: str, unsigned: tuple[bool, bool]) -> RegisterTile:
    """The register tile of the unit that multiplies such operands."""
    if dtype == i8:
        return integer_tile(target, unsigned)
    return split_tile(target, dtype, precision) or register_tile(target, dtype)
