"""A scatter into rows, row by row: each row of the result gathers the updates that are meant for it.

The updates are first sorted by row (counted, numbered, listed: three short serial loops over the rows and the updates);
then the rows are written in parallel, each element once, from registers. An embedding's gradient is nearly all rows
that nothing hits: this way it costs one write of the result, whatever type the sums are made in.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue

from luban.compiler.ir.attributes import INDEX, Access
from luban.compiler.lowering.bodies import combine, copy_body, identity
from luban.compiler.lowering.builder import KernelBuilder
from luban.symbolic import Dim, divide_exact, product

MIN_ROWS = 32  # fewer rows than this are not enough work to spread by rows
MIN_WIDTH = 16  # elements of a row below which the sorting is most of the work
RUN = 128  # updates of a row that are added up before they join its total


@dataclass(frozen=True)
class Rows:
    """The shape of such a scatter: `rows` rows of `width`, `count` updates over the dims `others`, lanes along `free`."""

    op: Operation
    free: int
    others: tuple[int, ...]
    sizes: tuple[Dim, ...]
    rows: Dim
    width: Dim
    streams: bool = False  # the result goes past the caches

    @property
    def count(self) -> Dim:
        return product(self.sizes)

    @property
    def workspaces(self) -> list[Dim]:
        """Bytes of the table of row ends and of the list of updates."""
        return [(self.rows + 1) * 8, self.count * 8]


def rows_of(op: Operation, free: int | None) -> Rows | None:
    """How to run a scatter by rows along its independent dimension; None where another way is better."""
    if free is None or op.properties["kind"].data == "set":  # type: ignore[union-attr]
        return None
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    width = domain[free]
    rows = divide_exact(product(op.results[0].type.shape), width)  # type: ignore[attr-defined]
    one_bit = getattr(getattr(op.results[0].type.dtype, "width", None), "data", 0) == 1  # type: ignore[attr-defined]
    if rows is None or one_bit or 0 in domain:
        return None
    if isinstance(rows, int) and rows < MIN_ROWS or isinstance(width, int) and width < MIN_WIDTH:
        return None
    others = tuple(d for d in range(len(domain)) if d != free)
    return Rows(op, free, others, tuple(domain[d] for d in others), rows, width)


def emit(b: KernelBuilder, shape: Rows, buffers: dict[SSAValue, SSAValue], target: SSAValue, made: list) -> None:
    """Sorts the updates and writes the rows; `made` are the buffers of the two workspaces."""
    ends, order = made
    _sort(b, shape, buffers, ends, order)
    with b.loop(b.dim(0), b.dim(shape.rows), "parallel") as row:
        low, high = (b.load(ends, [row.index], [1], offset) for offset in (0, 1))
        _write_row(b, shape, buffers, target, order, row.index, low, high)


def _sort(b: KernelBuilder, shape: Rows, buffers, ends: SSAValue, order: SSAValue) -> None:
    """Lists the updates by row, in program order within a row; ends[r] to ends[r + 1] are those of row r."""
    zero, one, rows = b.dim(0), b.dim(1), b.dim(shape.rows)
    with b.loop(zero, b.dim(shape.rows + 1), "vector") as at:
        b.store(b.constant(0, INDEX), ends, [at.index], [1])
    with b.loop(zero, b.dim(shape.count), "serial") as n:
        b.store(one, ends, [_row_of(b, shape, buffers, n.index)], [1], 1, combine="add")
    with b.loop(zero, rows, "serial", [b.constant(0, INDEX)], ["add"]) as row:
        hits = b.load(ends, [row.index], [1], 1)
        b.store(row.carried[0], ends, [row.index], [1], 1)
        row.yields = [b.add(row.carried[0], hits)]
    with b.loop(zero, b.dim(shape.count), "serial") as n:
        to = _row_of(b, shape, buffers, n.index)
        place = b.load(ends, [to], [1], 1)
        b.store(n.index, order, [place], [1])
        b.store(b.add(place, one), ends, [to], [1], 1)


def _row_of(b: KernelBuilder, shape: Rows, buffers, number: SSAValue) -> SSAValue:
    position, _ = _update(b, shape, buffers, number, b.dim(0))
    position = b.check(position, shape.rows * shape.width)
    return b.binary(arith.DivUIOp, position, b.dim(shape.width))


def _write_row(b: KernelBuilder, shape: Rows, buffers, target, order, row, low, high) -> None:
    kind = shape.op.properties["kind"].data  # type: ignore[union-attr]
    init = shape.op.operands[0]
    count = b.binary(arith.SubiOp, high, low)
    runs = b.binary(arith.DivUIOp, b.add(count, b.dim(RUN - 1)), b.dim(RUN))
    strides = [shape.width, 1] if init.type.shape else [0, 0]  # type: ignore[attr-defined]
    neutral = identity(b, kind, init.type.dtype)  # type: ignore[attr-defined]
    with b.loop(b.dim(0), b.dim(shape.width), "vector") as column:
        first = b.load(buffers[init], [row, column.index], strides)
        with b.loop(b.dim(0), runs, "serial", [first], [kind]) as run:
            start = b.add(low, b.mul(run.index, b.dim(RUN)))
            with b.loop(start, b.minimum(b.add(start, b.dim(RUN)), high), "serial", [neutral], [kind]) as each:
                number = b.load(order, [each.index], [1])
                _, value = _update(b, shape, buffers, number, column.index)
                each.yields = [combine(b, kind, each.carried[0], value)]
            run.yields = [combine(b, kind, run.carried[0], each.results[0])]
        got = rounded(b, run.results[0], target)
        b.store(got, target, [row, column.index], [shape.width, 1], streams=shape.streams)


def rounded(b: KernelBuilder, value: SSAValue, target: SSAValue) -> SSAValue:
    """A value as the target's elements are."""
    dtype = target.type.dtype  # type: ignore[attr-defined]
    return value if value.type == dtype else b.insert(arith.TruncFOp.create(operands=[value], result_types=[dtype]))


def _update(b: KernelBuilder, shape: Rows, buffers, number: SSAValue, column: SSAValue) -> tuple[SSAValue, SSAValue]:
    """Position and value of update `number` at a column."""
    if _is_flat(shape):
        digits = [b.dim(0)] * (len(shape.others) - 1) + [number]
    else:
        digits = b.digits(number, shape.sizes)
    index = {**dict(zip(shape.others, digits)), shape.free: column}
    args = []
    for value, access in zip(shape.op.operands[1:], shape.op.properties["accesses"].data):  # type: ignore[union-attr]
        if isinstance(access, Access):
            args.append(b.load(buffers[value], [index[d] for d in sorted(index)], access.strides, access.offset))
        else:
            args.append(buffers[value])
    position, value = copy_body(b, shape.op, args, lambda d: index[d])
    return position, value


def _is_flat(shape: Rows) -> bool:
    """Whether an update's number can stand for its last index: all operands walk over the updates in one step."""
    asked = {inner.properties["dim"].data for inner in shape.op.regions[0].block.ops if inner.name == "graph.index"} - {
        shape.free
    }
    if asked or not shape.others:
        return False
    for access in shape.op.properties["accesses"].data:  # type: ignore[union-attr]
        if isinstance(access, Access):
            strides = [access.strides[d] for d in shape.others]
            if any(s != t * n for s, t, n in zip(strides, strides[1:], shape.sizes[1:])):
                return False
    return True
