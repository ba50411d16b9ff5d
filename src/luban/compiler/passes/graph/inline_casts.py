"""Casts move into the bodies of the loops that read them, and plain copies go.

A cast of a vector that its reader broadcasts (a bias, a weight a column) was a kernel of its own: it covers too few dims
to join the reader's loops as a member. A cast to a wider type costs one instruction where it is read, and twice the bytes
where it goes through memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, ModuleOp
from xdsl.ir import Operation

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, contiguous
from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.passes.graph.compose import through
from luban.compiler.passes.registry import register
from luban.symbolic import product

CONVERSIONS = tuple(f"arith.{n}" for n in ("extf", "truncf", "sitofp", "uitofp", "extsi", "extui", "trunci"))


@register
@dataclass(frozen=True)
class InlineCasts:
    """See the module."""

    name: ClassVar[str] = "inline_casts"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                for op in func.body.block.ops:
                    if op.name == "graph.map" and is_plain_copy(op):
                        _forward(op)
                    elif op.name == "graph.map" and is_conversion(op):
                        for use in list(op.results[0].uses):
                            if use.operation.name in ("graph.map", "graph.reduce"):
                                _inline(op, use.operation, use.index)


def is_plain_copy(op: Operation) -> bool:
    """Whether a map only copies a whole tensor, in its own order."""
    block, access = op.regions[0].block, op.properties["accesses"].data[:1]  # type: ignore[union-attr]
    if len(op.operands) != 1 or len(list(block.ops)) != 1 or block.last_op.operands[0] is not block.args[0]:  # type: ignore[union-attr]
        return False
    shape, whole = op.results[0].type.shape, product(op.operands[0].type.shape)  # type: ignore[attr-defined]
    sizes = [n for n in shape if n != 1]
    strides = [s for n, s in zip(shape, access[0].strides) if n != 1] if isinstance(access[0], Access) else None
    return strides == list(contiguous(sizes)) and access[0].offset == 0 and product(shape) == whole


def _forward(copy: Operation) -> None:
    """Lets readers read what the copy reads; only what the caller holds in its hands needs memory of its own."""
    result, source = copy.results[0], copy.operands[0]
    result.replace_uses_with_if(source, lambda use: use.operation.name not in ("graph.return", "graph.assign"))


def is_conversion(op: Operation) -> bool:
    """Whether an operation does nothing but convert elements of one tensor."""
    if len(op.operands) != 1 or not isinstance(op.properties["accesses"].data[0], Access):  # type: ignore[union-attr]
        return False
    body = list(op.regions[0].block.ops)
    return len(body) == 2 and body[0].name in CONVERSIONS and body[1].operands[0] is body[0].results[0]


def _inline(cast: Operation, reader: Operation, operand: int) -> None:
    """Lets `reader` read what `cast` reads, if that is smaller or if the reader broadcasts the cast's result."""
    accesses = list(reader.properties["accesses"].data)  # type: ignore[union-attr]
    domain, access = reader.properties["domain"].data, accesses[operand]  # type: ignore[union-attr]
    if not isinstance(access, Access) or not (_widens(cast) or _repeats(access, domain)):
        return
    made, inner = cast.properties["domain"].data, cast.properties["accesses"].data[0]  # type: ignore[union-attr]
    seen = through(access, domain, made, inner)
    if seen is None:
        return
    accesses[operand] = seen
    reader.properties["accesses"] = ArrayAttr(accesses)
    reader.operands[operand] = cast.operands[0]
    block = reader.regions[0].block
    old = block.args[operand]
    new = block.insert_arg(cast.operands[0].type.dtype, operand)  # type: ignore[attr-defined]
    first, body = block.first_op, cast.regions[0].block
    conversion = body.first_op
    assert first is not None and conversion is not None
    copy = conversion.clone({body.args[0]: new})
    block.insert_op_before(copy, first)
    old.replace_all_uses_with(copy.results[0])
    block.erase_arg(old)


def _widens(cast: Operation) -> bool:
    return bytes_of(cast.operands[0].type.dtype) < bytes_of(cast.results[0].type.dtype)  # type: ignore[attr-defined]


def _repeats(access: Access, domain: tuple) -> bool:
    """Whether the reader visits elements more than once."""
    moving = product(n for n, s in zip(domain, access.strides, strict=True) if s != 0)
    return moving != product(domain)
