"""Arithmetic on whole vectors, written as LLVM IR text: what the elementary functions are made of.

A `Value` is a vector of `width` lanes (a plain scalar when the width is 1) of one element type: `float`, `double`,
`i32`, `i64` or `i1` (a mask). Python numbers become constants of the other operand's type. Nothing is contracted or
reassociated: a fused multiply-add happens only where `fma` says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

from luban.compiler.codegen.llvm.emitter import Function

INTEGER = {"float": "i32", "double": "i64"}
MANGLED = {"float": "f32", "double": "f64"}
MANTISSA_BITS = {"float": 23, "double": 52}
BYTES = {"float": 4, "double": 8}
EXPONENT_BIAS = {"float": 127, "double": 1023}
SIGN_BIT = {"float": 1 << 31, "double": 1 << 63}
# Adding this to |x| < 2^22 (2^51) leaves the nearest integer in the low mantissa bits, without a conversion
# instruction.
ROUNDING_MAGIC = {"float": 1.5 * 2.0**23, "double": 1.5 * 2.0**52}
INFINITY = float("inf")
NAN = float("nan")

Operand: TypeAlias = "Value | float | int"


def literal(elem: str, number: float) -> str:
    """The text of a constant of type `elem`."""
    if elem in ("float", "double"):
        if number != number:
            return "0x7FF8000000000000"
        if elem == "float" and abs(number) != INFINITY:
            number = struct.unpack("<f", struct.pack("<f", number))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    bits = int(elem[1:])
    whole = int(number) & ((1 << bits) - 1)
    return str(whole - (1 << bits) if bits > 1 and whole >> (bits - 1) else whole)


class Value:
    """A vector (or scalar) under construction; the operators emit one instruction each."""

    __slots__ = ("lanes", "text", "elem")

    def __init__(self, lanes: Lanes, text: str, elem: str):
        self.lanes, self.text, self.elem = lanes, text, elem

    def __add__(self, other: Operand) -> Value:
        return self.lanes.binary("fadd", "add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.lanes.binary("fadd", "add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.lanes.binary("fsub", "sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.lanes.binary("fsub", "sub", self.lanes.like(self, other), self)

    def __mul__(self, other: Operand) -> Value:
        return self.lanes.binary("fmul", "mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return self.lanes.binary("fmul", "mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.lanes.binary("fdiv", "sdiv", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.lanes.binary("fdiv", "sdiv", self.lanes.like(self, other), self)

    def __neg__(self) -> Value:
        return self.lanes.emit(f"fneg {self.type} {self.text}", self.elem)

    def __and__(self, other: Operand) -> Value:
        return self.lanes.binary("", "and", self, other)

    def __or__(self, other: Operand) -> Value:
        return self.lanes.binary("", "or", self, other)

    def __xor__(self, other: Operand) -> Value:
        return self.lanes.binary("", "xor", self, other)

    def __invert__(self) -> Value:
        return self.lanes.binary("", "xor", self, -1)

    def __lshift__(self, count: int) -> Value:
        return self.lanes.binary("", "shl", self, count)

    def __rshift__(self, count: int) -> Value:
        """Logical shift: zeros come in from the left."""
        return self.lanes.binary("", "lshr", self, count)

    def ashr(self, count: int) -> Value:
        """Arithmetic shift: the sign comes in from the left."""
        return self.lanes.binary("", "ashr", self, count)

    # Comparisons give masks. On floats they are false where an operand is NaN, except `ne`; on integers they are
    # signed.
    def __lt__(self, other: Operand) -> Value:
        return self.lanes.compare("olt", "slt", self, other)

    def __le__(self, other: Operand) -> Value:
        return self.lanes.compare("ole", "sle", self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.lanes.compare("ogt", "sgt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.lanes.compare("oge", "sge", self, other)

    def eq(self, other: Operand) -> Value:
        return self.lanes.compare("oeq", "eq", self, other)

    def ne(self, other: Operand) -> Value:
        """Different, or either is NaN."""
        return self.lanes.compare("une", "ne", self, other)

    def is_nan(self) -> Value:
        return self.lanes.compare("uno", "", self, self)

    @property
    def type(self) -> str:
        return self.lanes.type(self.elem)


class Lanes:
    """Emits vector instructions of one width into a function; `elem` is the type asked of the elementary function."""

    def __init__(self, fn: Function, elem: str, width: int):
        self.fn, self.elem, self.width = fn, elem, width

    # -- plumbing
    def type(self, elem: str) -> str:
        return elem if self.width == 1 else f"<{self.width} x {elem}>"

    def emit(self, text: str, elem: str) -> Value:
        return Value(self, self.fn.op(text), elem)

    def constant(self, number: float, elem: str) -> Value:
        return Value(self, self.fn.splat(elem, literal(elem, number), self.width), elem)

    def like(self, value: Value, operand: Operand) -> Value:
        """`operand` itself, or the number as a constant of `value`'s type."""
        return operand if isinstance(operand, Value) else self.constant(operand, value.elem)

    def binary(self, float_op: str, int_op: str, a: Value, b: Operand) -> Value:
        op = float_op if a.elem in MANGLED else int_op
        return self.emit(f"{op} {a.type} {a.text}, {self.like(a, b).text}", a.elem)

    def compare(self, float_op: str, int_op: str, a: Value, b: Operand) -> Value:
        op = f"fcmp {float_op}" if a.elem in MANGLED else f"icmp {int_op}"
        return self.emit(f"{op} {a.type} {a.text}, {self.like(a, b).text}", "i1")

    def unsigned_lt(self, a: Value, b: Operand) -> Value:
        return self.emit(f"icmp ult {a.type} {a.text}, {self.like(a, b).text}", "i1")

    def _intrinsic(self, name: str, first: Value, *rest: Operand) -> Value:
        suffix = MANGLED[first.elem] if self.width == 1 else f"v{self.width}{MANGLED[first.elem]}"
        arguments = [(first.type, first.text), *((first.type, self.like(first, v).text) for v in rest)]
        return Value(self, self.fn.intrinsic(f"llvm.{name}.{suffix}", first.type, arguments), first.elem)

    # -- floating point
    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once."""
        return self._intrinsic("fma", a, b, c)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's rule; the constant term comes first."""
        result = self.constant(coefficients[-1], x.elem)
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, x, coefficient)
        return result

    def abs(self, x: Value) -> Value:
        return self._intrinsic("fabs", x)

    def sqrt(self, x: Value) -> Value:
        return self._intrinsic("sqrt", x)

    def floor(self, x: Value) -> Value:
        return self._intrinsic("floor", x)

    def copysign(self, magnitude: Value, sign: Value) -> Value:
        return self._intrinsic("copysign", magnitude, sign)

    def at_most(self, x: Value, bound: Operand) -> Value:
        """min(x, bound); NaN in x stays."""
        limit = self.like(x, bound)
        return self.select(limit < x, limit, x)

    def at_least(self, x: Value, bound: Operand) -> Value:
        """max(x, bound); NaN in x stays."""
        limit = self.like(x, bound)
        return self.select(limit > x, limit, x)

    def nearest(self, x: Value, scale: float, bias: int = 0) -> tuple[Value, Value]:
        """The integer nearest to x * scale, as a float and as bits: the low bits of the second hold it plus `bias`.

        |x * scale| must stay under 2^21 (2^50 in double). Bits above the low 22 (51) are noise.
        """
        magic = ROUNDING_MAGIC[x.elem] + bias
        shifted = self.fma(x, scale, magic)
        return shifted - magic, self.bits(shifted)

    @property
    def scales(self) -> bool:
        """Whether `scale` is one instruction here: whole registers of AVX-512."""
        return "avx512f" in self.fn.module.features and self.width * BYTES[self.elem] == 64

    def scale(self, x: Value, n: Value) -> Value:
        """x * 2^n for a float n that is an integer, rounded once; only where `scales`."""
        name = f"llvm.x86.avx512.mask.scalef.{'ps' if x.elem == 'float' else 'pd'}.512"
        mask = f"i{self.width}"
        listed = [(x.type, x.text), (x.type, n.text), (x.type, "zeroinitializer"), (mask, "-1"), ("i32", "4")]
        return Value(self, self.fn.intrinsic(name, x.type, listed), x.elem)

    @property
    def looks_up(self) -> bool:
        """Whether `lookup` is one instruction here."""
        return self.scales and self.elem == "float"

    def lookup(self, table: Sequence[float], index: Value) -> Value:
        """The entry of a table of 16 floats that the low 4 bits of each lane's integer name; only where `looks_up`."""
        vector = self.type("float")
        entries = ", ".join(f"float {literal('float', entry)}" for entry in table)
        listed = [(vector, f"<{entries}>"), (self.type("i32"), index.text)]
        return Value(self, self.fn.intrinsic("llvm.x86.avx512.permvar.sf.512", vector, listed), "float")

    # -- choice and bits
    def select(self, mask: Value, then: Operand, otherwise: Operand) -> Value:
        known = then if isinstance(then, Value) else otherwise
        assert isinstance(known, Value)
        a, b = self.like(known, then), self.like(known, otherwise)
        return self.emit(f"select {mask.type} {mask.text}, {a.type} {a.text}, {b.type} {b.text}", a.elem)

    def bits(self, x: Value) -> Value:
        """The float's bit pattern as an integer."""
        elem = INTEGER[x.elem]
        return self.emit(f"bitcast {x.type} {x.text} to {self.type(elem)}", elem)

    def from_bits(self, x: Value) -> Value:
        """The float with this bit pattern."""
        elem = {"i32": "float", "i64": "double"}[x.elem]
        return self.emit(f"bitcast {x.type} {x.text} to {self.type(elem)}", elem)

    def flip_sign(self, x: Value, sign: Value) -> Value:
        """x with its sign bit exclusive-ored with the top bit of `sign`, an integer whose other bits are 0."""
        return self.from_bits(self.bits(x) ^ sign)

    def sign_of(self, x: Value) -> Value:
        """The sign bit alone, as an integer."""
        return self.bits(x) & SIGN_BIT[x.elem]

    def convert(self, op: str, x: Value, elem: str) -> Value:
        """sitofp, fptosi, fpext, fptrunc, sext, zext, trunc."""
        return self.emit(f"{op} {x.type} {x.text} to {self.type(elem)}", elem)

    def widen(self, x: Value) -> Value:
        return self.convert("fpext", x, "double")

    def narrow(self, x: Value) -> Value:
        return self.convert("fptrunc", x, "float")

    # -- control
    def any(self, mask: Value) -> str:
        """A scalar i1: is any lane of the mask set?"""
        if self.width == 1:
            return mask.text
        return self.fn.intrinsic(f"llvm.vector.reduce.or.v{self.width}i1", "i1", [(mask.type, mask.text)])

    def rarely(
        self,
        mask: Value,
        name: str,
        usual: Sequence[Value],
        arguments: Sequence[Value],
        build: Callable[..., list[Value]],
    ) -> list[Value]:
        """`usual`, or, when a lane of the mask is set, the results of `build(lanes, *usual, *arguments)`.

        `build` becomes a function of its own, called out of line, so that rare cases cost the usual ones a test and a
        branch.
        """
        before, rare, after = self.fn.current, self.fn.new_block("rare"), self.fn.new_block("usual")
        # A hint in place of the attribute `cold`, which would move the function to a section of its own.
        seldom = self.fn.intrinsic("llvm.expect.i1", "i1", [("i1", self.any(mask)), ("i1", "false")])
        self.fn.branch_if(seldom, rare, after)
        self.fn.place(rare)
        replaced = self.call_outlined(name, [*usual, *arguments], [v.elem for v in usual], build)
        self.fn.branch(after)
        self.fn.place(after)
        return [
            self.emit(f"phi {old.type} [ {old.text}, %{before} ], [ {new.text}, %{rare} ]", old.elem)
            for old, new in zip(usual, replaced, strict=True)
        ]

    def call_outlined(
        self, name: str, arguments: Sequence[Value], results: list[str], build: Callable[..., list[Value]]
    ) -> list[Value]:
        """The results of `build(lanes, *arguments)`, written as a function of its own that is called, never inlined."""
        full, module = f"luban.{name}.{self.elem}.{self.width}", self.fn.module
        types = [self.type(elem) for elem in results]
        returned = f"{{ {', '.join(types)} }}"
        if full not in module.functions:
            parameters = [(v.type, f"a{i}") for i, v in enumerate(arguments)]
            inner = Function(module, full, returned, parameters, "internal", "noinline nounwind")
            lanes = Lanes(inner, self.elem, self.width)
            values = build(lanes, *(Value(lanes, f"%a{i}", v.elem) for i, v in enumerate(arguments)))
            packed = "poison"
            for i, value in enumerate(values):
                packed = inner.op(f"insertvalue {returned} {packed}, {types[i]} {value.text}, {i}")
            inner.emit(f"ret {returned} {packed}")
            module.add(inner)
        packed = self.fn.call(returned, f"@{full}", [(v.type, v.text) for v in arguments])
        return [self.emit(f"extractvalue {returned} {packed}, {i}", elem) for i, elem in enumerate(results)]

    def each_lane(self, body: Callable[..., list[Value]], *arguments: Value) -> list[Value]:
        """Runs `body(scalar lanes, *scalars)` for every lane in turn and gathers its results."""
        scalar = Lanes(self.fn, self.elem, 1)
        if self.width == 1:
            return body(scalar, *(Value(scalar, v.text, v.elem) for v in arguments))
        gathered: list[tuple[str, str]] = []
        for lane in range(self.width):
            picked = [
                Value(scalar, self.fn.op(f"extractelement {v.type} {v.text}, i64 {lane}"), v.elem) for v in arguments
            ]
            results = body(scalar, *picked)
            gathered = gathered or [("poison", r.elem) for r in results]
            gathered = [
                (self.fn.op(f"insertelement {self.type(r.elem)} {text}, {r.elem} {r.text}, i64 {lane}"), r.elem)
                for (text, _), r in zip(gathered, results, strict=True)
            ]
        return [Value(self, text, elem) for text, elem in gathered]
