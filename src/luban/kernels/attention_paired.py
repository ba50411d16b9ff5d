"""Attention forward for small scores on a matrix unit: what is not a product of tiles is kept to few vector instructions.

With AMX most of the time goes not into products but into what lies between them: the exponential, its rounding to
bfloat16, and sums of weights that wait in memory. Here (measured: 8 to 16 % less time at 256 to 2048 positions)
- weights come as the bits of a bfloat16 (7 instructions), two of them side by side in 32 bits (2 for the two): a tile
  of scores has even keys in one half of its columns and odd keys in the other, since keys are packed that way, so that
  neighbours meet in one lane and lie in memory as the product with the values reads them;
- sums of weights are a product with ones (6 % of the time);
- the next tile of scores is built before the weights of this one, which do not wait for it (4 %).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32, i32
from xdsl.ir import SSAValue

from luban.kernels.attention_blocks import up
from luban.kernels.attention_bounded import TOGETHER, Bounded
from luban.kernels.attention_exponential import ORIGIN, weight_bits
from luban.kernels.attention_problem import Block
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_b
from luban.kernels.register_tiles import RegisterTile
from luban.symbolic import floordiv

if TYPE_CHECKING:
    from luban.kernels.attention import Forward

# Weights of even and odd keys are added to these; of the sum, with the odd ones moved up, only the weights are left.
ORIGINS = (ORIGIN, ORIGIN - (ORIGIN >> 16))


def pairs(score_tile: RegisterTile, tile: RegisterTile) -> bool:
    """Whether a unit has tiles of two panels, one for even and one for odd keys, and reads weights where they lie."""
    return score_tile.nr == 2 * score_tile.panel_b and score_tile.whole and tile.whole


class Paired(Bounded):
    """Scratch and code of one task: scores of one register tile, ones, and sums that the matrix unit builds."""

    reorders = True
    limit = 31.0  # the exponents of weights lie between -63 and 0, hence those of `weight_bits` between 64 and 127

    def __init__(self, writer: Forward):
        super().__init__(writer)
        b, t, s = writer.b, writer.tile, writer.score_tile
        self.lanes = s.panel_b
        self.sum_tile = replace(t, nr=self.lanes)
        self.tile_size = self.rows * s.nr
        self.scores = b.alloc(2 * self.tile_size, f32)
        self.pairs = b.pairs(writer.softmax.weights)
        self.ones = b.alloc(up(writer.key_block, t.k_multiple) * self.lanes, t.element)
        with b.loop(b.dim(0), b.dim(up(writer.key_block, t.k_multiple) * self.lanes), "vector") as loop:
            b.store(b.constant(1.0, t.element), self.ones, [loop.index], [1])
        self.waiting = None
        if not writer.single:
            self.waiting_size = up(writer.query_block, t.mr) * self.lanes
            self.waiting = b.alloc(self.waiting_size, f32)

    @property
    def sums_pitch(self) -> int:
        """A sum for each column of ones."""
        return self.w.score_tile.panel_b

    def pack_keys(self, rows: Matrix) -> None:
        """Even keys of a register tile as one panel, its odd keys as the next."""
        b, w, s = self.w.b, self.w, self.w.score_tile
        size = b.dim(w.problem.size)
        with w.each_block(b.dim(w.problem.keys), s.nr) as (tile, first, keys):
            for half in (0, 1):
                start = b.add(rows.base, b.mul(b.add(first, b.dim(half)), b.dim(rows.outer)))
                own = b.binary(arith.DivUIOp, b.add(keys, b.dim(1 - half)), b.dim(2))
                at = b.add(b.mul(tile, b.dim(s.nr * w.padded)), b.dim(half * self.lanes * w.padded))
                pack_b(b, s, replace(rows, base=start, outer=rows.outer * 2), own, size, w.packed_k, at)

    def longest_key(self, k: int) -> SSAValue:
        """From packed keys, whose lanes are keys: sums of squares need no sums over lanes (30 cycles a key by rows)."""
        b, w = self.w.b, self.w
        keys, nr = w.problem.keys, w.score_tile.nr
        panels = floordiv(keys + (nr - 1), nr) + floordiv(keys + (nr - 2), nr)  # one key fills no odd panel
        memory, zero = b.pairs(w.packed_k), b.constant(0.0, f32)
        with b.loop(b.dim(0), b.dim(panels), "serial", [zero], ["none"]) as panel:
            with b.loop(b.dim(0), b.dim(self.lanes), "vector", [zero], ["max"]) as lane:
                with b.loop(b.dim(0), b.dim(w.padded // 2), "serial", [zero, zero], ["none", "none"]) as feature:
                    at = [panel.index, feature.index, lane.index]
                    pair = b.load(memory, at, [w.padded * self.lanes // 2, self.lanes, 1])
                    high = b.binary(arith.AndIOp, pair, b.constant(-0x10000, i32))
                    low = b.binary(arith.ShLIOp, pair, b.constant(16, i32))
                    found = [b.insert(arith.BitcastOp.create(operands=[x], result_types=[f32])) for x in (low, high)]
                    feature.yields = [
                        b.binary(arith.AddfOp, total, b.binary(arith.MulfOp, x, x))
                        for total, x in zip(feature.carried, found, strict=True)
                    ]
                total = b.binary(arith.AddfOp, *feature.results)
                lane.yields = [b.binary(arith.MaximumfOp, lane.carried[0], total)]
            panel.yields = [b.binary(arith.MaximumfOp, panel.carried[0], lane.results[0])]
        return panel.results[0]

    def begin(self, whole: SSAValue) -> None:
        b = self.w.b
        self.exponent = b.binary(arith.SubfOp, b.constant(127.0, f32), whole)
        self.shift = whole
        if self.waiting is not None:
            self.w.clear(self.waiting, self.waiting_size)

    def weights(self, block: Block) -> None:
        """The matrix unit builds the next tile of scores while the vector units turn this one into weights."""
        b, nr = self.w.b, self.w.score_tile.nr
        tiles = b.binary(arith.DivUIOp, b.add(block.keys, b.dim(nr - 1)), b.dim(nr))
        seen = tiles
        if self.w.problem.causal:
            seen = b.binary(arith.DivUIOp, self.w.seen(block, b.dim(0)), b.dim(nr))
        self._products(block, b.dim(0), tiles)
        for begin, end, masked in ((b.dim(0), seen, False), (seen, tiles, True)):
            if masked and not self.w.problem.causal:
                continue
            with b.loop(begin, end, "serial") as turn:
                self._products(block, b.add(turn.index, b.dim(1)), tiles)
                self._weigh(block, turn.index, masked)

    def _scores(self, tile: SSAValue) -> SSAValue:
        """Where the scores of a register tile begin: two of them take turns."""
        b = self.w.b
        return b.mul(b.binary(arith.RemUIOp, tile, b.dim(2)), b.dim(self.tile_size))

    def _products(self, block: Block, tile: SSAValue, tiles: SSAValue) -> None:
        """Queries times the keys of a register tile of the block, as they are; nothing behind the last tile."""
        b, w = self.w.b, self.w
        columns = b.select(b.less(tile, tiles), b.dim(w.score_tile.nr), b.dim(0))
        place, nr = self._scores(tile), w.score_tile.nr

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            b.store(acc, self.scores, [place, i, j], [1, nr, 1])

        right = w.keys_from(w.packed_k, block, b.mul(tile, b.dim(nr)))
        dot(b, w.score_tile, w.left, right, (block.rows, columns, b.dim(w.problem.size)), keep)

    def _weigh(self, block: Block, tile: SSAValue, masked: bool) -> None:
        """Weights of a tile of scores, rows side by side; keys behind the last one have any weight."""
        b, w = self.w.b, self.w
        nr, place = w.score_tile.nr, self._scores(tile)
        first = b.mul(tile, b.dim(nr))
        groups = b.binary(arith.DivUIOp, b.add(block.rows, b.dim(TOGETHER - 1)), b.dim(TOGETHER))
        before = b.binary(arith.DivUIOp, first, b.dim(2))
        with b.loop(b.dim(0), groups, "serial") as group, b.loop(b.dim(0), b.dim(self.lanes), "vector") as loop:
            start = b.mul(group.index, b.dim(TOGETHER))
            rows = [b.add(start, b.dim(r)) for r in range(TOGETHER)]
            places = [(row, half) for half in (0, 1) for row in rows]
            scores = [
                b.load(self.scores, [place, row, loop.index], [1, nr, 1], half * self.lanes) for row, half in places
            ]
            bits = weight_bits(b, scores, w.scale2, self.exponent, [ORIGINS[half] for _, half in places])
            if masked:
                key = b.add(b.add(block.k0, first), b.mul(loop.index, b.dim(2)))
                bits = [
                    b.select(b.less(b.add(block.q0, row), b.add(key, b.dim(half))), b.constant(ORIGINS[half], i32), x)
                    for (row, half), x in zip(places, bits, strict=True)
                ]
            high = [b.binary(arith.ShLIOp, x, b.constant(16, i32)) for x in bits[TOGETHER:]]
            for row, x, y in zip(rows, bits, high, strict=False):
                b.store(b.add(x, y), self.pairs, [row, b.add(before, loop.index)], [w.softmax.weight_pitch // 2, 1])

    def add_sums(self, block: Block, final: bool) -> None:
        b, w = self.w.b, self.w
        weights = Matrix(w.softmax.weights, b.dim(0), w.softmax.weight_pitch, 1)
        ones = Matrix(self.ones, b.dim(0), 0, 0, self.lanes)

        def keep(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            b.store(acc, self.sums, [i, j], [self.sums_pitch, 1])

        extents = (block.rows, b.dim(self.lanes), block.keys)
        passes = Passes(self.waiting, keeps=not final, resumes=self.waiting is not None)
        dot(b, self.sum_tile, weights, ones, extents, keep, passes)

    def totals(self, rows: SSAValue) -> None:
        b, softmax = self.w.b, self.w.softmax
        with b.loop(b.dim(0), rows, "vector") as loop:
            b.store(b.load(self.sums, [loop.index], [self.sums_pitch]), softmax.total, [loop.index], [1])
            b.store(self.shift, softmax.top, [loop.index], [1])
