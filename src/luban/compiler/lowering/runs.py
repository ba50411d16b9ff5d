"""The loops of a reduction over some axes, as sums of sums of runs: with the last axis as lanes, or all of them serial.

So that the error of a long sum grows with the length of a run and the number of runs, not with their product, each run
starts from nothing and joins the total when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from luban.compiler.lowering.bodies import combine, identity
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.passes.graph.placement import Axis
from luban.symbolic import Dim, floordiv

# elements of a long row that are summed before they join the total, and of a flat map that a thread takes at once
BLOCK = 4096
LONG = 128  # steps of an outer loop around lanes that are added up before they join the total
RUN = 32  # elements of a run of one lane and sum
RUNS = 64  # runs that join a total

Body = Callable[[Sequence[SSAValue]], Sequence[SSAValue]]


class SerialNest:
    """Serial loops over axes around `body`, for rows side by side: each lane adds up by itself.

    `body` takes and gives what is carried; `index` gets each axis' position. The innermost loop adds up `sums` elements
    at once, apart from each other, so that one need not wait for another.
    """

    def __init__(self, b: KernelBuilder, index: dict[Axis, SSAValue], kinds: Sequence[str], body: Body, sums: int):
        self.b, self.index, self.kinds, self.body, self.sums = b, index, kinds, body, sums

    def emit(self, axes: Sequence[Axis], carried: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """All elements of the axes, from the first on."""
        if not axes:
            return self.body(carried)
        return self.between(axes, self.b.dim(0), self.b.dim(axes[0].size), axes[0].size, carried)

    def between(
        self, axes: Sequence[Axis], low: SSAValue, high: SSAValue, most: Dim, carried: Sequence[SSAValue]
    ) -> Sequence[SSAValue]:
        """Elements of the first axis in [low, high), which are at most `most`."""
        run_of = RUN * self.sums
        if not self.kinds or (isinstance(most, int) and most <= 2 * run_of):
            return self._steps(axes, low, high, carried)
        b = self.b
        step = run_of if isinstance(most, int) and most <= run_of * RUNS else run_of * RUNS
        runs = floordiv(most + (step - 1), step)  # the last ones may be empty
        with b.loop(b.dim(0), b.dim(runs), "serial", carried, self.kinds) as run:
            start = b.minimum(b.add(low, b.mul(run.index, b.dim(step))), high)
            got = self.between(axes, start, b.minimum(b.add(start, b.dim(step)), high), step, self._fresh(carried))
            run.yields = self._joined(run.carried, got)
        return run.results

    def _steps(
        self, axes: Sequence[Axis], low: SSAValue, high: SSAValue, carried: Sequence[SSAValue]
    ) -> Sequence[SSAValue]:
        if len(axes) == 1 and self.kinds and self.sums > 1:
            return self._several(axes[0], low, high, carried)
        with self.b.loop(low, high, "serial", carried, self.kinds) as loop:
            self.index[axes[0]] = loop.index
            if len(axes) == 1:
                loop.yields = self.body(loop.carried)
            else:
                loop.yields = self._joined(loop.carried, self.emit(axes[1:], self._fresh(carried)))
        return loop.results

    def _several(self, axis: Axis, low: SSAValue, high: SSAValue, carried: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """`sums` elements a step, each into a sum of its own, then what is left."""
        b, sums, width = self.b, self.sums, len(carried)
        steps = b.binary(arith.DivUIOp, b.binary(arith.SubiOp, high, low), b.dim(sums))
        starts = [*carried, *self._fresh(carried) * (sums - 1)]
        with b.loop(b.dim(0), steps, "serial", starts, [*self.kinds] * sums) as loop:
            first = b.add(low, b.mul(loop.index, b.dim(sums)))
            yields: list[SSAValue] = []
            for n in range(sums):
                self.index[axis] = b.add(first, b.dim(n)) if n else first
                yields += self.body(loop.carried[n * width : (n + 1) * width])
            loop.yields = yields
        with b.loop(b.add(low, b.mul(steps, b.dim(sums))), high, "serial", loop.results[:width], self.kinds) as rest:
            self.index[axis] = rest.index
            rest.yields = self.body(rest.carried)
        parts = [rest.results, *(loop.results[n * width : (n + 1) * width] for n in range(1, sums))]
        while len(parts) > 1:
            parts = [self._joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _fresh(self, carried: Sequence[SSAValue]) -> list[SSAValue]:
        return [identity(self.b, kind, v.type) for kind, v in zip(self.kinds, carried, strict=True)]

    def _joined(self, old: Sequence[SSAValue], new: Sequence[SSAValue]) -> list[SSAValue]:
        return [combine(self.b, kind, a, v) for kind, a, v in zip(self.kinds, old, new, strict=True)]


class LaneNest:
    """Loops over axes around `body`, the last axis as lanes; `index` gets each axis' position."""

    def __init__(self, b: KernelBuilder, index: dict[Axis, SSAValue], kinds: Sequence[str], body: Body):
        self.b, self.index, self.kinds, self.body = b, index, kinds, body

    def emit(
        self, axes: Sequence[Axis], init: Sequence[SSAValue], bounds: tuple[SSAValue, SSAValue] | None = None
    ) -> Sequence[SSAValue]:
        """All elements of the axes, or of the last one those in the bounds; returns the carried values at the end."""
        b = self.b
        if not axes:
            return self.body(list(init))
        size = axes[0].size
        if len(axes) > 1:
            if self.kinds and not (isinstance(size, int) and size <= 2 * LONG):
                return self._in_runs(axes, init)
            return self._serial(axes, b.dim(0), b.dim(size), init, bounds)
        if bounds is None and self.kinds and not (isinstance(size, int) and size <= 4 * BLOCK):
            return self._blocked(axes[0], init)
        return self._lanes(axes[0], *(bounds or (b.dim(0), b.dim(size))), init)

    def _lanes(self, axis: Axis, low: SSAValue, high: SSAValue, init: Sequence[SSAValue]) -> Sequence[SSAValue]:
        with self.b.loop(low, high, "vector", init, self.kinds) as loop:
            self.index[axis] = loop.index
            loop.yields = self.body(loop.carried)
        return loop.results

    def _serial(
        self,
        axes: Sequence[Axis],
        low: SSAValue,
        high: SSAValue,
        init: Sequence[SSAValue],
        bounds: tuple[SSAValue, SSAValue] | None = None,
    ) -> Sequence[SSAValue]:
        with self.b.loop(low, high, "serial", init, self.kinds) as loop:
            self.index[axes[0]] = loop.index
            loop.yields = self.emit(axes[1:], loop.carried, bounds)
        return loop.results

    def _in_runs(self, axes: Sequence[Axis], init: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """A long outer loop of a reduction as a sum of sums of runs."""
        b, size = self.b, axes[0].size
        fresh = [identity(b, k, v.type) for k, v in zip(self.kinds, init, strict=True)]
        with b.loop(b.dim(0), b.dim(floordiv(size + (LONG - 1), LONG)), "serial", init, self.kinds) as run:
            low = b.mul(run.index, b.dim(LONG))
            got = self._serial(axes, low, b.minimum(b.add(low, b.dim(LONG)), b.dim(size)), fresh)
            run.yields = [combine(b, k, old, v) for k, old, v in zip(self.kinds, run.carried, got, strict=True)]
        return run.results

    def _blocked(self, axis: Axis, init: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """A long reduction as a sum of sums of blocks, which bounds the rounding error by the number of blocks."""
        b, size = self.b, axis.size
        with b.loop(b.dim(0), b.dim(floordiv(size + (BLOCK - 1), BLOCK)), "serial", init, self.kinds) as block:
            low = b.mul(block.index, b.dim(BLOCK))
            high = b.minimum(b.add(low, b.dim(BLOCK)), b.dim(size))
            block.yields = self._lanes(axis, low, high, block.carried)
        return block.results
