"""Attention forward: blocks of queries against blocks of keys with an online softmax (Dao et al., arXiv 2205.14135).

Memory stays linear in the length. A task takes a head, or a part of its queries where heads are fewer than cores: it
packs the head's keys and values once, then walks its blocks of queries past them. Scores of a block stay in scratch
that fits the caches. Exponents are base 2: log2(e) is part of the scale.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from luban.compiler.lowering.registry import Lowered, Request
from luban.kernels.attention_blocks import pieces_of
from luban.kernels.attention_bounded import Bounded, bounded_for
from luban.kernels.attention_problem import LOG2_E, AttentionWriter, Block, flops_of
from luban.kernels.attention_softmax import Softmax
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_b
from luban.symbolic import Dim, floordiv

Q, K, V, BIAS = range(4)
ONCE = Passes()
Body = Callable[[SSAValue, SSAValue, SSAValue], None]


def lower(request: Request) -> Lowered:
    """The kernel of an attention and the maps fused into its store."""
    writer = Forward(request)
    writer.emit()
    return writer.lowered(flops_of(writer.problem, 2))


class Forward(AttentionWriter):
    def emit(self) -> None:
        """Every task takes each `pieces`-th block of a head's queries: with causality the later ones see more keys."""
        b, p = self.b, self.problem
        step = self.query_block
        blocks = floordiv(p.queries + (step - 1), step)
        pieces = pieces_of(self.request.target, p.batch, p.heads, blocks)
        counts: list[Dim] = [p.batch, p.heads, pieces]
        with b.loop(b.dim(0), b.dim(p.batch * p.heads * pieces), "parallel") as task:
            self.batch, self.head, piece = b.digits(task.index, counts)
            self._open()
            own = b.binary(arith.SubiOp, b.dim(blocks + (pieces - 1)), piece)
            own = own if pieces == 1 else b.binary(arith.DivUIOp, own, b.dim(pieces))
            for shift, count in self._turns(own).items():
                with b.loop(b.dim(0), count, "serial") as turn:
                    block = b.add(b.mul(turn.index, b.dim(pieces)), piece) if pieces > 1 else turn.index
                    q0 = b.mul(block, b.dim(step))
                    rows = b.minimum(b.dim(step), b.binary(arith.SubiOp, b.dim(p.queries), q0))
                    self._query_block(q0, rows, shift)

    def _open(self) -> None:
        """Scratch of a task, and the head's keys and values as the unit reads them."""
        b, p, t = self.b, self.problem, self.tile
        key_head = self.key_head(self.head)
        self.base = {Q: self.head_base(Q, self.batch, self.head)}
        self.base |= {o: self.head_base(o, self.batch, key_head) for o in (K, V)}
        self.softmax = Softmax(self)
        self.bounded: Bounded | None = bounded_for(self)
        self.out = b.alloc(self.query_block * p.size, f32)
        self.packed_k = self.room_for_keys()
        self.packed_v = None
        if not t.b_in_place or self.accesses[V].strides[3] != 1:
            self.packed_v = b.alloc(self.key_blocks * self.value_panel, t.element)
            with self.each_block(b.dim(p.keys), self.key_block) as (index, k0, keys):
                at = b.mul(index, b.dim(self.value_panel))
                self.pack_features(self.rows(V, self.base[V], k0), keys, self.packed_v, at, self.key_block, p.keys)

    def _turns(self, own: SSAValue) -> dict[SSAValue | None, SSAValue]:
        """How many blocks of queries go which way, with the keys packed for it; key: the bound of scores or None."""
        b, p = self.b, self.problem
        keys = self.rows(K, self.base[K], b.dim(0))
        if self.bounded is None:
            pack_b(b, self.score_tile, keys, b.dim(p.keys), b.dim(p.size), self.packed_k)
            return {None: own}
        self.bounded.pack_keys(keys)
        bound, none = self.bounded.bound(Q, K), b.dim(0)
        small = self.compare(bound, b.constant(self.bounded.limit, f32), "ole")
        if self.bounded.reorders:
            again = b.select(small, none, b.dim(p.keys))
            pack_b(b, self.score_tile, keys, again, b.dim(p.size), self.packed_k)
        return {bound: b.select(small, own, none), None: b.select(small, none, own)}

    def _query_block(self, q0: SSAValue, rows: SSAValue, shift: SSAValue | None) -> None:
        b, p = self.b, self.problem
        self.left = self.left_rows(Q, self.base[Q], q0, rows)
        last = b.dim(p.keys)
        if p.causal:  # keys behind the block's last query are never seen
            last = b.minimum(last, b.add(q0, rows))
        if shift is not None and self.bounded is not None:
            self.bounded.query_block(q0, rows, last, shift)
            return
        if self.single:
            self._only_block(Block(q0, rows, b.dim(0), b.dim(0), last))
            return
        self.clear(self.out, self.query_block * p.size)
        self.softmax.clear()
        with self.each_block(last, self.key_block) as (index, k0, keys):
            block = Block(q0, rows, index, k0, keys)
            self._scores(block)
            self.softmax.rows(block)
            self.softmax.carry(rows)
            self._add_values(block)
        self.softmax.finish(rows)
        with b.loop(b.dim(0), rows, "serial") as row:
            inverse = b.load(self.softmax.inverse, [row.index], [1])
            with b.loop(b.dim(0), b.dim(p.size), "vector") as loop:
                value = b.binary(arith.MulfOp, b.load(self.out, [row.index, loop.index], [p.size, 1]), inverse)
                self.store(0, value, [self.batch, self.head, b.add(q0, row.index), loop.index])
        self.store_sums(q0, rows)

    def _only_block(self, block: Block) -> None:
        """All keys at once: what the product with the values gives is final but for the sum."""
        b = self.b
        self._scores(block)
        self.softmax.rows(block)
        self.softmax.finish(block.rows)

        def put(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            value = b.binary(arith.MulfOp, acc, b.load(self.softmax.inverse, [i], [1]))
            self.store(0, value, [self.batch, self.head, b.add(block.q0, i), j])

        self.times_values(block, put)
        self.store_sums(block.q0, block.rows)

    def _scores(self, block: Block) -> None:
        """Products of queries and keys into scratch, as they are where the largest of them is the largest score."""
        b, p, pitch = self.b, self.problem, self.softmax.pitch
        shared = self.shared_keys(block)
        biased = BIAS < len(self.op.operands)

        def part(first: SSAValue | None, columns: SSAValue, masked: bool) -> None:
            def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
                column = j if first is None else b.add(first, j)
                query, key = b.add(block.q0, i), b.add(block.k0, column)
                value = self.biased(acc, [self.batch, self.head, query, key], BIAS) if biased else acc
                if self.scaled_first and not biased:
                    value = b.binary(arith.MulfOp, acc, b.constant(self.scale2, f32))
                if masked:
                    value = b.select(b.less(query, key), b.constant(float("-inf"), f32), value)
                b.store(value, self.softmax.scores, [i, column], [pitch, 1])

            right = self.keys_from(self.packed_k, block, first)
            dot(b, self.score_tile, self.left, right, (block.rows, columns, b.dim(p.size)), keep)

        if shared is None:
            part(None, block.keys, False)
        else:
            part(None, shared, False)
            part(shared, b.binary(arith.SubiOp, block.keys, shared), True)

    def _add_values(self, block: Block) -> None:
        """out = out * shrink + weights * values."""
        b, size = self.b, self.problem.size

        def add(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            shrink = b.load(self.softmax.shrink, [i], [1])
            old = b.binary(arith.MulfOp, b.load(self.out, [i, j], [size, 1]), shrink)
            b.store(b.binary(arith.AddfOp, old, acc), self.out, [i, j], [size, 1])

        self.times_values(block, add)

    def times_values(self, block: Block, body: Body, passes: Passes = ONCE) -> None:
        """weights * values: `body` says what becomes of the results."""
        b, p, t = self.b, self.problem, self.tile
        weights = Matrix(self.softmax.weights, b.dim(0), self.softmax.weight_pitch, 1)
        values = self.features(self.rows(V, self.base[V], block.k0))
        if self.packed_v is not None:
            at = b.mul(block.index, b.dim(self.value_panel))
            values = Matrix(self.packed_v, at, 0, 0, t.panel_b or t.nr, self.key_block)
        dot(b, t, weights, values, (block.rows, b.dim(p.size), block.keys), body, passes)

    def store_sums(self, q0: SSAValue, rows: SSAValue) -> None:
        """The log-sum-exp of each row, where something wants it."""
        b, p, lse = self.b, self.problem, self.op.results[1]
        if lse not in self.buffer:
            return
        with b.loop(b.dim(0), rows, "vector") as loop:
            total = b.load(self.softmax.total, [loop.index], [1])
            log = b.binary(arith.AddfOp, b.load(self.softmax.top, [loop.index], [1]), b.insert(math.Log2Op(total)))
            value = b.binary(arith.MulfOp, log, b.constant(1 / LOG2_E, f32))
            at = [self.batch, self.head, b.add(q0, loop.index)]
            b.store(value, self.buffer[lse], at, [p.heads * p.queries, p.queries, 1])
