"""GEMM as a tile program: blocks of columns and rows spread over threads, panels packed where that pays, epilogue fused.

The loop order is Goto's with the roles that fit a program compiled for known sizes: a task packs one block of B into
scratch that stays in the second-level cache, then walks the rows of A past it; the micro-kernel (codegen/llvm/dots) keeps
the output in registers over a whole block of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.evaluator import Evaluator
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.schedule import merge_axes, place_group
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.dot_writer import Matrix, dot, pack_a, pack_b, panel_elements
from luban.kernels.gemm_blocks import with_blocks
from luban.kernels.gemm_schedule import GemmSchedule, Shape, choose
from luban.symbolic import Dim, floordiv, product


@dataclass(frozen=True)
class Operand:
    """A matrix operand: its graph value, batch strides, strides along its outer dimension (m or n) and k, and offset."""

    value: SSAValue
    batch: tuple[Dim, ...]
    outer: Dim
    k: Dim
    offset: Dim


@dataclass(frozen=True)
class Problem:
    """One contraction with single m, n and k dimensions (contract_layout.py sees to that)."""

    batch: tuple[Dim, ...]
    m: Dim
    n: Dim
    k: Dim
    a: Operand
    b: Operand


def lower(request: Request) -> Lowered:
    """The kernel of a contraction and the maps fused into its store."""
    group = place_group(request.group)
    yields = request.group.body.block.last_op
    leaving = list(dict.fromkeys(yields.operands))  # type: ignore[union-attr]
    problem = problem_of(group.members[0].op)
    merge_axes(group, lambda outer, inner: any(outer in axes and inner in axes for axes in group.members[0].axes))
    writer = _Gemm(request, group, problem, leaving)
    writer.emit()
    results = {v: r for v, r in zip(yields.operands, request.group.results, strict=True)}  # type: ignore[union-attr]
    outputs = tuple(results[v] for v in leaving)
    points = product((*problem.batch, problem.m, problem.n, problem.k))
    moved = [product(v.type.shape) * bytes_of(v.type.dtype) for v in (*writer.external, *outputs)]  # type: ignore[attr-defined]
    return Lowered(
        writer.b.finish(),
        tuple(writer.external),
        outputs,
        (),
        2 * points if isinstance(points, int) else 0,
        sum(m for m in moved if isinstance(m, int)),
    )


def problem_of(op: Operation) -> Problem:
    """The sizes and strides of a normalised contraction."""
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    nb = op.properties["counts"].data[0].data  # type: ignore[union-attr]
    m, n, k = domain[nb:]
    a, b = op.properties["accesses"].data  # type: ignore[union-attr]
    left = Operand(op.operands[0], tuple(a.strides[:nb]), a.strides[nb], a.strides[nb + 2], a.offset)
    right = Operand(op.operands[1], tuple(b.strides[:nb]), b.strides[nb + 1], b.strides[nb + 2], b.offset)
    return Problem(tuple(domain[:nb]), m, n, k, left, right)


class _Gemm(Evaluator):
    """Writes the kernel. Tasks run over (batch, block of columns, block of rows)."""

    def __init__(self, request: Request, group: Group, problem: Problem, leaving: Sequence[SSAValue]):
        inside = group.produced
        self.external = list(dict.fromkeys(v for m in group.members for v in m.op.operands if v not in inside))
        dtypes: list[Attribute] = [v.type.dtype for v in (*self.external, *leaving)]  # type: ignore[attr-defined]
        builder = KernelBuilder(request.name, dtypes, request.symbols)
        super().__init__(builder, group, dict(zip((*self.external, *leaving), builder.buffers, strict=True)))
        self.problem, self.leaving = problem, leaving
        self.result = group.members[0].op.results[0]
        shape = Shape(
            product(problem.batch),
            problem.m,
            problem.n,
            problem.k,
            problem.a.outer,
            problem.a.k,
            problem.b.outer,
            problem.b.k,
        )
        self.schedule: GemmSchedule = choose(request.target, shape, problem.a.value.type.dtype)  # type: ignore[attr-defined]
        if request.tile_size is not None:
            self.schedule = with_blocks(self.schedule, shape, request.tile_size)

    # ---- tasks

    def emit(self) -> None:
        b, p, s = self.b, self.problem, self.schedule
        blocks_n = floordiv(p.n + (s.nc - 1), s.nc)
        blocks_m = floordiv(p.m + (s.mc - 1), s.mc)
        counts = [*p.batch, blocks_n, blocks_m]
        with b.loop(b.dim(0), b.dim(product(counts)), "parallel" if s.parallel else "serial") as task:
            *batch, jb, ib = b.digits(task.index, counts)
            j0, i0 = b.mul(jb, b.dim(s.nc)), b.mul(ib, b.dim(s.mc))
            n = b.minimum(b.binary(arith.SubiOp, b.dim(p.n), j0), b.dim(s.nc))
            m = b.minimum(b.binary(arith.SubiOp, b.dim(p.m), i0), b.dim(s.mc))
            self._task(batch, i0, m, j0, n)

    def _task(self, batch: list[SSAValue], i0: SSAValue, m: SSAValue, j0: SSAValue, n: SSAValue) -> None:
        b, p, s = self.b, self.problem, self.schedule
        self.known = self.constants()
        if isinstance(p.k, int) and p.k <= s.kc:
            self._block_of_k(batch, i0, m, j0, n, b.dim(0), b.dim(p.k), None, True)
            return
        partial = b.alloc(s.mc * s.nc, s.tile.accumulator)
        self._clear(partial)
        steps = floordiv(p.k + (s.kc - 1), s.kc) - 1
        with b.loop(b.dim(0), b.dim(steps), "serial") as step:
            k0 = b.mul(step.index, b.dim(s.kc))
            self._block_of_k(batch, i0, m, j0, n, k0, b.dim(s.kc), partial, False)
        k0 = b.dim(steps * s.kc)
        self._block_of_k(batch, i0, m, j0, n, k0, b.binary(arith.SubiOp, b.dim(p.k), k0), partial, True)

    def _clear(self, partial: SSAValue) -> None:
        b, s = self.b, self.schedule
        with b.loop(b.dim(0), b.dim(s.mc * s.nc), "vector") as loop:
            b.store(b.constant(0.0, s.tile.accumulator), partial, [loop.index], [1])

    def _block_of_k(self, batch, i0, m, j0, n, k0, k, partial: SSAValue | None, last: bool) -> None:
        """Products over one block of K; the last block runs the epilogue, the others add to `partial`."""
        p, s, b = self.problem, self.schedule, self.b
        left = self._matrix(p.a, batch, i0, k0)
        right = self._matrix(p.b, batch, j0, k0)
        depth = min(s.kc, p.k) if isinstance(p.k, int) else s.kc
        if s.pack_a:
            scratch = b.alloc(panel_elements(s.tile, s.tile.mr, s.mc, depth), s.tile.element)
            left = pack_a(b, s.tile, left, m, k, scratch)
        if s.pack_b:
            scratch = b.alloc(panel_elements(s.tile, s.tile.nr, s.nc, depth), s.tile.element)
            right = pack_b(b, s.tile, right, n, k, scratch)

        def body(acc: SSAValue, i: SSAValue, j: SSAValue) -> None:
            if partial is not None:
                acc = b.binary(arith.AddfOp, b.load(partial, [i, j], [s.nc, 1]), acc)
            if last:
                self._epilogue(acc, batch, b.add(i0, i), b.add(j0, j))
            else:
                b.store(acc, partial, [i, j], [s.nc, 1])  # type: ignore[arg-type]

        dot(b, s.tile, left, right, (m, n, k), body)

    def _matrix(self, o: Operand, batch: list[SSAValue], start: SSAValue, k0: SSAValue) -> Matrix:
        """The operand from (start, k0) on, where it lies."""
        b = self.b
        base = b.dim(o.offset)
        for index, stride in [*zip(batch, o.batch, strict=True), (start, o.outer), (k0, o.k)]:
            if stride != 0:
                base = b.add(base, index if stride == 1 else b.mul(index, b.dim(stride)))
        return Matrix(self.buffer[o.value], base, o.outer, o.k)

    # ---- the store

    def _epilogue(self, value: SSAValue, batch: list[SSAValue], row: SSAValue, column: SSAValue) -> None:
        b, member = self.b, self.group.members[0]
        self.index = {}
        for index, axes in zip([*batch, row, column], member.axes, strict=True):
            axes = [a for a in axes if a in self.group.axes]
            self.index.update(zip(axes, b.digits(index, [a.size for a in axes]), strict=True))
        dtype = self.result.type.dtype  # type: ignore[attr-defined]
        if dtype != value.type:
            exact, value = value, b.insert(arith.TruncFOp.create(operands=[value], result_types=[dtype]))
            b.unrounded[value] = exact
        self.cache = {**self.known, self.result: value}
        for v in self.leaving:
            b.store(self.value(v), self.buffer[v], *self.address(self.member(v).writes))
