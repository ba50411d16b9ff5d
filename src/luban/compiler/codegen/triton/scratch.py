"""tile.alloc: block values where all of it is one block, else a place in a workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xdsl.ir import Block, Operation

from luban.compiler.codegen.triton.blocks import Blocks, power_of_two
from luban.compiler.codegen.triton.context import Context, emits
from luban.compiler.codegen.triton.expressions import MUL, dim_value
from luban.compiler.codegen.triton.extents import as_dim, trip_bound
from luban.compiler.ir import tile


@dataclass(frozen=True)
class Variable:
    """Scratch held in a variable: a block of `size` lanes, or one scalar (size 0), stored by `stores` operations."""

    name: str
    size: int
    stores: int


def variable_size(alloc: tile.AllocOp, blocks: Blocks) -> int | None:
    """Lanes of the block that can hold the buffer, 0 where a scalar can, None where it has to be memory."""
    uses = [use.operation for use in alloc.buffer.uses]
    if not uses or not all(_plain(op) for op in uses):
        return None
    home = alloc.parent_block()
    first = next(op for op in alloc.parent_op().walk() if op in uses)  # type: ignore[union-attr]
    if not isinstance(first, tile.StoreOp) or not _right_below(first, home):
        return None
    if alloc.elements.data[0] == 1:
        stores = [op for op in uses if isinstance(op, tile.StoreOp)]
        return 0 if all(_loops_once(op, home) for op in stores) else None
    sizes = {_whole_block(op, home, blocks) for op in uses}
    return sizes.pop() if len(sizes) == 1 else None


def _plain(op: Operation) -> bool:
    if isinstance(op, tile.StoreOp):
        return op.mask is None and op.combine.data == "none"
    return isinstance(op, tile.LoadOp) and op.mask is None


def _right_below(op: Operation, home: Block | None) -> bool:
    """At the level of the allocation, or in a loop that stands there."""
    block = op.parent_block()
    return block is home or op.parent_op().parent_block() is home  # type: ignore[union-attr]


def _vector_loops(op: Operation, home: Block | None) -> list[tile.ForOp]:
    found = []
    block = op.parent_block()
    while block is not home and block is not None:
        parent: Any = block.parent_op()
        if isinstance(parent, tile.DotOp) or (isinstance(parent, tile.ForOp) and parent.role.data == "vector"):
            found.append(parent)
        block = parent.parent_block()
    return found


def _loops_once(op: Operation, home: Block | None) -> bool:
    """Whether no lanes are in flight where the operation stands."""
    return all(isinstance(v, tile.ForOp) and trip_bound(v.lower, v.upper) == 1 for v in _vector_loops(op, home))


def _whole_block(op: Any, home: Block | None, blocks: Blocks) -> int | None:
    """Lanes of the single vector loop around an access of element [its index]; None for any other access."""
    loops = _vector_loops(op, home)
    if len(loops) != 1 or not isinstance(loops[0], tile.ForOp) or op.parent_op() is not loops[0]:
        return None
    loop = loops[0]
    bound = trip_bound(loop.lower, loop.upper)
    if bound is None or not 1 < bound <= blocks.row or as_dim(loop.lower) != 0 or op.offset.data[0] != 0:
        return None
    terms = [(i, s) for i, s in zip(op.indices, op.strides.data, strict=True) if s != 0 and as_dim(i) != 0]
    return power_of_two(bound) if terms == [(loop.body.block.args[0], 1)] else None


@emits("tile.alloc")
def _alloc(ctx: Context, op: tile.AllocOp) -> None:
    if op.buffer in ctx.buffers:  # shared by several entries
        return
    size = variable_size(op, ctx.blocks)
    if size is not None:
        stores = sum(isinstance(use.operation, tile.StoreOp) for use in op.buffer.uses)
        ctx.scratch[op.buffer] = Variable(ctx.name("kept"), size, stores)
        return
    ctx.buffers[op.buffer] = ctx.new_workspace(op.buffer, op.elements.data[0])
    if ctx.program is not None:
        name, each = ctx.buffer(op.buffer), dim_value(op.elements.data[0]).at(MUL)
        ctx.scratch[op.buffer] = ctx.assign("scratch", f"{name} + {ctx.program} * {each}")
