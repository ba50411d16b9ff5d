"""`arith` and `math` operations as expressions. Half-width floats are computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdsl.dialects.arith import CMPF_COMPARISON_OPERATIONS, CMPI_COMPARISON_OPERATIONS
from xdsl.dialects.builtin import f32, i1, i32, i64
from xdsl.ir import Attribute, Operation

from luban.compiler.codegen.triton.context import Context, emits
from luban.compiler.codegen.triton.expressions import (
    ADD,
    ATOM,
    LOW,
    MUL,
    SIGN,
    Value,
    binary,
    call,
    is_half,
    literal,
    tensor,
    tl_type,
)  # fmt: skip
from luban.compiler.codegen.triton.extents import is_nonnegative
from luban.compiler.ir.numeric_types import conform
from luban.compiler.ir.scalar_semantics import evaluate

Rule = Callable[..., Value]  # (ctx, op, *operands) -> value
_WHOLE = ("arith.select", "arith.bitcast", "arith.extf", "arith.truncf", "arith.fptosi", "arith.fptoui")
UNSIGNED = {"int8": "uint8", "int16": "uint16", "int32": "uint32", "int64": "uint64"}


def expresses(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function that gives the expression of the operations with these names."""

    def register(rule: Rule) -> Rule:
        emits(*names)(lambda ctx, op: _emit(ctx, op, rule))
        return rule

    return register


def _emit(ctx: Context, op: Operation, rule: Rule) -> None:
    operands = [ctx.values[v] for v in op.operands]
    result = op.results[0]
    if operands and all(v.number is not None for v in operands):
        numbers = [conform(v.number, v.type) for v in operands]
        ctx.give(result, literal(evaluate(op, numbers)[0].item(), result.type))
        return
    if op.name not in _WHOLE:
        operands = [v.to(f32) if is_half(v.type) and v.number is None else v for v in operands]
        operands = [literal(v.number, f32) if is_half(v.type) else v for v in operands]
    value = rule(ctx, op, *operands)
    if is_half(result.type) and value.type == f32:
        value = value.to(result.type)
    ctx.give(result, value)


@emits("arith.constant")
def _constant(ctx: Context, op: Any) -> None:
    ctx.give(op.results[0], literal(op.properties["value"].value.data, op.results[0].type))


# ---- plain signs

for _name, _sign, _level in [
    ("addf", "+", ADD), ("subf", "-", ADD), ("mulf", "*", MUL), ("divf", "/", MUL),
    ("subi", "-", ADD), ("ori", "|", LOW), ("xori", "^", LOW), ("andi", "&", LOW), ("shli", "<<", LOW),
    ("shrsi", ">>", LOW), ("divsi", "//", MUL), ("remsi", "%", MUL),
]:  # fmt: skip
    expresses(f"arith.{_name}")(lambda ctx, op, a, b, s=_sign, n=_level: binary(s, a, b, n))


@expresses("arith.addi", "arith.muli")
def _integer(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    add = op.name == "arith.addi"
    if a.type == i1:
        return binary("^" if add else "&", a, b, LOW)
    neutral = 0 if add else 1
    if a.number == neutral or b.number == neutral:
        return b if a.number == neutral else a
    if not add and 0 in (a.number, b.number):
        return literal(0, a.type)
    return binary("+" if add else "*", a, b, ADD if add else MUL)


@expresses("arith.negf")
def _negate(ctx: Context, op: Operation, a: Value) -> Value:
    return Value(f"-{a.at(ATOM)}", a.type, a.axes, SIGN)


# ---- integers without a sign, and divisions that round otherwise than Triton's


def unsigned(value: Value) -> Value:
    """The same bits read without a sign; its type stays the signed one's, for converting back."""
    name = UNSIGNED[tl_type(value.type).removeprefix("tl.")]
    return Value(f"{tensor(value)}.to(tl.{name})", value.type, value.axes)


def signed(value: Value) -> Value:
    """Back from `unsigned`."""
    return Value(f"{value.at(ATOM)}.to({tl_type(value.type)})", value.type, value.axes)


@expresses("arith.divui", "arith.remui")
def _unsigned_quotient(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    sign = "//" if op.name.endswith("divui") else "%"
    if b.number == 1:
        return a if sign == "//" else literal(0, a.type)
    if all(is_nonnegative(v) for v in op.operands):
        return binary(sign, a, b, MUL)
    return signed(binary(sign, unsigned(a), unsigned(b), MUL))


@expresses("arith.ceildivui")
def _unsigned_quotient_up(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    a, b = ctx.held(unsigned(a)), ctx.held(unsigned(b))
    return signed(Value(f"{a.text} // {b.text} + (({a.text} % {b.text}) != 0)", a.type, a.axes | b.axes, LOW))


@expresses("arith.shrui")
def _shift_unsigned(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    return signed(binary(">>", unsigned(a), unsigned(b), LOW))


@expresses("arith.floordivsi", "arith.ceildivsi")
def _rounded_quotient(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    if op.name == "arith.floordivsi" and all(is_nonnegative(v) for v in op.operands):
        return binary("//", a, b, MUL)
    a, b = ctx.held(a), ctx.held(b)
    down = op.name == "arith.floordivsi"
    inexact = f"({a.text} % {b.text} != 0) & (({a.text} < 0) {'!=' if down else '=='} ({b.text} < 0))"
    quotient = ctx.held(binary("//", a, b, MUL)).text
    return Value(f"tl.where({inexact}, {quotient} {'-' if down else '+'} 1, {quotient})", a.type, a.axes | b.axes)


# ---- extremes, choices, comparisons

_EXTREMES = {
    "maxsi": "tl.maximum", "minsi": "tl.minimum", "maxnumf": "tl.maximum", "minnumf": "tl.minimum",
    "maximumf": "tl.maximum", "minimumf": "tl.minimum", "maxui": "tl.maximum", "minui": "tl.minimum",
}  # fmt: skip


@expresses(*(f"arith.{name}" for name in _EXTREMES))
def _extreme(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    name = op.name.removeprefix("arith.")
    if name.endswith("ui"):
        return signed(call(_EXTREMES[name], unsigned(a), unsigned(b)))
    value = call(_EXTREMES[name], a, b)
    if name in ("maximumf", "minimumf"):
        return Value(f"{value.text[:-1]}, propagate_nan=tl.PropagateNan.ALL)", value.type, value.axes)
    return value


def where(condition: Value, a: Value, b: Value) -> Value:
    """a where the condition holds, else b."""
    left = tensor(a) if a.number is not None and b.number is not None else a.text
    return Value(f"tl.where({condition.text}, {left}, {b.text})", a.type, condition.axes | a.axes | b.axes)


@expresses("arith.select")
def _select(ctx: Context, op: Operation, condition: Value, a: Value, b: Value) -> Value:
    if condition.number is not None:
        return a if condition.number else b
    return where(condition, a, b)


_ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@expresses("arith.cmpi")
def _compare_integers(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    predicate = CMPI_COMPARISON_OPERATIONS[op.properties["predicate"].value.data]  # type: ignore[attr-defined]
    if a.type == i1:
        a, b = (Value(f"{tensor(v)}.to(tl.int32)", i32, v.axes) for v in (a, b))
        if predicate[0] == "s":  # a set bit is -1
            a, b = b, a
    elif predicate[0] == "u":
        a, b = unsigned(a), unsigned(b)
    return binary(_ORDER[predicate[-2:]], a, b, LOW, i1)


@expresses("arith.cmpf")
def _compare_floats(ctx: Context, op: Operation, a: Value, b: Value) -> Value:
    predicate = CMPF_COMPARISON_OPERATIONS[op.properties["predicate"].value.data]  # type: ignore[attr-defined]
    if predicate in ("false", "true"):
        return literal(predicate == "true", i1)
    axes = a.axes | b.axes
    if predicate == "une" or (predicate[0] == "o" and predicate not in ("one", "ord")):
        return binary(_ORDER[predicate[1:]], a, b, LOW, i1)  # what == and the rest mean for NaN already
    a, b = ctx.held(a), ctx.held(b)
    nan = " | ".join(f"({v.text} != {v.text})" for v in (a, b) if v.number is None or v.number != v.number)
    ordered = " & ".join(f"({v.text} == {v.text})" for v in (a, b) if v.number is None or v.number != v.number)
    if predicate in ("uno", "ord"):
        return Value(nan if predicate == "uno" else ordered, i1, axes, LOW)
    holds = f"({a.text} {_ORDER[predicate[1:]]} {b.text})"
    return Value(f"{holds} & {ordered}" if predicate == "one" else f"{holds} | {nan}", i1, axes, LOW)


# ---- conversions


@expresses("arith.extf", "arith.truncf", "arith.index_cast", "arith.fptosi")
def _convert(ctx: Context, op: Operation, a: Value) -> Value:
    ty = op.results[0].type
    return a if a.type == ty else a.to(ty)


@expresses("arith.trunci")
def _narrow(ctx: Context, op: Operation, a: Value) -> Value:
    ty = op.results[0].type
    return binary("!=", binary("&", a, literal(1, i64), LOW), literal(0, i64), LOW, i1) if ty == i1 else a.to(ty)


@expresses("arith.extsi", "arith.sitofp")
def _widen_signed(ctx: Context, op: Operation, a: Value) -> Value:
    wide = a.to(_wide(op.results[0].type))
    return Value(f"-{wide.text}", wide.type, wide.axes, SIGN) if a.type == i1 else wide


@expresses("arith.extui", "arith.uitofp", "arith.index_castui")
def _widen_unsigned(ctx: Context, op: Operation, a: Value) -> Value:
    ty = _wide(op.results[0].type)
    if a.type == i1:
        return a.to(ty)
    return Value(f"{unsigned(a).text}.to({tl_type(ty)})", ty, a.axes)


@expresses("arith.fptoui")
def _float_to_unsigned(ctx: Context, op: Operation, a: Value) -> Value:
    ty = op.results[0].type
    name = UNSIGNED[tl_type(ty).removeprefix("tl.")]
    return Value(f"{tensor(a)}.to(tl.{name}).to({tl_type(ty)})", ty, a.axes)


@expresses("arith.bitcast")
def _bitcast(ctx: Context, op: Operation, a: Value) -> Value:
    ty = op.results[0].type
    return Value(f"{tensor(a)}.to({tl_type(ty)}, bitcast=True)", ty, a.axes)


def _wide(ty: Attribute) -> Attribute:
    """Integers become half floats by way of float32."""
    return f32 if is_half(ty) else ty


# ---- math

for _name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"):
    expresses(f"math.{_name}")(lambda ctx, op, a, n=_name: call(f"tl.{n}", a))
for _name in ("absf", "absi"):
    expresses(f"math.{_name}")(lambda ctx, op, a: call("tl.abs", a))
for _name, _helper in {
    "expm1": "expm1", "log1p": "log1p", "tanh": "tanh", "sinh": "sinh", "cosh": "cosh", "asinh": "asinh",
    "acosh": "acosh", "atanh": "atanh", "trunc": "trunc", "round": "round_away", "roundeven": "round_even",
    "copysign": "copysign", "powf": "pow", "ipowi": "ipow",
}.items():  # fmt: skip
    expresses(f"math.{_name}")(lambda ctx, op, *operands, h=_helper: call(ctx.helper(h), *operands))


@expresses("math.log10")
def _log10(ctx: Context, op: Operation, a: Value) -> Value:
    return binary("*", call("tl.log", a), literal(0.4342944819032518, a.type), MUL)


@expresses("math.tan")
def _tan(ctx: Context, op: Operation, a: Value) -> Value:
    a = ctx.held(a)
    return Value(f"tl.sin({a.text}) / tl.cos({a.text})", a.type, a.axes, MUL)


@expresses("math.fma")
def _fma(ctx: Context, op: Operation, a: Value, b: Value, c: Value) -> Value:
    return binary("+", binary("*", a, b, MUL), c, ADD)  # Triton contracts this where the chip can


__all__ = ["UNSIGNED", "expresses", "signed", "unsigned", "where"]
