"""Scalar operations (`arith`, `math`, `tile.dim`): for every one, what writes it for a scalar or for a vector of lanes.

bfloat16 and float16 arithmetic is done in float32 and rounded after every operation. Float operations carry `contract`,
which lets LLVM fuse a multiply with an add, and nothing else; maximum and minimum add `nsz`, since the frameworks do
not define which zero they give and honouring it costs x86 three instructions more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdsl.dialects.builtin import FloatAttr

from luban.compiler.codegen.llvm import mathlib
from luban.compiler.codegen.llvm.context import Context, at_depth, dim_value, emits, parts_of
from luban.compiler.codegen.llvm.dots.flow import mangled
from luban.compiler.codegen.llvm.small_floats import narrow, widen
from luban.compiler.codegen.llvm.values import (
    SMALL_FLOATS,
    Uniform,
    Value,
    Varying,
    constant,
    scalar_type,
    splat,
    vector_type,
)

# build(ctx, types of the operands and of the result, width, operand texts) -> text of the result
Build = Callable[[Context, list[str], int, list[str]], str]

CMPI = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
CMPF = (
    "false",
    "oeq",
    "ogt",
    "oge",
    "olt",
    "ole",
    "one",
    "ord",
    "ueq",
    "ugt",
    "uge",
    "ult",
    "ule",
    "une",
    "uno",
    "true",
)


def elementwise(ctx: Context, op: Any, build: Build) -> None:
    """Writes `build` once where all operands are uniform, else once for each vector in flight."""
    values: list[Value] = [ctx.values[operand] for operand in op.operands]
    types = [value.type for value in values] + [scalar_type(op.results[0].type)]
    if all(isinstance(value, Uniform) for value in values):
        depth = max((value.depth for value in values), default=0)  # type: ignore[union-attr]
        with at_depth(ctx, depth):
            text = build(ctx, types, 1, [value.text for value in values])  # type: ignore[union-attr]
        ctx.values[op.results[0]] = Uniform(types[-1], text, depth)
        return
    columns = [parts_of(ctx, value) for value in values]
    parts = tuple(build(ctx, types, ctx.width, list(texts)) for texts in zip(*columns, strict=True))
    ctx.values[op.results[0]] = Varying(types[-1], parts)


def convert_float(ctx: Context, source: str, target: str, width: int, text: str) -> str:
    """A float as another float type. float64 goes to the small types by way of float32, as the frameworks do."""
    if source == target:
        return text
    if source in SMALL_FLOATS:
        return convert_float(ctx, "float", target, width, widen(ctx, source, width, text))
    if target in SMALL_FLOATS:
        return narrow(ctx, target, width, convert_float(ctx, source, "float", width, text))
    word = "fpext" if source == "float" else "fptrunc"
    return ctx.fn.op(f"{word} {vector_type(source, width)} {text} to {vector_type(target, width)}")


def working_type(ty: str) -> str:
    """The type in which arithmetic on `ty` is done."""
    return "float" if ty in SMALL_FLOATS else ty


def binary(ctx: Context, instruction: str, ty: str, width: int, a: str, b: str) -> str:
    """One two-operand instruction; on small floats in float32, rounded after."""
    work = working_type(ty)
    if work != ty:
        a, b = (convert_float(ctx, ty, work, width, text) for text in (a, b))
    result = ctx.fn.op(f"{instruction} {vector_type(work, width)} {a}, {b}")
    return convert_float(ctx, work, ty, width, result) if work != ty else result


def intrinsic(ctx: Context, name: str, ty: str, width: int, arguments: list[str], flags: str = "") -> str:
    """An overloaded LLVM intrinsic whose arguments and result are all of one type; small floats go through float32."""
    work = working_type(ty)
    if work != ty:
        arguments = [convert_float(ctx, ty, work, width, text) for text in arguments]
    vector = vector_type(work, width)
    suffix = mangled(width, work) if width > 1 else mangled(1, work)[2:]
    result = ctx.fn.intrinsic(f"llvm.{name}.{suffix}", vector, [(vector, text) for text in arguments], flags)
    return convert_float(ctx, work, ty, width, result) if work != ty else result


def math_call(ctx: Context, name: str, ty: str, width: int, arguments: list[str]) -> str:
    """An elementary function of the math library."""
    work = working_type(ty)
    arguments = [convert_float(ctx, ty, work, width, text) for text in arguments]
    return convert_float(ctx, work, ty, width, mathlib.call(ctx.fn, name, work, width, arguments))


# -- tables: operation -> how it is written

_INSTRUCTIONS = {
    "arith.addf": "fadd contract",
    "arith.subf": "fsub contract",
    "arith.mulf": "fmul contract",
    "arith.andi": "and",
    "arith.ori": "or",
    "arith.xori": "xor",
    "arith.shli": "shl",
    "arith.shrsi": "ashr",
    "arith.shrui": "lshr",
}
_INTRINSICS = {
    "arith.maximumf": ("maximum", "nsz"),
    "arith.minimumf": ("minimum", "nsz"),
    "arith.maxnumf": ("maxnum", "nsz"),
    "arith.minnumf": ("minnum", "nsz"),
    "arith.maxui": ("umax", ""),
    "arith.minui": ("umin", ""),
    "math.absf": ("fabs", ""),
    "math.ceil": ("ceil", ""),
    "math.floor": ("floor", ""),
    "math.trunc": ("trunc", ""),
    "math.round": ("round", ""),
    "math.roundeven": ("roundeven", ""),
    "math.sqrt": ("sqrt", ""),
    "math.copysign": ("copysign", ""),
    "math.fma": ("fma", ""),
    "math.ctpop": ("ctpop", ""),
}
_ELEMENTARY = (
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf exp exp2 expm1 log log10 log1p log2 rsqrt sin sinh tan "
    "tanh"
).split()


def _register_instruction(name: str, instruction: str) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return binary(ctx, instruction, types[-1], width, *texts)

    emits(name)(lambda ctx, op: elementwise(ctx, op, build))


def _register_intrinsic(name: str, intrinsic_name: str, flags: str) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return intrinsic(ctx, intrinsic_name, types[-1], width, texts, flags)

    emits(name)(lambda ctx, op: elementwise(ctx, op, build))


def _register_elementary(name: str, function: str) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return math_call(ctx, function, types[-1], width, texts)

    emits(name)(lambda ctx, op: elementwise(ctx, op, build))


for _name, _instruction in _INSTRUCTIONS.items():
    _register_instruction(_name, _instruction)
for _name, (_intrinsic, _flags) in _INTRINSICS.items():
    _register_intrinsic(_name, _intrinsic, _flags)
for _name in _ELEMENTARY:
    _register_elementary(f"math.{_name}", _name)
_register_elementary("math.powf", "pow")


# -- operations with their own shape


@emits("arith.constant")
def _constant(ctx: Context, op: Any) -> None:
    attribute = op.value
    number = attribute.value.data
    if isinstance(attribute, FloatAttr):
        number = float(number)
    ctx.values[op.results[0]] = constant(scalar_type(op.results[0].type), number)


@emits("tile.dim")
def _dim(ctx: Context, op: Any) -> None:
    ctx.values[op.results[0]] = dim_value(ctx, op.value.data[0])


@emits("arith.negf")
def _negf(ctx: Context, op: Any) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[-1])
        wide = convert_float(ctx, types[-1], work, width, texts[0])
        return convert_float(ctx, work, types[-1], width, ctx.fn.op(f"fneg {vector_type(work, width)} {wide}"))

    elementwise(ctx, op, build)


@emits("arith.cmpf")
def _cmpf(ctx: Context, op: Any) -> None:
    predicate = CMPF[op.predicate.value.data]

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[0])
        a, b = (convert_float(ctx, types[0], work, width, text) for text in texts)
        return ctx.fn.op(f"fcmp {predicate} {vector_type(work, width)} {a}, {b}")

    elementwise(ctx, op, build)


@emits("arith.select")
def _select(ctx: Context, op: Any) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        vector = vector_type(types[-1], width)
        return ctx.fn.op(f"select {vector_type('i1', width)} {texts[0]}, {vector} {texts[1]}, {vector} {texts[2]}")

    elementwise(ctx, op, build)


@emits("math.absi")
def _absi(ctx: Context, op: Any) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        return intrinsic(ctx, "smax", types[-1], width, [texts[0], _negated(ctx, types[-1], width, texts[0])])

    elementwise(ctx, op, build)


def _negated(ctx: Context, ty: str, width: int, text: str) -> str:
    return ctx.fn.op(f"sub {vector_type(ty, width)} {splat(ctx.fn, ty, '0', width)}, {text}")


@emits("math.ctlz", "math.cttz")
def _count_zeros(ctx: Context, op: Any) -> None:
    name = op.name.removeprefix("math.")

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        vector = vector_type(types[-1], width)
        suffix = mangled(width, types[-1]) if width > 1 else types[-1]
        return ctx.fn.intrinsic(f"llvm.{name}.{suffix}", vector, [(vector, texts[0]), ("i1", "false")])

    elementwise(ctx, op, build)


@emits("math.fpowi")
def _fpowi(ctx: Context, op: Any) -> None:
    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[-1])
        exponent = ctx.fn.op(f"sitofp {vector_type(types[1], width)} {texts[1]} to {vector_type(work, width)}")
        base = convert_float(ctx, types[0], work, width, texts[0])
        return convert_float(ctx, work, types[-1], width, math_call(ctx, "pow", work, width, [base, exponent]))

    elementwise(ctx, op, build)
