"""Attention backward: weights are computed again from the log-sum-exp, block by block, so that nothing quadratic is kept.

A task takes one head of keys and the query heads that share it: for each block of queries and keys it needs five
products (Dao et al., arXiv 2205.14135, appendix B).
"""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from luban.compiler.lowering.registry import Lowered, Request
from luban.kernels.attention import b_constant, equal
from luban.kernels.attention_problem import AttentionWriter, flops_of
from luban.kernels.dot_writer import Matrix, dot, pack_a, pack_b, panel_elements
from luban.symbolic import Dim, floordiv

GRAD, Q, K, V, OUT, LSE, BIAS = range(7)


def lower(request: Request) -> Lowered:
    """The kernel of an attention's gradients and the maps fused into their stores."""
    writer = _Backward(request)
    writer.emit()
    return writer.lowered(flops_of(writer.problem, 5))


class _Backward(AttentionWriter):
    def emit(self) -> None:
        b, p = self.b, self.problem
        counts: list[Dim] = [p.batch, p.key_heads]
        with b.loop(b.dim(0), b.dim(p.batch * p.key_heads), "parallel") as task:
            self.batch, key_head = b.digits(task.index, counts)
            self._open(key_head)
            if p.shared == 1:
                self._head(key_head)
            else:
                with b.loop(b.dim(0), b.dim(p.shared), "serial") as member:
                    self._head(b.add(b.mul(key_head, b.dim(p.shared)), member.index))
            self.head = key_head
            for result, buffer in self.sums.items():
                self._store_rows(result, buffer, b.dim(0), b.dim(p.keys))

    def _open(self, key_head: SSAValue) -> None:
        """Scratch memory, and the sums of what the heads give to their keys and values."""
        b, p, t = self.b, self.problem, self.tile
        self.keys_base = {o: self.head_base(o, self.batch, key_head) for o in (K, V)}
        self.delta = b.alloc(p.queries, f32)
        self.sums = {1: b.alloc(p.keys * p.size, f32), 2: b.alloc(p.keys * p.size, f32)}
        self.sum_q = b.alloc(self.query_block * p.size, f32)
        block = self.query_block * self.key_block
        self.weights, self.scores = b.alloc(block, self.dtype), b.alloc(block, self.dtype)
        s = self.score_tile
        self.panel_nt = b.alloc(panel_elements(s, s.nr, self.key_block, p.size), s.element)
        self.panel_rows = b.alloc(panel_elements(t, t.nr, p.size, max(self.key_block, self.query_block)), t.element)
        rows, depth = max(self.key_block, self.query_block), max(self.query_block, p.size)
        self.panel_a = b.alloc(max(panel_elements(x, x.mr, rows, depth) for x in (t, s)), t.element)
        for buffer in self.sums.values():
            with b.loop(b.dim(0), b.dim(p.keys * p.size), "vector") as loop:
                b.store(b_constant(self, 0.0), buffer, [loop.index], [1])

    def _head(self, head: SSAValue) -> None:
        b, p = self.b, self.problem
        self.head = head
        self.base = {o: self.head_base(o, self.batch, head) for o in (GRAD, Q, OUT)} | self.keys_base
        self._deltas()
        with b.loop(b.dim(0), b.dim(floordiv(p.queries + (self.query_block - 1), self.query_block)), "serial") as step:
            q0 = b.mul(step.index, b.dim(self.query_block))
            self._query_block(q0, b.minimum(b.dim(self.query_block), b.binary(arith.SubiOp, b.dim(p.queries), q0)))

    def _deltas(self) -> None:
        """delta[i] = sum over features of grad_out * out: what the softmax's gradient subtracts."""
        b, p = self.b, self.problem
        with b.loop(b.dim(0), b.dim(p.queries), "serial") as row:
            grad, out = self.rows(GRAD, self.base[GRAD], row.index), self.rows(OUT, self.base[OUT], row.index)
            with b.loop(b.dim(0), b.dim(p.size), "vector", [b_constant(self, 0.0)], ["add"]) as loop:
                one = b.dim(1)
                x = self.widen(b.load(grad.buffer, [b.mul(grad.base, one), loop.index], [1, grad.k]))
                y = self.widen(b.load(out.buffer, [b.mul(out.base, one), loop.index], [1, out.k]))
                loop.yields = [b.binary(arith.AddfOp, loop.carried[0], b.binary(arith.MulfOp, x, y))]
            b.store(loop.results[0], self.delta, [row.index], [1])

    def _query_block(self, q0: SSAValue, rows: SSAValue) -> None:
        b, p = self.b, self.problem
        with b.loop(b.dim(0), b.dim(self.query_block * p.size), "vector") as loop:
            b.store(b_constant(self, 0.0), self.sum_q, [loop.index], [1])
        last = b.dim(p.keys)
        if p.causal:
            last = b.minimum(last, b.add(q0, rows))
        blocks = b.binary(arith.DivUIOp, b.add(last, b.dim(self.key_block - 1)), b.dim(self.key_block))
        with b.loop(b.dim(0), blocks, "serial") as step:
            k0 = b.mul(step.index, b.dim(self.key_block))
            keys = b.minimum(b.dim(self.key_block), b.binary(arith.SubiOp, last, k0))
            self._weights(q0, rows, k0, keys)
            self._score_gradients(q0, rows, k0, keys)
            self._products(q0, rows, k0, keys)
        self._store_rows(0, self.sum_q, q0, rows)

    def _left_rows(self, operand: int, start: SSAValue, rows: SSAValue) -> Matrix:
        """An operand's rows as the left side of a product over features."""
        b, t = self.b, self.score_tile
        left = self.rows(operand, self.base[operand], start)
        if t.any_a or left.k == 1:
            return left
        return pack_a(b, t, left, rows, b.dim(self.problem.size), self.panel_a)

    def _weights(self, q0, rows, k0, keys) -> None:
        """weights = exp(scores - lse)."""
        b, p, t = self.b, self.problem, self.score_tile
        right = pack_b(b, t, self.rows(K, self.base[K], k0), keys, b.dim(p.size), self.panel_nt)

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            query = b.add(q0, i)
            value = self.score(acc, self.batch, self.head, query, b.add(k0, j), BIAS)
            access = self.accesses[LSE]
            lse = b.load(
                self.buffer[self.op.operands[LSE]], [self.batch, self.head, query], access.strides, access.offset
            )
            blind = equal(self, lse, b_constant(self, float("-inf")))
            shift = b.select(blind, b_constant(self, float("inf")), lse)  # exp(x - inf) = 0: no key, no weight
            weight = b.insert(math.ExpOp(b.binary(arith.SubfOp, value, shift)))
            b.store(self.narrow(weight, self.dtype), self.weights, [i, j], [self.key_block, 1])

        dot(b, t, self._left_rows(Q, q0, rows), right, (rows, keys, b.dim(p.size)), keep)

    def _score_gradients(self, q0, rows, k0, keys) -> None:
        """scores' gradient = scale * weights * (grad_out . value - delta)."""
        b, p, t = self.b, self.problem, self.score_tile
        right = pack_b(b, t, self.rows(V, self.base[V], k0), keys, b.dim(p.size), self.panel_nt)

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            weight = self.widen(b.load(self.weights, [i, j], [self.key_block, 1]))
            centred = b.binary(arith.SubfOp, acc, b.load(self.delta, [b.add(q0, i)], [1]))
            scaled = b.binary(arith.MulfOp, b.binary(arith.MulfOp, weight, centred), b_constant(self, p.scale))
            b.store(self.narrow(scaled, self.dtype), self.scores, [i, j], [self.key_block, 1])

        dot(b, t, self._left_rows(GRAD, q0, rows), right, (rows, keys, b.dim(p.size)), keep)

    def _products(self, q0, rows, k0, keys) -> None:
        b, p = self.b, self.problem
        size = b.dim(p.size)
        transposed = (keys, size, rows)
        self._accumulate(self.weights, True, self.rows(GRAD, self.base[GRAD], q0), transposed, self.sums[2], k0)
        self._accumulate(self.scores, True, self.rows(Q, self.base[Q], q0), transposed, self.sums[1], k0)
        self._accumulate(self.scores, False, self.rows(K, self.base[K], k0), (rows, size, keys), self.sum_q, b.dim(0))

    def _accumulate(
        self, block: SSAValue, transpose: bool, rows: Matrix, extents, target: SSAValue, start: SSAValue
    ) -> None:
        """target[start + i] += sum over p of block(i, p) * rows(p)."""
        b, p, t = self.b, self.problem, self.tile
        left = Matrix(block, b.dim(0), 1, self.key_block) if transpose else Matrix(block, b.dim(0), self.key_block, 1)
        if transpose and not t.any_a:
            left = pack_a(b, t, left, extents[0], extents[2], self.panel_a)
        right = self.features(rows)
        if not t.b_in_place or right.outer != 1:
            right = pack_b(b, t, right, extents[1], extents[2], self.panel_rows)

        def add(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            at = [b.add(start, i), j]
            b.store(b.binary(arith.AddfOp, b.load(target, at, [p.size, 1]), acc), target, at, [p.size, 1])

        dot(b, t, left, right, extents, add)

    def _store_rows(self, result: int, buffer: SSAValue, start: SSAValue, rows: SSAValue) -> None:
        b, p = self.b, self.problem
        if self.op.results[result] not in self.group.produced and self.op.results[result] not in self.buffer:
            return
        with b.loop(b.dim(0), rows, "serial") as row, b.loop(b.dim(0), b.dim(p.size), "vector") as loop:
            value = b.load(buffer, [row.index, loop.index], [p.size, 1])
            self.store(result, value, [self.batch, self.head, b.add(start, row.index), loop.index])
