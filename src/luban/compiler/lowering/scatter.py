"""`graph.scatter` -> a copy of its init, then updates in domain order.

Updates along a dimension that moves the position by its own index, while all else moves it by multiples of the
dimension's size, never meet: such a dimension (a row of an embedding's gradient) is spread over lanes and threads, or
makes rows that gather their updates (scatter_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xdsl.dialects import arith
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir.attributes import INDEX, Access
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering import scatter_rows
from luban.compiler.lowering.bodies import copy_body
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.streams import is_assigned, is_large
from luban.symbolic import Dim, divide_exact, floordiv, product

COPY_BLOCK = 16384
LANES_BLOCK = 64  # lanes' worth of columns a thread takes


def lower(request: Request) -> Lowered:
    """The kernel of one scatter."""
    op = next(o for o in request.group.body.block.ops if o.name == "graph.scatter")
    operands = list(dict.fromkeys(op.operands))
    rows = scatter_rows.rows_of(op, independent_dimension(op))
    wide: Attribute = op.operands[0].type.dtype  # type: ignore[attr-defined]
    out_type = op.results[0].type
    extra, sizes = _workspaces(op, rows)
    dtypes = [*(v.type.dtype for v in operands), out_type.dtype, *extra]  # type: ignore[attr-defined]
    b = KernelBuilder(request.name, dtypes, request.symbols)
    buffers, made = dict(zip(operands, b.buffers)), b.buffers[len(operands) + 1 :]
    target = b.buffers[len(operands)]
    size = product(out_type.shape)  # type: ignore[attr-defined]
    if rows is not None:
        past = is_large(op.results[0], request.target) and not is_assigned(request.group.results[0])
        rows = replace(rows, streams=past)
        scatter_rows.emit(b, rows, buffers, target, made)
    elif out_type.dtype == wide:  # type: ignore[attr-defined]
        _copy(b, buffers[op.operands[0]], target, size, bool(op.operands[0].type.shape))  # type: ignore[attr-defined]
        _update(b, op, buffers, target)
    else:  # the sums wait in memory of their own until they are rounded
        _copy(b, buffers[op.operands[0]], made[0], size, bool(op.operands[0].type.shape))  # type: ignore[attr-defined]
        _update(b, op, buffers, made[0])
        _copy(b, made[0], target, size, True)
    moved = sum(_bytes(v) for v in (*operands, op.results[0]))
    return Lowered(b.finish(), tuple(operands), (request.group.results[0],), tuple(sizes), 0, moved)


def _workspaces(op: Operation, rows: scatter_rows.Rows | None) -> tuple[list[Attribute], list[Dim]]:
    """Element types and bytes of the memory that the kernel needs beside its operands and its result."""
    if rows is not None:
        return [INDEX, INDEX], rows.workspaces
    wide, out = op.operands[0].type.dtype, op.results[0].type  # type: ignore[attr-defined]
    return ([wide], [product(out.shape) * bytes_of(wide)]) if wide != out.dtype else ([], [])  # type: ignore[attr-defined]


def _bytes(value: SSAValue) -> Dim:
    return product(value.type.shape) * bytes_of(value.type.dtype)  # type: ignore[attr-defined]


def _copy(b: KernelBuilder, source: SSAValue, target: SSAValue, size: Dim, whole: bool) -> None:
    """Copies and rounds `size` elements, or one number so often."""
    with b.loop(b.dim(0), b.dim(floordiv(size + (COPY_BLOCK - 1), COPY_BLOCK)), "parallel") as block:
        low = b.mul(block.index, b.dim(COPY_BLOCK))
        with b.loop(low, b.minimum(b.add(low, b.dim(COPY_BLOCK)), b.dim(size)), "vector") as loop:
            got = b.load(source, [loop.index], [int(whole)])
            b.store(scatter_rows.rounded(b, got, target), target, [loop.index], [1])


def _update(b: KernelBuilder, op: Operation, buffers: dict[SSAValue, SSAValue], target: SSAValue) -> None:
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    free = independent_dimension(op)
    index: dict[int, SSAValue] = {}
    if free is None:
        with b.loop(b.dim(0), b.dim(1), "serial"):
            _rows(b, op, buffers, target, index, list(range(len(domain))), None)
        return
    width = LANES_BLOCK
    with b.loop(b.dim(0), b.dim(floordiv(domain[free] + (width - 1), width)), "parallel") as block:
        low = b.mul(block.index, b.dim(width))
        high = b.minimum(b.add(low, b.dim(width)), b.dim(domain[free]))
        _rows(b, op, buffers, target, index, [d for d in range(len(domain)) if d != free], (free, low, high))


def _rows(
    b: KernelBuilder, op: Operation, buffers, target, index: dict[int, SSAValue], dims: Sequence[int], lanes
) -> None:
    """Serial loops over `dims`, then the lanes' loop or a single update."""
    if dims:
        with b.loop(b.dim(0), b.dim(op.properties["domain"].data[dims[0]]), "serial") as loop:  # type: ignore[union-attr]
            index[dims[0]] = loop.index
            _rows(b, op, buffers, target, index, dims[1:], lanes)
    elif lanes is None:
        _one(b, op, buffers, target, index)
    else:
        free, low, high = lanes
        with b.loop(low, high, "vector") as loop:
            index[free] = loop.index
            _one(b, op, buffers, target, index)


def _one(b: KernelBuilder, op: Operation, buffers, target: SSAValue, index: dict[int, SSAValue]) -> None:
    args = []
    for value, access in zip(op.operands[1:], op.properties["accesses"].data):  # type: ignore[union-attr]
        if isinstance(access, Access):
            at = [index[d] for d in range(len(access.strides))]
            args.append(b.load(buffers[value], at, access.strides, access.offset))
        else:
            args.append(buffers[value])
    position, value = copy_body(b, op, args, lambda d: index[d])
    position = b.check(position, product(op.results[0].type.shape))  # type: ignore[attr-defined]
    kind = op.properties["kind"].data  # type: ignore[union-attr]
    b.store(value, target, [position], [1], combine="none" if kind == "set" else kind)


def independent_dimension(op: Operation) -> int | None:
    """The last dimension d whose index enters the position once, as is, beside multiples of its size; None if none does."""
    domain: tuple[Dim, ...] = op.properties["domain"].data  # type: ignore[union-attr]
    position = op.regions[0].block.last_op.operands[0]  # type: ignore[union-attr]
    terms = _terms(position)
    for d in reversed(range(len(domain))):
        own = [
            t
            for t in terms
            if t.owner is not None
            and getattr(t.owner, "name", "") == "graph.index"
            and t.owner.properties["dim"].data == d
        ]  # type: ignore[union-attr]
        rest = [t for t in terms if t not in own]
        if len(own) == 1 and domain[d] != 1 and all(_is_multiple(t, domain[d]) and not _mentions(t, d) for t in rest):
            return d
    return None


def _terms(value: SSAValue) -> list[SSAValue]:
    owner = value.owner
    return _terms(owner.operands[0]) + _terms(owner.operands[1]) if isinstance(owner, arith.AddiOp) else [value]


def _is_multiple(value: SSAValue, size: Dim) -> bool:
    owner = value.owner
    if isinstance(owner, arith.MuliOp):
        return any(_is_multiple(v, size) for v in owner.operands)
    if isinstance(owner, arith.ConstantOp):
        return divide_exact(owner.value.value.data, size) is not None  # type: ignore[union-attr]
    if isinstance(owner, Operation) and owner.name == "graph.dim":
        return divide_exact(owner.properties["value"].data[0], size) is not None  # type: ignore[union-attr]
    return False


def _mentions(value: SSAValue, d: int) -> bool:
    owner = value.owner
    if not isinstance(owner, Operation):
        return False
    if owner.name == "graph.index":
        return owner.properties["dim"].data == d  # type: ignore[union-attr]
    return any(_mentions(v, d) for v in owner.operands)
