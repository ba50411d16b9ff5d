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
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_b
from luban.symbolic import floordiv

if TYPE_CHECKING:
    from luban.kernels.attention import Forward

LIMIT = 32.0  # of the bound: weights of bfloat16 times values stay far from denormal numbers, which a matrix unit takes for 0
TOGETHER = 4  # rows whose sums are built side by side


def serves(writer: AttentionWriter) -> bool:
    """Whether an attention may take this way: a bias may be anything, float16 ends at 2^-24, and float32 would lose
    four bits, since the largest weight is no 1.
    """
    return not writer.biased_scores and writer.dtype == bf16


def bounded_for(writer: Forward) -> Bounded | None:
    """The way for small scores that suits an attention and the unit of its products."""
    from luban.kernels.attention_paired import Paired, pairs

    if not serves(writer):
        return None
    return Paired(writer) if pairs(writer.score_tile, writer.tile) else Bounded(writer)


class Bounded:
    """Scratch and code of one task: `sums` are partial sums of weights, added up at the end of a block of queries."""

    limit = LIMIT
    reorders = False  # whether it packs keys in an order of its own

    def __init__(self, writer: Forward):
        self.w, b = writer, writer.b
        t = writer.tile
        self.rows = up(writer.query_block, TOGETHER)
        self.columns = min(writer.key_block, writer.score_tile.nr)
        self.sums = b.alloc(self.rows * self.sums_pitch, f32)
        self.partial = None
        if not writer.single:
            self.partial_size = up(writer.query_block, t.mr) * up(writer.problem.size, t.nr)
            self.partial = b.alloc(self.partial_size, f32)

    @property
    def sums_pitch(self) -> int:
        """Partial sums of a row."""
        return self.columns

    def pack_keys(self, rows: Matrix) -> None:
        """The keys of a head as columns over features."""
        b, w = self.w.b, self.w
        pack_b(b, w.score_tile, rows, b.dim(w.problem.keys), b.dim(w.problem.size), w.packed_k)

    def bound(self, q: int, k: int) -> SSAValue:
        """What no score of the head exceeds, base 2; NaN or infinity where a row holds one."""
        b, w, p = self.w.b, self.w, self.w.problem
        roots = [b.insert(math.SqrtOp(square)) for square in (self._longest(q, p.queries), self.longest_key(k))]
        return b.binary(arith.MulfOp, b.binary(arith.MulfOp, *roots), b.constant(abs(w.scale2), f32))

    def longest_key(self, k: int) -> SSAValue:
        """The largest sum of squares of a head's keys, which have been packed."""
        return self._longest(k, self.w.problem.keys)

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
                found = [w.widen(b.load(row.buffer, [row.base, loop.index], [1, row.k], ahead=True)) for row in rows]
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
        self.begin(b.insert(math.CeilOp(bound)))
        block = Block(q0, rows, b.dim(0), b.dim(0), last)
        if self.partial is None:
            self.weights(block)
        else:
            w.clear(self.partial, self.partial_size)
            with w.each_block(last, w.key_block) as (index, k0, keys):
                block = Block(q0, rows, index, k0, keys)
                self.weights(block)
                self.add_sums(block, False)
                w.times_values(block, lambda *_: None, Passes(self.partial, keeps=True, resumes=True))
            block = Block(q0, rows, b.dim(0), b.dim(0), b.dim(0))  # a product over nothing ends the sums
        self.add_sums(block, True)
        self.totals(rows)
        w.softmax.finish(rows)

        def put(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            value = b.binary(arith.MulfOp, acc, b.load(w.softmax.inverse, [i], [1]))
            w.store(0, value, [w.batch, w.head, b.add(q0, i), j])

        w.times_values(block, put, Passes(self.partial, resumes=self.partial is not None))
        w.store_sums(q0, rows)

    def begin(self, whole: SSAValue) -> None:
        """No key seen yet; `whole` is what all scores are relative to."""
        b, w = self.w.b, self.w
        self.magic = b.binary(arith.SubfOp, b.constant(MAGIC, f32), whole)
        self.shift = b.binary(arith.SubfOp, whole, b.constant(log2(STEPPED[0]), f32))
        w.clear(self.sums, self.rows * self.sums_pitch)

    def add_sums(self, block: Block, final: bool) -> None:
        """The sums of a block's weights, where they are not added as the weights are made; the final block's last."""

    def weights(self, block: Block) -> None:
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
        b = self.w.b
        with b.loop(begin, end, "serial") as turn:
            self._part(block, b.mul(turn.index, b.dim(self.columns)), masked)

    def _part(self, block: Block, first: SSAValue, masked: bool) -> None:
        """Weights of the columns of a register tile, from key `first` of the block on."""
        b, w = self.w.b, self.w
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

    def totals(self, rows: SSAValue) -> None:
        """The sum of each row's weights, and the shift where the online softmax has its largest score."""
        b, w = self.w.b, self.w
        zero = b.constant(0.0, f32)
        groups = b.binary(arith.DivUIOp, b.add(rows, b.dim(TOGETHER - 1)), b.dim(TOGETHER))
        with b.loop(b.dim(0), groups, "serial") as group:
            found = [b.add(b.mul(group.index, b.dim(TOGETHER)), b.dim(r)) for r in range(TOGETHER)]
            with b.loop(b.dim(0), b.dim(self.columns), "vector", [zero] * TOGETHER, ["add"] * TOGETHER) as loop:
                loop.yields = [
                    b.binary(arith.AddfOp, sum_, b.load(self.sums, [row, loop.index], [self.sums_pitch, 1]))
                    for sum_, row in zip(loop.carried, found, strict=True)
                ]
            for row, total in zip(found, loop.results, strict=True):
                b.store(total, w.softmax.total, [row], [1])
                b.store(self.shift, w.softmax.top, [row], [1])
