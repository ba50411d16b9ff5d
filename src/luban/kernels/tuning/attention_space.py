"""The cache blocks of an attention near some, the most alike first: what a chip's caches suggest is seldom far off."""

from __future__ import annotations

import math
from dataclasses import replace

from luban.kernels.attention_blocks import Blocks
from luban.kernels.tuning import rules
from luban.kernels.tuning.workload import Workload
from luban.targets.target import Target

FACTORS = (0.5, 0.75, 1.5, 2.0)
EVEN = 6  # most equal blocks that a length is cut into


def near(blocks: Blocks, target: Target, workload: Workload) -> list[Blocks]:
    """The neighbours of some blocks that are right, the one expected to be fastest first."""
    steps, lengths = rules.attention_steps(blocks, workload), workload.shape[2:4]
    sides = [_sizes(*side) for side in zip((blocks.queries, blocks.keys), lengths, steps, strict=True)]
    found = [replace(blocks, queries=q) for q in sides[0]] + [replace(blocks, keys=k) for k in sides[1]]
    right = {b for b in found if b != blocks and rules.attention_holds(b, workload)}
    return sorted(right, key=lambda b: (_strangeness(b, blocks, target, workload), b.queries, b.keys))


def _sizes(size: int, length: int, step: int) -> set[int]:
    """Other sizes of a block: a part or a multiple of it, a step more or less, equal parts of the length, all of it."""
    wanted = [size * f for f in FACTORS] + [size - step, size + step] + [length / n for n in range(1, EVEN + 1)]
    return {min(n, length) for w in wanted if w >= 1 for n in (-(-math.ceil(w) // step) * step,)} | {
        -(-math.ceil(w) // step) * step for w in wanted if w >= 1
    }


def _strangeness(b: Blocks, old: Blocks, target: Target, workload: Workload) -> float:
    """How far a block is from the old one, what is left over of the lengths, and scores beyond the second-level cache."""
    far = abs(math.log2(b.queries / old.queries)) + abs(math.log2(b.keys / old.keys))
    left = sum(-(-n // size) * size / n - 1 for n, size in zip(workload.shape[2:4], (b.queries, b.keys), strict=True))
    return far + 2 * left + (2.0 if b.queries * b.keys * 8 > (target.l2_bytes or 1 << 20) else 0.0)
