"""What forward and backward attention kernels share: sizes, operands, and the store of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from luban.kernels.dot_writer import Matrix
from luban.kernels.register_tiles import RegisterTile, fit, register_tile
from luban.symbolic import Dim, floordiv, product

QUERY_BLOCK = 64  # queries of a block, more or less: 65 of them make one block, not a second one of a single row
KEY_BLOCK = 256  # keys that a block of queries meets at once: its scores stay in the second-level cache


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


def _at_most(length: Dim, block: int) -> int:
    """The block, or the whole length where it is shorter."""
    return max(1, min(block, length)) if isinstance(length, int) else block


def _even_blocks(length: Dim, block: int) -> int:
    """About `block`, such that a known length falls into blocks of one size."""
    if not isinstance(length, int):
        return block
    blocks = max(1, round(length / block))
    return max(1, -(-length // blocks))


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
        self.key_block = _at_most(self.problem.keys, KEY_BLOCK)
        self.query_block = _even_blocks(self.problem.queries, QUERY_BLOCK)
        tile = register_tile(request.target, self.dtype)
        # one tile for products with as many columns as features, one for those of queries and keys
        self.tile: RegisterTile = fit(tile, request.target, self.problem.size)
        self.score_tile: RegisterTile = fit(tile, request.target, self.key_block)

    def lowered(self, flops: Dim) -> Lowered:
        """The finished kernel."""
        yields = self.request.group.body.block.last_op
        results = {v: r for v, r in zip(yields.operands, self.request.group.results, strict=True)}  # type: ignore[union-attr]
        outputs = tuple(results[v] for v in self.leaving)
        moved = [product(v.type.shape) * bytes_of(v.type.dtype) for v in (*self.external, *outputs)]  # type: ignore[attr-defined]
        total = sum(n for n in moved if isinstance(n, int))
        return Lowered(
            self.b.finish(), tuple(self.external), outputs, (), flops if isinstance(flops, int) else 0, total
        )

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
        for v in self.leaving:
            if v in self.group.produced and source_of(self.group, v) is own:
                b.store(self.value(v), self.buffer[v], *self.address(self.member(v).writes))
            elif v is own:
                sizes = own.type.shape[1:]  # type: ignore[attr-defined]
                strides = (product(sizes), product(sizes[1:]), sizes[2], 1)
                b.store(self.cache[own], self.buffer[v], list(at), list(strides))

    def narrow(self, value: SSAValue, dtype: Attribute) -> SSAValue:
        """A float32 value rounded to an element type."""
        return value if dtype == f32 else self.b.insert(arith.TruncFOp.create(operands=[value], result_types=[dtype]))

    def widen(self, value: SSAValue) -> SSAValue:
        """A value as float32."""
        return value if value.type == f32 else self.b.insert(arith.ExtFOp.create(operands=[value], result_types=[f32]))

    def score(
        self, acc: SSAValue, batch: SSAValue, head: SSAValue, query: SSAValue, key: SSAValue, bias: int
    ) -> SSAValue:
        """The score of a query and a key from their product: scaled, biased, and -inf where causality hides the key."""
        b = self.b
        value = b.binary(arith.MulfOp, acc, b.constant(self.problem.scale, f32))
        if bias < len(self.op.operands):
            access = self.accesses[bias]
            loaded = b.load(
                self.buffer[self.op.operands[bias]], [batch, head, query, key], access.strides, access.offset
            )
            value = b.binary(arith.AddfOp, value, self.widen(loaded))
        if self.problem.causal:
            value = b.select(b.less(query, key), b.constant(float("-inf"), f32), value)
        return value


def flops_of(problem: Problem, products: int) -> Dim:
    """Multiply-adds of so many products of queries by keys by head size, times two; half of that when causal."""
    points = product((problem.batch, problem.heads, problem.queries, problem.keys, problem.size))
    return points * products if problem.causal else points * (2 * products)
