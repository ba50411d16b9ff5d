"""Scalar operations (`arith`, `math`, `tile.dim`): for every one, what writes it for a scalar or for a vector of lanes.

bfloat16 and float16 arithmetic is done in float32 and rounded after every operation. Float operations carry `contract`,
which lets LLVM fuse a multiply with an add, and nothing else; maximum and minimum add `nsz`, since the frameworks do not
define which zero they give and honouring it costs x86 three instructions more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdsl.dialects.builtin import FloatAttr

from luban.compiler.codegen.llvm import mathlib
from luban.compiler.codegen.llvm.context import Context, dim_value, emits, parts_of
from luban.compiler.codegen.llvm.dots.flow import mangled
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.values import (
    FLOATS,
    SMALL_FLOATS,
    Uniform,
    Value,
    Varying,
    constant,
    literal,
    scalar_type,
    vector_type,
)

# build(fn, types of the operands and of the result, width, operand texts) -> text of the result
Build = Callable[[Function, list[str], int, list[str]], str]

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
BITS = {"bfloat": 16, "half": 16, "float": 32, "double": 64}


def elementwise(ctx: Context, op: Any, build: Build) -> None:
    """Writes `build` once where all operands are uniform, else once for each vector in flight."""
    values: list[Value] = [ctx.values[operand] for operand in op.operands]
    types = [value.type for value in values] + [scalar_type(op.results[0].type)]
    if all(isinstance(value, Uniform) for value in values):
        text = build(ctx.fn, types, 1, [value.text for value in values])  # type: ignore[union-attr]
        depth = max((value.depth for value in values), default=0)  # type: ignore[union-attr]
        ctx.values[op.results[0]] = Uniform(types[-1], text, depth)
        return
    columns = [parts_of(ctx, value) for value in values]
    parts = tuple(build(ctx.fn, types, ctx.width, list(texts)) for texts in zip(*columns, strict=True))
    ctx.values[op.results[0]] = Varying(types[-1], parts)


def convert_float(fn: Function, source: str, target: str, width: int, text: str) -> str:
    """A float as another float type. double goes to the small types by way of float, as the frameworks do."""
    if source == target:
        return text
    if "double" in (source, target) and (source in SMALL_FLOATS or target in SMALL_FLOATS):
        return convert_float(fn, "float", target, width, convert_float(fn, source, "float", width, text))
    if source in SMALL_FLOATS and target in SMALL_FLOATS:
        return convert_float(fn, "float", target, width, convert_float(fn, source, "float", width, text))
    word = "fpext" if BITS[source] < BITS[target] else "fptrunc"
    return fn.op(f"{word} {vector_type(source, width)} {text} to {vector_type(target, width)}")


def working_type(ty: str) -> str:
    """The type in which arithmetic on `ty` is done."""
    return "float" if ty in SMALL_FLOATS else ty


def binary(fn: Function, instruction: str, ty: str, width: int, a: str, b: str) -> str:
    """One two-operand instruction; on small floats in float32, rounded after."""
    work = working_type(ty)
    if work != ty:
        a, b = (convert_float(fn, ty, work, width, text) for text in (a, b))
    result = fn.op(f"{instruction} {vector_type(work, width)} {a}, {b}")
    return convert_float(fn, work, ty, width, result) if work != ty else result


def intrinsic(fn: Function, name: str, ty: str, width: int, arguments: list[str], flags: str = "") -> str:
    """An overloaded LLVM intrinsic whose arguments and result are all of one type; small floats go through float32."""
    work = working_type(ty)
    if work != ty:
        arguments = [convert_float(fn, ty, work, width, text) for text in arguments]
    vector = vector_type(work, width)
    suffix = mangled(width, work) if width > 1 else mangled(1, work)[2:]
    result = fn.intrinsic(f"llvm.{name}.{suffix}", vector, [(vector, text) for text in arguments], flags)
    return convert_float(fn, work, ty, width, result) if work != ty else result


def math_call(fn: Function, name: str, ty: str, width: int, arguments: list[str]) -> str:
    """An elementary function of the math library."""
    work = working_type(ty)
    arguments = [convert_float(fn, ty, work, width, text) for text in arguments]
    return convert_float(fn, work, ty, width, mathlib.call(fn, name, work, width, arguments))


# -- tables: operation -> how it is written

_INSTRUCTIONS = {
    "arith.addf": "fadd contract",
    "arith.subf": "fsub contract",
    "arith.mulf": "fmul contract",
    "arith.divf": "fdiv contract",
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
    "arith.maxsi": ("smax", ""),
    "arith.minsi": ("smin", ""),
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
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf exp exp2 expm1 log log10 log1p log2 rsqrt sin sinh tan tanh"
).split()


def _register_instruction(name: str, instruction: str) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        return binary(fn, instruction, types[-1], width, *texts)

    emits(name)(lambda ctx, op: elementwise(ctx, op, build))


def _register_intrinsic(name: str, intrinsic_name: str, flags: str) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        return intrinsic(fn, intrinsic_name, types[-1], width, texts, flags)

    emits(name)(lambda ctx, op: elementwise(ctx, op, build))


def _register_elementary(name: str, function: str) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        return math_call(fn, function, types[-1], width, texts)

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
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[-1])
        wide = convert_float(fn, types[-1], work, width, texts[0])
        return convert_float(fn, work, types[-1], width, fn.op(f"fneg {vector_type(work, width)} {wide}"))

    elementwise(ctx, op, build)


@emits("arith.cmpf")
def _cmpf(ctx: Context, op: Any) -> None:
    predicate = CMPF[op.predicate.value.data]

    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[0])
        a, b = (convert_float(fn, types[0], work, width, text) for text in texts)
        return fn.op(f"fcmp {predicate} {vector_type(work, width)} {a}, {b}")

    elementwise(ctx, op, build)


@emits("arith.select")
def _select(ctx: Context, op: Any) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        vector = vector_type(types[-1], width)
        return fn.op(f"select {vector_type('i1', width)} {texts[0]}, {vector} {texts[1]}, {vector} {texts[2]}")

    elementwise(ctx, op, build)


@emits("math.absi")
def _absi(ctx: Context, op: Any) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        return intrinsic(fn, "smax", types[-1], width, [texts[0], _negated(fn, types[-1], width, texts[0])])

    elementwise(ctx, op, build)


def _negated(fn: Function, ty: str, width: int, text: str) -> str:
    return fn.op(f"sub {vector_type(ty, width)} {fn.splat(ty, '0', width)}, {text}")


@emits("math.ctlz", "math.cttz")
def _count_zeros(ctx: Context, op: Any) -> None:
    name = op.name.removeprefix("math.")

    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        vector = vector_type(types[-1], width)
        suffix = mangled(width, types[-1]) if width > 1 else types[-1]
        return fn.intrinsic(f"llvm.{name}.{suffix}", vector, [(vector, texts[0]), ("i1", "false")])

    elementwise(ctx, op, build)


@emits("math.fpowi")
def _fpowi(ctx: Context, op: Any) -> None:
    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[-1])
        exponent = fn.op(f"sitofp {vector_type(types[1], width)} {texts[1]} to {vector_type(work, width)}")
        base = convert_float(fn, types[0], work, width, texts[0])
        return convert_float(fn, work, types[-1], width, math_call(fn, "pow", work, width, [base, exponent]))

    elementwise(ctx, op, build)


# -- conversions


@emits("arith.extf", "arith.truncf")
def _float_to_float(ctx: Context, op: Any) -> None:
    elementwise(ctx, op, lambda fn, types, width, texts: convert_float(fn, types[0], types[1], width, texts[0]))


@emits("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")
def _integer_to_integer(ctx: Context, op: Any) -> None:
    source, target = (scalar_type(value.type) for value in (op.operands[0], op.results[0]))
    if source == target:
        ctx.values[op.results[0]] = ctx.values[op.operands[0]]
        return
    grow = "zext" if op.name == "arith.extui" else "sext"
    word = grow if int(source[1:]) < int(target[1:]) else "trunc"
    elementwise(ctx, op, lambda fn, types, width, texts: _cast(fn, word, types, width, texts[0]))
    _keep_span(ctx, op, source, signed=word == "sext")


def _keep_span(ctx: Context, op: Any, source: str, signed: bool) -> None:
    """What widening tells about the range of an integer, for the division of indices."""
    result = ctx.values[op.results[0]]
    bits = int(source[1:])
    if isinstance(result, Varying) and not signed and bits <= 16 and op.name == "arith.extui":
        ctx.values[op.results[0]] = Varying(result.type, result.parts, (0, (1 << bits) - 1))


@emits("arith.sitofp", "arith.uitofp")
def _integer_to_float(ctx: Context, op: Any) -> None:
    word = op.name.removeprefix("arith.")

    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        work = working_type(types[1])
        return convert_float(fn, work, types[1], width, _cast(fn, word, [types[0], work], width, texts[0]))

    elementwise(ctx, op, build)


@emits("arith.fptosi", "arith.fptoui")
def _float_to_integer(ctx: Context, op: Any) -> None:
    """Values outside of the integer's range give what the hardware gives (frozen, so that they stay harmless).

    8- and 16-bit results wrap around a 32-bit conversion and unsigned 32-bit ones around a 64-bit one, as in the frameworks.
    """

    def build(fn: Function, types: list[str], width: int, texts: list[str]) -> str:
        source, target = working_type(types[0]), types[1]
        value = convert_float(fn, types[0], source, width, texts[0])
        wide = {"i1": "i32", "i8": "i32", "i16": "i32"}.get(target, target)
        word = "fptosi"
        if op.name == "arith.fptoui" and target == "i32":
            wide = "i64"
        if op.name == "arith.fptoui" and target == "i64":
            word = "fptoui"
        raw = _cast(fn, word, [source, wide], width, value)
        whole = fn.op(f"freeze {vector_type(wide, width)} {raw}")
        return whole if wide == target else _cast(fn, "trunc", [wide, target], width, whole)

    elementwise(ctx, op, build)


@emits("arith.bitcast")
def _bitcast(ctx: Context, op: Any) -> None:
    elementwise(ctx, op, lambda fn, types, width, texts: _cast(fn, "bitcast", types, width, texts[0]))


def _cast(fn: Function, word: str, types: list[str], width: int, text: str) -> str:
    return fn.op(f"{word} {vector_type(types[0], width)} {text} to {vector_type(types[1], width)}")


def identity(ty: str, combine: str, unsigned: bool) -> str:
    """The start of a reduction: what combines with x to x."""
    if combine in ("add", "or"):
        return literal(ty, 0)
    if combine == "and":
        return literal(ty, -1) if ty != "i1" else "true"
    if combine == "mul":
        return literal(ty, 1)
    if ty in FLOATS:
        return literal(ty, float("-inf") if combine == "max" else float("inf"))
    if ty == "i1":
        return "false" if combine == "max" else "true"
    bits = int(ty[1:])
    if unsigned:
        return literal(ty, 0 if combine == "max" else -1)
    return literal(ty, -(1 << (bits - 1)) if combine == "max" else (1 << (bits - 1)) - 1)


_COMBINE_FLOAT = {"add": "fadd contract", "mul": "fmul contract"}
_COMBINE_INTEGER = {"add": "add", "mul": "mul", "and": "and", "or": "or"}


def combine_values(fn: Function, combine: str, ty: str, width: int, a: str, b: str, unsigned: bool = False) -> str:
    """a combined with b, of the kinds that loops and stores name; bools combine with "add"/"max" as or, "mul"/"min" as and."""
    if ty == "i1":
        return binary(fn, "or" if combine in ("add", "max", "or") else "and", ty, width, a, b)
    if combine in ("max", "min"):
        if ty in FLOATS:
            return intrinsic(fn, f"{combine}imum", ty, width, [a, b], "nsz")
        return intrinsic(fn, f"{'u' if unsigned else 's'}{combine}", ty, width, [a, b])
    table = _COMBINE_FLOAT if ty in FLOATS else _COMBINE_INTEGER
    return binary(fn, table[combine], ty, width, a, b)
