"""`graph.concat` -> one copy loop a piece."""

from __future__ import annotations

from xdsl.ir import Operation

from luban.compiler.ir.attributes import contiguous
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.registry import Lowered, Request
from luban.symbolic import Dim, product

SERIAL_ELEMENTS = 16384


def lower(request: Request) -> Lowered:
    """The kernel of one concatenation."""
    op = next(o for o in request.group.body.block.ops if o.name == "graph.concat")
    operands = list(dict.fromkeys(op.operands))
    out = op.results[0].type
    b = KernelBuilder(request.name, [*(v.type.dtype for v in operands), out.dtype], request.symbols)  # type: ignore[attr-defined]
    buffers = dict(zip(operands, b.buffers))
    start: Dim = 0
    for piece, extent in zip(range(len(op.operands)), op.properties["extents"].data):  # type: ignore[union-attr]
        _copy_piece(b, op, piece, buffers[op.operands[piece]], start, extent)
        start = start + extent
    moved = product(out.shape) * (2 * bytes_of(out.dtype))  # type: ignore[attr-defined]
    return Lowered(b.finish(), tuple(operands), (request.group.results[0],), (), 0, moved)


def _copy_piece(b: KernelBuilder, op: Operation, piece: int, source, start: Dim, extent: Dim) -> None:
    shape: list[Dim] = list(op.results[0].type.shape)  # type: ignore[attr-defined]
    axis = op.properties["axis"].data  # type: ignore[union-attr]
    strides = contiguous(shape)
    access = op.properties["accesses"].data[piece]  # type: ignore[union-attr]
    sizes = [extent if d == axis else n for d, n in enumerate(shape)]
    rows, total = sizes[:-1], product(sizes)
    small = isinstance(total, int) and total < SERIAL_ELEMENTS
    with b.loop(b.dim(0), b.dim(product(rows)), "serial" if small else "parallel") as row:
        outer = b.digits(row.index, rows) if rows else []
        with b.loop(b.dim(0), b.dim(sizes[-1]), "vector") as lane:
            at = [*outer, lane.index]
            value = b.load(source, at, access.strides, access.offset)
            b.store(value, b.buffers[-1], at, strides, start * strides[axis])
