"""What the kernels of contractions share: buffers, addresses, blocks, and the store with the maps fused into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from xdsl.dialects import arith
from xdsl.ir import Attribute, SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.evaluator import Evaluator
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.schedule import merge_axes, place_group
from luban.compiler.passes.graph.grouping import Group
from luban.symbolic import Dim, product


class ContractionKernel(Evaluator):
    """A kernel under construction: a contraction, then maps of its result. `leaving` are the values that it stores."""

    def __init__(self, request: Request, group: Group, leaving: Sequence[SSAValue]):
        inside = group.produced
        self.external = list(dict.fromkeys(v for m in group.members for v in m.op.operands if v not in inside))
        dtypes: list[Attribute] = [v.type.dtype for v in (*self.external, *leaving)]  # type: ignore[attr-defined]
        builder = KernelBuilder(request.name, dtypes, request.symbols)
        super().__init__(builder, group, dict(zip((*self.external, *leaving), builder.buffers, strict=True)))
        self.leaving, self.target = leaving, request.target
        self.result = group.members[0].op.results[0]
        self.known: dict[object, SSAValue] = {}  # single numbers that maps of the store read, once a task begins

    @property
    def products(self) -> Dim:
        """Multiplications of the whole contraction."""
        raise NotImplementedError

    def emit(self) -> None:
        """Writes the kernel."""
        raise NotImplementedError

    def place(self, offset: Dim, terms: Sequence[tuple[SSAValue, Dim]]) -> SSAValue:
        """offset + the sum of index * stride."""
        b = self.b
        base = b.dim(offset)
        for index, stride in terms:
            if stride != 0:
                base = b.add(base, index if stride == 1 else b.mul(index, b.dim(stride)))
        return base

    def rest(self, size: Dim, start: SSAValue, most: int) -> SSAValue:
        """min(size - start, most)."""
        b = self.b
        if isinstance(size, int) and size % most == 0:
            return b.dim(most)
        return b.minimum(b.binary(arith.SubiOp, b.dim(size), start), b.dim(most))

    @contextmanager
    def blocks(self, count: SSAValue, share: int, block: int) -> Iterator[tuple[SSAValue, SSAValue]]:
        """The blocks of `count` rows or columns, at most `share`: where one starts and how much of it there is."""
        b = self.b
        if block >= share:
            yield b.dim(0), count
            return
        more = b.add(count, b.dim(block - 1))
        with b.loop(b.dim(0), b.binary(arith.DivUIOp, more, b.dim(block)), "serial") as step:
            at = b.mul(step.index, b.dim(block))
            yield at, b.minimum(b.binary(arith.SubiOp, count, at), b.dim(block))

    def store(self, value: SSAValue, batch: Sequence[SSAValue], row: SSAValue, column: SSAValue) -> None:
        """What becomes of one sum: the maps of the group, and the stores of what leaves it."""
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
        self.store_values(self.leaving)


def lower_contraction(
    request: Request, make: Callable[[Request, Group, Sequence[SSAValue]], ContractionKernel]
) -> Lowered:
    """The kernel that `make` begins for a contraction and the maps fused into its store."""
    group = place_group(request.group)
    yields = request.group.body.block.last_op
    leaving = list(dict.fromkeys(yields.operands))  # type: ignore[union-attr]
    merge_axes(group, lambda outer, inner: any(outer in axes and inner in axes for axes in group.members[0].axes))
    kernel = make(request, group, leaving)
    kernel.emit()
    results = {v: r for v, r in zip(yields.operands, request.group.results, strict=True)}  # type: ignore[union-attr]
    outputs = tuple(results[v] for v in leaving)
    moved = [product(v.type.shape) * bytes_of(v.type.dtype) for v in (*kernel.external, *outputs)]  # type: ignore[attr-defined]
    return Lowered(kernel.b.finish(), tuple(kernel.external), outputs, (), kernel.products * 2, sum(moved))
