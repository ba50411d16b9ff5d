"""What a kernel's builder asks: the tuned schedule of its workload, and what is derived from the chip where there is none.

One look into a dictionary a kernel; nothing is measured here. A kept schedule that this version cannot read, or that
breaks a rule, counts as missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import i8
from xdsl.ir import Attribute, Operation

from luban.kernels.attention_blocks import Blocks
from luban.kernels.tuning import codec, rules, workload
from luban.kernels.tuning.workload import Workload
from luban.runtime import schedules
from luban.runtime.schedules import Key
from luban.targets.target import Target

if TYPE_CHECKING:
    from luban.kernels.gemm_schedule import GemmSchedule, Shape

# Raised where a field of a schedule, or what a kernel does with it, changes its meaning.
GEMM_VERSION = 1
ATTENTION_VERSION = 1

Choose = Callable[..., Any]


def kept_gemm(choose: Choose) -> Choose:
    """Makes a function that derives GEMM schedules look for a kept one first."""

    @functools.wraps(choose)
    def kept(
        target: Target,
        shape: Shape,
        dtype: Attribute,
        held: tuple[Attribute, ...] | None = None,
        precision: str = "highest",
        unsigned: tuple[bool, bool] = (False, False),
    ) -> GemmSchedule:
        derived: GemmSchedule = choose(target, shape, dtype, held, precision, unsigned)
        if dtype == i8:
            return derived  # a workload does not know signs, and nothing tunes products of integers
        found = workload.of_gemm(target.cores, shape, dtype, held, precision)
        return derived if found is None else of_gemm(derived, target, found)

    return kept


def of_gemm(derived: GemmSchedule, target: Target, found: Workload) -> GemmSchedule:
    """The kept schedule of a contraction, else the derived one."""
    data = schedules.lookup(gemm_key(target, found, type(derived)))
    if data is None:
        return derived
    s = codec.decode(derived, data, (derived.tile, *rules.gemm_tiles(target, found)))
    return s if s is not None and rules.gemm_holds(s, target, found) else derived


def of_attention(derived: Blocks, target: Target, op: Operation) -> Blocks:
    """The kept blocks of an attention or its gradients, else the derived ones."""
    found = workload.of_attention(target.cores, op)
    data = None if found is None else schedules.lookup(attention_key(target, found))
    if found is None or data is None:
        return derived
    blocks = codec.decode(derived, data, (derived.tile, derived.score_tile))
    return blocks if blocks is not None and rules.attention_holds(blocks, found) else derived


def gemm_key(target: Target, found: Workload, schedule: type) -> Key:
    """The key of a contraction's schedule."""
    return Key(schedules.chip_of(target), gemm_space(schedule), str(found))


def attention_key(target: Target, found: Workload) -> Key:
    """The key of an attention's blocks."""
    return Key(schedules.chip_of(target), attention_space(), str(found))


@functools.cache
def gemm_space(schedule: type) -> str:
    """The name of the space of GEMM schedules."""
    return codec.space_of("gemm", GEMM_VERSION, schedule)


@functools.cache
def attention_space() -> str:
    """The name of the space of attention blocks."""
    return codec.space_of("attention", ATTENTION_VERSION, Blocks)
