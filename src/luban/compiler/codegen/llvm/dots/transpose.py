"""In-register transposes from shuffles that every SIMD set has: interleaves in 128-bit lanes, then lane selection."""

from __future__ import annotations

from luban.compiler.codegen.llvm.emitter import Function


def transpose(fn: Function, rows: list[str], ty: str, lane: int) -> list[str]:
    """Transposes `len(rows)` vectors of as many elements of type `ty`; returns the columns.

    `lane` is the number of elements in 128 bits (at most the vector's width); both are powers of two. A row may be
    `poison`, which leaves the lanes of its number undefined in every column.
    """
    width = len(rows)
    lane = min(lane, width)
    columns: list[list[str]] = [[] for _ in range(lane)]
    for first in range(0, width, lane):
        for number, vector in enumerate(_within_lanes(fn, rows[first : first + lane], ty, width, lane)):
            columns[number].append(vector)
    parts = [_across_lanes(fn, vectors, ty, width, lane) for vectors in columns]
    return [parts[c % lane][c // lane] for c in range(width)]


def shuffle(fn: Function, a: str, b: str, ty: str, width: int, order: list[int]) -> str:
    """`shufflevector` of two vectors of `width` elements; poison in, poison out."""
    if a == b == "poison":
        return "poison"
    indices = ", ".join(f"i32 {i}" for i in order)
    vector = f"<{width} x {ty}>"
    return fn.op(f"shufflevector {vector} {a}, {vector} {b}, <{len(order)} x i32> <{indices}>")


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


def _across_lanes(fn: Function, vectors: list[str], ty: str, width: int, lane: int) -> list[str]:
    """Vector `g` holds block (g, L) in lane L; returns for each L the vector of blocks (0, L), (1, L), ..."""
    if len(vectors) == 1:
        return vectors
    even = [2 * (i // lane) * lane + i % lane for i in range(width)]
    odd = [i + lane for i in even]
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    evens = _across_lanes(fn, [shuffle(fn, a, b, ty, width, even) for a, b in pairs], ty, width, lane)
    odds = _across_lanes(fn, [shuffle(fn, a, b, ty, width, odd) for a, b in pairs], ty, width, lane)
    return [vector for both in zip(evens, odds, strict=True) for vector in both]
