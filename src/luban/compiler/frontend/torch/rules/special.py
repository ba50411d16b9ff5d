"""Special functions written in arithmetic: lgamma, digamma, its derivatives and the inverse of erf.

All compute in float64: float32 results are then right to the last bits also beside the functions' zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.views import View

SHIFT = 8  # from here on the asymptotic series are exact to 1e-14; smaller arguments are moved up by the recurrence
# Coefficients of falling odd and even powers, from the Bernoulli numbers.
_LGAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_DIGAMMA = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760)
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
# The start values for erfinv that torch has, too, inside and outside of 0.7: numerators and denominators, constant last.
_INNER = (
    (-0.140543331, 0.914624893, -1.645349621, 0.886226899),
    (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0),
)
_OUTER = (1.641345311, 3.429567803, -1.624906493, -1.970840454), (1.637067800, 3.543889200, 1.0)


@rule("aten.lgamma.default", "prims.lgamma.default")
def lgamma(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, _lgamma, (x,), torch.float64)


@rule("aten.digamma.default", "prims.digamma.default")
def digamma(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, _digamma, (x,), torch.float64)


@rule("aten.polygamma.default")
def polygamma(cx: Builder, node: Node, n: int, x: View) -> View:
    return cx.pointwise(node, _polygamma(n) if n else _digamma, (x,), torch.float64)


@rule("aten.erfinv.default", "prims.erf_inv.default")
def erfinv(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, _erfinv, (x,), torch.float64)


def _polynomial(b: Body, z: SSAValue, coefficients: tuple[float, ...]) -> SSAValue:
    """The sum with the constant last, by Horner's rule."""
    total = b.like(z, coefficients[0])
    for c in coefficients[1:]:
        total = b.add(b.mul(total, z), b.like(z, c))
    return total


def _reflected(b: Body, x: SSAValue) -> tuple[SSAValue, SSAValue]:
    """Whether x is below 1/2, and 1 - x there, x elsewhere."""
    low = b.cmp("lt", x, b.like(x, 0.5))
    return low, b.select(low, b.sub(b.like(x, 1.0), x), x)


def _angle(b: Body, x: SSAValue) -> SSAValue:
    """pi * x less its nearest multiple of pi."""
    return b.mul(b.sub(x, b.round(x)), b.like(x, math.pi))


def _raised(b: Body, z: SSAValue, shift: int = SHIFT) -> tuple[SSAValue, SSAValue]:
    """Whether z is below the shift, and z + shift there, z elsewhere."""
    small = b.cmp("lt", z, b.like(z, shift))
    return small, b.select(small, b.add(z, b.like(z, shift)), z)


def _lgamma(b: Body, x: SSAValue) -> SSAValue:
    low, z = _reflected(b, x)
    small, s = _raised(b, z)
    one, half = b.like(x, 1.0), b.like(x, 0.5)
    steps = z
    for k in range(1, SHIFT):
        steps = b.mul(steps, b.add(z, b.like(z, k)))
    inverse = b.reciprocal(s)
    series = b.mul(inverse, _polynomial(b, b.mul(inverse, inverse), _LGAMMA[::-1]))
    main = b.sub(b.mul(b.sub(s, half), b.sub(b.log(s), one)), b.like(s, 0.5 - 0.5 * math.log(2 * math.pi)))
    value = b.sub(b.add(main, series), b.select(small, b.log(steps), b.like(x, 0.0)))
    sine = b.abs(b.sin(_angle(b, x)))
    mirrored = b.sub(b.log(b.div(b.like(x, math.pi), sine)), value)
    infinite = b.cmp("eq", b.abs(x), b.like(x, math.inf))
    root = b.or_(b.cmp("eq", x, one), b.cmp("eq", x, b.like(x, 2.0)))
    value = b.select(root, b.like(x, 0.0), value)
    return b.select(infinite, b.like(x, math.inf), b.select(low, mirrored, value))


def _digamma(b: Body, x: SSAValue) -> SSAValue:
    low, z = _reflected(b, x)
    small, s = _raised(b, z)
    zero, steps = b.like(x, 0.0), b.reciprocal(z)
    for k in range(1, SHIFT):
        steps = b.add(steps, b.reciprocal(b.add(z, b.like(z, k))))
    inverse = b.reciprocal(s)
    square = b.mul(inverse, inverse)
    series = b.sub(b.mul(square, _polynomial(b, square, _DIGAMMA[::-1])), b.mul(inverse, b.like(s, 0.5)))
    value = b.sub(b.add(b.log(s), series), b.select(small, steps, zero))
    mirrored = b.sub(value, b.div(b.like(x, math.pi), b.tan(_angle(b, x))))
    pole = b.and_(b.cmp("le", x, zero), b.cmp("eq", b.floor(x), x))
    at_pole = b.select(b.cmp("eq", x, zero), b.copysign(b.like(x, math.inf), b.neg(x)), b.like(x, math.nan))
    return b.select(pole, at_pole, b.select(low, mirrored, value))


def _polygamma(n: int) -> Callable[[Body, SSAValue], SSAValue]:
    """The n-th derivative of digamma, n > 0, by the same recurrence, series and reflection as digamma itself."""
    count = SHIFT + 2 * n
    sign, factorial = float((-1) ** (n + 1)), float(math.factorial(n))
    series = tuple(
        bernoulli * math.factorial(2 * j + n - 1) / math.factorial(2 * j) for j, bernoulli in enumerate(_BERNOULLI, 1)
    )

    def body(b: Body, x: SSAValue) -> SSAValue:
        low, z = _reflected(b, x)
        small, s = _raised(b, z, count)
        steps = b.like(x, 0.0)
        for k in range(count):
            steps = b.add(steps, _power(b, b.reciprocal(b.add(z, b.like(z, k))), n + 1))
        inverse = b.reciprocal(s)
        square = b.mul(inverse, inverse)
        head = b.add(b.like(x, math.factorial(n - 1)), b.mul(inverse, b.like(x, factorial / 2)))
        tail = b.mul(square, _polynomial(b, square, series[::-1]))
        value = b.mul(_power(b, inverse, n), b.add(head, tail))
        value = b.add(value, b.select(small, b.mul(steps, b.like(x, factorial)), b.like(x, 0.0)))
        value = b.mul(value, b.like(x, sign))
        turn = b.mul(b.like(x, math.pi ** (n + 1)), _polynomial(b, b.reciprocal(b.tan(_angle(b, x))), _cotangent(n)))
        return b.select(low, b.sub(b.mul(value, b.like(x, -sign)), turn), value)

    return body


def _power(b: Body, x: SSAValue, n: int) -> SSAValue:
    """x to the n, n > 0."""
    result = x
    for _ in range(n - 1):
        result = b.mul(result, x)
    return result


def _cotangent(n: int) -> tuple[float, ...]:
    """The n-th derivative of the cotangent as a polynomial of the cotangent, constant last."""
    powers = [0.0, 1.0]  # constant first
    for _ in range(n):
        slope = [k * c for k, c in enumerate(powers)][1:]
        powers = [-(a + c) for a, c in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope])]
    return tuple(powers[::-1])


def _erfinv(b: Body, y: SSAValue) -> SSAValue:
    """A rational start and two steps of Newton's."""
    size, one = b.abs(y), b.like(y, 1.0)
    square = b.mul(y, y)
    inner = b.div(b.mul(y, _polynomial(b, square, _INNER[0])), _polynomial(b, square, _INNER[1]))
    tail = b.sqrt(b.neg(b.log(b.mul(b.sub(one, size), b.like(y, 0.5)))))
    outer = b.div(b.copysign(_polynomial(b, tail, _OUTER[0]), y), _polynomial(b, tail, _OUTER[1]))
    x = b.select(b.cmp("le", size, b.like(y, 0.7)), inner, outer)
    for _ in range(2):
        slope = b.mul(b.like(y, 2 / math.sqrt(math.pi)), b.exp(b.neg(b.mul(x, x))))
        x = b.sub(x, b.div(b.sub(b.erf(x), y), slope))
    ends = b.select(b.cmp("eq", size, one), b.copysign(b.like(y, math.inf), y), x)
    return b.select(b.cmp("gt", size, one), b.like(y, math.nan), ends)
