"""The end of a reduction: unrolled copies into one vector, lanes into one scalar."""

from __future__ import annotations

from collections.abc import Sequence

from luban.compiler.codegen.llvm.combine import combine_values
from luban.compiler.codegen.llvm.context import Context
from luban.compiler.codegen.llvm.lanes import shuffle
from luban.compiler.codegen.llvm.values import register_type


def combine_parts(ctx: Context, combine: str, ty: str, width: int, parts: Sequence[str], unsigned: bool = False) -> str:
    """The copies of an accumulator as one vector, pairwise."""
    level = list(parts)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        single = level[-1:] if len(level) % 2 else []
        level = [combine_values(ctx, combine, ty, width, a, b, unsigned) for a, b in pairs] + single
    return level[0]


def reduce_lanes(ctx: Context, combine: str, ty: str, width: int, text: str, unsigned: bool = False) -> str:
    """All lanes of a vector (a power of two) combined into a scalar, by halving."""
    while width > 1:
        half = width // 2
        low = shuffle(ctx.fn, width, ty, text, "poison", list(range(half)))
        high = shuffle(ctx.fn, width, ty, text, "poison", list(range(half, width)))
        if half == 1:
            low, high = (ctx.fn.op(f"extractelement <1 x {register_type(ty)}> {v}, i64 0") for v in (low, high))
        text = combine_values(ctx, combine, ty, half, low, high, unsigned)
        width = half
    return text
