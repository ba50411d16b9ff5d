"""Attention forward: blocks of queries against blocks of keys with an online softmax (Dao et al., arXiv 2205.14135).

Memory stays linear in the length. A task takes one head and a share of its queries; scores of a block stay in scratch
that fits the second-level cache.
"""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from luban.compiler.lowering.registry import Lowered, Request
from luban.kernels.attention_problem import AttentionWriter, flops_of
from luban.kernels.dot_writer import Matrix, dot, pack_a, pack_b, panel_elements
from luban.symbolic import Dim, floordiv


def lower(request: Request) -> Lowered:
    """The kernel of an attention and the maps fused into its store."""
    writer = _Forward(request)
    writer.emit()
    return writer.lowered(flops_of(writer.problem, 2))


class _Forward(AttentionWriter):
    def emit(self) -> None:
        b, p = self.b, self.problem
        blocks = floordiv(p.queries + (self.query_block - 1), self.query_block)
        counts: list[Dim] = [p.batch, p.heads, blocks]
        total = p.batch * p.heads * blocks
        with b.loop(b.dim(0), b.dim(total), "parallel") as task:
            batch, head, block = b.digits(task.index, counts)
            q0 = b.mul(block, b.dim(self.query_block))
            rows = b.minimum(b.dim(self.query_block), b.binary(arith.SubiOp, b.dim(p.queries), q0))
            self._query_block(batch, head, q0, rows)

    def _query_block(self, batch: SSAValue, head: SSAValue, q0: SSAValue, rows: SSAValue) -> None:
        b, p, t, s = self.b, self.problem, self.tile, self.score_tile
        self.scores = b.alloc(self.query_block * self.key_block, f32)
        self.weights = self.scores if self.dtype == f32 else b.alloc(self.query_block * self.key_block, self.dtype)
        self.out = b.alloc(self.query_block * p.size, f32)
        self.top, self.total, self.shrink = (b.alloc(self.query_block, f32) for _ in range(3))
        self.packed_k = b.alloc(panel_elements(s, s.nr, self.key_block, p.size), s.element)
        self.packed_v = None if t.b_in_place else b.alloc(panel_elements(t, t.nr, p.size, self.key_block), t.element)
        self._clear(self.query_block * p.size, self.out, 0.0)
        self._clear(self.query_block, self.top, float("-inf"))
        self._clear(self.query_block, self.total, 0.0)
        last = b.dim(p.keys)
        if p.causal:  # keys behind the block's last query are never seen
            last = b.minimum(last, b.add(q0, rows))
        blocks = b.binary(arith.DivUIOp, b.add(last, b.dim(self.key_block - 1)), b.dim(self.key_block))
        with b.loop(b.dim(0), blocks, "serial") as step:
            k0 = b.mul(step.index, b.dim(self.key_block))
            self._key_block(
                batch, head, q0, rows, k0, b.minimum(b.dim(self.key_block), b.binary(arith.SubiOp, last, k0))
            )
        self._finish(batch, head, q0, rows)

    def _clear(self, elements: int, buffer: SSAValue, value: float) -> None:
        b = self.b
        with b.loop(b.dim(0), b.dim(elements), "vector") as loop:
            b.store(b.constant(value, f32), buffer, [loop.index], [1])

    def _key_block(self, batch, head, q0, rows, k0, keys) -> None:
        b, p, t, s = self.b, self.problem, self.tile, self.score_tile
        queries = self.rows(0, self.head_base(0, batch, head), q0)
        if not s.any_a and queries.k != 1:
            scratch = b.alloc(panel_elements(s, s.mr, self.query_block, p.size), s.element)
            queries = pack_a(b, s, queries, rows, b.dim(p.size), scratch)
        all_keys = self.rows(1, self.head_base(1, batch, self.key_head(head)), k0)
        right = pack_b(b, s, all_keys, keys, b.dim(p.size), self.packed_k)

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            value = self.score(acc, batch, head, b.add(q0, i), b.add(k0, j), 3)
            b.store(value, self.scores, [i, j], [self.key_block, 1])

        dot(b, s, queries, right, (rows, keys, b.dim(p.size)), keep)
        with b.loop(b.dim(0), rows, "serial") as row:
            self._softmax_row(row.index, keys)
        weights = Matrix(self.weights, b.dim(0), self.key_block, 1)
        values = self.features(self.rows(2, self.head_base(2, batch, self.key_head(head)), k0))
        if self.packed_v is not None or values.outer != 1:
            scratch = self.packed_v or b.alloc(panel_elements(t, t.nr, p.size, self.key_block), t.element)
            values = pack_b(b, t, values, b.dim(p.size), keys, scratch)

        def add(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            old = b.binary(arith.MulfOp, b.load(self.out, [i, j], [p.size, 1]), b.load(self.shrink, [i], [1]))
            b.store(b.binary(arith.AddfOp, old, acc), self.out, [i, j], [p.size, 1])

        dot(b, t, weights, values, (rows, b.dim(p.size), keys), add)

    def _softmax_row(self, i: SSAValue, keys: SSAValue) -> None:
        """Scores of one row -> weights; updates the row's maximum, sum, and the factor for what was summed before."""
        b, low = self.b, b_constant(self, float("-inf"))
        with b.loop(b.dim(0), keys, "vector", [low], ["max"]) as loop:
            got = b.load(self.scores, [i, loop.index], [self.key_block, 1])
            loop.yields = [b.binary(arith.MaximumfOp, loop.carried[0], got)]
        old = b.load(self.top, [i], [1])
        top = b.binary(arith.MaximumfOp, old, loop.results[0])
        safe = b.select(equal(self, top, low), b_constant(self, 0.0), top)  # a row that has seen no key yet
        with b.loop(b.dim(0), keys, "vector", [b_constant(self, 0.0)], ["add"]) as loop:
            got = b.load(self.scores, [i, loop.index], [self.key_block, 1])
            weight = self._exp(b.binary(arith.SubfOp, got, safe))
            b.store(self.narrow(weight, self.dtype), self.weights, [i, loop.index], [self.key_block, 1])
            loop.yields = [b.binary(arith.AddfOp, loop.carried[0], weight)]
        shrink = self._exp(b.binary(arith.SubfOp, old, safe))
        total = b.binary(arith.AddfOp, b.binary(arith.MulfOp, b.load(self.total, [i], [1]), shrink), loop.results[0])
        for value, buffer in ((top, self.top), (total, self.total), (shrink, self.shrink)):
            b.store(value, buffer, [i], [1])

    def _finish(self, batch, head, q0, rows) -> None:
        """Divides by the sums and stores; a row that saw no key gives 0."""
        b, p = self.b, self.problem
        lse = self.op.results[1]
        with b.loop(b.dim(0), rows, "serial") as row:
            i = row.index
            total, query = b.load(self.total, [i], [1]), b.add(q0, i)
            empty = equal(self, total, b_constant(self, 0.0))
            inverse = b.select(empty, b_constant(self, 0.0), b.binary(arith.DivfOp, b_constant(self, 1.0), total))
            with b.loop(b.dim(0), b.dim(p.size), "vector") as loop:
                value = b.binary(arith.MulfOp, b.load(self.out, [i, loop.index], [p.size, 1]), inverse)
                self.store(0, value, [batch, head, query, loop.index])
            if lse in self.buffer:
                log = b.insert(math.LogOp(total))
                value = b.binary(arith.AddfOp, b.load(self.top, [i], [1]), log)
                b.store(value, self.buffer[lse], [batch, head, query], [p.heads * p.queries, p.queries, 1])

    def _exp(self, value: SSAValue) -> SSAValue:
        return self.b.insert(math.ExpOp(value))


def b_constant(writer: AttentionWriter, value: float) -> SSAValue:
    """A float32 number."""
    return writer.b.constant(value, f32)


def equal(writer: AttentionWriter, a: SSAValue, c: SSAValue) -> SSAValue:
    """a == c, false for NaN."""
    op: Operation = arith.CmpfOp(a, c, "oeq")
    return writer.b.insert(op)
