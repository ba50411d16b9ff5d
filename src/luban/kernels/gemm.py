"""GEMM as a tile program: blocks of columns and rows spread over threads, panels packed where that pays, epilogue fused.

The loop order is Goto's with the roles that fit a program compiled for known sizes: a task packs one block of B into
scratch that stays in the second-level cache, then walks the rows of A past it; the micro-kernel (codegen/llvm/dots) keeps
the output in registers over a whole block of K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from xdsl.dialects import arith
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.passes.graph.grouping import Group
from luban.kernels import convolution
from luban.kernels.contraction_kernel import ContractionKernel, lower_contraction
from luban.kernels.dot_writer import Matrix, Passes, dot, pack_a, pack_b, packed_depth, panel_elements
from luban.kernels.gemm_blocks import with_blocks
from luban.kernels.gemm_schedule import GemmSchedule, Shape, choose, tile_of, turns
from luban.symbolic import Dim, floordiv, product

# rows or columns of a task: the first, how many, how many at most, how many at a time
Span = tuple[SSAValue, SSAValue, int, int]


@dataclass(frozen=True)
class Operand:
    """A matrix operand: its graph value, batch strides, strides along its outer dimension (m or n) and k, and offset."""

    value: SSAValue
    batch: tuple[Dim, ...]
    outer: Dim
    k: Dim
    offset: Dim
    unsigned: bool = False


@dataclass(frozen=True)
class Problem:
    """One contraction with single m, n and k dimensions (contract_layout.py sees to that)."""

    batch: tuple[Dim, ...]
    m: Dim
    n: Dim
    k: Dim
    a: Operand
    b: Operand
    element: Attribute
    precision: str

    @property
    def shape(self) -> Shape:
        a, b = self.a, self.b
        return Shape(product(self.batch), self.m, self.n, self.k, a.outer, a.k, b.outer, b.k)

    @property
    def held(self) -> tuple[Attribute, ...]:
        """The types in which the operands lie."""
        return tuple(o.value.type.dtype for o in (self.a, self.b))  # type: ignore[attr-defined]

    @property
    def signs(self) -> tuple[bool, bool]:
        return self.a.unsigned, self.b.unsigned


def lower(request: Request) -> Lowered:
    """The kernel of a contraction and the maps fused into its store."""
    if "window" in request.group.body.block.first_op.properties:  # type: ignore[union-attr]
        return convolution.lower(request)
    return lower_contraction(request, _Gemm)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pieces(size: Dim, piece: int) -> Dim:
    return floordiv(size + (piece - 1), piece)


def problem_of(op: Operation) -> Problem:
    """The sizes and strides of a normalised contraction."""
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    nb = op.properties["counts"].data[0].data  # type: ignore[union-attr]
    m, n, k = domain[nb:]
    a, b = op.properties["accesses"].data  # type: ignore[union-attr]
    unsigned = op.properties.get("unsigned", StringAttr("")).data  # type: ignore[attr-defined]
    left = Operand(op.operands[0], tuple(a.strides[:nb]), a.strides[nb], a.strides[nb + 2], a.offset, "a" in unsigned)
    right = Operand(
        op.operands[1], tuple(b.strides[:nb]), b.strides[nb + 1], b.strides[nb + 2], b.offset, "b" in unsigned
    )
    precision = op.properties.get("precision", StringAttr("highest")).data  # type: ignore[attr-defined]
    return Problem(tuple(domain[:nb]), m, n, k, left, right, op.multiplied, precision)  # type: ignore[attr-defined]


class _Gemm(ContractionKernel):
    """Writes the kernel. Tasks run over (batch, block of columns, block of rows)."""

    def __init__(self, request: Request, group: Group, leaving: Sequence[SSAValue]):
        super().__init__(request, group, leaving)
        self.problem = problem = problem_of(group.members[0].op)
        tile = tile_of(request.target, problem.element, problem.precision, problem.signs)
        self.turned = request.tile_size is None and turns(request.target, problem.shape, tile, problem.held)
        if self.turned:
            self.problem = problem = replace(problem, m=problem.n, n=problem.m, a=problem.b, b=problem.a)
        shape = problem.shape
        self.schedule: GemmSchedule = choose(
            request.target, shape, problem.element, problem.held, problem.precision, problem.signs
        )
        if request.tile_size is not None:
            self.schedule = with_blocks(self.schedule, shape, request.tile_size)

    @property
    def products(self) -> Dim:
        p = self.problem
        return product((*p.batch, p.m, p.n, p.k))

    # ---- tasks

    def emit(self) -> None:
        """A task is a block of C, which it works through column block by column block and row block by row block."""
        b, p, s = self.b, self.problem, self.schedule
        counts = [*p.batch, _pieces(p.n, s.share_n), _pieces(p.m, s.share_m)]
        with b.loop(b.dim(0), b.dim(product(counts)), "parallel" if s.parallel else "serial") as task:
            self.known = self.constants()
            self._allocate()
            *batch, jb, ib = b.digits(task.index, counts)
            j0, i0 = b.mul(jb, b.dim(s.share_n)), b.mul(ib, b.dim(s.share_m))
            columns = (j0, self.rest(p.n, j0, s.share_n), s.share_n, s.nc)
            rows = (i0, self.rest(p.m, i0, s.share_m), s.share_m, s.mc)
            for_each = self._task_packed if self._one_pass else self._task
            for_each(batch, columns, rows)

    @property
    def _one_pass(self) -> bool:
        """Whether all of k is packed at once."""
        return isinstance(self.problem.k, int) and self.problem.k <= self.schedule.kc

    @contextmanager
    def _blocks(self, span: Span) -> Iterator[tuple[SSAValue, SSAValue]]:
        """The blocks of a share of rows or columns: where one starts and how much of it there is."""
        start, count, share, block = span
        with self.blocks(count, share, block) as (at, size):
            yield start if block >= share else self.b.add(start, at), size

    def _task_packed(self, batch: list[SSAValue], columns: Span, rows: Span) -> None:
        """B's block is packed over all of k and stays in the second-level cache while the rows walk past."""
        b, p, s = self.b, self.problem, self.schedule
        zero, k = b.dim(0), b.dim(p.k)
        passes = Passes(self.partial, s.depth if self.partial is not None else None, s.order)
        one_block = s.mc >= s.share_m  # of rows, which is then packed once
        packed = self._left(batch, rows[0], rows[1], zero, k) if one_block else None
        with self._blocks(columns) as (j0, n):
            right = self._right(batch, j0, n, zero, k)
            with self._blocks(rows) as (i0, m):
                left = packed or self._left(batch, i0, m, zero, k)
                self._dot(left, right, (m, n, k), batch, (i0, j0), passes)

    def _task(self, batch: list[SSAValue], columns: Span, rows: Span) -> None:
        """Passes over k, between which the sums of a block wait."""
        b, p, s = self.b, self.problem, self.schedule
        with self._blocks(columns) as (j0, n), self._blocks(rows) as (i0, m):

            def part(k0: SSAValue, k: SSAValue, passes: Passes) -> None:
                right = self._right(batch, j0, n, k0, k)
                self._dot(self._left(batch, i0, m, k0, k), right, (m, n, k), batch, (i0, j0), passes)

            start = b.dim(0)
            steps = _pieces(p.k, s.kc) - 1  # the last pass, empty where the first one takes all of k
            known = isinstance(p.k, int)
            first = b.dim(s.kc) if known else b.minimum(b.dim(s.kc), b.dim(p.k))
            part(start, first, Passes(self.partial, s.depth, s.order, keeps=True))
            with b.loop(b.dim(1), b.dim(steps), "serial") as step:
                k0 = b.mul(step.index, b.dim(s.kc))
                part(k0, b.dim(s.kc), Passes(self.partial, s.depth, s.order, keeps=True, resumes=True))
            k0 = b.dim(steps * s.kc) if known else b.maximum(b.dim(steps * s.kc), first)
            rest = b.dim(p.k - steps * s.kc) if known else b.binary(arith.SubiOp, b.dim(p.k), k0)
            part(k0, rest, Passes(self.partial, s.depth, s.order, resumes=True))

    def _allocate(self) -> None:
        """Scratch of a task: panels of what is packed, and the sums between passes."""
        b, p, s = self.b, self.problem, self.schedule
        t, deep = s.tile, min(s.kc, p.k) if isinstance(p.k, int) else s.kc
        self.panels = {
            name: b.alloc(panel_elements(t, panel, count, deep), t.element)
            for name, panel, count, packed in (("a", t.mr, s.mc, s.pack_a), ("b", t.nr, s.nc, s.pack_b))
            if packed
        }
        waits = not self._one_pass or (s.depth is not None and s.depth < packed_depth(t, deep))
        self.partial = b.alloc(_rounded(s.mc, t.mr) * _rounded(s.nc, t.nr), t.accumulator) if waits else None

    def _left(self, batch: list[SSAValue], i0: SSAValue, m: SSAValue, k0: SSAValue, k: SSAValue) -> Matrix:
        left = self._matrix(self.problem.a, batch, i0, k0)
        return pack_a(self.b, self.schedule.tile, left, m, k, self.panels["a"]) if self.schedule.pack_a else left

    def _right(self, batch: list[SSAValue], j0: SSAValue, n: SSAValue, k0: SSAValue, k: SSAValue) -> Matrix:
        right = self._matrix(self.problem.b, batch, j0, k0)
        return pack_b(self.b, self.schedule.tile, right, n, k, self.panels["b"]) if self.schedule.pack_b else right

    def _dot(self, left: Matrix, right: Matrix, extents, batch: list[SSAValue], start, passes: Passes) -> None:
        b, (i0, j0), t = self.b, start, self.schedule.tile
        if t.terms > 1:  # all parts of the values, as packed
            m, n, k = extents
            steps = b.binary(arith.DivUIOp, b.add(k, b.dim(t.k_multiple - 1)), b.dim(t.k_multiple))
            extents = (m, n, b.mul(steps, b.dim(t.k_multiple * t.terms)))

        def body(total: SSAValue, i: SSAValue, j: SSAValue) -> None:
            place = b.add(i0, i), b.add(j0, j)
            self.store(total, batch, *(reversed(place) if self.turned else place))

        dot(b, t, left, right, extents, body, passes)

    def _matrix(self, o: Operand, batch: list[SSAValue], start: SSAValue, k0: SSAValue) -> Matrix:
        """The operand from (start, k0) on, where it lies."""
        terms = [*zip(batch, o.batch, strict=True), (start, o.outer), (k0, o.k)]
        return Matrix(self.buffer[o.value], self.place(o.offset, terms), o.outer, o.k, unsigned=o.unsigned)
