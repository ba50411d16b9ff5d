"""Dimensions that may be unknown until run time.

A `Dim` is an int or an `Expr`: a polynomial with integer coefficients over symbols (`s0`) and atoms
(`floordiv`, `mod`, `max`, `min` of dims). Polynomials are kept in a normal form, so that equal ones compare equal;
this is all the algebra that views and fusion need, at a thousandth of sympy's cost.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from luban.errors import ConfigError


@dataclass(frozen=True, order=True)
class Atom:
    """A non-polynomial operation on two dims: kind is floordiv, mod, max or min."""

    kind: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.kind}({self.left}, {self.right})"


# A monomial is a sorted tuple of factor texts; an Expr maps monomials to coefficients.
Monomial = tuple[str, ...]


@dataclass(frozen=True)
class Expr:
    """A polynomial: ((monomial, coefficient), ...) sorted, no zero coefficients. Build with `symbol` and operators."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _normal(_terms(self) + _terms(other))

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + (other * -1)

    def __rsub__(self, other: Dim) -> Dim:
        return (self * -1) + other

    def __mul__(self, other: Dim) -> Dim:
        return _normal([(tuple(sorted(m + n)), a * b) for m, a in _terms(self) for n, b in _terms(other)])

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return mod(other, self)

    def __str__(self) -> str:
        return " + ".join(_term_text(m, c) for m, c in self.terms)

    __repr__ = __str__


Dim = int | Expr

_NAME = r"[A-Za-z_]\w*"


def symbol(name: str) -> Expr:
    """The dim that is just the symbol `name`. Raises ConfigError for a name that would not parse back."""
    if name in _FUNCTIONS or not re.fullmatch(_NAME, name):
        raise ConfigError(
            f"{name!r} cannot name a dimension; use letters, digits and _, but not {', '.join(_FUNCTIONS)}"
        )
    return Expr((((name,), 1),))


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, exact where b divides every term."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    exact = divide_exact(a, b)
    return exact if exact is not None else _atom("floordiv", a, b)


def mod(a: Dim, b: Dim) -> Dim:
    """a % b (sign of b, as in Python)."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    return 0 if divide_exact(a, b) is not None else _atom("mod", a, b)


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger of two dims."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return a if a == b else _atom("max", a, b)


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller of two dims."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return a if a == b else _atom("min", a, b)


def divide_exact(a: Dim, b: Dim) -> Dim | None:
    """a / b when b is a monomial that divides every term of a without remainder, else None (also for b = 0)."""
    if b == 0:
        return None
    if a == b:
        return 1
    if a == 0:
        return 0
    divisor = _terms(b)
    if len(divisor) != 1 or divisor[0][1] == 0:
        return None
    monomial, coefficient = divisor[0]
    quotient = []
    for factors, c in _terms(a):
        rest = list(factors)
        for f in monomial:
            if f not in rest:
                return None
            rest.remove(f)
        if c % coefficient:
            return None
        quotient.append((tuple(rest), c // coefficient))
    return _normal(quotient)


def product(dims) -> Dim:
    """The product of dims; 1 for none."""
    result: Dim = 1
    for d in dims:
        result = result * d
    return result


def symbols(dim: Dim) -> set[str]:
    """The names of the symbols in a dim."""
    return set() if isinstance(dim, int) else set(re.findall(_NAME, _strip_calls(str(dim))))


def evaluate(dim: Dim, env: Mapping[str, int]) -> int:
    """The value of a dim with symbols bound by env. Raises ConfigError for an unbound symbol."""
    if isinstance(dim, int):
        return dim
    total = 0
    for factors, c in dim.terms:
        value = c
        for f in factors:
            value *= _evaluate_factor(f, env)
        total += value
    return total


def parse(text: str | int) -> Dim:
    """A dim from the text that `str` gives (ints pass through). Raises ConfigError on anything else."""
    return text if isinstance(text, int) else _parse_text(text)


@functools.lru_cache(maxsize=4096)  # evaluating a floordiv or max reads its two sides again at every call
def _parse_text(text: str) -> Dim:
    tokens = re.findall(r"\d+|[A-Za-z_]\w*|[()+*,-]|\S", text)
    value, rest = _parse_sum(tokens, text)
    if rest:
        raise ConfigError(
            f"cannot read the dimension {text!r}: unexpected {rest[0]!r}; write sums of products, e.g. 's0*4 + 1'"
        )
    return value


def _terms(d: Dim) -> list[tuple[Monomial, int]]:
    return [((), d)] if isinstance(d, int) else list(d.terms)


def _normal(terms: list[tuple[Monomial, int]]) -> Dim:
    total: dict[Monomial, int] = {}
    for m, c in terms:
        total[m] = total.get(m, 0) + c
    kept = tuple(sorted((m, c) for m, c in total.items() if c))
    if not kept:
        return 0
    return kept[0][1] if len(kept) == 1 and kept[0][0] == () else Expr(kept)


def _atom(kind: str, a: Dim, b: Dim) -> Dim:
    return Expr((((str(Atom(kind, str(a), str(b))),), 1),))


def _term_text(monomial: Monomial, c: int) -> str:
    if not monomial:
        return str(c)
    return "*".join(monomial) if c == 1 else "*".join((*monomial, str(c)))


_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}
_BUILDERS = {"floordiv": floordiv, "mod": mod, "max": maximum, "min": minimum}


def _strip_calls(text: str) -> str:
    return re.sub(r"\b(floordiv|mod|max|min)\(", "(", text)


def split_call(factor: str) -> tuple[str, str, str] | None:
    """('floordiv', 'a', 'b') for the factor text 'floordiv(a, b)', None for a plain symbol."""
    if not factor.endswith(")"):
        return None
    kind, inner = factor[:-1].split("(", 1)
    depth = 0
    for i, ch in enumerate(inner):
        depth += (ch == "(") - (ch == ")")
        if ch == "," and depth == 0:
            return kind, inner[:i], inner[i + 2 :]
    raise ConfigError(f"cannot read the dimension {factor!r}: a call needs two arguments")


def _evaluate_factor(factor: str, env: Mapping[str, int]) -> int:
    call = split_call(factor)
    if call is not None:
        kind, a, b = call
        return _FUNCTIONS[kind](evaluate(parse(a), env), evaluate(parse(b), env))
    if factor not in env:
        raise ConfigError(f"the symbol {factor} has no value; bound are {sorted(env)}")
    return env[factor]


def _parse_sum(tokens: list[str], text: str) -> tuple[Dim, list[str]]:
    value, tokens = _parse_product(tokens, text)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        term, tokens = _parse_product(tokens[1:], text)
        value = value + term * sign
    return value, tokens


def _parse_product(tokens: list[str], text: str) -> tuple[Dim, list[str]]:
    value, tokens = _parse_factor(tokens, text)
    while tokens and tokens[0] == "*":
        factor, tokens = _parse_factor(tokens[1:], text)
        value = value * factor
    return value, tokens


def _parse_factor(tokens: list[str], text: str) -> tuple[Dim, list[str]]:
    if not tokens:
        raise ConfigError(f"the dimension {text!r} ends early")
    head, rest = tokens[0], tokens[1:]
    if head == "-":
        value, rest = _parse_factor(rest, text)
        return value * -1, rest
    if head.isdecimal():
        return int(head), rest
    if head == "(":
        value, rest = _parse_sum(rest, text)
        return value, _expect(rest, ")", text)
    if head in _BUILDERS:
        a, rest = _parse_sum(_expect(rest, "(", text), text)
        b, rest = _parse_sum(_expect(rest, ",", text), text)
        return _BUILDERS[head](a, b), _expect(rest, ")", text)
    if re.fullmatch(_NAME, head):
        return symbol(head), rest
    raise ConfigError(f"cannot read the dimension {text!r}: unexpected {head!r}")


def _expect(tokens: list[str], want: str, text: str) -> list[str]:
    if not tokens or tokens[0] != want:
        raise ConfigError(f"cannot read the dimension {text!r}: expected {want!r}")
    return tokens[1:]
