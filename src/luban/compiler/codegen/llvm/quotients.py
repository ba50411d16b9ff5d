"""Division of floats. A vector by a divisor that is the same for all lanes is three multiplications.

A vector division keeps the divider busy for 16 cycles (x86, 512 bits); with the divisor's reciprocal known outside of
the loop it is a product and one correction: q = a r, then q + (a - q d) r. Where r is rounded right and nothing
underflows this is the rounded quotient (Markstein); an operand below the normal range can cost its last place.
"""

from __future__ import annotations

import math
from typing import Any

from luban.compiler.codegen.llvm.context import Context, at_depth, emits, parts_of, splat_uniform
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.mathlib.lanes import INFINITY, Lanes, Value
from luban.compiler.codegen.llvm.scalar_ops import binary, convert_float, elementwise, working_type
from luban.compiler.codegen.llvm.values import Uniform, Varying, literal, scalar_type, vector_type

# Divisors between 1 / these bounds and these bounds have normal reciprocals.
_BOUNDS = {"float": 2.0**126, "double": 2.0**1022}


@emits("arith.divf")
def _divf(ctx: Context, op: Any) -> None:
    divisor = ctx.values[op.operands[1]]
    dividend = ctx.values[op.operands[0]]
    if isinstance(divisor, Uniform) and not isinstance(dividend, Uniform) and not _exact_reciprocal(divisor):
        _by_uniform(ctx, op, dividend, divisor)
        return
    elementwise(
        ctx, op, lambda ctx, types, width, texts: binary(ctx, "fdiv contract", types[-1], width, texts[0], texts[1])
    )


def _exact_reciprocal(divisor: Uniform) -> bool:
    """A power of two: LLVM turns the division into one product by itself."""
    return divisor.number is not None and abs(math.frexp(divisor.number)[0]) == 0.5


def _by_uniform(ctx: Context, op: Any, dividend: Any, divisor: Uniform) -> None:
    ty = scalar_type(op.results[0].type)
    work = working_type(ty)
    wide = _in_type(ctx, divisor, work)
    reciprocal, usual = _reciprocal(ctx, wide)
    d, r = splat_uniform(ctx, wide), splat_uniform(ctx, reciprocal)
    parts = []
    for part in parts_of(ctx, dividend):
        a = convert_float(ctx, ty, work, ctx.width, part)
        parts.append(convert_float(ctx, work, ty, ctx.width, _quotient(ctx.fn, work, ctx.width, a, d, r, usual.text)))
    ctx.values[op.results[0]] = Varying(ty, tuple(parts))


def _in_type(ctx: Context, value: Uniform, ty: str) -> Uniform:
    if value.type == ty:
        return value
    if value.number is not None:
        return Uniform(ty, literal(ty, value.number), 0, value.number)
    with at_depth(ctx, value.depth):
        return Uniform(ty, convert_float(ctx, value.type, ty, 1, value.text), value.depth)


def _reciprocal(ctx: Context, divisor: Uniform) -> tuple[Uniform, Uniform]:
    """1 / divisor and whether both are normal numbers, computed where the divisor is known."""
    ty, bound = divisor.type, _BOUNDS[divisor.type]
    with at_depth(ctx, divisor.depth) as fn:
        lanes = Lanes(fn, ty, 1)
        d = Value(lanes, divisor.text, ty)
        r = lanes.constant(1.0, ty) / d
        size = lanes.abs(r)
        usual = lanes.emit(f"and i1 {(size <= bound).text}, {(size >= 1 / bound).text}", "i1")
    return Uniform(ty, r.text, divisor.depth), Uniform("i1", usual.text, divisor.depth)


def _quotient(fn: Function, ty: str, width: int, a: str, d: str, r: str, usual: str) -> str:
    """Calls @luban.quotient.<type>.<width>(a, d, 1 / d, whether 1 / d is usual), which is always inlined."""
    name, vector = f"luban.quotient.{ty}.{width}", vector_type(ty, width)
    if name not in fn.module.functions:
        parameters = [(vector, "a"), (vector, "d"), (vector, "r"), ("i1", "usual")]
        inner = Function(fn.module, name, vector, parameters, "internal", "alwaysinline nounwind")
        _write_quotient(inner, Lanes(inner, ty, width), vector)
        fn.module.add(inner)
    return fn.call(vector, f"@{name}", [(vector, a), (vector, d), (vector, r), ("i1", usual)])


def _write_quotient(fn: Function, lanes: Lanes, vector: str) -> None:
    a, d, r = (Value(lanes, f"%{n}", lanes.elem) for n in "adr")
    q = a * r
    better = lanes.fma(lanes.fma(-q, d, a), r, q)
    # infinity, and NaN, stay: their correction would be NaN
    fast = lanes.select(lanes.abs(q) < INFINITY, better, q)
    plain, done = fn.new_block("plain"), fn.new_block("done")
    fn.branch_if("%usual", done, plain)
    fn.place(plain)
    slow = a / d
    fn.branch(done)
    fn.place(done)
    fn.emit(f"ret {vector} {fn.op(f'phi {vector} [ {fast.text}, %entry ], [ {slow.text}, %{plain} ]')}")
