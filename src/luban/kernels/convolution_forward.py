"""Convolutions whose columns are points of the output: forward, and the gradient of the input.

An implicit GEMM: a task copies the patches of a block of points into panels, which stay in the second-level cache, and
walks the rows of the weights past them. Images too small to fill whole register tiles are joined into one line of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xdsl.ir import SSAValue

from luban.compiler.lowering.registry import Request
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.convolution_kernel import ConvolutionKernel
from luban.kernels.convolution_problem import Convolution, Side
from luban.kernels.convolution_schedule import blocks_of, tile_of
from luban.kernels.dot_writer import Matrix, Passes, dot
from luban.symbolic import floordiv, product
from luban.targets.target import Target

WASTE = 1.02  # columns computed for each point, beyond which images are joined


def joined_images(p: Convolution, target: Target) -> int | None:
    """The batch dim of images that the points take in, None where each image is worked through by itself."""
    images = [d for d, (a, b) in enumerate(zip(p.a_batch, p.b_batch, strict=True)) if a == 0 and b != 0]
    if len(images) != 1:
        return None
    points, m = p.points.count, p.m
    assert isinstance(points, int) and isinstance(m, int)
    tile = tile_of(target, p.element, m, points)
    return images[0] if -(-points // tile.nr) * tile.nr > points * WASTE else None


def join(p: Convolution, image: int) -> Convolution:
    """The problem with its images among the points."""
    kept = [d for d in range(len(p.batch)) if d != image]
    return replace(
        p,
        batch=tuple(p.batch[d] for d in kept),
        a_batch=tuple(p.a_batch[d] for d in kept),
        b_batch=tuple(p.b_batch[d] for d in kept),
        points=Side((p.batch[image], *p.points.sizes), (p.b_batch[image], *p.points.strides)),
    )


class Forward(ConvolutionKernel):
    """Tasks run over (batch, block of points, block of rows)."""

    def __init__(self, request: Request, group: Group, problem: Convolution, leaving: Sequence[SSAValue]):
        super().__init__(request, group, problem, leaving)
        self.image = joined_images(problem, request.target)
        if self.image is not None:
            self.problem = join(problem, self.image)
        p = self.problem
        channels, each = p.taps.sizes[0], product(p.taps.sizes[1:])
        assert isinstance(channels, int) and isinstance(each, int)
        self.each = each
        sizes = (product(p.batch), p.m, p.points.count)
        self.schedule = blocks_of(request.target, p.element, sizes, (channels, each))

    def emit(self) -> None:
        b, p, s = self.b, self.problem, self.schedule
        n = p.points.count
        counts = [*p.batch, floordiv(n + (s.share_n - 1), s.share_n), floordiv(p.m + (s.share_m - 1), s.share_m)]
        with b.loop(b.dim(0), b.dim(product(counts)), "parallel" if s.parallel else "serial") as task:
            self.known = self.constants()
            self._allocate()
            *batch, jb, ib = b.digits(task.index, counts)
            j0, i0 = b.mul(jb, b.dim(s.share_n)), b.mul(ib, b.dim(s.share_m))
            columns, rows = self.rest(n, j0, s.share_n), self.rest(p.m, i0, s.share_m)
            with self.blocks(columns, s.share_n, s.nc) as (j, width):
                self._block(batch, (b.add(j0, j), width), (i0, rows))

    def _allocate(self) -> None:
        """Scratch of a task: the patches, and the sums between passes over channels."""
        b, s, t = self.b, self.schedule, self.schedule.tile
        self.panels = b.alloc(s.nc * s.channels * self.each, t.element)
        one = s.channels >= self.problem.taps.sizes[0]  # type: ignore[operator]
        self.waiting = None if one else b.alloc(s.share_m * s.nc, t.accumulator)

    def _block(
        self, batch: list[SSAValue], columns: tuple[SSAValue, SSAValue], rows: tuple[SSAValue, SSAValue]
    ) -> None:
        """A block of points, in passes over channels: their patches, then all rows of the task past them."""
        b, s = self.b, self.schedule
        count = self.problem.taps.sizes[0]
        assert isinstance(count, int)
        last = (count - 1) // s.channels

        def part(number: SSAValue, channels: int, passes: Passes) -> None:
            self._pass(batch, columns, rows, (b.mul(number, b.dim(s.channels)), channels), passes)

        if last == 0:
            part(b.dim(0), count, Passes(None, order="rows"))
            return
        part(b.dim(0), s.channels, Passes(self.waiting, order="rows", keeps=True))
        with b.loop(b.dim(1), b.dim(last), "serial") as step:
            part(step.index, s.channels, Passes(self.waiting, order="rows", keeps=True, resumes=True))
        part(b.dim(last), count - last * s.channels, Passes(self.waiting, order="rows", resumes=True))

    def _pass(
        self,
        batch: list[SSAValue],
        columns: tuple[SSAValue, SSAValue],
        rows: tuple[SSAValue, SSAValue],
        channels: tuple[SSAValue, int],
        passes: Passes,
    ) -> None:
        b, p, t = self.b, self.problem, self.schedule.tile
        first, count = channels
        k = b.dim(count * self.each)
        image = self.place(p.b_offset, [*zip(batch, p.b_batch, strict=True), (first, p.taps.strides[0])])
        self.patches(image, *columns, Side((count, *p.taps.sizes[1:]), p.taps.strides), t.nr, self.panels)
        terms = [*zip(batch, p.a_batch, strict=True), (rows[0], p.a_outer), (first, p.a_k[0])]
        left = Matrix(self.buffer[p.a], self.place(p.a_offset, terms), p.a_outer, p.a_k[-1])

        def body(total: SSAValue, row: SSAValue, column: SSAValue) -> None:
            self._store(total, batch, b.add(rows[0], row), b.add(columns[0], column))

        right = Matrix(self.panels, b.dim(0), 0, 0, t.nr)
        dot(b, t, left, right, (rows[1], columns[1], k), body, passes)

    def _store(self, total: SSAValue, batch: list[SSAValue], row: SSAValue, column: SSAValue) -> None:
        if self.image is not None:
            where = self.problem.points
            image, column = self.b.digits(column, [where.sizes[0], product(where.sizes[1:])])
            batch = [*batch[: self.image], image, *batch[self.image :]]
        self.store(total, batch, row, column)
