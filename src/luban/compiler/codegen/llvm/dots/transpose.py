"""Transposes from loads of 128-bit quarters and shuffles within 128-bit lanes, which every SIMD set has.

Vector i of a block takes rows i, lane + i, 2 lane + i, ...: a lane of the register holds a piece of a row, so that no
shuffle has to cross lanes. A 16 x 16 block of 32-bit words takes 32 shuffles instead of 64.
"""

from __future__ import annotations

from collections.abc import Callable

from luban.compiler.codegen.llvm.emitter import Function


def transpose(
    fn: Function, gather: Callable[[int, int], str], ty: str, width: int, lane: int, blocks: int
) -> list[str]:
    """The `blocks * lane` columns of `width` rows, each a vector of `width` elements of type `ty`.

    `gather(i, c)` gives columns `c * lane` to `(c + 1) * lane` of rows i, lane + i, 2 lane + i, ... side by side. It is
    called row by row: rows a page apart share one set of the first-level cache, and each must be read before it goes.
    """
    gathered = [[gather(i, c) for c in range(blocks)] for i in range(lane)]
    columns: list[str] = []
    for c in range(blocks):
        columns += _within_lanes(fn, [row[c] for row in gathered], ty, width, lane)
    return columns


def shuffle(fn: Function, a: str, b: str, ty: str, width: int, order: list[int]) -> str:
    """`shufflevector` of two vectors of `width` elements; poison in, poison out."""
    if a == b == "poison":
        return "poison"
    indices = ", ".join(f"i32 {i}" for i in order)
    vector = f"<{width} x {ty}>"
    return fn.op(f"shufflevector {vector} {a}, {vector} {b}, <{len(order)} x i32> <{indices}>")


def side_by_side(fn: Function, parts: list[str], ty: str, width: int) -> str:
    """A power of two of vectors of `width` elements as one."""
    while len(parts) > 1:
        order = list(range(2 * width))
        parts = [shuffle(fn, a, b, ty, width, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        width *= 2
    return parts[0]


def interleave(fn: Function, a: str, b: str, ty: str, width: int) -> str:
    """a[0], b[0], a[1], b[1], ..."""
    return shuffle(fn, a, b, ty, width, [i // 2 + (width if i % 2 else 0) for i in range(2 * width)])


def _within_lanes(fn: Function, vectors: list[str], ty: str, width: int, lane: int) -> list[str]:
    """Transposes the `lane x lane` blocks of `lane` vectors by a perfect-shuffle network."""
    half = lane // 2
    low = [base + i // 2 + (width if i % 2 else 0) for base in range(0, width, lane) for i in range(lane)]
    high = [i + half for i in low]
    for _ in range(lane.bit_length() - 1):
        vectors = [
            shuffle(fn, vectors[i], vectors[i + half], ty, width, order) for i in range(half) for order in (low, high)
        ]
    return vectors
