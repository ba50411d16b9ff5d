"""Products of wide integers as plain reductions: no chip's dot unit of ours computes them, and they are rare."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Block, Region

from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, Dims


def to_reduction(op: graph.ContractOp) -> None:
    """Replaces a contraction by a reduction over its k dims, in the element type of the result."""
    dtype = op.out.type.dtype
    body = Block(arg_types=[dtype, dtype])
    product = arith.MuliOp(*body.args)
    body.add_ops([product, graph.YieldOp.create(operands=[product.result])])
    domain, accesses, reduced = op.domain.data, list(op.accesses), op.counts.data[3].data
    if not reduced:  # a reduction has at least one dim
        domain, reduced = (*domain, 1), 1
        accesses = [Access.of([*a.strides, 0], a.offset) for a in accesses]
    new = graph.ReduceOp.create(
        operands=list(op.operands),
        result_types=[op.out.type],
        properties={
            "domain": Dims(domain),
            "reduced": IntAttr(reduced),
            "kinds": ArrayAttr([StringAttr("add")]),
            "accesses": ArrayAttr(accesses),
        },
        regions=[Region(body)],
    )
    block = op.parent
    assert block is not None
    block.insert_op_before(new, op)
    op.out.replace_all_uses_with(new.results[0])
    op.detach()
    op.erase()
