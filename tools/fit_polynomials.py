"""Fits the polynomials of the math library and writes their coefficient file.

    python tools/fit_polynomials.py            # writes src/luban/compiler/codegen/llvm/mathlib/coefficients.py
    python tools/fit_polynomials.py NAME...    # prints these fits only

Each fit is a minimax polynomial found by Remez' exchange in 50-digit arithmetic. Coefficients are rounded to their
machine type one after the other, lowest power first, and the rest is fitted again after each, so that the rounded
polynomial is nearly as good as the exact one. Needs mpmath.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp

mp.mp.dps = 50
OUTPUT = Path(__file__).parent.parent / "src/luban/compiler/codegen/llvm/mathlib/coefficients.py"
Real = Callable[[mp.mpf], mp.mpf]


@dataclass(frozen=True)
class Fit:
    """`function` on `interval` by powers 0..degree; `weight` times the error is what is made small.

    `meaning` says in the comment what the weighted error is relative to.
    """

    name: str
    text: str
    function: Real
    interval: tuple[float, float]
    degree: int
    weight: Real
    meaning: str
    precision: str = "float"


def round_to(value: mp.mpf, precision: str) -> float:
    return struct.unpack("<f", struct.pack("<f", float(value)))[0] if precision == "float" else float(value)


def chebyshev_points(interval: tuple[float, float], count: int) -> list[mp.mpf]:
    low, high = (mp.mpf(bound) for bound in interval)
    return [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * i / (count - 1)) for i in range(count)]


def horner(coefficients: list[mp.mpf], x: mp.mpf) -> mp.mpf:
    result = mp.mpf(0)
    for coefficient in reversed(coefficients):
        result = result * x + coefficient
    return result


def alternation(errors: list[mp.mpf], count: int) -> list[int]:
    """Indices of `count` extrema of alternating sign, the largest run of them."""
    picked: list[int] = []
    for i, error in enumerate(errors):
        if picked and (errors[picked[-1]] > 0) == (error > 0):
            if abs(error) > abs(errors[picked[-1]]):
                picked[-1] = i
        else:
            picked.append(i)
    while len(picked) > count:
        size = [abs(errors[i]) for i in picked]
        least = size.index(min(size))
        if least in (0, len(size) - 1):
            picked.pop(least)
        elif len(picked) == count + 1:
            picked.pop(0 if size[0] < size[-1] else -1)
        else:  # two neighbours go, so that the signs still alternate
            other = least - 1 if size[least - 1] < size[least + 1] else least + 1
            del picked[min(least, other) : max(least, other) + 1]
    return picked


def remez(target: list[mp.mpf], weight: list[mp.mpf], grid: list[mp.mpf], terms: int) -> list[mp.mpf]:
    """Minimax coefficients of x^0 .. x^(terms - 1) on the grid."""
    step = (len(grid) - 1) / terms
    points = [round(i * step) for i in range(terms + 1)]
    coefficients: list[mp.mpf] = []
    for _ in range(30):
        rows = [[grid[p] ** k for k in range(terms)] + [(-1) ** i / weight[p]] for i, p in enumerate(points)]
        solved = list(mp.lu_solve(mp.matrix(rows), mp.matrix([target[p] for p in points])))
        coefficients, level = solved[:-1], abs(solved[-1])
        errors = [(t - horner(coefficients, x)) * w for t, w, x in zip(target, weight, grid, strict=True)]
        found = alternation(errors, terms + 1)
        if len(found) < terms + 1 or found == points or max(map(abs, errors)) <= level * mp.mpf("1.0001"):
            break
        points = found
    return coefficients


def fit(spec: Fit) -> tuple[list[float], float]:
    """Rounded coefficients, constant term first, and the largest weighted error over the interval."""
    # Near 0 weight and function may be 0/0; the weighted error vanishes there, so that points can be left out.
    gap = (spec.interval[1] - spec.interval[0]) / 500
    grid = [x for x in chebyshev_points(spec.interval, 40 * (spec.degree + 2) + 1) if abs(x) > gap]
    rest, weight, rounded = [spec.function(x) for x in grid], [spec.weight(x) for x in grid], []
    for terms in range(spec.degree + 1, 0, -1):
        rounded.append(round_to(remez(rest, weight, grid, terms)[0], spec.precision))
        rest = [(r - mp.mpf(rounded[-1])) / x for r, x in zip(rest, grid, strict=True)]
        weight = [w * abs(x) for w, x in zip(weight, grid, strict=True)]
    return rounded, float(max(abs(r * w) for r, w in zip(rest, weight, strict=True)))


def root(function: Callable[[mp.mpf, mp.mpf], mp.mpf]) -> Real:
    """A function of u = z^2 written with z and u."""
    return lambda u: function(mp.sqrt(u), u)


LN2 = float(mp.log(2))
HALF_PI = float(mp.pi / 2)
THIRD = 1 / 3
S_MAX = float((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)) ** 2 * 1.001


def exponential_fits() -> list[Fit]:
    def exp_rest(r: mp.mpf) -> mp.mpf:
        return (mp.expm1(r) - r) / r**2

    def exp2_rest(r: mp.mpf) -> mp.mpf:
        return (mp.mpf(2) ** r - 1) / r

    reach = LN2 / 2 * 1.002
    exp_text, exp2_text = "exp(r) = 1 + r + r^2 q(r)", "2^r = 1 + r q(r)"
    return [
        Fit("EXP_FLOAT", exp_text, exp_rest, (-reach, reach), 4, abs, "relative to r"),
        Fit("EXP_DOUBLE", exp_text, exp_rest, (-reach, reach), 9, abs, "relative to r", "double"),
        Fit("EXP2_FLOAT", exp2_text, exp2_rest, (-0.5, 0.5), 5, abs, "relative to r"),
        Fit("EXP2_DOUBLE", exp2_text, exp2_rest, (-0.5, 0.5), 10, abs, "relative to r", "double"),
    ]


def logarithm_fits() -> list[Fit]:
    def log_rest(f: mp.mpf) -> mp.mpf:
        return (mp.log1p(f) - f + f * f / 2) / f**3

    def atanh_rest(s: mp.mpf, z: mp.mpf) -> mp.mpf:
        return (2 * mp.atanh(s) - 2 * s) / (s * z)

    def log2_ratio(f: mp.mpf) -> mp.mpf:
        return mp.log1p(f) / mp.log(2) / f

    return [
        Fit(
            "LOG_FLOAT",
            "log(1 + f) = f - f^2/2 + f^3 p(f)",
            log_rest,
            (-THIRD, THIRD),
            7,
            lambda f: abs(f**3 / mp.log1p(f)),
            "relative to log(1 + f)",
        ),
        Fit(
            "LOG2_FLOAT",
            "log2(1 + f) = f + f p(f)",
            lambda f: log2_ratio(f) - 1,
            (-THIRD, THIRD),
            9,
            lambda f: 1 / log2_ratio(f),
            "relative to log2(1 + f)",
        ),
        Fit(
            "LOG2_WIDE",
            "log2(1 + f) = f p(f), double inside float32 pow",
            log2_ratio,
            (-THIRD, THIRD),
            14,
            lambda f: 1 / log2_ratio(f),
            "relative to log2(1 + f)",
            "double",
        ),
        Fit(
            "ATANH_POW",
            "atanh(s) = s (1 + z/3 + z^2 p(z)), z = s^2, inside float64 pow",
            root(lambda s, z: (mp.atanh(s) / s - 1 - z / 3) / z**2),
            (0, S_MAX),
            6,
            lambda z: z**2,
            "relative to s",
            "double",
        ),
        Fit(
            "ATANH_DOUBLE",
            "log((1 + s) / (1 - s)) = 2 s + s z p(z), z = s^2",
            root(atanh_rest),
            (0, S_MAX),
            6,
            root(lambda s, z: s * z / mp.atanh(s) / 2),
            "relative to the logarithm",
            "double",
        ),
    ]


def trigonometric_fits() -> list[Fit]:
    def odd(f: Real) -> tuple[Real, Real]:
        return root(lambda z, u: (f(z) - z) / (z * u)), root(lambda z, u: z * u / f(z))

    def make(name: str, f: Real, top: float, degree: int, precision: str = "float") -> Fit:
        rest, weight = odd(f)
        label = name.split("_")[0].lower()
        return Fit(
            name,
            f"{label}(z) = z + z u p(u), u = z^2",
            rest,
            (0, top),
            degree,
            weight,
            f"relative to {label}",
            precision,
        )

    return [
        make("SIN_FLOAT", mp.sin, HALF_PI**2 * 1.002, 3),
        make("SIN_DOUBLE", mp.sin, HALF_PI**2 * 1.002, 7, "double"),
        make("TAN_FLOAT", mp.tan, HALF_PI**2 / 4 * 1.01, 6),
        make("ATAN_FLOAT", mp.atan, 1, 8),
        make("ASIN_FLOAT", mp.asin, 0.3165, 5),
    ]


def error_function_fits() -> list[Fit]:
    def scaled(w: mp.mpf) -> mp.mpf:
        return mp.exp((1 / w - 3) ** 2) * mp.erfc(1 / w - 3)

    small, text = root(lambda z, u: mp.erf(z) / z - 1), "exp(x^2) erfc(x) = p(w), w = 1 / (x + 3)"
    small_weight = root(lambda z, u: z / mp.erf(z))
    return [
        Fit(
            "ERFC_WIDE",
            text + ", double inside float32 erfc",
            scaled,
            (1 / 13.25, 1 / 3),
            10,
            lambda w: 1 / scaled(w),
            "relative to erfc",
            "double",
        ),
        Fit(
            "ERFC_DOUBLE", text, scaled, (1 / 30.5, 1 / 3.99), 20, lambda w: 1 / scaled(w), "relative to erfc", "double"
        ),
        Fit("ERF_DOUBLE", "erf(z) = z + z p(u), u = z^2", small, (0, 1), 12, small_weight, "relative to erf", "double"),
        Fit("ERF_FLOAT", "erf(z) = z + z p(u), u = z^2", small, (0, 1.1875**2), 6, small_weight, "relative to erf"),
        Fit(
            "ERF_TAIL_FLOAT",
            "1 - erf(x) = p(x - 2.59375), x from 1.1875 to 4",
            lambda y: mp.erfc(y + 2.59375),
            (-1.40625, 1.40625),
            13,
            lambda y: mp.mpf(1),
            "absolute",
        ),
    ]


# Centres of the pieces of erf are this far apart; sixteen of them reach up to where it is 1 to within half an ulp. At
# this distance erf of the first centres is nearly a float32, so that the sum is right to 1.6 ulp.
ERF_STEP, ERF_PIECES = 1089 / 4096, 16


def erf_pieces() -> list[list[float]]:
    """Degree 5 about each centre, relative to erf; the first piece has no constant term and leaves out t itself."""
    reach = ERF_STEP / 2 * 1.001
    first = Fit("", "", lambda t: mp.erf(t) / t - 1, (0, reach), 4, lambda t: t / mp.erf(t), "")
    found = [[0.0, *fit(first)[0]]]
    for piece in range(1, ERF_PIECES):
        centre = mp.mpf(ERF_STEP) * piece
        spec = Fit("", "", lambda t, c=centre: mp.erf(c + t), (-reach, reach), 5, lambda t, c=centre: 1 / mp.erf(c), "")
        found.append(fit(spec)[0])
    return found


def written_pieces() -> str:
    """The pieces as one row a power."""
    powers = "".join(
        f"    (  # t^{power}\n{indented([shortest(c, 'float') for c in column])}    ),\n"
        for power, column in enumerate(zip(*erf_pieces(), strict=True))
    )
    text = (
        f"erf(c + t) = p(t), and t + p(t) for c = 0, about {ERF_PIECES} centres c = 0, {ERF_STEP}, ...; a row a power"
    )
    return f"\n# {text}.\nERF_PIECES_FLOAT = (\n{powers})\n"


HEADER = '''"""Coefficients of the elementary functions, constant term first. Written by tools/fit_polynomials.py."""
'''


def rows(coefficients: list[float]) -> str:
    return "".join(f"    {value!r},\n" for value in coefficients)


def indented(values: list[float]) -> str:
    return "".join(f"        {value!r},\n" for value in values)


def shortest(value: float, precision: str) -> float:
    """A float32 with as few digits as identify it."""
    if precision == "double":
        return value
    if value == 0:
        return 0.0
    return next(short for digits in range(1, 10) if round_to(short := float(f"{value:.{digits}g}"), "float") == value)


def main(wanted: list[str]) -> None:
    specs = [*exponential_fits(), *logarithm_fits(), *trigonometric_fits(), *error_function_fits()]
    parts = [HEADER]
    for spec in specs:
        if wanted and spec.name not in wanted:
            continue
        coefficients, error = fit(spec)
        low, high = spec.interval
        size = f"max error 2^{float(mp.log(error, 2)):.1f} {spec.meaning}"
        print(f"{spec.name}: degree {spec.degree}, {size}", file=sys.stderr)
        parts.append(
            f"\n# {spec.text}.\n# Degree {spec.degree} on [{low:.6g}, {high:.6g}], {size}.\n"
            f"{spec.name} = (\n{rows([shortest(c, spec.precision) for c in coefficients])})\n"
        )
    if not wanted or "ERF_PIECES_FLOAT" in wanted:
        parts.append(written_pieces())
    if wanted:
        print("".join(parts))
    else:
        OUTPUT.write_text("".join(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
