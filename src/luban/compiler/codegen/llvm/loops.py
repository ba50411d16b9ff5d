"""tile.for: serial and unrolled loops; the other roles have files of their own."""

from __future__ import annotations

from typing import Any

from luban.compiler.codegen.llvm.context import Context, emit_block, emits, parts_of, uniform_of
from luban.compiler.codegen.llvm.parallel import emit_parallel
from luban.compiler.codegen.llvm.strips import emit_strip, strip_of
from luban.compiler.codegen.llvm.values import Buffer, Uniform, Value, Varying, constant, vector_type
from luban.compiler.codegen.llvm.vectorise import emit_vector, holds_vector_loop
from luban.errors import ConfigError


@emits("tile.for")
def _for(ctx: Context, op: Any) -> None:
    role = op.role.data
    if role == "parallel":
        emit_parallel(ctx, op)
        return
    lower = uniform_of(ctx, op.lower, "a loop bound")
    upper = uniform_of(ctx, op.upper, "a loop bound")
    if role == "unroll":
        results = _unroll(ctx, op, lower, upper)
    elif role == "vector" and ctx.width == 1 and not holds_vector_loop(op):
        results = emit_vector(ctx, op, lower, upper)
    else:
        results = _serial(ctx, op, lower, upper)
    ctx.values.update(zip(op.results, results, strict=True))


def _unroll(ctx: Context, op: Any, lower: Uniform, upper: Uniform) -> list[Value]:
    """Every iteration written out, with its index as a number."""
    if lower.number is None or upper.number is None:
        raise ConfigError("a loop with the role unroll needs numbers as bounds; make it serial")
    block = op.body.block
    carried = [ctx.values[value] for value in op.init]
    for index in range(int(lower.number), int(upper.number)):
        ctx.values[block.args[0]] = constant("i64", index)
        ctx.values.update(zip(block.args[1:], carried, strict=True))
        carried = [ctx.values[value] for value in emit_block(ctx, block)]
    return carried


def _serial(ctx: Context, op: Any, lower: Uniform, upper: Uniform) -> list[Value]:
    """A loop whose carried values are scalars, or vectors of lanes where they differ among the lanes around it."""
    block = op.body.block
    inits = [ctx.values[value] for value in op.init]
    spread = [
        not isinstance(init, Uniform) or arg in ctx.varying for init, arg in zip(inits, block.args[1:], strict=True)
    ]
    carried: list[tuple[str, str]] = []
    for init, wide in zip(inits, spread, strict=True):
        carried += [(_type_of(ctx, init, wide), part) for part in _parts(ctx, init, wide)]

    def body(index: Uniform, names: list[str]) -> list[str]:
        ctx.values[block.args[0]] = index
        ctx.values.update(zip(block.args[1:], _gathered(ctx, inits, spread, names, ctx.depth), strict=True))
        yielded = [ctx.values[value] for value in emit_block(ctx, block)]
        return [text for value, wide in zip(yielded, spread, strict=True) for text in _parts(ctx, value, wide)]

    last = emit_strip(ctx, strip_of(lower, upper, 1), carried, body)
    return _gathered(ctx, inits, spread, last, ctx.depth)


def _type_of(ctx: Context, value: Value, wide: bool) -> str:
    return vector_type(value.type, ctx.width if wide else 1)


def _parts(ctx: Context, value: Value, wide: bool) -> list[str]:
    if wide:
        return parts_of(ctx, value)
    assert isinstance(value, Uniform | Buffer)
    return [value.text if isinstance(value, Uniform) else value.pointer]


def _gathered(ctx: Context, inits: list[Value], spread: list[bool], texts: list[str], depth: int) -> list[Value]:
    """Carried values again, from a flat list of operand texts."""
    values: list[Value] = []
    rest = iter(texts)
    for init, wide in zip(inits, spread, strict=True):
        if wide:
            values.append(Varying(init.type, tuple(next(rest) for _ in range(ctx.copies))))
        else:
            values.append(Uniform(init.type, next(rest), depth))
    return values
