"""Reductions and nested loops of generated code against NumPy in float64 and against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

HEAD = """
%z = "arith.constant"() <{value = 0 : i64}> : () -> i64
%one = "arith.constant"() <{value = 1 : i64}> : () -> i64
%n = "tile.dim"() <{value = #graph.dims<[s0]>}> : () -> i64
"""
FLOAT_KINDS = {"add": "addf", "mul": "mulf", "max": "maximumf", "min": "minimumf"}
INTEGER_KINDS = {"add": "addi", "mul": "muli", "max": "maxsi", "min": "minsi", "and": "andi", "or": "ori"}
NUMPY = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
DTYPES = {"f32": np.float32, "f64": np.float64, "i64": np.int64, "i32": np.int32, "i8": np.int8, "i1": np.bool_}


def reduction(kind: str, operation: str, ty: str, init: str) -> str:
    return (
        HEAD
        + f"""
%init = "arith.constant"() <{{value = {init} : {ty}}}> : () -> {ty}
%r = for vector %i = %z to %n carry %acc = %init combine {kind} : {ty} {{
%x = load %a[%i] [1] + 0 : {ty}
%next = "arith.{operation}"(%acc, %x) : ({ty}, {ty}) -> {ty}
yield %next : {ty}
}}
store %r, %o[%z] [1] + 0 : {ty}
"""
    )


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", ["f32", "f64", "i64", "i32", "i8"])
@pytest.mark.parametrize("kind", ["add", "mul", "max", "min", "and", "or"])
def test_kinds_and_lengths(tile, target, kind, ty):
    floats = ty.startswith("f")
    table = FLOAT_KINDS if floats else INTEGER_KINDS
    if kind not in table:
        pytest.skip("floats have no bits")
    init = {"add": "3", "mul": "1", "max": "-90", "min": "90", "and": "-1", "or": "0"}[kind] + (".0" if floats else "")
    text = tile.text(reduction(kind, table[kind], ty, init), f"%a: {ty}, %o: {ty}", "s0")
    kernel = tile.load(text, target)
    rng = np.random.default_rng(1)
    for n in [*range(0, 71, 7), 1, 15, 16, 17, 63, 64, 65, 200]:
        a = (rng.uniform(0.9, 1.1, n) if floats and kind == "mul" else rng.integers(-50, 50, n)).astype(DTYPES[ty])
        out = np.zeros(1, DTYPES[ty])
        kernel(a, out, symbols=(n,))
        want = NUMPY[kind].reduce(
            a.astype(np.float64) if floats else a, initial=DTYPES[ty](float(init)), dtype=None if floats else a.dtype
        )
        assert np.allclose(out[0], want, rtol=1e-6, atol=0), (n, out, want)


@pytest.mark.parametrize("kind", ["and", "or"])
def test_bools(tile, kind):
    init = "true" if kind == "and" else "false"
    text = tile.text(
        reduction(kind, INTEGER_KINDS[kind], "i1", "0").replace("value = 0 : i1", f"value = {init}"),
        "%a: i1, %o: i1",
        "s0",
    )
    kernel = tile.load(text)
    for n in (0, 1, 70):
        for hit in range(min(n, 3) + 1):
            a = np.full(n, kind == "and")
            a[n // 2 : n // 2 + hit] = kind == "or"
            out = np.zeros(1, bool)
            kernel(a, out, symbols=(n,))
            assert out[0] == (a.all() if kind == "and" else a.any())


def test_unsigned_maximum_starts_at_zero(tile):
    text = tile.text(reduction("max", "maxui", "i8", "0"), "%a: i8, %o: i8", "s0")
    a, out = np.array([3, 200, 7, 100] * 9, np.uint8), np.zeros(1, np.uint8)
    tile.load(text)(a, out, symbols=(36,))
    assert out[0] == 200


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("kind", ["max", "min", "add"])
def test_nan_and_infinity(tile, target, kind):
    init = {"add": "0.0", "max": "0xff800000", "min": "0x7f800000"}[kind]
    kernel = tile.load(tile.text(reduction(kind, FLOAT_KINDS[kind], "f32", init), "%a: f32, %o: f32", "s0"), target)
    for n in (1, 5, 16, 40, 64, 100):
        for place in {0, n // 2, n - 1}:
            for special in (np.nan, np.inf, -np.inf):
                a = np.arange(n, dtype=np.float32) - n / 2
                a[place] = special
                out = np.zeros(1, np.float32)
                kernel(a, out, symbols=(n,))
                assert np.array_equal(out[0], NUMPY[kind].reduce(a), equal_nan=True)
    out = np.zeros(1, np.float32)
    kernel(np.zeros(0, np.float32), out, symbols=(0,))
    assert out[0] == {"add": 0, "max": -np.inf, "min": np.inf}[kind]


def test_several_reductions_in_one_loop(tile):
    body = (
        HEAD
        + """
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
%low = "arith.constant"() <{value = 0xff800000 : f32}> : () -> f32
%r, %q = for vector %i = %z to %n carry %s, %m = %zero, %low combine add, max : f32, f32 {
%x = load %a[%i] [1] + 0 : f32
%square = "arith.mulf"(%x, %x) : (f32, f32) -> f32
%s2 = "arith.addf"(%s, %square) : (f32, f32) -> f32
%m2 = "arith.maximumf"(%m, %x) : (f32, f32) -> f32
yield %s2, %m2 : f32, f32
}
store %r#0, %o[%z] [1] + 0 : f32
store %r#1, %o[%z] [1] + 1 : f32
"""
    )
    text = tile.text(
        body.replace("store %r#0,", "store %r0,").replace("store %r#1,", "store %r1,"), "%a: f32, %o: f32", "s0"
    )
    text = text.replace("%r0", "%r#0").replace("%r1", "%r#1")
    kernel = tile.load(text)
    for n in (1, 33, 100, 1000):
        a, out = np.random.default_rng(n).standard_normal(n).astype(np.float32), np.zeros(2, np.float32)
        kernel(a, out, symbols=(n,))
        assert np.allclose(out, [np.square(a.astype(np.float64)).sum(), a.max()], rtol=1e-6)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_column_reduction_carries_vectors_through_a_serial_loop(tile, target):
    body = (
        HEAD
        + """
%m = "tile.dim"() <{value = #graph.dims<[s1]>}> : () -> i64
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
for vector %j = %z to %m {
%r = for serial %i = %z to %n carry %acc = %zero combine add : f32 {
%x = load %a[%i, %j] ["s1", 1] + 0 : f32
%next = "arith.addf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
store %r, %o[%j] [1] + 0 : f32
}
"""
    )
    kernel = tile.load(tile.text(body, "%a: f32, %o: f32", "s0, s1"), target)
    for n, m in ((5, 70), (0, 5), (9, 128), (3, 1)):
        a, out = np.random.default_rng(m).standard_normal((n, m)).astype(np.float32), np.full(m, 9, np.float32)
        kernel(a, out, symbols=(n, m))
        assert np.allclose(out, a.astype(np.float64).sum(0), rtol=1e-6, atol=1e-6)


def test_unrolled_loops_and_plain_carried_values(tile):
    """Horner's rule, with the coefficient index unrolled inside lanes, and a scalar recurrence in a serial loop."""
    body = (
        HEAD
        + """
%three = "arith.constant"() <{value = 3 : i64}> : () -> i64
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
for vector %j = %z to %n {
%x = load %a[%j] [1] + 0 : f32
%r = for unroll %i = %z to %three carry %acc = %zero combine none : f32 {
%c = load %b[%i] [1] + 0 : f32
%p = "arith.mulf"(%acc, %x) : (f32, f32) -> f32
%next = "arith.addf"(%p, %c) : (f32, f32) -> f32
yield %next : f32
}
store %r, %o[%j] [1] + 0 : f32
}
%last = for serial %i = %z to %n carry %acc = %zero combine none : f32 {
%c = load %a[%i] [1] + 0 : f32
%next = "arith.subf"(%c, %acc) : (f32, f32) -> f32
yield %next : f32
}
store %last, %o[%n] [1] + 0 : f32
"""
    )
    kernel = tile.load(tile.text(body, "%a: f32, %b: f32, %o: f32", "s0"))
    b = np.array([0.5, -2, 3], np.float32)
    for n in (1, 20, 70):
        a, out = np.random.default_rng(n).standard_normal(n).astype(np.float32), np.zeros(n + 1, np.float32)
        kernel(a, b, out, symbols=(n,))
        assert np.allclose(out[:n], np.polyval(b, a), rtol=1e-5, atol=1e-5)
        alternating = 0.0
        for value in a:
            alternating = value - alternating
        assert np.isclose(out[n], alternating, rtol=1e-5)


SOFTMAX = (
    HEAD
    + """
%m = "tile.dim"() <{value = #graph.dims<[s1]>}> : () -> i64
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
%unit = "arith.constant"() <{value = 1.0 : f32}> : () -> f32
%low = "arith.constant"() <{value = 0xff800000 : f32}> : () -> f32
for parallel %i = %z to %n {
%row = "tile.alloc"() <{elements = #graph.dims<[SIZE]>}> : () -> !tile.buf<f32>
%max = for vector %j = %z to %m carry %acc = %low combine max : f32 {
%x = load %a[%i, %j] ["s1", 1] + 0 : f32
%next = "arith.maximumf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
%sum = for vector %j = %z to %m carry %acc = %zero combine add : f32 {
%x = load %a[%i, %j] ["s1", 1] + 0 : f32
%d = "arith.subf"(%x, %max) : (f32, f32) -> f32
%e = "math.exp"(%d) : (f32) -> f32
store %e, %row[%j] [1] + 0 : f32
%next = "arith.addf"(%acc, %e) : (f32, f32) -> f32
yield %next : f32
}
%inverse = "arith.divf"(%unit, %sum) : (f32, f32) -> f32
for vector %j = %z to %m {
%e = load %row[%j] [1] + 0 : f32
%y = "arith.mulf"(%e, %inverse) : (f32, f32) -> f32
store %y, %o[%i, %j] ["s1", 1] + 0 : f32
}
}
"""
)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("size", ["1024", "s1", "65536"])
def test_row_softmax_with_scratch(tile, target, size):
    kernel = tile.load(tile.text(SOFTMAX.replace("SIZE", size), "%a: f32, %o: f32", "s0, s1"), target)
    for threads in (1, 2):
        for n, m in ((1, 7), (5, 64), (9, 1000)):
            a = np.random.default_rng(m).standard_normal((n, m)).astype(np.float32)
            out = np.zeros((n, m), np.float32)
            kernel(a, out, symbols=(n, m), threads=threads)
            e = np.exp(a.astype(np.float64) - a.max(1, keepdims=True))
            assert np.allclose(out, e / e.sum(1, keepdims=True), rtol=2e-6, atol=1e-9)


LAYER_NORM = (
    HEAD
    + """
%m = "arith.constant"() <{value = 100 : i64}> : () -> i64
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
%scale = "arith.constant"() <{value = 0.01 : f32}> : () -> f32
%eps = "arith.constant"() <{value = 1.0e-5 : f32}> : () -> f32
for parallel %i = %z to %n {
%sum = for vector %j = %z to %m carry %acc = %zero combine add : f32 {
%x = load %a[%i, %j] [100, 1] + 0 : f32
%next = "arith.addf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
%mean = "arith.mulf"(%sum, %scale) : (f32, f32) -> f32
%squares = for vector %j = %z to %m carry %acc = %zero combine add : f32 {
%x = load %a[%i, %j] [100, 1] + 0 : f32
%d = "arith.subf"(%x, %mean) : (f32, f32) -> f32
%square = "arith.mulf"(%d, %d) : (f32, f32) -> f32
%next = "arith.addf"(%acc, %square) : (f32, f32) -> f32
yield %next : f32
}
%variance = "arith.mulf"(%squares, %scale) : (f32, f32) -> f32
%shifted = "arith.addf"(%variance, %eps) : (f32, f32) -> f32
%rstd = "math.rsqrt"(%shifted) : (f32) -> f32
for vector %j = %z to %m {
%x = load %a[%i, %j] [100, 1] + 0 : f32
%w = load %b[%j] [1] + 0 : f32
%d = "arith.subf"(%x, %mean) : (f32, f32) -> f32
%t = "arith.mulf"(%d, %rstd) : (f32, f32) -> f32
%y = "arith.mulf"(%t, %w) : (f32, f32) -> f32
store %y, %o[%i, %j] [100, 1] + 0 : f32
}
store %mean, %p[%i] [1] + 0 : f32
}
"""
)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
def test_layer_norm(tile, target):
    kernel = tile.load(tile.text(LAYER_NORM, "%a: f32, %b: f32, %o: f32, %p: f32", "s0"), target)
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((13, 100)).astype(np.float32) + 3, rng.standard_normal(100).astype(np.float32)
    out, mean = np.zeros((13, 100), np.float32), np.zeros(13, np.float32)
    kernel(a, w, out, mean, symbols=(13,), threads=2)
    wide = a.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * w
    assert np.allclose(out, want, rtol=1e-5, atol=1e-5) and np.allclose(mean, wide.mean(1), rtol=1e-6)


def test_the_interpreter_agrees(tile):
    text = tile.text(LAYER_NORM, "%a: f32, %b: f32, %o: f32, %p: f32", "s0")
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal(300).astype(np.float32), rng.standard_normal(100).astype(np.float32)
    ours, theirs = ((np.zeros(300, np.float32), np.zeros(3, np.float32)) for _ in range(2))
    tile.load(text)(a, w, *ours, symbols=(3,))
    tile.interpret(text, a, w, *theirs, s0=3)
    assert np.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6) and np.allclose(ours[1], theirs[1], rtol=1e-6)


def test_phases_run_in_order(tile):
    """Two parallel loops and the scalar code around them see each other's results."""
    body = (
        HEAD
        + """
%zero = "arith.constant"() <{value = 0.0 : f32}> : () -> f32
%m = "tile.dim"() <{value = #graph.dims<["s0*64"]>}> : () -> i64
for parallel %i = %z to %n {
%r = for vector %j = %z to %n carry %acc = %zero combine add : f32 {
%x = load %a[%i, %j] ["s0", 1] + 0 : f32
%next = "arith.addf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
store %r, %p[%i] [1] + 0 : f32
}
%total = for vector %i = %z to %n carry %acc = %zero combine add : f32 {
%x = load %p[%i] [1] + 0 : f32
%next = "arith.addf"(%acc, %x) : (f32, f32) -> f32
yield %next : f32
}
for parallel %i = %one to %n {
%x = load %p[%i] [1] + 0 : f32
%y = "arith.divf"(%x, %total) : (f32, f32) -> f32
store %y, %o[%i] [1] + 0 : f32
}
"""
    )
    kernel = tile.load(tile.text(body, "%a: f32, %p: f32, %o: f32", "s0"))
    for n in (1, 2, 3, 40):
        for threads in (1, 2, 5):
            a = np.random.default_rng(n).uniform(1, 2, (n, n)).astype(np.float32)
            partial, out = np.zeros(n, np.float32), np.full(n, 7, np.float32)
            kernel(a, partial, out, symbols=(n,), threads=threads)
            rows = a.astype(np.float64).sum(1)
            assert np.allclose(out[1:], (rows / rows.sum())[1:], rtol=1e-6) and out[0] == 7
