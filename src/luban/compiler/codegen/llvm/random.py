"""tile.random: Philox4x32-10, written once for scalars and vectors.

The counter words are (counter low, counter high, 0, 0), the key (seed low, seed high).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from luban.compiler.codegen.llvm import mathlib
from luban.compiler.codegen.llvm.context import Context, emits
from luban.compiler.codegen.llvm.emitter import Function
from luban.compiler.codegen.llvm.scalar_ops import elementwise
from luban.compiler.codegen.llvm.values import literal, vector_type
from luban.errors import ConfigError

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_UNIT = 2.0**-24


@emits("tile.random")
def _random(ctx: Context, op: Any) -> None:
    finish = _KINDS.get(op.kind.data)
    if finish is None:
        raise ConfigError(f"tile.random has no kind {op.kind.data!r}; use one of {', '.join(_KINDS)}")

    def build(ctx: Context, types: list[str], width: int, texts: list[str]) -> str:
        fn = ctx.fn
        name = _philox(fn, width)
        words = fn.call(_words_type(width), name, [(vector_type("i64", width), text) for text in texts])
        first, second = (fn.op(f"extractvalue {_words_type(width)} {words}, {i}") for i in (0, 1))
        return finish(fn, width, first, second)

    elementwise(ctx, op, build)


def _words_type(width: int) -> str:
    word = vector_type("i32", width)
    return f"{{ {word}, {word} }}"


def _philox(fn: Function, width: int) -> str:
    """The function (seed, counter) -> the first two of the four random words, added to the module once a width."""
    name = f"luban.philox.{width}"
    if name not in fn.module.functions:
        wide = vector_type("i64", width)
        inner = Function(
            fn.module,
            name,
            _words_type(width),
            [(wide, "seed"), (wide, "counter")],
            "internal",
            "alwaysinline nounwind",
        )
        words = _rounds(inner, width)
        pair = "poison"
        for position, word in enumerate(words[:2]):
            pair = inner.op(f"insertvalue {_words_type(width)} {pair}, {vector_type('i32', width)} {word}, {position}")
        inner.emit(f"ret {_words_type(width)} {pair}")
        fn.module.add(inner)
    return f"@{name}"


def _rounds(fn: Function, width: int) -> list[str]:
    vector, wide = vector_type("i32", width), vector_type("i64", width)

    def low(text: str) -> str:
        return fn.op(f"trunc {wide} {text} to {vector}")

    def high(text: str) -> str:
        return low(fn.op(f"lshr {wide} {text}, {fn.splat('i64', '32', width)}"))

    zero = fn.splat("i32", "0", width)
    counter = [low("%counter"), high("%counter"), zero, zero]
    key = [low("%seed"), high("%seed")]
    for number in range(_ROUNDS):
        if number:
            key = [
                fn.op(f"add {vector} {k}, {_number(fn, step, width)}") for k, step in zip(key, _KEY_STEPS, strict=True)
            ]
        products = [_product(fn, width, counter[place], _MULTIPLIERS[i]) for i, place in enumerate((0, 2))]
        counter = [
            _xor(fn, vector, high(products[1]), counter[1], key[0]),
            low(products[1]),
            _xor(fn, vector, high(products[0]), counter[3], key[1]),
            low(products[0]),
        ]
    return counter


def _number(fn: Function, number: int, width: int) -> str:
    return fn.splat("i32", literal("i32", number), width)


def _product(fn: Function, width: int, word: str, multiplier: int) -> str:
    wide = vector_type("i64", width)
    extended = fn.op(f"zext {vector_type('i32', width)} {word} to {wide}")
    return fn.op(f"mul nuw {wide} {extended}, {fn.splat('i64', str(multiplier), width)}")


def _xor(fn: Function, vector: str, a: str, b: str, c: str) -> str:
    return fn.op(f"xor {vector} {fn.op(f'xor {vector} {a}, {b}')}, {c}")


def _fraction(fn: Function, width: int, word: str, plus: int) -> str:
    """((word >> 8) + plus) * 2^-24."""
    vector, floats = vector_type("i32", width), vector_type("float", width)
    top = fn.op(f"lshr {vector} {word}, {fn.splat('i32', '8', width)}")
    if plus:
        top = fn.op(f"add {vector} {top}, {fn.splat('i32', str(plus), width)}")
    number = fn.op(f"uitofp nneg {vector} {top} to {floats}")
    return fn.op(f"fmul {floats} {number}, {fn.splat('float', literal('float', _UNIT), width)}")


def _uniform(fn: Function, width: int, first: str, _second: str) -> str:
    return _fraction(fn, width, first, 0)


def _normal(fn: Function, width: int, first: str, second: str) -> str:
    """Box-Muller: sqrt(-2 ln u1) * cos(2 pi u2), u1 in (0, 1] and u2 in [0, 1)."""
    floats = vector_type("float", width)

    def times(a: str, number: float) -> str:
        return fn.op(f"fmul {floats} {a}, {fn.splat('float', literal('float', number), width)}")

    logarithm = mathlib.call(fn, "log", "float", width, [_fraction(fn, width, first, 1)])
    square = times(logarithm, -2.0)
    suffix = f"v{width}f32" if width > 1 else "f32"
    radius = fn.intrinsic(f"llvm.sqrt.{suffix}", floats, [(floats, square)])
    angle = times(_fraction(fn, width, second, 0), 6.283185307179586)
    cosine = mathlib.call(fn, "cos", "float", width, [angle])
    return fn.op(f"fmul {floats} {radius}, {cosine}")


def _bits(fn: Function, width: int, first: str, _second: str) -> str:
    return fn.op(f"zext {vector_type('i32', width)} {first} to {vector_type('i64', width)}")


_KINDS: dict[str, Callable[[Function, int, str, str], str]] = {"uniform": _uniform, "normal": _normal, "bits": _bits}
