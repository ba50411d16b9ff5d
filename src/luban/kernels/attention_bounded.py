"""Attention forward where scores are known to be small: one pass over the keys, without a running maximum.

A softmax may subtract any number from its scores as long as nothing overflows or vanishes. No score exceeds the product
of the longest query and the longest key, which two passes over rows give. Where that product is at most LIMIT (base 2)
it serves for all rows of a head: weights come right out of the product of queries and keys, 2^-64 at least, no block
shrinks what came before it, and the output stays in register tiles. Elsewhere the online softmax takes over.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import bf16, f32
from xdsl.ir import SSAValue

from luban.kernels.attention_blocks import up
from luban.kernels.attention_exponential import MAGIC, STEPPED, bfloat16_weight
from luban.kernels.attention_problem import AttentionWriter, Block
from luban.kernels.dot_writer import Passes, dot
from luban.symbolic import floordiv

if TYPE_CHECKING:
    from luban.kernels.attention import Forward

LIMIT = 32.0  # weights of bfloat16 times values stay far from denormal numbers, which a matrix unit takes for 0
TOGETHER = 4  # rows whose sums are built side by side


def serves(writer: AttentionWriter) -> bool:
    """Whether an attention may take this way: a bias may be anything, float16 ends at 2^-24, and float32 would lose
    four bits, since the largest weight is no 1.
    """
    return not writer.biased_scores and writer.dtype == bf16


class Bounded:
    """Scratch and code of one task: `sums` are partial sums of weights, added up at the end of a block of queries."""

    def __init__(self, writer: Forward):
        self.w, b = writer, writer.b
        t, s = writer.tile, writer.score_tile
        self.rows = up(writer.query_block, TOGETHER)
        self.columns = min(writer.key_block, s.nr)
        self.sums = b.alloc(self.rows * self.columns, f32)
        self.partial = None
        if not writer.single:
            self.partial_size = up(writer.query_block, t.mr) * up(writer.problem.size, t.nr)
            self.partial = b.alloc(self.partial_size, f32)

    def bound(self, q: int, k: int) -> SSAValue:
        """What no score of the head exceeds, base 2; NaN or infinity where a row holds one."""
        b, w, p = self.w.b, self.w, self.w.problem
        squares = [self._longest(o, count) for o, count in ((q, p.queries), (k, p.keys))]
        roots = [b.insert(math.SqrtOp(square)) for square in squares]
        return b.binary(arith.MulfOp, b.binary(arith.MulfOp, *roots), b.constant(abs(w.scale2), f32))

    def _longest(self, operand: int, count) -> SSAValue:
        """The largest sum of squares of a head's rows."""
        b, w = self.w.b, self.w
        zero = b.constant(0.0, f32)
        groups = floordiv(count + (TOGETHER - 1), TOGETHER)
        with b.loop(b.dim(0), b.dim(groups), "serial", [zero], ["none"]) as group:
            first = b.mul(group.index, b.dim(TOGETHER))
            inside = [b.minimum(b.add(first, b.dim(r)), b.dim(count - 1)) for r in range(TOGETHER)]
            rows = [w.rows(operand, w.base[operand], row) for row in inside]
            with b.loop(b.dim(0), b.dim(w.problem.size), "vector", [zero] * TOGETHER, ["add"] * TOGETHER) as loop:
                found = [w.widen(b.load(row.buffer, [row.base, loop.index], [1, row.k])) for row in rows]
                loop.yields = [
                    b.binary(arith.AddfOp, sum_, b.binary(arith.MulfOp, x, x))
                    for sum_, x in zip(loop.carried, found, strict=True)
                ]
            most = group.carried[0]
            for total in loop.results:
                most = b.binary(arith.MaximumfOp, most, total)
            group.yields = [most]
        return group.results[0]

    # ---- a block of queries

    def query_block(self, q0: SSAValue, rows: SSAValue, last: SSAValue, bound: SSAValue) -> None:
        b, w = self.w.b, self.w
        whole = b.insert(math.CeilOp(bound))
        self.magic = b.binary(arith.SubfOp, b.constant(MAGIC, f32), whole)
        self.shift = b.binary(arith.SubfOp, whole, b.constant(log2(STEPPED[0]), f32))
        w.clear(self.sums, self.rows * self.columns)
        final = b.dim(0)
        if self.partial is not None:
            w.clear(self.partial, self.partial_size)
            blocks = b.binary(arith.DivUIOp, b.add(last, b.dim(w.key_block - 1)), b.dim(w.key_block))
            final = b.maximum(b.dim(0), b.binary(arith.SubiOp, blocks, b.dim(1)))
            with b.loop(b.dim(0), final, "serial") as turn:
                block = Block(q0, rows, turn.index, b.mul(turn.index, b.dim(w.key_block)), b.dim(w.key_block))
                self._weights(block)
                w.times_values(block, lambda *_: None, Passes(self.partial, keeps=True, resumes=True))
        k0 = b.mul(final, b.dim(w.key_block))
        block = Block(q0, rows, final, k0, b.binary(arith.SubiOp, last, k0))
        self._weights(block)
        self._totals(rows)
        w.softmax.finish(rows)

        def put(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            value = b.binary(arith.MulfOp, acc, b.load(w.softmax.inverse, [i], [1]))
            w.store(0, value, [w.batch, w.head, b.add(q0, i), j])

        w.times_values(block, put, Passes(self.partial, resumes=self.partial is not None))
        w.store_sums(q0, rows)

    def _weights(self, block: Block) -> None:
        """Weights of a block, some columns after the other, so that their sums stay near."""
        b, w, step = self.w.b, self.w, self.w.b.dim(self.columns)
        parts = b.binary(arith.DivUIOp, b.add(block.keys, b.dim(self.columns - 1)), step)
        if not w.problem.causal:
            self._parts(block, b.dim(0), parts, False)
            return
        whole = b.binary(arith.DivUIOp, w.seen(block, b.dim(0)), step)
        self._parts(block, b.dim(0), whole, False)
        self._parts(block, whole, parts, True)

    def _parts(self, block: Block, begin: SSAValue, end: SSAValue, masked: bool) -> None:
        b, w = self.w.b, self.w
        with b.loop(begin, end, "serial") as turn:
            first = b.mul(turn.index, b.dim(self.columns))
            columns = b.minimum(b.dim(self.columns), b.binary(arith.SubiOp, block.keys, first))

            def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
                value = bfloat16_weight(b, acc, w.scale2, self.magic)
                if masked:
                    hidden = b.less(b.add(block.q0, i), b.add(b.add(block.k0, first), j))
                    value = b.select(hidden, b.constant(0.0, f32), value)
                at, strides = [i, j], [self.columns, 1]
                b.store(b.binary(arith.AddfOp, b.load(self.sums, at, strides), value), self.sums, at, strides)
                place = [i, b.add(first, j)]
                b.store(w.narrow(value, w.dtype), w.softmax.weights, place, [w.softmax.weight_pitch, 1])

            right = w.keys_from(w.packed_k, block, first)
            dot(b, w.score_tile, w.left, right, (block.rows, columns, b.dim(w.problem.size)), keep)

    def _totals(self, rows: SSAValue) -> None:
        """The sum of each row's weights, and the shift where the online softmax has its largest score."""
        b, w = self.w.b, self.w
        zero = b.constant(0.0, f32)
        groups = b.binary(arith.DivUIOp, b.add(rows, b.dim(TOGETHER - 1)), b.dim(TOGETHER))
        with b.loop(b.dim(0), groups, "serial") as group:
            found = [b.add(b.mul(group.index, b.dim(TOGETHER)), b.dim(r)) for r in range(TOGETHER)]
            with b.loop(b.dim(0), b.dim(self.columns), "vector", [zero] * TOGETHER, ["add"] * TOGETHER) as loop:
                loop.yields = [
                    b.binary(arith.AddfOp, sum_, b.load(self.sums, [row, loop.index], [self.columns, 1]))
                    for sum_, row in zip(loop.carried, found, strict=True)
                ]
            for row, total in zip(found, loop.results, strict=True):
                b.store(total, w.softmax.total, [row], [1])
                b.store(self.shift, w.softmax.top, [row], [1])
