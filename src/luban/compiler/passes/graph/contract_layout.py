"""Brings every contraction to one m, one n and one k dimension (and few batch dimensions).

Neighbouring dimensions join where both operands walk them as one. An operand that does not - the patches of a
convolution, transposed heads - is copied into rows first; fusion may then compute it there instead of copying it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp, i8, i32
from xdsl.ir import Block, Region, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, Dims, TensorType, contiguous
from luban.compiler.ir.dtypes import is_float
from luban.compiler.ir.window import points_in_n, window_of
from luban.compiler.passes.graph.integer_contracts import to_reduction
from luban.compiler.passes.registry import register
from luban.symbolic import Dim, product

LINE = 512  # values of k in a row for one image from which on the images of a gradient are worked through one by one


@dataclass
class _Operand:
    value: SSAValue
    strides: list[list[Dim]]  # for batch, m or n, k
    offset: Dim


@register
@dataclass(frozen=True)
class ContractLayout:
    """See the module. Without it the compute library would need a kernel for every number of dimensions."""

    name: ClassVar[str] = "contract_layout"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                for op in list(func.body.block.ops):
                    if isinstance(op, graph.ContractOp):
                        (_normalise if _has_units(op) else to_reduction)(op)


def _has_units(op: graph.ContractOp) -> bool:
    """Whether dot units compute such products: floats, and 8-bit integers summed in 32 bits."""
    result = op.out.type.dtype
    return is_float(result) or (result == i32 and all(v.type.dtype == i8 for v in (op.a, op.b)))  # type: ignore[attr-defined]


def _normalise(op: graph.ContractOp) -> None:
    counts = [c.data for c in op.counts]
    sizes = _segments(op.domain.data, counts)
    a_strides, b_strides = (_segments(access.strides, counts) for access in op.accesses.data)
    a = _Operand(op.a, [a_strides[0], a_strides[1], a_strides[3]], op.accesses.data[0].offset)
    b = _Operand(op.b, [b_strides[0], b_strides[2], b_strides[3]], op.accesses.data[1].offset)
    batch, m, n, k = sizes
    if op.window is not None:
        _keep_window(op, sizes, a)
        return
    if not (_is_line(m, a.strides[1]) and _is_line(k, a.strides[2])):
        a = _to_rows(op, a, batch, m, k)
    if not (_is_line(n, b.strides[1]) and _is_line(k, b.strides[2])):
        b = _to_rows(op, b, batch, n, k)
    a.strides[1:] = [_line(m, a.strides[1]), _line(k, a.strides[2])]
    b.strides[1:] = [_line(n, b.strides[1]), _line(k, b.strides[2])]
    m, n, k = [product(m)], [product(n)], [product(k)]
    batch, (a.strides[0], b.strides[0]) = _merge(batch, [a.strides[0], b.strides[0]])
    zeros: list[Dim] = [0]
    new = graph.ContractOp.create(
        operands=[a.value, b.value],
        result_types=[TensorType.of([*batch, *m, *n], op.out.type.dtype)],
        properties={
            "domain": Dims((*batch, *m, *n, *k)),
            "counts": ArrayAttr([IntAttr(len(batch)), IntAttr(1), IntAttr(1), IntAttr(1)]),
            "accesses": ArrayAttr(
                [
                    Access.of([*a.strides[0], *a.strides[1], *zeros, *a.strides[2]], a.offset),
                    Access.of([*b.strides[0], *zeros, *b.strides[1], *b.strides[2]], b.offset),
                ]
            ),
        },
    )
    _replace(op, new)


def _replace(op: graph.ContractOp, new: graph.ContractOp) -> None:
    for kept in ("element", "precision", "unsigned", "window"):
        if kept in op.properties:
            new.properties[kept] = op.properties[kept]
    new.attributes.update(op.attributes)
    block = op.parent
    assert block is not None
    block.insert_op_before(new, op)
    op.out.replace_all_uses_with(new.out)
    op.detach()
    op.erase()


def _keep_window(op: graph.ContractOp, sizes: list[list[Dim]], a: _Operand) -> None:
    """A convolution keeps its dims of n and k, over which its kernel reads patches; its result has one of n.

    The other operand becomes rows along k, or lines of at least LINE values of k for each image.
    """
    batch, m, n, k = sizes
    points = k[1:] if not points_in_n(op.domain.data, [c.data for c in op.counts], window_of(op.window)) else []
    long = points and _at_least(product(points), LINE) and _is_line(points, a.strides[2][1:])
    if not (_is_line(m, a.strides[1]) and (long or _is_line(k, a.strides[2]))):
        rows = _to_rows(op, a, batch, m, k)
        a = _Operand(rows.value, [rows.strides[0], rows.strides[1], list(contiguous(k))], 0)
    a.strides[1] = _line(m, a.strides[1])
    first = 1 if long and not _is_line(k, a.strides[2]) else 0
    step = _line(k[first:], a.strides[2][first:])[0]
    a.strides[2][first:] = [s * step for s in contiguous(k[first:])]
    new = graph.ContractOp.create(
        operands=[a.value, op.b],
        result_types=[TensorType.of([*batch, product(m), product(n)], op.out.type.dtype)],
        properties={
            "domain": Dims((*batch, product(m), *n, *k)),
            "counts": ArrayAttr([IntAttr(len(batch)), IntAttr(1), IntAttr(len(n)), IntAttr(len(k))]),
            "accesses": ArrayAttr(
                [
                    Access.of([*a.strides[0], *a.strides[1], *[0] * len(n), *a.strides[2]], a.offset),
                    _without_m(op, len(batch), len(m)),
                ]
            ),
        },
    )
    _replace(op, new)


def _without_m(op: graph.ContractOp, batch: int, m: int) -> Access:
    """The access of the second operand over a domain with one dim of m."""
    access = op.accesses.data[1]
    return Access.of([*access.strides[:batch], 0, *access.strides[batch + m :]], access.offset)


def _at_least(size: Dim, least: int) -> bool:
    return isinstance(size, int) and size >= least


def _is_line(sizes: list[Dim], strides: list[Dim]) -> bool:
    """Whether the dimensions can be walked as one."""
    return len(strides) == 1 or len(_merge(sizes, [strides])[0]) == 1


def _line(sizes: list[Dim], strides: list[Dim]) -> list[Dim]:
    """The stride of the dimensions walked as one."""
    return strides if len(strides) == 1 else _merge(sizes, [strides])[1][0]


def _segments(values: Sequence[Dim], counts: Sequence[int]) -> list[list[Dim]]:
    result, at = [], 0
    for c in counts:
        result.append(list(values[at : at + c]))
        at += c
    return result


def _merge(sizes: list[Dim], tables: list[list[Dim]]) -> tuple[list[Dim], list[list[Dim]]]:
    """Joins neighbouring dimensions that every stride table walks as one; drops those of size 1 but keeps at least one."""
    kept = [d for d, n in enumerate(sizes) if n != 1]
    if not kept:
        return ([1], [[0] for _ in tables])
    out_sizes: list[Dim] = []
    out: list[list[Dim]] = [[] for _ in tables]
    for d in kept:
        if out_sizes and all(t[-1] == table[d] * sizes[d] for t, table in zip(out, tables)):
            out_sizes[-1] = out_sizes[-1] * sizes[d]
            for t, table in zip(out, tables):
                t[-1] = table[d]
        else:
            out_sizes.append(sizes[d])
            for t, table in zip(out, tables):
                t.append(table[d])
    return out_sizes, out


def _to_rows(op: graph.ContractOp, operand: _Operand, batch: list[Dim], outer: list[Dim], k: list[Dim]) -> _Operand:
    """A copy of the operand as (batch, outer, k) rows; batch dimensions along which it does not move are left out."""
    moving = [d for d, s in enumerate(operand.strides[0]) if s != 0]
    shape = [batch[d] for d in moving] + outer + k
    strides = [operand.strides[0][d] for d in moving] + operand.strides[1] + operand.strides[2]
    dtype = operand.value.type.dtype  # type: ignore[attr-defined]
    body = Block(arg_types=[dtype])
    body.add_op(graph.YieldOp.create(operands=[body.args[0]]))
    rows = graph.MapOp.create(
        operands=[operand.value],
        result_types=[TensorType.of(shape, dtype)],
        properties={"domain": Dims(tuple(shape)), "accesses": ArrayAttr([Access.of(strides, operand.offset)])},
        regions=[Region(body)],
    )
    block = op.parent
    assert block is not None
    block.insert_op_before(rows, op)
    depth = product(k)
    steps = contiguous([batch[d] for d in moving] + [product(outer), depth])
    batch_strides: list[Dim] = [0] * len(batch)
    for d, s in zip(moving, steps):
        batch_strides[d] = s
    return _Operand(rows.outs[0], [batch_strides, [depth], [1]], 0)
