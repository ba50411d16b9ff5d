"""The softmax of a block of scores: rows of scores in scratch become weights, with the sums that an online softmax keeps.

Rows go several at a time, so that their chains of maximum, exponential and sum overlap. A causal row ends with its last
visible key: what lies behind it is neither read nor computed, only set to 0 as far as the product with the values reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.kernels.attention_exponential import weight

if TYPE_CHECKING:
    from luban.kernels.attention_problem import AttentionWriter, Block

TOGETHER = 4  # rows side by side: their chains fill the vector units


class Softmax:
    """Scratch and code of one task's softmax.

    scores, weights       rows `pitch` and `weight_pitch` apart; float32 weights overwrite their scores
    top, total            of each row: the largest score seen (scaled, base 2) and the sum of weights relative to it
    shrink, inverse       factors for what was summed before this block, and for the end
    """

    def __init__(self, writer: AttentionWriter):
        self.w, b = writer, writer.b
        rows = -(-writer.query_block // TOGETHER) * TOGETHER
        self.size, line = rows, writer.request.target.line_bytes
        # one line more than a row: rows of a power of two would share a few sets of the first-level cache
        self.pitch = writer.key_block + line // 4
        self.scores = b.alloc(rows * self.pitch, f32)
        self.weights, self.weight_pitch = self.scores, self.pitch
        if writer.dtype != f32:
            self.weight_pitch = writer.key_block + line // bytes_of(writer.dtype)
            self.weights = b.alloc(rows * self.weight_pitch, writer.dtype)
        self.top, self.total, self.now, self.sums, self.shrink, self.inverse = (b.alloc(rows, f32) for _ in range(6))
        p, self.lanes = writer.problem, max(1, writer.request.target.vector_bits // 32)
        ends = (p.keys, writer.query_block, p.queries) if p.causal else (p.keys,)
        self.aligned = all(isinstance(end, int) and end % self.lanes == 0 for end in ends)
        self.scale = 1.0 if writer.scaled_first else writer.scale2

    def _number(self, value: float) -> SSAValue:
        return self.w.b.constant(value, f32)

    def clear(self) -> None:
        """No key seen yet."""
        self.w.clear(self.top, self.size, float("-inf"))
        self.w.clear(self.total, self.size)

    def rows(self, block: Block) -> None:
        """Scores -> weights; `now` and `sums` are each row's largest score (with what came before) and sum."""
        b = self.w.b
        groups = b.binary(arith.DivUIOp, b.add(block.rows, b.dim(TOGETHER - 1)), b.dim(TOGETHER))
        with b.loop(b.dim(0), groups, "serial") as group:
            first = b.mul(group.index, b.dim(TOGETHER))
            rows = [b.add(first, b.dim(r)) for r in range(TOGETHER)]
            limit = self._whole(self.w.seen(block, rows[-1]))
            if not self.aligned:
                with b.loop(block.keys, self._whole(block.keys), "vector") as loop:
                    for row in rows:
                        b.store(self._number(float("-inf")), self.scores, [row, loop.index], [self.pitch, 1])
            tops = self._tops(rows, limit)
            self._weigh(rows, limit, tops)
            if self.w.problem.causal:
                with b.loop(limit, block.keys, "vector") as loop:
                    for row in rows:
                        self._put(self._number(0.0), row, loop.index)

    def _whole(self, columns: SSAValue) -> SSAValue:
        """Columns rounded up to whole vectors: those behind the last visible key hold -inf."""
        b, lanes = self.w.b, self.w.b.dim(self.lanes)
        return b.mul(b.binary(arith.DivUIOp, b.add(columns, b.dim(self.lanes - 1)), lanes), lanes)

    def _put(self, value: SSAValue, row: SSAValue, column: SSAValue) -> None:
        w = self.w
        w.b.store(w.narrow(value, w.dtype), self.weights, [row, column], [self.weight_pitch, 1])

    def _score(self, row: SSAValue, column: SSAValue) -> SSAValue:
        return self.w.b.load(self.scores, [row, column], [self.pitch, 1])

    def _tops(self, rows: list[SSAValue], limit: SSAValue) -> list[SSAValue]:
        """The largest score of each row, scaled; NaN is passed over here, since its weight will be NaN."""
        b, start = self.w.b, self._number(float("-inf"))
        with b.loop(b.dim(0), limit, "vector", [start] * len(rows), ["max"] * len(rows)) as loop:
            found = [self._score(row, loop.index) for row in rows]
            loop.yields = [
                b.select(self.w.compare(new, old, "ogt"), new, old)
                for new, old in zip(found, loop.carried, strict=True)
            ]
        tops = [b.binary(arith.MulfOp, v, self._number(self.scale)) for v in loop.results]
        if not self.w.single:
            before = [b.load(self.top, [row], [1]) for row in rows]
            tops = [b.select(self.w.compare(new, old, "ogt"), new, old) for new, old in zip(tops, before, strict=True)]
        for row, top in zip(rows, tops, strict=True):
            b.store(top, self.top if self.w.single else self.now, [row], [1])
        return tops

    def _safe(self, top: SSAValue) -> SSAValue:
        """What to subtract: 0 in a row that has seen no key yet."""
        low = self.w.compare(top, self._number(float("-inf")), "oeq")
        return self.w.b.select(low, self._number(0.0), top)

    def _weigh(self, rows: list[SSAValue], limit: SSAValue, tops: list[SSAValue]) -> None:
        b, safe = self.w.b, [self._safe(top) for top in tops]
        with b.loop(b.dim(0), limit, "vector", [self._number(0.0)] * len(rows), ["add"] * len(rows)) as loop:
            sums = []
            for row, top, total in zip(rows, safe, loop.carried, strict=True):
                scaled = self._score(row, loop.index)
                if self.scale != 1.0:
                    scaled = b.binary(arith.MulfOp, scaled, self._number(self.scale))
                value = weight(b, b.binary(arith.SubfOp, scaled, top), self.w.dtype)
                self._put(value, row, loop.index)
                sums.append(b.binary(arith.AddfOp, total, value))
            loop.yields = sums
        for row, total in zip(rows, loop.results, strict=True):
            b.store(total, self.total if self.w.single else self.sums, [row], [1])

    def carry(self, rows: SSAValue) -> None:
        """Takes a block's sums in: what was summed before shrinks by the growth of the largest score."""
        b = self.w.b
        with b.loop(b.dim(0), rows, "vector") as loop:
            at = [loop.index]
            now, old = b.load(self.now, at, [1]), b.load(self.top, at, [1])
            shrink = b.insert(math.Exp2Op(b.binary(arith.SubfOp, old, self._safe(now))))
            total = b.binary(arith.MulfOp, b.load(self.total, at, [1]), shrink)
            total = b.binary(arith.AddfOp, total, b.load(self.sums, at, [1]))
            for value, buffer in ((now, self.top), (total, self.total), (shrink, self.shrink)):
                b.store(value, buffer, at, [1])

    def finish(self, rows: SSAValue) -> None:
        """1 / total; 0 in a row that saw no key."""
        b = self.w.b
        with b.loop(b.dim(0), rows, "vector") as loop:
            total = b.load(self.total, [loop.index], [1])
            empty = self.w.compare(total, self._number(0.0), "oeq")
            inverse = b.select(empty, self._number(0.0), b.binary(arith.DivfOp, self._number(1.0), total))
            b.store(inverse, self.inverse, [loop.index], [1])
