"""Gradients in the memory of kept values that the backward has read for the last time.

A forward keeps its values in blocks of the pool (`torch_call.py`). In the backward, a result that is first written after
the last reader of such values may lie where they were: gradients then need no memory of their own (54 MB on a BERT of 6
layers). What is dead when is known from compiling; whether a block is nobody else's is asked at each call:

- the graph is not kept for another backward,
- torch counts no other holder of the block than the tensors that this call was given, all of them donated by AOTAutograd
  (none is an input or an output of the model, or a window on one),
- Python counts no other holder of those tensors (a hook on saved tensors may keep one).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from luban.runtime import pools
from luban.runtime.program import ALIGN, Plan

_HELD = (
    3  # references to an input inside of `_blocks`: the list of inputs, the loop's variable and getrefcount's argument
)
_LEAST = 4 << 20  # bytes of inputs below which looking (1.6 us an input) is not worth it
_FILLED = 0.5  # of a block must be used: whoever holds one of the results holds all of it

_kept_for_another = torch._C._autograd._get_current_graph_task_keep_graph  # True outside of a backward, too

Layout = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # of each block: its size, and (input, start in bytes)


@dataclass(frozen=True)
class Place:
    """Where a result goes: the number of the block, and its first byte there."""

    output: int
    block: int
    at: int


class Donation:
    """The donations of one plan. `inputs` are those that nobody sees but the backward, with the position of their last
    reader among the kernels; `outputs` the results that may move, with that of their first writer."""

    def __init__(self, plan: Plan, positions: Sequence[int], inputs: Mapping[int, int], outputs: Mapping[int, int]):
        sizes = {i: t.bytes for i, t in zip(positions, plan.inputs, strict=True)}
        self._inputs = {i: (sizes[i], last) for i, last in inputs.items() if i in sizes}
        results = {i: t.bytes for i, t in plan.own if i in outputs and t.bytes >= pools.SMALL}
        self._outputs = sorted((outputs[i], i, size) for i, size in results.items())
        self._chosen: dict[Layout, tuple[Place, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs) and sum(size for size, _ in self._inputs.values()) >= _LEAST

    def places(self, inputs: Sequence[Any]) -> list[tuple[int, pools.Block, int]]:
        """(output, block, first byte there) for the results of this call that take over memory."""
        if _kept_for_another():
            return []
        found = self._blocks(inputs)
        layout: Layout = tuple((block.size, tuple(given)) for block, given in found)
        chosen = self._chosen.get(layout)
        if chosen is None:
            if len(self._chosen) >= 16:
                self._chosen.clear()
            chosen = self._chosen[layout] = tuple(self._choose(layout))
        return [(place.output, found[place.block][0], place.at) for place in chosen]

    def _blocks(self, inputs: Sequence[Any]) -> list[tuple[pools.Block, list[tuple[int, int]]]]:
        """The blocks that only this call holds, with the inputs in each and where they start."""
        found: dict[int, tuple[pools.Block, list[tuple[int, int]]]] = {}
        for i in self._inputs:
            tensor = inputs[i]
            if sys.getrefcount(tensor) > _HELD:
                continue  # its block then has a holder more than was found
            key = tensor.untyped_storage()._cdata
            block = found[key][0] if key in found else pools.outputs.saved.get(key)
            if block is not None:
                found.setdefault(key, (block, []))[1].append((i, tensor.data_ptr() - block.address))
        return [(block, given) for block, given in found.values() if block.held_by(len(given)) and not block.moved()]

    def _choose(self, layout: Layout) -> Iterable[Place]:
        """Places in order of the first write: in blocks that hold results already, else in the one that dies first."""
        dies = [max(self._inputs[i][1] for i, _ in given) for _, given in layout]
        placed: list[list[tuple[int, int, int]]] = [[] for _ in layout]  # (start, end, output) in each block
        for first, output, size in self._outputs:
            by_use = sorted(range(len(layout)), key=lambda b: (not placed[b], dies[b]))
            for b in by_use:
                total, given = layout[b]
                alive = [(at, at + self._inputs[i][0]) for i, at in given if self._inputs[i][1] >= first]
                at = _gap([*alive, *((s, e) for s, e, _ in placed[b])], size)
                if at + size <= total:
                    placed[b].append((at, at + size, output))
                    break
        for b, results in enumerate(placed):
            if sum(end - start for start, end, _ in results) >= _FILLED * layout[b][0]:
                yield from (Place(output, b, start) for start, _, output in results)


def _gap(busy: list[tuple[int, int]], size: int) -> int:
    """The first aligned byte with room for `size` bytes beside what is busy."""
    start = 0
    for begin, end in sorted(busy):
        if begin - start >= size:
            break
        start = max(start, -(-end // ALIGN) * ALIGN)
    return start
