"""The kinds by which loops and stores combine values."""

from __future__ import annotations

from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.scalar_ops import binary, intrinsic
from luban.compiler.codegen.llvm.values import FLOATS, literal


def identity(ty: str, combine: str, unsigned: bool) -> str:
    """The start of a reduction: what combines with x to x."""
    if combine in ("add", "or"):
        return literal(ty, 0)
    if combine == "and":
        return literal(ty, -1) if ty != "i1" else "true"
    if combine == "mul":
        return literal(ty, 1)
    if ty in FLOATS:
        return literal(ty, float("-inf") if combine == "max" else float("inf"))
    if ty == "i1":
        return "false" if combine == "max" else "true"
    bits = int(ty[1:])
    if unsigned:
        return literal(ty, 0 if combine == "max" else -1)
    return literal(ty, -(1 << (bits - 1)) if combine == "max" else (1 << (bits - 1)) - 1)


_COMBINE_FLOAT = {"add": "fadd contract", "mul": "fmul contract"}
_COMBINE_INTEGER = {"add": "add", "mul": "mul", "and": "and", "or": "or"}


def combine_values(ctx: Context, combine: str, ty: str, width: int, a: str, b: str, unsigned: bool = False) -> str:
    """a combined with b by a kind that loops and stores name; for bools add and max are or, mul and min are and."""
    if ty == "i1":
        return binary(ctx, "or" if combine in ("add", "max", "or") else "and", ty, width, a, b)
    if combine in ("max", "min"):
        if ty in FLOATS:
            return intrinsic(ctx, f"{combine}imum", ty, width, [a, b], "nsz")
        return intrinsic(ctx, f"{'u' if unsigned else 's'}{combine}", ty, width, [a, b])
    table = _COMBINE_FLOAT if ty in FLOATS else _COMBINE_INTEGER
    return binary(ctx, table[combine], ty, width, a, b)
