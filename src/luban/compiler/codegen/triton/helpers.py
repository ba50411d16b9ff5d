"""Functions that Triton's shared subset lacks, written in it; a kernel's source holds those that it uses.

They keep relative accuracy near zero, where the plain formulas lose it: expm1 and log1p divide out the rounding error
of exp and log (Kahan), and the hyperbolic functions are made of these two.
"""

from __future__ import annotations

import re

EXPM1 = '''
@triton.jit
def expm1(x):
    """exp(x) - 1, also for small x."""
    u = tl.exp(x)
    small = (u - 1.0) * x / tl.log(u)
    return tl.where(u == 1.0, x, tl.where((u > 3.0e38) | (u < 1e-7), u - 1.0, small))
'''
LOG1P = '''
@triton.jit
def log1p(x):
    """log(1 + x), also for small x."""
    u = x + 1.0
    return tl.where(u == 1.0, x, tl.where(u > 3.0e38, tl.log(u), tl.log(u) * x / (u - 1.0)))
'''
TANH = '''
@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    e = expm1(-2.0 * tl.abs(x))
    t = -e / (e + 2.0)
    return tl.where(x < 0.0, -t, t)
'''
SINH = '''
@triton.jit
def sinh(x):
    """The hyperbolic sine."""
    e = expm1(tl.abs(x))
    t = tl.where(e > 3.0e38, e, 0.5 * (e + e / (e + 1.0)))
    return tl.where(x < 0.0, -t, t)
'''
COSH = '''
@triton.jit
def cosh(x):
    """The hyperbolic cosine."""
    e = tl.exp(tl.abs(x))
    return 0.5 * e + 0.5 / e
'''
ASINH = '''
@triton.jit
def asinh(x):
    """The inverse hyperbolic sine."""
    a = tl.abs(x)
    t = tl.where(a > 1e9, tl.log(a) + 0.6931471805599453, log1p(a + a * a / (1.0 + tl.sqrt(a * a + 1.0))))
    return tl.where(x < 0.0, -t, t)
'''
ACOSH = '''
@triton.jit
def acosh(x):
    """The inverse hyperbolic cosine."""
    t = x - 1.0
    return tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, log1p(t + tl.sqrt(2.0 * t + t * t)))
'''
ATANH = '''
@triton.jit
def atanh(x):
    """The inverse hyperbolic tangent."""
    a = tl.abs(x)
    t = 0.5 * log1p(2.0 * a / (1.0 - a))
    return tl.where(x < 0.0, -t, t)
'''
TRUNC = '''
@triton.jit
def trunc(x):
    """Towards zero, to a whole number."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
'''
ROUND = '''
@triton.jit
def round_away(x):
    """To the nearest whole number, halves away from zero."""
    t = tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
    step = tl.where(x < 0.0, -1.0, 1.0)
    return tl.where(tl.abs(x - t) >= 0.5, t + step, t)
'''
ROUND_EVEN = '''
@triton.jit
def round_even(x):
    """To the nearest whole number, halves to the even one."""
    f = tl.floor(x)
    odd = f - 2.0 * tl.floor(f * 0.5)
    return tl.where(x - f < 0.5, f, tl.where(x - f > 0.5, f + 1.0, f + odd))
'''
COPYSIGN = '''
@triton.jit
def copysign(x, y):
    """|x| with the sign of y, that of -0.0 included."""
    return tl.where((y < 0.0) | ((y == 0.0) & (1.0 / y < 0.0)), -tl.abs(x), tl.abs(x))
'''
POW = '''
@triton.jit
def pow(x, y):
    """x to the power y; the relative error grows as |y log2 x| * 2**-24 in float32."""
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    a = tl.exp2(y * tl.log2(tl.abs(x)))
    a = tl.where(odd & (x < 0.0), -a, tl.where((x < 0.0) & (whole == 0), float("nan"), a))
    return tl.where((y == 0.0) | (x == 1.0), 1.0, a)
'''
IPOW = '''
@triton.jit
def ipow(x, n):
    """x to the power n, both integers; the inverse of x, rounded to zero, to the power -n where n is negative."""
    result = x * 0 + 1
    square = x
    rest = tl.where(n < 0, n * 0, n)
    for _ in range(0, 63):
        result = tl.where((rest & 1) == 1, result * square, result)
        square = square * square
        rest = rest >> 1
    inverse = tl.where(x == 1, x, tl.where(x == -1, tl.where((n & 1) == 0, -x, x), x * 0))
    return tl.where(n < 0, inverse, result)
'''
BLOCK_MAX = '''
@triton.jit
def block_max(x):
    """The largest element of a block, NaN where it holds one (tl.max passes over NaN)."""
    return tl.where(tl.max((x != x).to(tl.int32), axis=0) != 0, float("nan"), tl.max(x, axis=0))
'''
BLOCK_MIN = '''
@triton.jit
def block_min(x):
    """The smallest element of a block, NaN where it holds one (tl.min passes over NaN)."""
    return tl.where(tl.max((x != x).to(tl.int32), axis=0) != 0, float("nan"), tl.min(x, axis=0))
'''
PRODUCT = '''
@triton.jit
def product(x, y):
    """Combines the elements of a block by tl.reduce."""
    return x * y
'''
BITWISE_AND = '''
@triton.jit
def bitwise_and(x, y):
    """Combines the elements of a block by tl.reduce."""
    return x & y
'''
BITWISE_OR = '''
@triton.jit
def bitwise_or(x, y):
    """Combines the elements of a block by tl.reduce."""
    return x | y
'''
RANDOM_WORDS = '''
@triton.jit
def random_words(seed, counter):
    """The first two words of Philox4x32-10 with counter words (low, high, 0, 0) and key words (low, high)."""
    low = counter.to(tl.uint64).to(tl.uint32)
    high = (counter.to(tl.uint64) >> 32).to(tl.uint32)
    zero = low * 0
    w0, w1, w2, w3 = tl.philox(seed.to(tl.uint64), low, high, zero, zero)
    return w0, w1
'''
RANDOM_BITS = '''
@triton.jit
def random_bits(seed, counter):
    """32 random bits."""
    w0, w1 = random_words(seed, counter)
    return w0.to(tl.int64)
'''
RANDOM_UNIFORM = '''
@triton.jit
def random_uniform(seed, counter):
    """Uniform in [0, 1), with 24 random bits."""
    w0, w1 = random_words(seed, counter)
    return (w0 >> 8).to(tl.float32) * 5.9604644775390625e-08
'''
RANDOM_NORMAL = '''
@triton.jit
def random_normal(seed, counter):
    """Normal with mean 0 and variance 1 (Box-Muller)."""
    w0, w1 = random_words(seed, counter)
    u1 = ((w0 >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08
    u2 = (w1 >> 8).to(tl.float32) * 5.9604644775390625e-08
    return tl.sqrt(-2.0 * tl.log(u1)) * tl.cos(6.283185307179586 * u2)
'''

_TEXTS = [
    EXPM1, LOG1P, TANH, SINH, COSH, ASINH, ACOSH, ATANH, TRUNC, ROUND, ROUND_EVEN, COPYSIGN, POW, IPOW, BLOCK_MAX,
    BLOCK_MIN, PRODUCT, BITWISE_AND, BITWISE_OR, RANDOM_WORDS, RANDOM_BITS, RANDOM_UNIFORM, RANDOM_NORMAL,
]  # fmt: skip
HELPERS = {text.split("def ")[1].split("(")[0]: text for text in _TEXTS}


def helper_source(names: set[str]) -> str:
    """The text of these functions and of those that they call, callees first."""
    needed = set(names)
    for name in reversed(HELPERS):  # callees come before their callers
        if name in needed:
            needed |= {other for other in HELPERS if re.search(rf"\b{other}\(", HELPERS[name])}
    return "".join("\n" + HELPERS[name] for name in HELPERS if name in needed)
