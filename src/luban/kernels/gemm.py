"""GEMM as a tile program: blocks of columns and rows spread over threads, panels packed where that pays, epilogue fused.

The loop order is Goto's with the roles that fit a program compiled for known sizes: a task packs one block of B into
scratch that stays in the second-level cache, then walks the rows of A past it; the micro-kernel (codegen/llvm/dots) keeps
the output in registers over a whole block of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntAttr, StringAttr, bf16, f32
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from luban.compiler.ir import tile
from luban.compiler.ir.attributes import INDEX, Dims
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.evaluator import Evaluator
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.schedule import merge_axes, place_group
from luban.compiler.passes.graph.grouping import Group
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
    owner = {a: d for d, axes in enumerate(group.members[0].axes) for a in axes}
    merge_axes(group, lambda outer, inner: owner[outer] == owner[inner])
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
        dtype = problem.a.value.type.dtype  # type: ignore[attr-defined]
        shape = Shape(product(problem.batch), problem.m, problem.n, problem.k, problem.a.outer, problem.a.k, problem.b.outer, problem.b.k)
        self.schedule: GemmSchedule = choose(request.target, shape, str(dtype))
        self.element = bf16 if self.schedule.kk > 1 else dtype

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
        if isinstance(p.k, int) and p.k <= s.kc:
            self._block_of_k(batch, i0, m, j0, n, b.dim(0), b.dim(p.k), None, True)
            return
        partial = b.alloc(s.mc * s.nc, f32)
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
            b.store(b.constant(0.0, f32), partial, [loop.index], [1])

    def _block_of_k(self, batch, i0, m, j0, n, k0, k, partial: SSAValue | None, last: bool) -> None:
        """Products over one block of K; the last block runs the epilogue, the others add to `partial`."""
        p, s = self.problem, self.schedule
        a_buffer, a_base, a_strides, a_panel = self._operand_block(p.a, batch, i0, m, k0, k, s.mr, s.pack_a, s.mc)
        b_buffer, b_base, b_strides, b_panel = self._operand_block(p.b, batch, j0, n, k0, k, s.nr, s.pack_b, s.nc)
        body = Block(arg_types=[f32, INDEX, INDEX])
        acc, i, j = body.args
        outer, self.b._block = self.b._block, body
        if not last:
            assert partial is not None
            old = self.b.load(partial, [i, j], [s.nc, 1])
            self.b.store(self.b.binary(arith.AddfOp, old, acc), partial, [i, j], [s.nc, 1])
        else:
            value: SSAValue = acc
            if partial is not None:
                value = self.b.binary(arith.AddfOp, self.b.load(partial, [i, j], [s.nc, 1]), acc)
            self._epilogue(value, batch, self.b.add(i0, i), self.b.add(j0, j))
        self.b.insert(tile.YieldOp.create())
        self.b._block = outer
        self.b.insert(
            tile.DotOp.create(
                operands=[a_buffer, a_base, b_buffer, b_base, m, n, k],
                properties={
                    "a_strides": Dims(a_strides),
                    "b_strides": Dims(b_strides),
                    "a_panel": IntAttr(a_panel),
                    "b_panel": IntAttr(b_panel),
                    "kk": IntAttr(s.kk),
                    "unit": StringAttr(s.unit),
                    "rows": IntAttr(s.mr),
                    "columns": IntAttr(s.nr),
                },
                regions=[Region(body)],
            )
        )

    def _operand_block(self, o: Operand, batch, start, count, k0, k, panel: int, pack: bool, most: int):
        """Where the dot finds its operand: in place, or packed into scratch first."""
        b, s = self.b, self.schedule
        base = b.dim(o.offset)
        for index, stride in [*zip(batch, o.batch, strict=True), (start, o.outer), (k0, o.k)]:
            if stride != 0:
                base = b.add(base, index if stride == 1 else b.mul(index, b.dim(stride)))
        source = self.buffer[o.value]
        if not pack:
            return source, base, (o.outer, o.k), 0
        depth = -(-s.kc // s.k_multiple) * s.k_multiple
        if isinstance(self.problem.k, int):
            depth = min(depth, -(-self.problem.k // s.k_multiple) * s.k_multiple)
        scratch = b.alloc(-(-most // panel) * panel * depth, self.element)
        b.insert(
            tile.PackOp.create(
                operands=[source, base, count, k, scratch],
                properties={"strides": Dims((o.outer, o.k)), "panel": IntAttr(panel), "kk": IntAttr(s.kk)},
            )
        )
        return scratch, b.dim(0), (0, 0), panel

    # ---- the store

    def _epilogue(self, value: SSAValue, batch: list[SSAValue], row: SSAValue, column: SSAValue) -> None:
        b, member = self.b, self.group.members[0]
        self.index = {}
        for index, axes in zip([*batch, row, column], member.axes, strict=True):
            axes = [a for a in axes if a in self.group.axes]
            self.index.update(zip(axes, b.digits(index, [a.size for a in axes]), strict=True))
        dtype = self.result.type.dtype  # type: ignore[attr-defined]
        if dtype != f32:
            value = b.insert(arith.TruncFOp.create(operands=[value], result_types=[dtype]))
        self.cache = {self.result: value}
        for v in self.leaving:
            b.store(self.value(v), self.buffer[v], *self.address(self.member(v).writes))
