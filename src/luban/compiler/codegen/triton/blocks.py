"""How large blocks are, from the target's data alone."""

from __future__ import annotations

from dataclasses import dataclass

from luban.targets.target import ITEM_BITS, Target

MOST_DOT = 128  # rows and columns of a dot's block: 128 x 128 float32 sums fill the registers of four warps
LEAST_DOT = 16  # tl.dot takes no smaller block
STAGES = 3  # blocks of operands in flight while a pipelined dot runs


@dataclass(frozen=True)
class Blocks:
    """`lanes` a step of a long vector loop, `row` lanes of the longest row that stays one block."""

    lanes: int
    row: int
    scratch: int
    line: int

    def dot(self, dtype: str, m: int | None, n: int | None, k: int | None) -> tuple[int, int, int]:
        """Rows, columns and depth of a dot's block; None for an extent that is not a number."""
        bits = ITEM_BITS[dtype]
        depth = max(self.line * 8 // bits, LEAST_DOT)  # a cache line of each operand's row
        side = MOST_DOT
        while side > LEAST_DOT and 2 * side * depth * bits // 8 * STAGES > self.scratch:
            side //= 2
        return _fit(side, m), _fit(side, n), _fit(depth, k)


def _fit(most: int, extent: int | None) -> int:
    return most if extent is None else max(min(most, power_of_two(extent)), LEAST_DOT)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def blocks_of(target: Target) -> Blocks:
    """Block sizes for a target: the core's own memory holds sixteen float32 blocks of a step, four of a row."""
    scratch = target.l1_bytes
    lanes = max(power_of_two(scratch // (4 * 16) + 1) // 2, 16)
    return Blocks(lanes, 4 * lanes, scratch, target.line_bytes)


def warps(lanes: int) -> int:
    """Warps for a block: about eight lanes a thread, at most four warps where dots need no more."""
    return max(1, min(8, lanes // 256))
