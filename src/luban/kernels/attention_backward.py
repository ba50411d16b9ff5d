"""Attention backward: weights are computed again from the log-sum-exp, block by block, so that nothing quadratic is kept.

A task takes one head of keys and the query heads that share it. Of the five products of a block of keys and queries (Dao
et al., arXiv 2205.14135, appendix B) those of weights are built with keys as rows: weights and score gradients then lie
as the products with the block's queries read them, and only the gradient of the queries needs one of them turned. The
sums of a block of keys stay in register tiles while all its queries pass by.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.registry import Lowered, Request
from luban.kernels.attention_blocks import up
from luban.kernels.attention_exponential import weight
from luban.kernels.attention_problem import LOG2_E, AttentionWriter, flops_of
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_a, pack_b, panel_elements
from luban.symbolic import Dim, floordiv

GRAD, Q, K, V, OUT, LSE, BIAS = range(7)
TOGETHER = 4  # rows whose sums are built side by side


def lower(request: Request) -> Lowered:
    """The kernel of an attention's gradients and the maps fused into their stores."""
    writer = _Backward(request)
    writer.emit()
    return writer.lowered(flops_of(writer.problem, 5))


@dataclass(frozen=True)
class Pair:
    """A block of `keys` keys from k0 on and `rows` queries from q0 on, the block of queries with this `index`."""

    k0: SSAValue
    keys: SSAValue
    q0: SSAValue
    rows: SSAValue
    index: SSAValue


class _Backward(AttentionWriter):
    def emit(self) -> None:
        b, p = self.b, self.problem
        counts: list[Dim] = [p.batch, p.key_heads]
        with b.loop(b.dim(0), b.dim(p.batch * p.key_heads), "parallel") as task:
            self.batch, self.shared_head = b.digits(task.index, counts)
            self._open()
            if p.shared == 1:
                self._head(self.shared_head)
                return
            for buffer in self.sums:
                self.clear(buffer, p.keys * p.size)
            with b.loop(b.dim(0), b.dim(p.shared), "serial") as member:
                self._head(b.add(b.mul(self.shared_head, b.dim(p.shared)), member.index))
            for result, buffer in zip((1, 2), self.sums, strict=True):
                self._store_rows(result, buffer, self.shared_head, p.keys)

    def _open(self) -> None:
        """Scratch of a task, and the sums of what heads give to their keys and values where several share them."""
        b, p, t, c = self.b, self.problem, self.tile, self.blocks
        self.keys_base = {o: self.head_base(o, self.batch, self.shared_head) for o in (K, V)}
        rows = floordiv(p.queries + (TOGETHER - 1), TOGETHER) * TOGETHER
        self.delta, self.shift = b.alloc(rows, f32), b.alloc(rows, f32)
        self.sums = [b.alloc(p.keys * p.size, f32) for _ in range(2)] if p.shared > 1 else []
        self.sum_q = b.alloc(p.queries * p.size, f32)
        self.pitch = c.queries + self.request.target.line_bytes // bytes_of(self.dtype)
        self.weights, self.scores = (b.alloc(c.keys * self.pitch, self.dtype) for _ in range(2))
        self.products, self.product_pitch = self.scores, self.pitch  # in float32 they are overwritten
        if self.dtype != f32:
            self.product_pitch = c.queries + self.request.target.line_bytes // 4
            self.products = b.alloc(c.keys * self.product_pitch, f32)
        self.partial = [b.alloc(up(c.keys, t.mr) * up(p.size, t.nr), f32) for _ in range(2)]
        self.turned = None if t.any_a else b.alloc(panel_elements(t, t.mr, c.queries, c.keys), t.element)
        blocks = floordiv(p.queries + (c.queries - 1), c.queries)
        self.columns = {o: b.alloc(blocks * self._column_elements, self.score_tile.element) for o in (Q, GRAD)}
        self.rooms = {Q: c.queries, GRAD: c.queries, K: c.keys}
        self.packed = {o: b.alloc((blocks if o != K else 1) * self._room(o), t.element) for o in self._repacked()}

    def _repacked(self) -> list[int]:
        """Operands whose rows must be packed as columns of features."""
        return [o for o in (Q, GRAD, K) if not self.tile.b_in_place or self.accesses[o].strides[3] != 1]

    @property
    def _column_elements(self) -> int:
        """Elements of a block of queries packed as columns over features."""
        s = self.score_tile
        return panel_elements(s, s.nr, self.blocks.queries, self.problem.size)

    def _room(self, operand: int) -> int:
        t = self.tile
        return panel_elements(t, t.nr, self.problem.size, self.rooms[operand])

    # ---- a head

    def _head(self, head: SSAValue) -> None:
        b, p, c = self.b, self.problem, self.blocks
        self.head = head
        self.base = {o: self.head_base(o, self.batch, head) for o in (GRAD, Q, OUT)} | self.keys_base
        self._row_numbers()
        self.clear(self.sum_q, p.queries * p.size)
        with self._blocks(p.queries, c.queries) as (index, q0, rows):
            for operand, scratch in self.columns.items():
                at = b.mul(index, b.dim(self._column_elements))
                pack_b(b, self.score_tile, self._rows(operand, q0), rows, b.dim(p.size), scratch, at)
            for operand in (o for o in self.packed if o != K):
                self.pack_features(
                    self._rows(operand, q0), rows, self.packed[operand], self._at(operand, index), c.queries, p.queries
                )
        with self._blocks(p.keys, c.keys) as (_, k0, keys):
            self._key_block(k0, keys)
        self._store_rows(0, self.sum_q, head, p.queries)

    def _blocks(self, length: Dim, step: int, first: SSAValue | None = None):
        return self.each_block(self.b.dim(length), step, first)

    def _rows(self, operand: int, start: SSAValue) -> Matrix:
        return self.rows(operand, self.base[operand], start)

    def _at(self, operand: int, index: SSAValue) -> SSAValue:
        return self.b.mul(index, self.b.dim(self._room(operand)))

    def _row_numbers(self) -> None:
        """Of each query: delta = scale * sum over features of grad_out * out, what the softmax's gradient subtracts,
        and the log-sum-exp, base 2; infinity where there is no key, since exp(x - inf) = 0.
        """
        b, p = self.b, self.problem
        zero = b.constant(0.0, f32)
        groups = floordiv(p.queries + (TOGETHER - 1), TOGETHER)
        with b.loop(b.dim(0), b.dim(groups), "serial") as group:
            rows = [b.add(b.mul(group.index, b.dim(TOGETHER)), b.dim(r)) for r in range(TOGETHER)]
            inside = [b.minimum(row, b.dim(p.queries - 1)) for row in rows]
            pairs = [(self._rows(GRAD, row), self._rows(OUT, row)) for row in inside]
            with b.loop(b.dim(0), b.dim(p.size), "vector", [zero] * TOGETHER, ["add"] * TOGETHER) as loop:
                loop.yields = [
                    b.binary(arith.AddfOp, sum_, b.binary(arith.MulfOp, self._feature(x, loop), self._feature(y, loop)))
                    for sum_, (x, y) in zip(loop.carried, pairs, strict=True)
                ]
            for row, total in zip(rows, loop.results, strict=True):
                b.store(b.binary(arith.MulfOp, total, b.constant(p.scale, f32)), self.delta, [row], [1])
        access, buffer = self.accesses[LSE], self.buffer[self.op.operands[LSE]]
        with b.loop(b.dim(0), b.dim(p.queries), "vector") as loop:
            lse = b.load(buffer, [self.batch, self.head, loop.index], access.strides, access.offset)
            blind = self.compare(lse, b.constant(float("-inf"), f32), "oeq")
            shift = b.binary(arith.MulfOp, lse, b.constant(LOG2_E, f32))
            b.store(b.select(blind, b.constant(float("inf"), f32), shift), self.shift, [loop.index], [1])

    def _feature(self, row: Matrix, loop) -> SSAValue:
        return self.widen(self.b.load(row.buffer, [row.base, loop.index], [1, row.k]))

    # ---- a block of keys

    def _key_block(self, k0: SSAValue, keys: SSAValue) -> None:
        b, p, c = self.b, self.problem, self.blocks
        for partial in self.partial:
            self.clear(partial, up(c.keys, self.tile.mr) * up(p.size, self.tile.nr))
        if K in self.packed:
            self.pack_features(self._rows(K, k0), keys, self.packed[K], b.dim(0), c.keys, p.keys)
        first = b.binary(arith.DivUIOp, k0, b.dim(c.queries)) if p.causal else None
        with self._blocks(p.queries, c.queries, first) as (index, q0, rows):
            seen = keys
            if p.causal:  # no key behind the block's last query; whole register tiles, whose sums stay
                ahead = b.add(b.binary(arith.SubiOp, b.add(q0, rows), k0), b.dim(self.tile.mr - 1))
                whole = b.mul(b.binary(arith.DivUIOp, ahead, b.dim(self.tile.mr)), b.dim(self.tile.mr))
                seen = b.minimum(keys, whole)
            pair = Pair(k0, seen, q0, rows, index)
            self._value_products(pair)
            self._weights(pair)
            self._products(pair)
        for result, partial in zip((1, 2), self.partial[::-1], strict=True):
            self._give(result, partial, k0, keys)

    def _weights(self, pair: Pair) -> None:
        """weights = exp(scores - lse) and the gradients of scores, keys as rows.

        Only where queries may come before keys something is hidden.
        """
        b, p = self.b, self.problem
        biased = self.biased_scores

        def part(first: SSAValue | None, columns: SSAValue, masked: bool) -> None:
            def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
                column = j if first is None else b.add(first, j)
                query, key = b.add(pair.q0, column), b.add(pair.k0, i)
                if biased:
                    value = self.biased(acc, [self.batch, self.head, query, key], BIAS)
                else:
                    value = b.binary(arith.MulfOp, acc, b.constant(self.scale2, f32))
                value = b.binary(arith.SubfOp, value, b.load(self.shift, [query], [1]))
                found = weight(b, value, self.dtype)
                if masked:
                    found = b.select(b.less(query, key), b.constant(0.0, f32), found)
                for value, buffer in (
                    (found, self.weights),
                    (self._score_gradient(found, i, column, query), self.scores),
                ):
                    b.store(self.narrow(value, self.dtype), buffer, [i, column], [self.pitch, 1])

            left = self.left_rows(K, self.base[K], pair.k0, pair.keys)
            dot(b, self.score_tile, left, self._columns(Q, pair, first), (pair.keys, columns, b.dim(p.size)), keep)

        if not p.causal:
            part(None, pair.rows, False)
            return
        step = b.dim(self.score_tile.nr)
        hidden = b.binary(arith.SubiOp, b.add(pair.k0, pair.keys), b.add(pair.q0, b.dim(1)))
        hidden = b.maximum(b.dim(0), b.add(hidden, b.dim(self.score_tile.nr - 1)))
        hidden = b.minimum(pair.rows, b.mul(b.binary(arith.DivUIOp, hidden, step), step))
        part(None, hidden, True)
        part(hidden, b.binary(arith.SubiOp, pair.rows, hidden), False)

    def _columns(self, operand: int, pair: Pair, first: SSAValue | None = None) -> Matrix:
        """A block of queries as columns over features, from column `first` on, which starts a register tile."""
        b, s = self.b, self.score_tile
        at = b.mul(pair.index, b.dim(self._column_elements))
        if first is not None:
            tiles = b.binary(arith.DivUIOp, b.add(first, b.dim(s.nr - 1)), b.dim(s.nr))
            at = b.add(at, b.mul(tiles, b.dim(panel_elements(s, s.nr, s.nr, self.problem.size))))
        return Matrix(self.columns[operand], at, 0, 0, s.panel_b or s.nr)

    def _value_products(self, pair: Pair) -> None:
        """grad_out . value in float32, as it comes: the weights turn it into score gradients."""
        b, p = self.b, self.problem

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            b.store(acc, self.products, [i, j], [self.product_pitch, 1])

        left = self.left_rows(V, self.base[V], pair.k0, pair.keys)
        dot(b, self.score_tile, left, self._columns(GRAD, pair), (pair.keys, pair.rows, b.dim(p.size)), keep)

    def _score_gradient(self, weight: SSAValue, key: SSAValue, column: SSAValue, query: SSAValue) -> SSAValue:
        """weight * (scale * grad_out . value - delta), from the weight before it is rounded."""
        b = self.b
        product = b.load(self.products, [key, column], [self.product_pitch, 1])
        scaled = b.binary(arith.MulfOp, product, b.constant(self.problem.scale, f32))
        return b.binary(arith.MulfOp, weight, b.binary(arith.SubfOp, scaled, b.load(self.delta, [query], [1])))

    def _products(self, pair: Pair) -> None:
        """What a block gives to the gradients: sums of keys and values stay in register tiles."""
        b, p, t = self.b, self.problem, self.tile
        size = b.dim(p.size)
        for block, operand, partial in ((self.weights, GRAD, self.partial[0]), (self.scores, Q, self.partial[1])):
            left = Matrix(block, b.dim(0), self.pitch, 1)
            right = self._features(operand, pair.q0, pair.index)
            passes = Passes(partial, keeps=True, resumes=True)
            dot(b, t, left, right, (pair.keys, size, pair.rows), lambda *_: None, passes)
        left = Matrix(self.scores, b.dim(0), 1, self.pitch)
        if self.turned is not None:
            left = pack_a(b, t, left, pair.rows, pair.keys, self.turned)

        def add(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            at = [b.add(pair.q0, i), j]
            b.store(b.binary(arith.AddfOp, b.load(self.sum_q, at, [p.size, 1]), acc), self.sum_q, at, [p.size, 1])

        right = self._features(K, pair.k0, b.dim(0))
        dot(b, t, left, right, (pair.rows, size, pair.keys), add)

    def _features(self, operand: int, start: SSAValue, index: SSAValue) -> Matrix:
        """An operand's rows as columns of features."""
        t = self.tile
        if operand not in self.packed:
            return self.features(self._rows(operand, start))
        room = self.rooms[operand]
        return Matrix(self.packed[operand], self._at(operand, index), 0, 0, t.panel_b or t.nr, room)

    # ---- results

    def _give(self, result: int, partial: SSAValue, k0: SSAValue, keys: SSAValue) -> None:
        """Sums of a block of keys, out of their register tiles (a product over nothing), to the result or to `sums`."""
        b, p, t = self.b, self.problem, self.tile

        def put(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            if not self.sums:
                self.store(result, acc, [self.batch, self.head, b.add(k0, i), j])
                return
            buffer, at = self.sums[result - 1], [b.add(k0, i), j]
            b.store(b.binary(arith.AddfOp, b.load(buffer, at, [p.size, 1]), acc), buffer, at, [p.size, 1])

        if self._wanted(result):
            left, right = Matrix(self.scores, b.dim(0), self.pitch, 1), self._features(Q, b.dim(0), b.dim(0))
            dot(b, t, left, right, (keys, b.dim(p.size), b.dim(0)), put, Passes(partial, resumes=True))

    def _wanted(self, result: int) -> bool:
        value = self.op.results[result]
        return value in self.group.produced or value in self.buffer

    def _store_rows(self, result: int, buffer: SSAValue, head: SSAValue, count: Dim) -> None:
        b, p = self.b, self.problem
        if not self._wanted(result):
            return
        with b.loop(b.dim(0), b.dim(count), "serial") as row, b.loop(b.dim(0), b.dim(p.size), "vector") as loop:
            value = b.load(buffer, [row.index, loop.index], [p.size, 1])
            self.store(result, value, [self.batch, head, row.index, loop.index])
