"""Every scalar operation as one pointwise kernel with many outputs, against the tile interpreter and NumPy."""

from __future__ import annotations

import re

import numpy as np
import pytest

from luban.compiler.codegen.triton.helpers import HELPERS, helper_source

FLOATS = ["addf", "subf", "mulf", "divf", "maximumf", "minimumf", "maxnumf", "minnumf"]
INTEGERS = [
    "addi", "subi", "muli", "andi", "ori", "xori", "divsi", "remsi", "floordivsi", "ceildivsi", "minsi", "maxsi",
    "divui", "remui", "ceildivui", "minui", "maxui",
]  # fmt: skip
SHIFTS = ["shli", "shrsi", "shrui"]
NUMPY = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": np.float32,
    "i64": np.int64,
    "i32": np.int32,
    "i8": np.int8,
    "i1": np.bool_,
}
N = 200


def pointwise(tr, tile, lines: list[str], inputs: dict[str, str], results: list[tuple[str, str]]):
    """A kernel that loads each input, runs the lines and stores each (value, type) into a buffer of its own."""
    loads = [f"%{name} = load %{name}_buf[%l] [1] + 0 : {ty}" for name, ty in inputs.items()]
    stores = [f"store {value}, %out{i}[%l] [1] + 0 : {ty}" for i, (value, ty) in enumerate(results)]
    body = (
        tr.number("z", 0) + tr.number("n", N) + "\n".join(["for vector %l = %z to %n {", *loads, *lines, *stores, "}"])
    )
    buffers = [f"%{name}_buf: {ty}" for name, ty in inputs.items()] + [
        f"%out{i}: {ty}" for i, (_, ty) in enumerate(results)
    ]
    return tile.kernel(tile.text(body, ", ".join(buffers)))


def arrays(given: list[np.ndarray], results: list[tuple[str, str]]) -> list[np.ndarray]:
    return [*given, *(np.zeros(N, NUMPY[ty]) for _, ty in results)]


@pytest.mark.parametrize("ty", ["f32", "f64", "f16", "bf16"])
def test_float_operations(tr, tile, ty):
    lines = [f'%r{i} = "arith.{name}"(%a, %b) : ({ty}, {ty}) -> {ty}' for i, name in enumerate(FLOATS)]
    lines.append(f'%neg = "arith.negf"(%a) : ({ty}) -> {ty}')
    results = [*((f"%r{i}", ty) for i in range(len(FLOATS))), ("%neg", ty)]
    a, b = tr.noise(N, 1), tr.noise(N, 2)
    a[:4], b[:4] = [np.nan, 1.0, np.inf, -np.inf], [1.0, np.nan, 2.0, np.inf]
    given = [x.astype(NUMPY[ty]) if ty != "bf16" else tr.bf16(x) for x in (a, b)]
    tr.compare(
        pointwise(tr, tile, lines, {"a": ty, "b": ty}, results), arrays(given, results), exact=ty != "f16", rtol=1e-3
    )


@pytest.mark.parametrize("ty", ["i64", "i32", "i8"])
def test_integer_operations(tr, tile, ty):
    lines = [f'%r{i} = "arith.{name}"(%a, %b) : ({ty}, {ty}) -> {ty}' for i, name in enumerate(INTEGERS)]
    lines += [f'%s{i} = "arith.{name}"(%a, %c) : ({ty}, {ty}) -> {ty}' for i, name in enumerate(SHIFTS)]
    lines += [f'%k = "math.absi"(%a) : ({ty}) -> {ty}', f'%p = "math.ipowi"(%c, %c) : ({ty}, {ty}) -> {ty}']
    lines += tr.number("five", 5, ty).splitlines() + [f'%q = "arith.muli"(%a, %five) : ({ty}, {ty}) -> {ty}']
    results = [(f"%r{i}", ty) for i in range(len(INTEGERS))] + [(f"%s{i}", ty) for i in range(len(SHIFTS))]
    results += [("%k", ty), ("%p", ty), ("%q", ty)]
    rng = np.random.default_rng(0)
    a, b = rng.integers(-100, 100, N), rng.integers(-20, 20, N)
    b[b == 0] = 7
    given = [x.astype(NUMPY[ty]) for x in (a, b, rng.integers(0, 4, N))]
    tr.compare(pointwise(tr, tile, lines, {"a": ty, "b": ty, "c": ty}, results), arrays(given, results))


def test_comparisons_and_choices(tr, tile):
    lines = [f'%i{p} = "arith.cmpi"(%a, %b) <{{predicate = {p} : i64}}> : (i32, i32) -> i1' for p in range(10)]
    lines += [
        f'%f{p} = "arith.cmpf"(%x, %y) <{{predicate = {p} : i64, fastmath = #arith.fastmath<none>}}> : (f32, f32) -> i1'
        for p in range(16)
    ]
    lines += [
        '%s = "arith.select"(%f4, %x, %y) : (i1, f32, f32) -> f32',
        '%t = "arith.select"(%m, %i2, %f1) : (i1, i1, i1) -> i1',
    ]
    lines += [
        f'%b{i} = "arith.{n}"(%m, %i2) : (i1, i1) -> i1' for i, n in enumerate(["andi", "ori", "xori", "addi", "muli"])
    ]
    results = [
        *((f"%i{p}", "i1") for p in range(10)),
        *((f"%f{p}", "i1") for p in range(16)),
        ("%s", "f32"),
        ("%t", "i1"),
    ]
    results += [(f"%b{i}", "i1") for i in range(5)]
    rng = np.random.default_rng(1)
    a, b = rng.integers(-3, 3, (2, N)).astype(np.int32)
    x, y = rng.integers(-2, 2, (2, N)).astype(np.float32)
    x[:3], y[2:5] = np.nan, np.nan
    kernel = pointwise(tr, tile, lines, {"a": "i32", "b": "i32", "x": "f32", "y": "f32", "m": "i1"}, results)
    tr.compare(kernel, arrays([a, b, x, y, rng.random(N) < 0.5], results), exact=True)


def test_conversions(tr, tile):
    pairs = [
        ("extsi", "c", "i8", "i32"), ("extui", "c", "i8", "i32"), ("extsi", "m", "i1", "i64"),
        ("extui", "m", "i1", "i64"), ("trunci", "i", "i32", "i8"), ("trunci", "i", "i32", "i1"),
        ("sitofp", "i", "i32", "f32"), ("uitofp", "c", "i8", "f32"), ("sitofp", "m", "i1", "f32"),
        ("uitofp", "m", "i1", "bf16"), ("fptosi", "x", "f32", "i32"), ("extf", "x", "f32", "f64"),
        ("truncf", "x", "f32", "f16"), ("truncf", "x", "f32", "bf16"), ("bitcast", "x", "f32", "i32"),
        ("bitcast", "i", "i32", "f32"), ("sitofp", "i", "i32", "f16"),
    ]  # fmt: skip
    lines = [f'%r{i} = "arith.{n}"(%{v}) : ({source}) -> {to}' for i, (n, v, source, to) in enumerate(pairs)]
    results = [(f"%r{i}", p[3]) for i, p in enumerate(pairs)]
    rng = np.random.default_rng(2)
    given = [
        rng.integers(-128, 128, N).astype(np.int8),
        rng.random(N) < 0.5,
        rng.integers(-999, 999, N).astype(np.int32),
        50 * tr.noise(N),
    ]
    tr.compare(
        pointwise(tr, tile, lines, {"c": "i8", "m": "i1", "i": "i32", "x": "f32"}, results),
        arrays(given, results),
        exact=True,
    )


MATH = {
    "exp": (-20, 20), "exp2": (-20, 20), "expm1": (-2, 2), "log": (1e-3, 50), "log2": (1e-3, 50), "log10": (1e-3, 50),
    "log1p": (-0.9, 9), "sqrt": (0, 50), "rsqrt": (1e-3, 50), "sin": (-9, 9), "cos": (-9, 9), "tan": (-1.5, 1.5),
    "erf": (-4, 4), "tanh": (-9, 9), "sinh": (-9, 9), "cosh": (-9, 9), "asinh": (-50, 50), "acosh": (1, 50),
    "atanh": (-0.99, 0.99), "floor": (-9, 9), "ceil": (-9, 9), "trunc": (-9, 9), "round": (-9, 9), "roundeven": (-9, 9),
    "absf": (-9, 9),
}  # fmt: skip


@pytest.mark.parametrize("ty", ["f32", "f64"])
def test_math_functions(tr, tile, ty):
    """Relative accuracy also where results are near zero; the tile interpreter evaluates in float64 and rounds once."""
    names = list(MATH)
    lines = [f'%r_{n} = "math.{n}"(%x_{n}) <{{fastmath = #arith.fastmath<none>}}> : ({ty}) -> {ty}' for n in names]
    results = [(f"%r_{n}", ty) for n in names]
    given = []
    for low, high in MATH.values():
        x = np.random.default_rng(3).uniform(low, high, N)
        x[:40] = np.where((x[:40] * 1e-5 >= low), x[:40] * 1e-5, x[:40])  # small arguments
        x[40:50] = np.clip(np.round(x[40:50]) + 0.5, low, high)  # ties
        given.append(x.astype(NUMPY[ty]))
    kernel = pointwise(tr, tile, lines, {f"x_{n}": ty for n in names}, results)
    tr.compare(kernel, arrays(given, results), rtol=1e-6 if ty == "f32" else 1e-13, atol=0)


def test_math_functions_of_several_values_and_of_infinity(tr, tile):
    one = [
        f'%r{i} = "math.{n}"(%x) <{{fastmath = #arith.fastmath<none>}}> : (f32) -> f32'
        for i, n in enumerate(["tanh", "expm1", "log1p", "sinh", "cosh"])
    ]
    two = [
        f'%s{i} = "math.{n}"(%x, %y) <{{fastmath = #arith.fastmath<none>}}> : (f32, f32) -> f32'
        for i, n in enumerate(["copysign", "powf"])
    ]
    lines = [*one, *two, '%f = "math.fma"(%x, %y, %x) <{fastmath = #arith.fastmath<none>}> : (f32, f32, f32) -> f32']
    results = [*((f"%r{i}", "f32") for i in range(5)), ("%s0", "f32"), ("%s1", "f32"), ("%f", "f32")]
    x, y = 2 * tr.noise(N, 5), np.round(2 * tr.noise(N, 6))
    x[:6], y[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 100.0], [2.0, 0.0, -0.0, -0.0, 3.0, 0.0]
    with np.errstate(all="ignore"):
        kernel = pointwise(tr, tile, lines, {"x": "f32", "y": "f32"}, results)
        tr.compare(kernel, arrays([x, y.astype(np.float32)], results), rtol=3e-6, atol=1e-7)


def test_random_numbers_are_the_same_everywhere(tr, tile):
    seed = tr.number("seed", -7046029254386353131)
    lines = [
        *seed.splitlines(),
        *tr.number("big", 1 << 33).splitlines(),
        '%c = "arith.addi"(%l, %big) : (i64, i64) -> i64',
    ]
    lines += [
        f'%r{i} = "tile.random"(%seed, %c) <{{kind = "{k}"}}> : (i64, i64) -> {t}'
        for i, (k, t) in enumerate([("uniform", "f32"), ("normal", "f32"), ("bits", "i64")])
    ]
    results = [("%r0", "f32"), ("%r1", "f32"), ("%r2", "i64")]
    got, _ = tr.compare(pointwise(tr, tile, lines, {}, results), arrays([], results))
    assert 0.3 < got[0].mean() < 0.7 and len(set(got[2])) == N


def test_a_helper_brings_those_that_it_calls_before_itself():
    text = helper_source({"tanh", "random_normal"})
    assert [name for name in HELPERS if f"def {name}(" in text] == ["expm1", "tanh", "random_words", "random_normal"]
    assert text.index("def expm1(") < text.index("def tanh(")
    everything = helper_source(set(HELPERS))
    for name in HELPERS:
        before = everything[: everything.index(f"def {name}(")]
        assert not re.search(rf"(?<![.\w]){name}\(", before)
