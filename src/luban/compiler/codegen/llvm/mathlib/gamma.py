"""lgamma and digamma.

Both climb to an argument of at least 10 by the recurrence, where Stirling's series converges in eight terms, and
reflect negative arguments. Everything is computed in double, with an error of a few 1e-15 of the largest term: enough
for float32 even next to the functions' zeros, while digamma in float64 loses digits there, and lgamma in float64 is
left to libm.
"""

from __future__ import annotations

import math

from luban.compiler.codegen.llvm.mathlib.lanes import INFINITY, NAN, Lanes, Value
from luban.compiler.codegen.llvm.mathlib.logarithm import log
from luban.compiler.codegen.llvm.mathlib.registry import elementary, from_libm
from luban.compiler.codegen.llvm.mathlib.trigonometric import sine_of_reduced

CLIMB = 10
# Bernoulli numbers B2, B4, ... B16.
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
LGAMMA_SERIES = tuple(b / ((2 * n + 2) * (2 * n + 1)) for n, b in enumerate(BERNOULLI))
DIGAMMA_SERIES = tuple(-b / (2 * n + 2) for n, b in enumerate(BERNOULLI))


def climb(lanes: Lanes, x: Value) -> tuple[Value, Value, Value]:
    """(y, p, d) for x >= 0: y = x + k >= CLIMB, p = x (x + 1) ... (x + k - 1) and d its derivative by x."""
    product, derivative = lanes.constant(1.0, "double"), lanes.constant(0.0, "double")
    for _ in range(CLIMB):
        active = x < float(CLIMB)
        derivative = lanes.select(active, lanes.fma(derivative, x, product), derivative)
        product = lanes.select(active, product * x, product)
        x = lanes.select(active, x + 1.0, x)
    return x, product, derivative


def reflected_angle(lanes: Lanes, x: Value) -> tuple[Value, Value]:
    """(sin, cos) of pi times the distance from x to the nearest integer."""
    t = (x - lanes.floor(x + 0.5)) * math.pi
    return sine_of_reduced(lanes, t), sine_of_reduced(lanes, math.pi / 2 - lanes.abs(t))


def lgamma_wide(lanes: Lanes, x: Value) -> Value:
    negative = x < 0.0
    y, product, _ = climb(lanes, lanes.select(negative, 1.0 - x, x))
    inverse = 1.0 / y
    series = lanes.fma(lanes.polynomial(inverse * inverse, LGAMMA_SERIES), inverse, 0.5 * math.log(2 * math.pi))
    upper = lanes.fma(y - 0.5, log(lanes, y), series - y) - log(lanes, product)
    sine, _ = reflected_angle(lanes, x)
    lower = log(lanes, math.pi / lanes.abs(sine)) - upper
    result = lanes.select(negative, lower, upper)
    result = lanes.select(x.eq(1.0) | x.eq(2.0), 0.0, result)
    return lanes.select(lanes.abs(x).eq(INFINITY), lanes.constant(INFINITY, "double"), result)


@elementary("digamma", "double")
def digamma_wide(lanes: Lanes, x: Value) -> Value:
    negative = x < 0.0
    y, product, derivative = climb(lanes, lanes.select(negative, 1.0 - x, x))
    inverse = 1.0 / y
    square = inverse * inverse
    tail = lanes.fma(lanes.polynomial(square, DIGAMMA_SERIES), square, inverse * -0.5)
    upper = log(lanes, y) + (tail - derivative / product)
    sine, cosine = reflected_angle(lanes, x)
    lower = lanes.select(sine.eq(0.0), NAN, lanes.fma(cosine / sine, -math.pi, upper))
    result = lanes.select(negative, lower, upper)
    at_zero = lanes.copysign(lanes.constant(INFINITY, "double"), -x)
    return lanes.select(x.eq(0.0), at_zero, result)


@elementary("lgamma", "float")
def lgamma(lanes: Lanes, x: Value) -> Value:
    return lanes.narrow(lgamma_wide(lanes, lanes.widen(x)))


@elementary("digamma", "float")
def digamma(lanes: Lanes, x: Value) -> Value:
    return lanes.narrow(digamma_wide(lanes, lanes.widen(x)))


from_libm("lgamma", "double")
