"""tile.load, tile.store, tile.check and tile.random.

A load that was done before, or of what was just stored, gives the value that is known already: this is what keeps a row
in registers through all the passes over it.
"""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import f16, f32, f64, i32, i64
from xdsl.ir import SSAValue

from luban.compiler.codegen.triton.context import Context, emits
from luban.compiler.codegen.triton.expressions import (
    ADD,
    MUL,
    Value,
    binary,
    dim_value,
    literal,
    plain_number,
    tensor,
)  # fmt: skip
from luban.compiler.codegen.triton.hazards import SCALAR
from luban.compiler.codegen.triton.reductions import combined
from luban.compiler.codegen.triton.scratch import Variable
from luban.errors import ConfigError

_ATOMICS = {
    "add": "tl.atomic_add",
    "max": "tl.atomic_max",
    "min": "tl.atomic_min",
    "and": "tl.atomic_and",
    "or": "tl.atomic_or",
}
_ATOMIC_TYPES = {
    "add": (f16, f32, f64, i32, i64),
    "max": (f32, i32, i64),
    "min": (f32, i32, i64),
    "and": (i32, i64),
    "or": (i32, i64),
}


def position(ctx: Context, op: Any) -> Value:
    """offset + sum of stride * index of a load or store; what is the same in all lanes comes first."""
    return linear([(ctx.values[i], s) for i, s in zip(op.indices, op.strides.data, strict=True)], op.offset.data[0])


def linear(terms: list[tuple[Value, Any]], offset: Any) -> Value:
    """offset + sum of value * stride."""
    total: Value | None = None
    number = offset if isinstance(offset, int) else 0
    products = [] if isinstance(offset, int) else [dim_value(offset)]
    for value, stride in terms:
        if value.number is not None and isinstance(stride, int):
            number += value.number * stride
        elif stride == 1:
            products.append(value)
        elif stride != 0:
            products.append(binary("*", value, dim_value(stride), MUL))
    for product in sorted(products, key=lambda v: len(v.axes)):
        total = product if total is None else binary("+", total, product, ADD)
    if total is None:
        return literal(number, i64)
    return total if number == 0 else binary("+", total, literal(number, i64), ADD)


def pointer(ctx: Context, buffer: SSAValue, index: Value) -> str:
    """The address of an element, as text."""
    base = ctx.buffer(buffer)
    return base if index.number == 0 else f"{base} + {index.at(ADD)}"


def mask_text(ctx: Context, axes: frozenset[int], condition: Value | None) -> str:
    """The mask of an access that varies along these axes; empty where every lane may go."""
    parts = [ctx.axes[a].mask for a in sorted(axes) if ctx.axes[a].mask is not None]
    if condition is not None:
        parts.append(condition.at(4))
    return " & ".join(p for p in parts if p)


def _spread(ctx: Context, index: Value) -> Value:
    """The same index for every lane of the whole block."""
    return Value(f"{index.at(ADD)} + tl.zeros({ctx.shape}, tl.int64)", i64, ctx.all_axes, ADD)


def _condition(ctx: Context, op: Any) -> Value | None:
    found = ctx.values[op.mask] if op.mask is not None else None
    return None if found is not None and found.number else found


@emits("tile.load")
def _load(ctx: Context, op: Any) -> None:
    kept = ctx.scratch.get(op.buffer)
    if isinstance(kept, Variable):
        axes = ctx.all_axes if kept.size else frozenset[int]()
        text = kept.name if kept.stores == 1 else ctx.assign("x", kept.name)
        ctx.values[op.result] = Value(text, op.result.type, axes)
        return
    condition = _condition(ctx, op)
    if condition is not None and condition.number is not None:
        ctx.values[op.result] = literal(0, op.result.type)
        return
    index = position(ctx, op)
    if condition is not None and not condition.axes <= index.axes:
        index = _spread(ctx, index)
    address, mask = pointer(ctx, op.buffer, index), mask_text(ctx, index.axes, condition)
    known = _known(ctx, (op.buffer, address, mask))
    if known is None:
        _wait(ctx, ctx.hazards.load(op.buffer, address if index.axes else SCALAR))
        other = f", mask={mask}, other={plain_number(0, op.result.type)}" if mask else ""
        known = Value(ctx.assign("x", f"tl.load({address}{other})"), op.result.type, index.axes)
        ctx.scopes[-1][op.buffer, address, mask] = known
    ctx.values[op.result] = known


def _known(ctx: Context, key: Any) -> Value | None:
    return next((scope[key] for scope in ctx.scopes if key in scope), None)


def forget(ctx: Context, buffers: set[SSAValue]) -> None:
    """Drops what is known of the contents of buffers."""
    for scope in ctx.scopes:
        for key in [k for k in scope if isinstance(k, tuple) and k[0] in buffers]:
            del scope[key]


def _wait(ctx: Context, needed: bool) -> None:
    if needed:
        barrier(ctx)


def barrier(ctx: Context) -> None:
    """All threads of the program wait for each other."""
    ctx.line("tl.debug_barrier()")
    ctx.hazards.clear()


@emits("tile.store")
def _store(ctx: Context, op: Any) -> None:
    value, kept = ctx.values[op.value], ctx.scratch.get(op.buffer)
    if isinstance(kept, Variable):
        ctx.line(f"{kept.name} = {ctx.filled(value, op.value.type)}")
        return
    condition = _condition(ctx, op)
    if condition is not None and condition.number is not None:
        return
    index, kind = position(ctx, op), op.combine.data
    lanes = index.axes | (condition.axes if condition is not None else frozenset())
    if kind != "none" and ctx.axes:
        _atomic(ctx, op, index, value, condition)
        return
    if not value.axes <= lanes:
        raise ConfigError(f"a tile.store in kernel {ctx.kernel} writes differing lanes to one place; reduce them first")
    if lanes != index.axes:
        index = _spread(ctx, index)
    address, mask = pointer(ctx, op.buffer, index), mask_text(ctx, index.axes, condition)
    key = address if index.axes else SCALAR
    if kind != "none":
        _wait(ctx, ctx.hazards.load(op.buffer, key))
        old = Value(ctx.assign("x", f"tl.load({address}{', mask=' + mask if mask else ''})"), value.type)
        value = combined(ctx, kind, old, value)
    elif op.buffer in ctx.read_back:
        value = ctx.held(value)
    _wait(ctx, ctx.hazards.store(op.buffer, key))
    ctx.line(f"tl.store({address}, {value.text}{', mask=' + mask if mask else ''})")
    forget(ctx, {op.buffer})
    if condition is None and value.number is None:
        ctx.scopes[-1][op.buffer, address, mask] = value


def _atomic(ctx: Context, op: Any, index: Value, value: Value, condition: Value | None) -> None:
    """Lanes that may hit the same place combine there one after another."""
    kind = op.combine.data
    if value.type not in _ATOMIC_TYPES.get(kind, ()):
        raise ConfigError(
            f"a tile.store in kernel {ctx.kernel} combines {value.type} lanes by {kind}, "
            "which Triton has no atomic for; make its loop serial"
        )
    index = index if index.axes == ctx.all_axes else _spread(ctx, index)
    address, mask = pointer(ctx, op.buffer, index), mask_text(ctx, index.axes, condition)
    _wait(ctx, ctx.hazards.store(op.buffer, None))
    ctx.line(f"{_ATOMICS[kind]}({address}, {ctx.filled(value, value.type)}{', mask=' + mask if mask else ''})")
    forget(ctx, {op.buffer})


@emits("tile.check")
def _check(ctx: Context, op: Any) -> None:
    index, bound = ctx.held(ctx.values[op.index], "index"), dim_value(op.bound.data[0])
    status = ctx.use_argument("status")
    text = tensor(index)
    inside = ctx.assign("inside", f"({text} >= 0) & ({text} < {bound.at(1)})")
    if index.axes:
        mask = " & ".join([f"({inside} == 0)", *filter(None, [mask_text(ctx, index.axes, None)])])
        ctx.line(f"tl.store({status} + {text} * 0, 1, mask={mask})")
    else:
        ctx.line(f"tl.store({status}, 1, mask={inside} == 0)")
    ctx.give(op.result, Value(f"tl.where({inside}, {text}, 0)", i64, index.axes), "index")


@emits("tile.random")
def _random(ctx: Context, op: Any) -> None:
    seed, counter = ctx.values[op.seed], ctx.values[op.counter]
    name = ctx.helper(f"random_{op.kind.data}")
    text = f"{name}({tensor(seed)}, {tensor(counter)})"
    ctx.give(op.result, Value(text, op.result.type, seed.axes | counter.axes))


@emits("tile.dim")
def _dim(ctx: Context, op: Any) -> None:
    ctx.give(op.result, dim_value(op.value.data[0]), "size")
