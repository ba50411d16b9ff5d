"""Where every value lives: an argument's memory or a place in the arena, with reuse.

The arena is one block that stays between steps; values whose lives do not overlap share bytes in it. Values with symbolic
sizes share only with values of the same size, since nothing else can be promised for every symbol's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from luban.symbolic import Dim, floordiv

ALIGN = 64


@dataclass(frozen=True)
class Life:
    """A temporary: bytes, and the first and last kernel (by position) that touch it."""

    bytes: Dim
    first: int
    last: int


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offset of each temporary, and the arena's size."""

    offsets: tuple[Dim, ...]
    bytes: Dim


def plan_arena(lives: Sequence[Life]) -> ArenaPlan:
    """Offsets without overlap among temporaries alive at the same time; the largest are placed first."""
    offsets: list[Dim] = [0] * len(lives)
    fixed = [i for i, life in enumerate(lives) if isinstance(life.bytes, int)]
    top = 0
    placed: list[tuple[int, int, Life]] = []  # (start, end, life)
    for i in sorted(fixed, key=lambda i: (-lives[i].bytes, lives[i].first)):  # type: ignore[operator]
        life = lives[i]
        size = int(_round_up(life.bytes))  # type: ignore[arg-type]
        start = _first_gap(placed, life, size)
        placed.append((start, start + size, life))
        offsets[i] = start
        top = max(top, start + size)
    total = _plan_symbolic(lives, offsets, top)
    return ArenaPlan(tuple(offsets), total)


def _first_gap(placed: list[tuple[int, int, Life]], life: Life, size: int) -> int:
    busy = sorted((s, e) for s, e, other in placed if other.first <= life.last and life.first <= other.last)
    start = 0
    for s, e in busy:
        if s - start >= size:
            break
        start = max(start, e)
    return start


def _plan_symbolic(lives: Sequence[Life], offsets: list[Dim], top: Dim) -> Dim:
    slots: list[tuple[Dim, Dim, int]] = []  # (size, offset, free after kernel)
    for i in sorted(
        (i for i, life in enumerate(lives) if not isinstance(life.bytes, int)), key=lambda i: lives[i].first
    ):
        life = lives[i]
        found = next((n for n, (size, _, last) in enumerate(slots) if size == life.bytes and last < life.first), None)
        if found is None:
            slots.append((life.bytes, top, life.last))
            offsets[i] = top
            top = top + _round_up(life.bytes)
        else:
            offsets[i] = slots[found][1]
            slots[found] = (life.bytes, slots[found][1], life.last)
    return top


def _round_up(size: Dim) -> Dim:
    return floordiv(size + (ALIGN - 1), ALIGN) * ALIGN
