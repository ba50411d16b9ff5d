"""Reductions as serial loops, whose lanes lie side by side: sums of sums of short runs.

Every lane adds up by itself, one element after the other. So that the error of a long sum grows with the length of a run
and the number of runs, not with their product, each run starts from nothing and joins the total when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from luban.compiler.lowering.bodies import combine, identity
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.passes.graph.placement import Axis
from luban.symbolic import Dim, floordiv

RUN = 32  # elements of a run
RUNS = 64  # runs that join a total, and elements of one axis that need no runs

Body = Callable[[Sequence[SSAValue]], Sequence[SSAValue]]


class SerialNest:
    """Serial loops over axes around `body`, which takes and gives what is carried; `index` gets each axis' position.

    The innermost loop adds up `sums` elements at once, apart from each other, so that one need not wait for another.
    """

    def __init__(self, b: KernelBuilder, index: dict[Axis, SSAValue], kinds: Sequence[str], body: Body, sums: int):
        self.b, self.index, self.kinds, self.body, self.sums = b, index, kinds, body, sums

    def emit(self, axes: Sequence[Axis], carried: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """All elements of the axes, from the first on."""
        if not axes:
            return self.body(carried)
        return self._span(axes, self.b.dim(0), self.b.dim(axes[0].size), axes[0].size, carried)

    def _span(
        self, axes: Sequence[Axis], low: SSAValue, high: SSAValue, most: Dim, carried: Sequence[SSAValue]
    ) -> Sequence[SSAValue]:
        """Elements of the first axis in [low, high), which are at most `most`."""
        if not self.kinds or (isinstance(most, int) and most <= RUNS):
            return self._steps(axes, low, high, carried)
        b = self.b
        step = RUN if isinstance(most, int) and most <= RUN * RUNS else RUN * RUNS
        runs = floordiv(most + (step - 1), step)  # the last ones may be empty
        with b.loop(b.dim(0), b.dim(runs), "serial", carried, self.kinds) as run:
            start = b.add(low, b.mul(run.index, b.dim(step)))
            got = self._span(axes, start, b.minimum(b.add(start, b.dim(step)), high), step, self._fresh(carried))
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
