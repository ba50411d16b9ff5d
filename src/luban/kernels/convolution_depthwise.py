"""Depthwise convolutions: one channel of the image each, products of single numbers with shifted lines.

A task copies its channel with zeros around it into scratch, which a first- or second-level cache holds, so that no tap has
an edge; every result is then a sum over taps of neighbouring lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.dialects import math as math_dialect
from xdsl.dialects.builtin import f32, f64
from xdsl.ir import Attribute, SSAValue

from luban.compiler.ir.attributes import contiguous
from luban.kernels.convolution_kernel import ConvolutionKernel
from luban.kernels.convolution_problem import Convolution
from luban.symbolic import Dim, product

SUMS = 4  # independent sums, that hide the latency of a multiply-add
MOST_TAPS = 128  # all of them are written out
LINES = 8  # lines of results side by side at most, which have a vector each in flight
CARRIED = 8  # taps whose sums are built side by side


def is_depthwise(p: Convolution) -> bool:
    """Whether each result is a sum over taps of one channel, which unrolled taps and one pitch can say."""
    same = p.points_are_n or len(set(p.window.n_step)) == 1
    return p.m == 1 and p.taps.sizes[0] == 1 and product(p.taps.sizes) <= MOST_TAPS and same  # type: ignore[operator]


class Channel(ConvolutionKernel):
    """What forward and the gradient of the weights share: the padded channel in scratch."""

    def geometry(self) -> None:
        """Sizes of the output (or its gradient), of the kernel and of the padded channel, with its strides."""
        p = self.problem
        rank = p.window.rank
        self.space: tuple[int, ...] = p.points.sizes[-rank:]  # type: ignore[assignment]
        self.kernel: tuple[int, ...] = p.taps.sizes[-rank:]  # type: ignore[assignment]
        self.step, self.reach = p.window.n_step, p.window.k_step
        self.padded = tuple(
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(self.space, self.step, self.kernel, self.reach, strict=True)
        )
        self.pitch: tuple[int, ...] = contiguous(self.padded)  # type: ignore[assignment]
        self.all_taps = list(itertools.product(*map(range, self.kernel)))
        self.wide: Attribute = p.element if p.element == f64 else f32  # narrower floats are widened as they are copied

    def nest(self, sizes: Sequence[Dim], body: Callable[[list[SSAValue]], None]) -> None:
        """Serial loops, the last one as lanes."""
        b = self.b

        def level(d: int, index: list[SSAValue]) -> None:
            with b.loop(b.dim(0), b.dim(sizes[d]), "vector" if d == len(sizes) - 1 else "serial") as loop:
                inner = [*index, loop.index]
                body(inner) if d == len(sizes) - 1 else level(d + 1, inner)

        level(0, [])

    def copy_padded(self, base: SSAValue, scratch: SSAValue) -> None:
        """The channel that starts at `base` (of its position -pad) with zeros around it; what no tap reads is left out."""
        b, p = self.b, self.problem
        self.fill(scratch, product(self.padded))
        first = [max(0, -pad) for pad in p.window.pad]
        ends = [min(n, size - pad) for n, size, pad in zip(p.window.extent, self.padded, p.window.pad, strict=True)]
        sizes = [max(0, end - start) for start, end in zip(first, ends, strict=True)]
        at = [start + pad for start, pad in zip(first, p.window.pad, strict=True)]
        skipped: Dim = 0
        for n, stride in zip(at, self.image_strides, strict=True):
            skipped = skipped + n * stride
        inside = sum(n * s for n, s in zip(at, self.pitch, strict=True))

        def one(index: list[SSAValue]) -> None:
            value = self.read(self.buffer[p.b], [base, *index], [1, *self.image_strides], skipped)
            b.store(value, scratch, index, self.pitch, inside)

        self.nest(sizes, one)

    def read(self, buffer: SSAValue, indices: Sequence[SSAValue], strides: Sequence[Dim], offset: Dim = 0) -> SSAValue:
        """An element of an operand, in the type of the sums."""
        value = self.b.load(buffer, indices, strides, offset)
        if value.type == self.wide:
            return value
        return self.b.insert(arith.ExtFOp.create(operands=[value], result_types=[self.wide]))

    def fill(self, buffer: SSAValue, count: Dim) -> None:
        """Zeros."""
        b = self.b
        with b.loop(b.dim(0), b.dim(count), "vector") as loop:
            b.store(b.constant(0, self.wide), buffer, [loop.index], [1])

    @property
    def image_strides(self) -> tuple[Dim, ...]:
        """Element strides of the image along its spatial dims."""
        rank = self.problem.window.rank
        strides = self.problem.points.strides[-rank:]
        return tuple(s // n if isinstance(s, int) else s for s, n in zip(strides, self.step, strict=True))

    def shift(self, tap: Sequence[int]) -> int:
        """How far a tap lies from the first one in the padded channel."""
        return sum(t * d * s for t, d, s in zip(tap, self.reach, self.pitch, strict=True))

    def add_product(self, a: SSAValue, x: SSAValue, total: SSAValue) -> SSAValue:
        """a * x + total, rounded once."""
        return self.b.insert(math_dialect.FmaOp.create(operands=[a, x, total], result_types=[total.type]))


class Depthwise(Channel):
    """Forward and the gradient of the input; tasks run over channels."""

    def emit(self) -> None:
        b, p = self.b, self.problem
        self.geometry()
        with b.loop(b.dim(0), b.dim(product(p.batch)), "parallel") as task:
            self.known = self.constants()
            scratch = b.alloc(product(self.padded), self.wide)
            batch = b.digits(task.index, p.batch)
            self.copy_padded(self.place(p.b_offset, list(zip(batch, p.b_batch, strict=True))), scratch)
            start = self.place(p.a_offset, list(zip(batch, p.a_batch, strict=True)))
            self._points(scratch, start, batch)

    def _points(self, scratch: SSAValue, weights: SSAValue, batch: list[SSAValue]) -> None:
        """All results, some lines at a time: a weight is read once for all of them."""
        b = self.b
        lines = self.space[-2] if len(self.space) > 1 else 1
        together = _together(lines)
        for first, count, times in (
            (0, together, lines // together),
            (lines // together * together, lines % together, 1),
        ):
            if count == 0:
                continue
            blocks = [*self.space[:-2], times, self.space[-1]]

            def block(index: list[SSAValue], first: int = first, count: int = count) -> None:
                line = b.add(b.mul(index[-2], b.dim(count)), b.dim(first))
                at = [*index[:-2], line, index[-1]] if len(self.space) > 1 else [index[-1]]
                self._block(at, count, scratch, weights, batch)

            self.nest(blocks, block)

    def _block(
        self, index: list[SSAValue], lines: int, scratch: SSAValue, weights: SSAValue, batch: list[SSAValue]
    ) -> None:
        """`lines` neighbouring lines of results at one place.

        A weight is read where it is used: more of them than registers would be spread over lanes and spilled first, which
        takes longer than all products of a small channel.
        """
        b, p = self.b, self.problem
        strides = [n * s for n, s in zip(self.step, self.pitch, strict=True)]
        chains = max(1, min(SUMS // lines, len(self.all_taps)))
        sums = [[b.constant(0, self.wide)] * chains for _ in range(lines)]
        for number, tap in enumerate(self.all_taps):
            at = sum(t * s for t, s in zip(tap, p.a_k[-len(tap) :], strict=True))  # type: ignore[misc]
            weight = self.read(self.buffer[p.a], [weights], [1], at)
            for line, held in enumerate(sums):
                below = line * strides[-2] if lines > 1 else 0
                value = b.load(scratch, index, strides, self.shift(tap) + below)
                held[number % chains] = self.add_product(weight, value, held[number % chains])
        for line, held in enumerate(sums):
            total = held[0]
            for more in held[1:]:
                total = b.binary(arith.AddfOp, total, more)
            place = list(zip(index, contiguous(self.space), strict=True))
            self.store(total, batch, b.dim(0), self.place(line * self.space[-1], place))


def _together(lines: int) -> int:
    """Lines of a block: as many as divide them all, of four to eight."""
    return next((n for n in range(LINES, SUMS - 1, -1) if lines % n == 0), min(SUMS, lines))


class DepthwiseWeights(Channel):
    """The gradient of the weights; tasks run over channels, whose images they go through one by one.

    The gradient of the output lies in scratch with the pitch of the padded channel, so that both are one line. What lies
    between its rows is no point: it is masked, as zeros would turn an infinity of the image into a NaN.
    """

    def emit(self) -> None:
        b, p = self.b, self.problem
        self.geometry()
        self.length = 1 + sum((n - 1) * s for n, s in zip(self.space, self.pitch, strict=True))
        images = product(p.points.sizes[: len(p.points.sizes) - p.window.rank])
        with b.loop(b.dim(0), b.dim(product(p.batch)), "parallel") as task:
            self.known = self.constants()
            channel, gradient, points = (
                b.alloc(n, self.wide) for n in (product(self.padded), self.length, self.length)
            )
            totals = b.alloc(len(self.all_taps), self.wide)
            batch = b.digits(task.index, p.batch)
            for buffer, count in ((gradient, self.length), (points, self.length), (totals, len(self.all_taps))):
                self.fill(buffer, count)
            one = b.constant(1, self.wide)
            self.nest(self.space, lambda index: b.store(one, points, index, self.pitch))
            x = self.place(p.b_offset, list(zip(batch, p.b_batch, strict=True)))
            g = self.place(p.a_offset, list(zip(batch, p.a_batch, strict=True)))
            with b.loop(b.dim(0), b.dim(images), "serial") as image:
                self.copy_padded(b.add(x, b.mul(image.index, b.dim(p.points.strides[0]))), channel)
                self._copy_gradient(b.add(g, b.mul(image.index, b.dim(p.a_k[0]))), gradient)
                for first in range(0, len(self.all_taps), CARRIED):
                    self._add(self.all_taps[first : first + CARRIED], first, (channel, gradient, points), totals)
            with b.loop(b.dim(0), b.dim(len(self.all_taps)), "vector") as loop:
                self.store(b.load(totals, [loop.index], [1]), batch, b.dim(0), loop.index)

    def _copy_gradient(self, base: SSAValue, scratch: SSAValue) -> None:
        b, p = self.b, self.problem
        strides = p.a_k[-len(self.space) :]

        def one(index: list[SSAValue]) -> None:
            b.store(self.read(self.buffer[p.a], [base, *index], [1, *strides]), scratch, index, self.pitch)

        self.nest(self.space, one)

    def _add(
        self, taps: Sequence[Sequence[int]], first: int, held: tuple[SSAValue, SSAValue, SSAValue], totals: SSAValue
    ) -> None:
        """Adds the sums of some taps over one image."""
        b = self.b
        channel, gradient, points = held
        zero = b.constant(0, self.wide)
        with b.loop(b.dim(0), b.dim(self.length), "vector", [zero] * len(taps), ["add"] * len(taps)) as loop:
            is_point = b.insert(
                arith.CmpfOp(b.load(points, [loop.index], [1]), zero, "one"),
            )
            g = b.load(gradient, [loop.index], [1])
            loop.yields = [
                self.add_product(g, b.load(channel, [loop.index], [self.step[-1]], self.shift(tap), is_point), total)
                for tap, total in zip(taps, loop.carried, strict=True)
            ]
        for number, got in enumerate(loop.results, first):
            at = [b.dim(number)]
            b.store(b.binary(arith.AddfOp, b.load(totals, at, [1]), got), totals, at, [1])
