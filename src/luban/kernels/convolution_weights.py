"""Convolutions that sum over points of the image: the gradient of the weights.

The matrix is the gradient of the output, whose rows are channels of the output; the patches are rows of the other operand,
one for each tap, along which points are neighbours. A task takes a block of channels of the image, with all taps of each,
and goes through all points a block at a time while the sums wait in the second-level cache: the gradient is packed, the
patches are read as they were copied, and the result is stored turned.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.registry import Request
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.convolution_kernel import ConvolutionKernel
from luban.kernels.convolution_problem import Convolution, Side
from luban.kernels.convolution_schedule import plain_tile
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_b, panel_elements
from luban.kernels.gemm_facts import ANY_CACHE
from luban.kernels.register_tiles import fit
from luban.symbolic import Dim, floordiv, product

POINTS = 256  # of a block


class Weights(ConvolutionKernel):
    """Tasks run over (batch, block of channels, block of rows of the matrix)."""

    def __init__(self, request: Request, group: Group, problem: Convolution, leaving: Sequence[SSAValue]):
        super().__init__(request, group, problem, leaving)
        p = self.problem
        target = request.target
        assert isinstance(p.m, int)
        self.tile = fit(plain_tile(target, p.element), target, p.m)
        lanes = max(1, target.vector_bits // (64 if bytes_of(p.element) == 8 else 32))
        self.lines, self.line = self._lines()
        held = max(1, min(self.line, POINTS)) if isinstance(self.line, int) else POINTS
        self.room = -(-held // lanes) * lanes
        quarter = (target.l2_bytes or ANY_CACHE) // 4
        pieces = -(-p.m // min(p.m, 256))
        self.columns = -(-p.m // pieces // self.tile.nr) * self.tile.nr
        size = bytes_of(self.tile.accumulator)
        taps = product(p.taps.sizes[1:])
        assert isinstance(taps, int)
        most = min(quarter // (self.columns * size), quarter // (self.room * bytes_of(p.element)))
        self.channels = self._channels(max(1, most // taps), target.cores)

    def _lines(self) -> tuple[Dim, Dim]:
        """Lines of neighbouring points of the matrix, and points of one: all in one line, or a line an image."""
        p = self.problem
        sizes, strides = p.points.sizes, p.a_k
        running: Dim = 1
        for size, stride in zip(reversed(sizes[1:]), reversed(strides[1:]), strict=True):
            assert size == 1 or stride == running * strides[-1], "contract_layout lines the points of an image up"
            running = running * size
        if sizes[0] == 1 or strides[0] == running * strides[-1]:
            return 1, running * sizes[0]
        return sizes[0], running

    def _channels(self, most: int, cores: int) -> int:
        """Channels of a block: a divisor of all, so that no block is ragged, and blocks for all cores if there are any."""
        p = self.problem
        count, batch = p.taps.sizes[0], product(p.batch)
        assert isinstance(count, int) and isinstance(p.m, int)
        tasks = (max(1, batch) if isinstance(batch, int) else 1) * -(-p.m // self.columns)
        most = min(count, most, max(1, -(-count * tasks // cores)))
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        found = max(d for d in divisors if d <= most)
        larger = min(d for d in divisors if d >= most)
        return found if 4 * found >= most else larger

    def emit(self) -> None:
        b, p = self.b, self.problem
        count = p.taps.sizes[0]
        assert isinstance(count, int) and isinstance(p.m, int)
        counts = [*p.batch, count // self.channels, -(-p.m // self.columns)]
        self.taps = Side((self.channels, *p.taps.sizes[1:]), p.taps.strides)
        self.rows = self.taps.count
        with b.loop(b.dim(0), b.dim(product(counts)), "parallel") as task:
            self.known = self.constants()
            self._allocate()
            *batch, cb, jb = b.digits(task.index, counts)
            c0, j0 = b.mul(cb, b.dim(self.channels)), b.mul(jb, b.dim(self.columns))
            self._task(batch, c0, (j0, self.rest(p.m, j0, self.columns)))

    def _allocate(self) -> None:
        b, t = self.b, self.tile
        rows = self.rows
        assert isinstance(rows, int)
        self.patch = b.alloc(rows * self.room, t.element)
        self.panels = b.alloc(panel_elements(t, t.nr, self.columns, self.room), t.element)
        self.sums = b.alloc(-(-rows // t.mr) * t.mr * self.columns, t.accumulator)

    def _task(self, batch: list[SSAValue], c0: SSAValue, columns: tuple[SSAValue, SSAValue]) -> None:
        """All blocks of points add to the sums; an empty pass over k brings them to the store."""
        b, p = self.b, self.problem
        per_line = floordiv(self.line + (self.room - 1), self.room)
        zero = b.dim(0)
        image = self.place(p.b_offset, [*zip(batch, p.b_batch, strict=True), (c0, p.taps.strides[0])])
        start = self.place(p.a_offset, [*zip(batch, p.a_batch, strict=True), (columns[0], p.a_outer)])

        def part(number: SSAValue, passes: Passes) -> None:
            line, block = (number, zero) if per_line == 1 else b.digits(number, [self.lines, per_line])
            at = b.mul(block, b.dim(self.room))
            first = b.add(b.mul(line, b.dim(self.line)), at)
            left = b.binary(arith.SubiOp, b.dim(self.line), at)
            all_left = b.binary(arith.SubiOp, b.dim(self.lines * self.line), first)
            count = b.maximum(zero, b.minimum(b.dim(self.room), b.minimum(left, all_left)))
            self.patches(image, first, count, self.taps, self.room, self.patch)
            place = b.add(start, b.mul(line, b.dim(p.a_k[0]))) if self.lines != 1 else start
            place = b.add(place, b.mul(at, b.dim(p.a_k[-1])))
            matrix = Matrix(self.buffer[p.a], place, p.a_outer, p.a_k[-1])
            right = pack_b(b, self.tile, matrix, columns[1], count, self.panels)
            self._dot(right, columns, count, passes, batch, c0)

        part(zero, Passes(self.sums, order="rows", keeps=True))
        with b.loop(b.dim(1), b.dim(self.lines * per_line), "serial") as step:
            part(step.index, Passes(self.sums, order="rows", keeps=True, resumes=True))
        empty = Matrix(self.panels, zero, 0, 0, self.tile.nr)
        self._dot(empty, columns, zero, Passes(self.sums, order="rows", resumes=True), batch, c0)

    def _dot(
        self,
        right: Matrix,
        columns: tuple[SSAValue, SSAValue],
        k: SSAValue,
        passes: Passes,
        batch: list[SSAValue],
        c0: SSAValue,
    ) -> None:
        b = self.b
        first = b.mul(c0, b.dim(product(self.taps.sizes[1:])))

        def body(total: SSAValue, row: SSAValue, column: SSAValue) -> None:
            self.store(total, batch, b.add(columns[0], column), b.add(first, row))

        left = Matrix(self.patch, b.dim(0), self.room, 1)
        dot(b, self.tile, left, right, (b.dim(self.rows), columns[1], k), body, passes)
