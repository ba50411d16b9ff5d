"""What the scalar operations of `arith` and `math` compute, as NumPy functions on arrays, and the random numbers.

Both interpreters and constant folding use this table. Elementary functions are evaluated in float64 and rounded once,
so that results are an oracle for generated code; + - * / and sqrt are exactly rounded in the operation's own type.

Random numbers are Philox4x32-10 with this layout: the four counter words are (counter's low 32 bits, counter's high
32 bits, 0, 0), the two key words are (seed's low 32 bits, seed's high 32 bits). With w0, w1 the first two output words:
    bits     w0, zero-extended
    uniform  (w0 >> 8) * 2**-24, in [0, 1)
    normal   sqrt(-2 * ln(u1)) * cos(2 * pi * u2), u1 = ((w0 >> 8) + 1) * 2**-24 in (0, 1], u2 = (w1 >> 8) * 2**-24
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xdsl.dialects.arith import CMPF_COMPARISON_OPERATIONS, CMPI_COMPARISON_OPERATIONS
from xdsl.dialects.builtin import BFloat16Type, FloatAttr
from xdsl.ir import Operation

from luban.compiler.ir.numeric_types import conform, numpy_dtype
from luban.errors import ConfigError

Function = Callable[..., Any]  # (op, *operand arrays) -> array, or a tuple of arrays for several results
FUNCTIONS: dict[str, Function] = {}


def evaluate(op: Operation, operands: Sequence[Any]) -> list[np.ndarray]:
    """The results of one arith or math operation on arrays that broadcast. Raises ConfigError for an unknown one."""
    function = FUNCTIONS.get(op.name)
    if function is None:
        raise ConfigError(f"the interpreter has no meaning for {op.name}; add it to luban.compiler.ir.scalar_semantics")
    with np.errstate(all="ignore"):
        values = function(op, *operands)
        listed = values if isinstance(values, tuple) else (values,)
        return [conform(v, r.type) for v, r in zip(listed, op.results, strict=False)]


def semantics(*names: str) -> Callable[[Function], Function]:
    """Registers a function as the meaning of the operations of these names."""

    def register(function: Function) -> Function:
        for name in names:
            FUNCTIONS[name] = function
        return function

    return register


def signed(x: Any) -> np.ndarray:
    """Integers as they are; i1 as 0 and -1."""
    array = np.asarray(x)
    return -array.astype(np.int8) if array.dtype == np.bool_ else array


def unsigned(x: Any) -> np.ndarray:
    """The same bits read without a sign; i1 as 0 and 1."""
    array = np.asarray(x)
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _simple(name: str, function: Callable[..., Any], convert: Callable[[Any], Any] = np.asarray) -> None:
    def apply(op: Operation, *operands: Any) -> Any:
        result = np.asarray(function(*[convert(x) for x in operands]))
        # Unsigned results go back to the signed dtype of the same width, so that `conform` never sees them as foreign.
        return result.view(np.dtype(f"i{result.dtype.itemsize}")) if result.dtype.kind == "u" else result

    FUNCTIONS[name] = apply


def _truncated_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient, remainder = np.floor_divide(a, b), np.remainder(a, b)
    return quotient + ((remainder != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _ordered(a: np.ndarray, b: np.ndarray, pick: Callable[..., Any], first_when_less: bool) -> np.ndarray:
    """max or min that orders -0.0 below 0.0; `pick` is NumPy's own, which settles everything else."""
    both_zero = (a == 0) & (b == 0)
    zero = np.where(np.signbit(a) == first_when_less, a, b)
    return np.where(both_zero, zero, pick(a, b))


_INTEGER_BINARY: dict[str, Callable[..., Any]] = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "andi": np.bitwise_and, "ori": np.bitwise_or,
    "xori": np.bitwise_xor, "divsi": _truncated_quotient, "floordivsi": np.floor_divide, "minsi": np.minimum,
    "ceildivsi": lambda a, b: -np.floor_divide(-a, b), "remsi": np.fmod, "maxsi": np.maximum, "shrsi": np.right_shift,
    "shli": np.left_shift,
}  # fmt: skip
_UNSIGNED_BINARY: dict[str, Callable[..., Any]] = {
    "divui": np.floor_divide, "remui": np.remainder, "minui": np.minimum, "maxui": np.maximum, "shrui": np.right_shift,
    "ceildivui": lambda a, b: np.floor_divide(a, b) + (np.remainder(a, b) != 0).astype(a.dtype),
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Any]] = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod, "negf": np.negative,
    "maximumf": lambda a, b: _ordered(a, b, np.maximum, False),
    "minimumf": lambda a, b: _ordered(a, b, np.minimum, True),
    "maxnumf": lambda a, b: _ordered(a, b, np.fmax, False), "minnumf": lambda a, b: _ordered(a, b, np.fmin, True),
}  # fmt: skip
for _name, _function in _INTEGER_BINARY.items():
    _simple(f"arith.{_name}", _function, signed)
for _name, _function in _UNSIGNED_BINARY.items():
    _simple(f"arith.{_name}", _function, unsigned)
for _name, _function in _FLOAT.items():
    _simple(f"arith.{_name}", _function)


def _float64(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(*[np.asarray(x).astype(np.float64) for x in operands])


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(np.float64)


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return np.copysign(np.abs(whole) + (np.abs(x - whole) >= 0.5), x)


_ELEMENTARY: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos,
    "atan": np.arctan, "atan2": np.arctan2,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1.0 / np.sqrt(x), "cbrt": np.cbrt, "erf": _erf, "powf": np.power,
    "fpowi": np.power, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip
_EXACT: dict[str, Callable[..., Any]] = {
    "absf": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "roundeven": np.rint,
    "round": _round_half_away, "copysign": np.copysign, "absi": np.abs,
}  # fmt: skip
for _name, _function in _ELEMENTARY.items():
    _simple(f"math.{_name}", _float64(_function))
for _name, _function in _EXACT.items():
    _simple(f"math.{_name}", _function)


@semantics("arith.constant")
def _constant(op: Operation) -> Any:
    attribute = op.properties["value"]
    if isinstance(attribute, FloatAttr):
        return np.float64(attribute.value.data)
    return np.int64(attribute.value.data)


@semantics("arith.cmpi")
def _cmpi(op: Operation, a: Any, b: Any) -> Any:
    predicate = CMPI_COMPARISON_OPERATIONS[op.properties["predicate"].value.data]
    convert = unsigned if predicate.startswith("u") else signed
    return _ORDER[predicate[-2:]](convert(a), convert(b))


@semantics("arith.cmpf")
def _cmpf(op: Operation, a: Any, b: Any) -> Any:
    predicate = CMPF_COMPARISON_OPERATIONS[op.properties["predicate"].value.data]
    unordered = np.isnan(a) | np.isnan(b)
    if predicate in _FIXED:
        return _FIXED[predicate](unordered)
    holds = _ORDER[predicate[1:]](a, b)
    return holds | unordered if predicate.startswith("u") else holds & ~unordered


_ORDER: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_FIXED: dict[str, Function] = {
    "false": np.zeros_like, "true": np.ones_like, "ord": np.logical_not, "uno": np.asarray,
}  # fmt: skip


@semantics("arith.select")
def _select(op: Operation, condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)


@semantics(
    "arith.extf",
    "arith.truncf",
    "arith.extui",
    "arith.trunci",
    "arith.uitofp",
    "arith.index_cast",
    "arith.index_castui",
)
def _convert_unsigned(op: Operation, x: Any) -> Any:
    narrow = np.asarray(x)
    if op.name in ("arith.extui", "arith.uitofp", "arith.index_castui"):
        narrow = unsigned(narrow)
    if isinstance(op.results[0].type, BFloat16Type):
        return narrow.astype(np.float32)
    return narrow if narrow.dtype != np.bool_ else narrow.astype(np.uint8)


@semantics("arith.extsi", "arith.sitofp")
def _convert_signed(op: Operation, x: Any) -> Any:
    return signed(x)


@semantics("arith.fptosi", "arith.fptoui")
def _float_to_integer(op: Operation, x: Any) -> Any:
    whole = np.trunc(np.asarray(x).astype(np.float64))
    return whole.astype(np.uint64 if op.name.endswith("ui") else np.int64)


@semantics("arith.bitcast")
def _bitcast(op: Operation, x: Any) -> Any:
    source, target = op.operands[0].type, op.results[0].type
    bits = np.asarray(x)
    if isinstance(source, BFloat16Type):
        bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
    if isinstance(target, BFloat16Type):
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view(numpy_dtype(target))


@semantics("math.ipowi")
def _ipowi(op: Operation, a: Any, b: Any) -> Any:
    base, exponent = signed(a), signed(b)
    positive = np.power(base, np.maximum(exponent, 0))
    inverse = np.where(base == 1, 1, np.where(base == -1, np.where(exponent % 2 == 0, 1, -1), 0)).astype(base.dtype)
    return np.where(exponent < 0, inverse, positive)


@semantics("math.ctpop", "math.ctlz", "math.cttz")
def _count_bits(op: Operation, x: Any) -> Any:
    bits = unsigned(x)
    width = op.results[0].type.width.data
    if op.name == "math.ctpop":
        return np.bitwise_count(bits).astype(np.int64)
    places = range(width - 1, -1, -1) if op.name == "math.ctlz" else range(width)
    count, open_ = np.zeros(bits.shape, np.int64), np.ones(bits.shape, bool)
    for place in places:
        open_ = open_ & (((bits >> bits.dtype.type(place)) & 1) == 0)
        count = count + open_
    return count


@semantics("arith.addui_extended")
def _add_with_carry(op: Operation, a: Any, b: Any) -> Any:
    total = unsigned(a) + unsigned(b)
    return total.view(np.asarray(a).dtype), total < unsigned(a)


@semantics("arith.mului_extended", "arith.mulsi_extended")
def _wide_product(op: Operation, a: Any, b: Any) -> Any:
    convert = unsigned if op.name == "arith.mului_extended" else signed
    width = op.results[0].type.width.data
    product = convert(a).astype(object) * convert(b).astype(object)
    return _wrap(product, width, np.asarray(a).dtype), _wrap(product >> width, width, np.asarray(a).dtype)


def _wrap(values: Any, width: int, dtype: np.dtype) -> np.ndarray:
    low = np.asarray(values % (1 << width)).astype(np.uint64)
    return low.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)


def philox(seed: Any, counter: Any) -> tuple[np.ndarray, ...]:
    """The four output words (uint64 arrays below 2**32) of Philox4x32-10 in the layout that the module text gives."""
    seed64, counter64 = np.asarray(seed, np.int64).view(np.uint64), np.asarray(counter, np.int64).view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    k0, k1 = seed64 & low, seed64 >> half
    c0, c1 = counter64 & low, counter64 >> half
    c2: Any = np.uint64(0)
    c3: Any = np.uint64(0)
    with np.errstate(over="ignore"):
        for _ in range(10):
            p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
            c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.asarray(c0), np.asarray(c1), np.asarray(c2), np.asarray(c3)


def random(kind: str, seed: Any, counter: Any) -> np.ndarray:
    """graph.random and tile.random: "uniform" and "normal" as float64 before rounding, or "bits" as int64."""
    w0, w1, _, _ = philox(seed, counter)
    if kind == "bits":
        return w0.astype(np.int64)
    top = (w0 >> np.uint64(8)).astype(np.float64)
    if kind == "uniform":
        return top * 2.0**-24
    if kind == "normal":
        angle = 2 * np.pi * (w1 >> np.uint64(8)).astype(np.float64) * 2.0**-24
        return np.sqrt(-2 * np.log((top + 1) * 2.0**-24)) * np.cos(angle)
    raise ConfigError(f"there is no random kind {kind!r}; use uniform, normal or bits")
