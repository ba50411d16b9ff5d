"""What the tuner must know of a kernel family: a workload's key, what is derived for it, and the schedules near one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from luban.compiler.ir.dtypes import from_name
from luban.kernels.attention_blocks import backward_blocks, forward_blocks
from luban.kernels.gemm_schedule import GemmSchedule, Shape, choose
from luban.kernels.register_tiles import RegisterTile
from luban.kernels.tuning import attention_space, codec, gemm_space, kept, rules
from luban.kernels.tuning.workload import ATTENTION, GEMM, Workload, strides_of
from luban.runtime import schedules
from luban.runtime.schedules import Key, Schedule
from luban.targets.target import Target


@dataclass(frozen=True)
class Family:
    """A workload's schedules: `derived` from the chip's data, the `tiles` that may be in one, which of them are right and
    which lie near one.
    """

    key: Key
    derived: Any
    tiles: tuple[RegisterTile, ...]
    holds: Callable[[Any], bool]
    beside: Callable[[Any], Iterable[Any]]

    def read(self, schedule: Schedule) -> Any:
        """The schedule of some data; None where it is none of this version, or breaks a rule."""
        found = codec.decode(self.derived, schedule, self.tiles)
        return found if found is not None and self.holds(found) else None

    def near(self, schedule: Schedule) -> list[Schedule]:
        """The neighbours of a schedule, the one expected to be fastest first."""
        found = self.read(schedule)
        return [] if found is None else [codec.encode(s) for s in self.beside(found)]

    @property
    def in_use(self) -> Schedule:
        """What is compiled today: the kept schedule, else the derived one."""
        kept_one = schedules.lookup(self.key)
        found = None if kept_one is None else self.read(kept_one)
        return codec.encode(self.derived if found is None else found)


def spaces() -> set[str]:
    """The schedule spaces of this version."""
    return {kept.gemm_space(GemmSchedule), kept.attention_space()}


def family(workload: Workload, target: Target) -> Family:
    """The family of a workload."""
    return _gemm(workload, target) if workload.op == GEMM else _attention(workload, target)


def _gemm(workload: Workload, target: Target) -> Family:
    (a_m, a_k), (b_n, b_k) = strides_of(workload)
    batch, m, n, k = workload.shape
    element, *held = map(from_name, workload.dtypes)
    shape = Shape(batch=batch, m=m, n=n, k=k, a_m=a_m, a_k=a_k, b_n=b_n, b_k=b_k)
    with schedules.forced({}):
        derived = choose(target, shape, element, tuple(held), workload.precision)
    return Family(
        kept.gemm_key(target, workload, GemmSchedule),
        derived,
        (derived.tile, *rules.gemm_tiles(target, workload)),
        lambda s: rules.gemm_holds(s, target, workload),
        lambda s: gemm_space.near(s, target, workload),
    )


def _attention(workload: Workload, target: Target) -> Family:
    blocks_of = forward_blocks if workload.op == ATTENTION else backward_blocks
    _, _, queries, keys, size = workload.shape
    derived = blocks_of(target, from_name(workload.dtypes[0]), queries, keys, size)
    return Family(
        kept.attention_key(target, workload),
        derived,
        (derived.tile, derived.score_tile),
        lambda b: rules.attention_holds(b, workload),
        lambda b: attention_space.near(b, target, workload),
    )
