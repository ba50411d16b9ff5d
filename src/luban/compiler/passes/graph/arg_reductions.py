"""Turns argmax and argmin into two plain reductions: the extreme value, then the lowest position that holds it.

Both are reductions that lanes and threads may reorder, so no kernel has to carry pairs of a value and a position; fusion
puts them in one kernel, as it does with a softmax's maximum and sum. A NaN wins over every number, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, IntAttr, IntegerAttr, ModuleOp, StringAttr
from xdsl.ir import Block, Operation, SSAValue

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import INDEX, Access, Dims, TensorType, contiguous
from luban.compiler.ir.dtypes import is_float
from luban.compiler.passes.registry import register
from luban.symbolic import Dim

NOWHERE = 2**63 - 1


@register
@dataclass(frozen=True)
class ArgReductions:
    """See the module."""

    name: ClassVar[str] = "arg_reductions"

    def apply(self, module: ModuleOp) -> None:
        for func in module.body.block.ops:
            if isinstance(func, graph.FuncOp):
                for op in list(func.body.block.ops):
                    if isinstance(op, graph.ReduceOp) and any(k.data.startswith("arg") for k in op.kinds):
                        _split(op)


def _split(op: graph.ReduceOp) -> None:
    kinds = [k.data for k in op.kinds]
    plain = [k.removeprefix("arg") for k in kinds]
    extremes = _reduce(op, list(op.ins), list(op.accesses), plain, graph.yielded(op), op.body.clone())
    body = op.body.clone()
    block = body.block
    access = Access.of([*contiguous(op.parallel), *[0] * op.reduced.data])
    wanted = [i for i, k in enumerate(kinds) if k.startswith("arg")]
    found = [block.insert_arg(extremes.results[i].type.dtype, len(block.args)) for i in wanted]  # type: ignore[attr-defined]
    end = block.last_op
    assert end is not None
    place = _position(block, end, op.domain.data[len(op.parallel) :], len(op.parallel))
    yields = [_where(block, end, end.operands[i], best, place) for i, best in zip(wanted, found)]
    end.operands = yields
    ins = [*op.ins, *(extremes.results[i] for i in wanted)]
    accesses = [*op.accesses, *[access] * len(wanted)]
    places = _reduce(op, ins, accesses, ["min"] * len(wanted), yields, body)
    parent = op.parent
    assert parent is not None
    parent.insert_op_before(extremes, op)
    parent.insert_op_before(places, op)
    for i, result in enumerate(op.results):
        result.replace_all_uses_with(places.results[wanted.index(i)] if i in wanted else extremes.results[i])
    op.detach()
    op.erase()


def _reduce(
    op: graph.ReduceOp, ins, accesses, kinds: Sequence[str], yields: Sequence[SSAValue], body
) -> graph.ReduceOp:
    return graph.ReduceOp.create(
        operands=ins,
        result_types=[TensorType.of(op.parallel, v.type) for v in yields],
        properties={
            "domain": op.domain,
            "reduced": op.reduced,
            "kinds": ArrayAttr([StringAttr(k) for k in kinds]),
            "accesses": ArrayAttr(accesses),
        },
        regions=[body],
    )


def _position(block: Block, end: Operation, sizes: Sequence[Dim], first: int) -> SSAValue:
    """The flat position in the reduced dims, computed before `end`."""

    def add(made: Operation) -> SSAValue:
        block.insert_op_before(made, end)
        return made.results[0]

    place: SSAValue | None = None
    for d, size in enumerate(sizes):
        index = add(graph.IndexOp.create(properties={"dim": IntAttr(first + d)}, result_types=[INDEX]))
        if place is not None:
            extent = add(graph.DimOp.create(properties={"value": Dims((size,))}, result_types=[INDEX]))
            index = add(arith.AddiOp(add(arith.MuliOp(place, extent)), index))
        place = index
    assert place is not None
    return place


def _where(block: Block, end: Operation, value: SSAValue, best: SSAValue, place: SSAValue) -> SSAValue:
    """`place` where the value is the best one, else a position behind all others."""

    def add(made: Operation) -> SSAValue:
        block.insert_op_before(made, end)
        return made.results[0]

    if is_float(value.type):
        nan = add(arith.AndIOp(add(arith.CmpfOp(value, value, "uno")), add(arith.CmpfOp(best, best, "uno"))))
        same = add(arith.OrIOp(add(arith.CmpfOp(value, best, "oeq")), nan))
    else:
        same = add(arith.CmpiOp(value, best, "eq"))
    nowhere = add(arith.ConstantOp(IntegerAttr(NOWHERE, INDEX)))
    return add(arith.SelectOp(same, place, nowhere))
