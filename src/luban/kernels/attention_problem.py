"""What forward and backward attention kernels share: sizes, operands, and the store of results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32, f64
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir.attributes import Access
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.ir.graph import shared_heads
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.evaluator import Evaluator
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.schedule import merge_axes, place_group
from luban.compiler.passes.graph.grouping import source_of
from luban.errors import UnsupportedOperatorError
from luban.kernels.attention_blocks import Blocks, backward_blocks, forward_blocks
from luban.kernels.dot_writer import Matrix, pack_a, pack_b, panel_elements
from luban.kernels.tuning.kept import of_attention
from luban.symbolic import Dim, floordiv, product

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Problem:
    """Domain sizes and options of an attention; the head size must be a number."""

    batch: Dim
    heads: Dim
    queries: Dim
    keys: Dim
    size: int
    scale: float
    causal: bool
    shared: int  # query heads that share one head of keys and values

    @property
    def key_heads(self) -> Dim:
        """How many heads keys and values have."""
        return floordiv(self.heads, self.shared)


def problem_of(op: Operation) -> Problem:
    """The problem of an attention operation. Raises UnsupportedOperatorError for a symbolic head size and for float64."""
    if op.operands[1].type.dtype == f64:  # type: ignore[attr-defined]
        raise UnsupportedOperatorError([f"{op.name} in float64, since its kernels accumulate in float32"])
    batch, heads, queries, keys, size = op.properties["domain"].data  # type: ignore[union-attr]
    if not isinstance(size, int):
        raise UnsupportedOperatorError([f"{op.name} with the symbolic head size {size}"])
    scale, causal = op.properties["scale"].value.data, bool(op.properties["causal"].value.data)  # type: ignore[union-attr]
    return Problem(batch, heads, queries, keys, size, scale, causal, shared_heads(op))


@dataclass(frozen=True)
class Block:
    """A block of `rows` queries from q0 on and `keys` keys from k0 on, the block of keys with this `index`."""

    q0: SSAValue
    rows: SSAValue
    index: SSAValue
    k0: SSAValue
    keys: SSAValue


class AttentionWriter(Evaluator):
    """The group's buffers, and the helpers that both kernels use. A task is one head of one batch entry."""

    def __init__(self, request: Request):
        group = place_group(request.group)
        merge_axes(group, lambda outer, inner: any(outer in axes and inner in axes for axes in group.members[0].axes))
        yields = request.group.body.block.last_op
        self.leaving: Sequence[SSAValue] = list(dict.fromkeys(yields.operands))  # type: ignore[union-attr]
        first = group.members[0].op
        inside = {r for m in group.members for r in m.op.results}
        self.external = list(dict.fromkeys(v for m in group.members for v in m.op.operands if v not in inside))
        dtypes: list[Attribute] = [v.type.dtype for v in (*self.external, *self.leaving)]  # type: ignore[attr-defined]
        builder = KernelBuilder(request.name, dtypes, request.symbols)
        super().__init__(builder, group, dict(zip((*self.external, *self.leaving), builder.buffers, strict=True)))
        self.request, self.op, self.problem = request, first, problem_of(first)
        self.accesses: list[Access] = list(first.properties["accesses"].data)  # type: ignore[union-attr]
        self.dtype: Attribute = first.operands[1].type.dtype  # type: ignore[attr-defined]
        p = self.problem
        choose = backward_blocks if first.name.endswith("backward") else forward_blocks
        derived = choose(request.target, self.dtype, p.queries, p.keys, p.size)
        self.blocks: Blocks = of_attention(derived, request.target, first)
        self.tile, self.score_tile = self.blocks.tile, self.blocks.score_tile
        self.query_block, self.key_block = self.blocks.queries, self.blocks.keys
        self.single = isinstance(p.keys, int) and p.keys <= self.key_block

    def lowered(self, flops: Dim) -> Lowered:
        """The finished kernel."""
        yields = self.request.group.body.block.last_op
        results = {v: r for v, r in zip(yields.operands, self.request.group.results, strict=True)}  # type: ignore[union-attr]
        outputs = tuple(results[v] for v in self.leaving)
        moved = [product(v.type.shape) * bytes_of(v.type.dtype) for v in (*self.external, *outputs)]  # type: ignore[attr-defined]
        return Lowered(self.b.finish(), tuple(self.external), outputs, (), flops, sum(moved))

    def head_base(self, operand: int, batch: SSAValue, head: SSAValue) -> SSAValue:
        """The first element of an operand's head."""
        access, b = self.accesses[operand], self.b
        base = b.dim(access.offset)
        for index, stride in ((batch, access.strides[0]), (head, access.strides[1])):
            if stride != 0:
                base = b.add(base, b.mul(index, b.dim(stride)))
        return base

    def key_head(self, head: SSAValue) -> SSAValue:
        """The head of keys and values that a query head meets."""
        b, shared = self.b, self.problem.shared
        return head if shared == 1 else b.binary(arith.DivUIOp, head, b.dim(shared))

    def rows(self, operand: int, base: SSAValue, start: SSAValue) -> Matrix:
        """An operand of a head from row `start` on: rows are positions, k is the feature."""
        access, b = self.accesses[operand], self.b
        step = access.strides[2]
        moved = base if step == 0 else b.add(base, b.mul(start, b.dim(step)))
        return Matrix(self.buffer[self.op.operands[operand]], moved, step, access.strides[3])

    def features(self, matrix: Matrix) -> Matrix:
        """The same memory with features outside and positions as k."""
        return Matrix(matrix.buffer, matrix.base, matrix.k, matrix.outer)

    def store(self, result: int, value: SSAValue, at: Sequence[SSAValue]) -> None:
        """Stores what leaves of one element (batch, head, position, feature) of a result, given in float32."""
        b, member, own = self.b, self.group.members[0], self.op.results[result]
        self.index = {}
        for index, axes in zip(at, member.axes, strict=True):
            kept = [a for a in axes if a in self.group.axes]
            self.index.update(zip(kept, b.digits(index, [a.size for a in kept]), strict=True))
        self.cache = {own: self.narrow(value, own.type.dtype)}  # type: ignore[attr-defined]
        self.store_values(v for v in self.leaving if v in self.group.produced and source_of(self.group, v) is own)
        if own in self.leaving and own not in self.group.produced:
            sizes = own.type.shape[1:]  # type: ignore[attr-defined]
            strides = (product(sizes), product(sizes[1:]), sizes[2], 1)
            b.store(self.cache[own], self.buffer[own], list(at), list(strides))

    def narrow(self, value: SSAValue, dtype: Attribute) -> SSAValue:
        """A float32 value rounded to an element type."""
        return value if dtype == f32 else self.b.insert(arith.TruncFOp.create(operands=[value], result_types=[dtype]))

    def widen(self, value: SSAValue) -> SSAValue:
        """A value as float32."""
        return value if value.type == f32 else self.b.insert(arith.ExtFOp.create(operands=[value], result_types=[f32]))

    # ---- keys

    @property
    def key_blocks(self) -> Dim:
        """Blocks of keys of a head."""
        return floordiv(self.problem.keys + (self.key_block - 1), self.key_block)

    @property
    def value_panel(self) -> int:
        """Elements that a block of values takes when it is packed with positions as k."""
        t = self.tile
        return panel_elements(t, t.nr, self.problem.size, self.key_block)

    @contextmanager
    def each_block(
        self, last: SSAValue, size: int, first: SSAValue | None = None
    ) -> Iterator[tuple[SSAValue, SSAValue, SSAValue]]:
        """A loop over blocks of the positions before `last`, from block `first` on: the block's number, its first
        position, and how many it has.
        """
        b, step = self.b, self.b.dim(size)
        blocks = b.binary(arith.DivUIOp, b.add(last, b.dim(size - 1)), step)
        with b.loop(b.dim(0) if first is None else first, blocks, "serial") as turn:
            start = b.mul(turn.index, step)
            yield turn.index, start, b.minimum(step, b.binary(arith.SubiOp, last, start))

    def room_for_keys(self) -> SSAValue:
        """Scratch for all keys of a head, packed as columns over features: panels of positions."""
        s = self.score_tile
        columns = floordiv(self.problem.keys + (s.nr - 1), s.nr) * s.nr
        return self.b.alloc(columns * self.padded, s.element)

    def pack_features(
        self, rows: Matrix, count: SSAValue, scratch: SSAValue, at: SSAValue, most: int, length: Dim
    ) -> None:
        """So many rows of `length` packed as columns of features over positions, in panels with room for `most`.

        Panel by panel where blocks may have fewer rows: their distance stays the same then. At once where all are full,
        since that reads the rows in order.
        """
        if isinstance(length, int) and length % most == 0 and most % self.tile.k_multiple == 0:
            pack_b(self.b, self.tile, self.features(rows), self.b.dim(self.problem.size), count, scratch, at)
            return
        b, t, size = self.b, self.tile, self.problem.size
        width, room = t.panel_b or t.nr, -(-most // t.k_multiple) * t.k_multiple
        with b.loop(b.dim(0), b.dim(-(-size // width)), "serial") as turn:
            first = b.mul(turn.index, b.dim(width))
            step = b.add(rows.base, b.mul(first, b.dim(rows.k)))
            columns = b.minimum(b.dim(width), b.binary(arith.SubiOp, b.dim(size), first))
            place = b.add(at, b.mul(turn.index, b.dim(width * room)))
            pack_b(b, t, self.features(replace(rows, base=step)), columns, count, scratch, place)

    @property
    def padded(self) -> int:
        """The head size as packed panels hold it."""
        return -(-self.problem.size // self.score_tile.k_multiple) * self.score_tile.k_multiple

    def keys_from(self, packed: SSAValue, block: Block, first: SSAValue | None) -> Matrix:
        """What `pack_keys` packed, from key `first` of a block on, which starts a register tile."""
        b, s = self.b, self.score_tile
        start = block.k0 if first is None else b.add(block.k0, first)
        tiles = b.binary(arith.DivUIOp, start, b.dim(s.nr))
        return Matrix(packed, b.mul(tiles, b.dim(s.nr * self.padded)), 0, 0, s.panel_b or s.nr)

    def shared_keys(self, block: Block) -> SSAValue | None:
        """The keys of a block, in whole register tiles, that causality hides from none of its queries; None for all."""
        b, step = self.b, self.b.dim(self.score_tile.nr)
        if not self.problem.causal:
            return None
        seen = b.minimum(block.keys, self.seen(block, b.dim(0)))
        return b.mul(b.binary(arith.DivUIOp, seen, step), step)

    def seen(self, block: Block, row: SSAValue) -> SSAValue:
        """How many of a block's keys a row of it sees: with causality those up to its own position."""
        b = self.b
        if not self.problem.causal:
            return block.keys
        ahead = b.binary(arith.SubiOp, b.add(b.add(block.q0, row), b.dim(1)), block.k0)
        return b.maximum(b.dim(0), b.minimum(block.keys, ahead))

    def left_rows(self, operand: int, base: SSAValue, start: SSAValue, rows: SSAValue) -> Matrix:
        """An operand's rows as the left side of a product over features."""
        b, t = self.b, self.score_tile
        left = self.rows(operand, base, start)
        if t.any_a or left.k == 1:
            return left
        size = self.problem.size
        scratch = b.alloc(panel_elements(t, t.mr, self.query_block, size), t.element)
        return pack_a(b, t, left, rows, b.dim(size), scratch)

    # ---- numbers

    @property
    def scale2(self) -> float:
        """The scale of scores whose exponents are base 2."""
        return self.problem.scale * LOG2_E

    @property
    def biased_scores(self) -> bool:
        """Whether a bias is added to the scores."""
        return len(self.op.operands) > (6 if self.op.name.endswith("backward") else 3)

    @property
    def scaled_first(self) -> bool:
        """Whether products are scaled before they are compared: a negative scale turns their order around."""
        return self.biased_scores or self.problem.scale <= 0

    def compare(self, a: SSAValue, c: SSAValue, predicate: str) -> SSAValue:
        """A comparison of two floats."""
        return self.b.insert(arith.CmpfOp(a, c, predicate))

    def clear(self, buffer: SSAValue, elements: Dim, value: float = 0.0) -> None:
        """Fills a float32 buffer."""
        b = self.b
        with b.loop(b.dim(0), b.dim(elements), "vector") as loop:
            b.store(b.constant(value, f32), buffer, [loop.index], [1])

    def biased(self, acc: SSAValue, at: Sequence[SSAValue], operand: int) -> SSAValue:
        """The score, base 2, of a product of a query and a key at (batch, head, query, key), with its bias."""
        b, access = self.b, self.accesses[operand]
        value = b.binary(arith.MulfOp, acc, b.constant(self.scale2, f32))
        loaded = b.load(self.buffer[self.op.operands[operand]], list(at), access.strides, access.offset)
        return b.binary(arith.AddfOp, value, b.binary(arith.MulfOp, self.widen(loaded), b.constant(LOG2_E, f32)))


def flops_of(problem: Problem, products: int) -> Dim:
    """Multiply-adds of so many products of queries by keys by head size, times two; half of that when causal."""
    points = product((problem.batch, problem.heads, problem.queries, problem.keys, problem.size))
    return points * products if problem.causal else points * (2 * products)
