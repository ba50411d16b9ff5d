"""Every scalar operation of generated code against the reference interpreter, which computes in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

HEAD = """
%z = "arith.constant"() <{value = 0 : i64}> : () -> i64
%n = "tile.dim"() <{value = #graph.dims<[s0]>}> : () -> i64
"""
DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "i1": torch.bool,
}  # fmt: skip
FLOATS, INTEGERS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "i16", "i8")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-3, 100.25, -7.75]


def apply_text(operation: str, operands: list[str], result: str, properties: str = "") -> str:
    names = [f"%x{i}" for i in range(len(operands))]
    loads = [f"{n} = load %a{i}[%i] [1] + 0 : {ty}" for i, (n, ty) in enumerate(zip(names, operands))]
    props = f" <{{{properties}}}>" if properties else ""
    line = f'%r = "{operation}"({", ".join(names)}){props} : ({", ".join(operands)}) -> {result}'
    store = f"store %r, %o[%i] [1] + 0 : {result}"
    return HEAD + "\n".join(["for vector %i = %z to %n {", *loads, line, store, "}"]) + "\n"


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def reference(tensor: torch.Tensor) -> np.ndarray:
    """What the interpreter takes: bf16 as float32 arrays."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def values(ty: str, seed: int, count: int = 83, low: float = -6, high: float = 6) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if ty in FLOATS:
        data = rng.uniform(low, high, count)
        data[: len(SPECIAL)] = rng.permutation(SPECIAL)
        return torch.from_numpy(data).to(DTYPES[ty])
    if ty == "i1":
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    return torch.from_numpy(rng.integers(-100, 100, count)).to(DTYPES[ty])


def check(tile, operation, operand_types, result_type, inputs, properties="", target="native", rtol=None):
    body = apply_text(operation, operand_types, result_type, properties)
    buffers = ", ".join([*(f"%a{i}: {ty}" for i, ty in enumerate(operand_types)), f"%o: {result_type}"])
    text = tile.text(body, buffers, "s0")
    out = torch.zeros(len(inputs[0]), dtype=DTYPES[result_type])
    tile.load(text, target)(*map(as_array, inputs), as_array(out), symbols=(len(out),))
    want = reference(torch.zeros_like(out))
    tile.interpret(text, *map(reference, inputs), want, s0=len(out))
    got = reference(out)
    if rtol is None:
        assert np.array_equal(got, want, equal_nan=got.dtype.kind == "f"), (operation, operand_types, inputs, got, want)
    else:
        assert np.allclose(got.astype(float), want.astype(float), rtol=rtol, atol=1e-30, equal_nan=True), (
            operation,
            got,
            want,
        )


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", FLOATS)
@pytest.mark.parametrize(
    "operation",
    ["addf", "subf", "mulf", "divf", "negf", "maximumf", "minimumf", "maxnumf", "minnumf"],
)
def test_float_arithmetic(tile, operation, ty, target):
    count = 1 if operation == "negf" else 2
    check(tile, f"arith.{operation}", [ty] * count, ty, [values(ty, i) for i in range(count)], target=target)


@pytest.mark.parametrize("ty", FLOATS)
@pytest.mark.parametrize(
    "operation", ["absf", "ceil", "floor", "trunc", "round", "roundeven", "sqrt", "copysign", "fma"]
)
def test_float_functions_of_the_chip(tile, operation, ty):
    count = {"copysign": 2, "fma": 3}.get(operation, 1)
    exact = (operation, ty) != ("fma", "f64")  # the interpreter rounds twice there
    inputs = [values(ty, i) for i in range(count)]
    if operation == "copysign":
        inputs[1] = torch.nan_to_num(inputs[1])  # nobody defines the sign of a NaN
    check(tile, f"math.{operation}", [ty] * count, ty, inputs, rtol=None if exact else 1e-12)


ELEMENTARY = "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf exp exp2 expm1 log log10 log1p log2 powf rsqrt"
ELEMENTARY += " sin sinh tan tanh"


@pytest.mark.parametrize("operation", ELEMENTARY.split())
@pytest.mark.parametrize("ty", ["f32", "f64", "bf16"])
def test_elementary_functions(tile, operation, ty):
    count = 2 if operation in ("atan2", "powf") else 1
    tolerance = {"f32": 3e-7, "f64": 1e-14, "bf16": 1e-2}[ty]
    check(tile, f"math.{operation}", [ty] * count, ty, [values(ty, i) for i in range(count)], rtol=tolerance)


@pytest.mark.parametrize("ty", FLOATS)
def test_float_comparisons(tile, ty):
    for predicate in range(16):
        check(tile, "arith.cmpf", [ty, ty], "i1", [values(ty, 0), values(ty, 3)], f"predicate = {predicate} : i64")


@pytest.mark.parametrize("ty", INTEGERS)
def test_integer_comparisons(tile, ty):
    for predicate in range(10):
        a, b = values(ty, 0), values(ty, 1)
        b[::3] = a[::3]
        check(tile, "arith.cmpi", [ty, ty], "i1", [a, b], f"predicate = {predicate} : i64")


INTEGER_ARITHMETIC = "addi subi muli andi ori xori maxsi minsi maxui minui divsi divui remsi remui floordivsi ceildivsi"
INTEGER_ARITHMETIC += " ceildivui shli shrsi shrui"


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", INTEGERS)
@pytest.mark.parametrize("operation", INTEGER_ARITHMETIC.split())
def test_integer_arithmetic(tile, operation, ty, target):
    a, b = values(ty, 0), values(ty, 1)
    if operation.startswith(("div", "rem", "floor", "ceil")):
        b = torch.where(b == 0, torch.ones_like(b), b)
        b[::7] = -1 if operation.endswith("si") else 3
    if operation.startswith("sh"):
        b = b.abs() % 8
    check(tile, f"arith.{operation}", [ty, ty], ty, [a, b], target=target)


def test_division_never_traps(tile):
    """A zero divisor counts as one, and the lowest number divided by -1 wraps."""
    a = torch.tensor([7, -7, -(2**31), 5], dtype=torch.int32)
    b = torch.tensor([0, 0, -1, 2], dtype=torch.int32)
    for operation, want in (("divsi", [7, -7, -(2**31), 2]), ("remsi", [0, 0, 0, 1])):
        kernel = tile.load(
            tile.text(apply_text(f"arith.{operation}", ["i32", "i32"], "i32"), "%a0: i32, %a1: i32, %o: i32", "s0")
        )
        out = np.zeros(4, np.int32)
        kernel(a.numpy(), b.numpy(), out, symbols=(4,))
        assert out.tolist() == want


@pytest.mark.parametrize("ty", ["f32", "bf16", "f16", "i64", "i8", "i1"])
def test_select(tile, ty):
    check(tile, "arith.select", ["i1", ty, ty], ty, [values("i1", 5), values(ty, 0), values(ty, 1)])


@pytest.mark.parametrize("target", ["native", "x86-64-avx2", "x86-64-avx512"])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("result", FLOATS)
def test_conversions_among_floats(tile, source, result, target):
    bits = {"f64": 64, "f32": 32, "bf16": 16, "f16": 16}
    if bits[source] == bits[result]:
        return
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(900) * 10.0 ** rng.integers(-9, 9, 900)
    wide[: len(SPECIAL)] = SPECIAL
    wide[20:24] = [65519, 65520, 5.96e-8, 2.9e-8]
    operation = "arith.extf" if bits[source] < bits[result] else "arith.truncf"
    data = torch.from_numpy(wide).to(DTYPES[source])
    body = apply_text(operation, [source], result)
    out = torch.zeros(900, dtype=DTYPES[result])
    tile.load(tile.text(body, f"%a0: {source}, %o: {result}", "s0"), target)(
        as_array(data), as_array(out), symbols=(900,)
    )
    assert torch.equal(
        torch.nan_to_num(out.double(), nan=12345.0), torch.nan_to_num(data.to(DTYPES[result]).double(), nan=12345.0)
    )


def test_every_float16_and_bfloat16_without_instructions_for_them(tile):
    """The integer sequences that targets without conversion instructions get, on all 65536 values, both ways."""
    from luban import targets
    from luban.compiler.codegen.llvm import small_floats

    native = small_floats._NATIVE
    try:
        small_floats._NATIVE = {"half": frozenset(), "bfloat": frozenset()}
        kernels = {
            (s, r): tile.load(tile.text(apply_text(f"arith.{op}", [s], r), f"%a0: {s}, %o: {r}", "s0"))
            for op, s, r in (
                ("extf", "f16", "f32"),
                ("extf", "bf16", "f32"),
                ("truncf", "f32", "f16"),
                ("truncf", "f32", "bf16"),
            )
        }
    finally:
        small_floats._NATIVE = native
    assert targets.get("native").vector_bits
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 100000).astype(np.int32)).view(torch.float32)
    for ty in ("f16", "bf16"):
        small = every.view(DTYPES[ty])
        wide = torch.zeros(len(small))
        kernels[(ty, "f32")](as_array(small), wide.numpy(), symbols=(len(small),))
        assert np.array_equal(wide.numpy(), small.float().numpy(), equal_nan=True)
        middle = (small.float()[:-1] + small.float()[1:]) / 2  # ties
        for data in (words, middle.contiguous(), wide):
            out = torch.zeros(len(data), dtype=DTYPES[ty])
            kernels[("f32", ty)](data.numpy(), as_array(out), symbols=(len(data),))
            want = data.to(DTYPES[ty])
            assert np.array_equal(out.float().numpy(), want.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("source", [*INTEGERS, "i1"])
@pytest.mark.parametrize("result", FLOATS)
def test_integers_to_floats(tile, source, result, target):
    for operation in ("sitofp", "uitofp") if source != "i1" else ("uitofp",):
        check(tile, f"arith.{operation}", [source], result, [values(source, 0)], target=target)


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("result", INTEGERS)
def test_floats_to_integers(tile, source, result, target):
    data = values(source, 0, low=-100, high=100)
    data = torch.where(data.isfinite(), data, torch.zeros_like(data))
    check(tile, "arith.fptosi", [source], result, [data], target=target)
    check(tile, "arith.fptoui", [source], result, [data.abs()], target=target)


def test_integers_to_integers(tile):
    for source, result, operation in (
        ("i8", "i64", "extsi"),
        ("i8", "i32", "extui"),
        ("i64", "i16", "trunci"),
        ("i1", "i32", "extui"),
    ):
        check(tile, f"arith.{operation}", [source], result, [values(source, 0)])


def test_bitcast_and_bit_counts(tile):
    check(tile, "arith.bitcast", ["f32"], "i32", [values("f32", 0)])
    check(tile, "arith.bitcast", ["i32"], "f32", [values("i32", 0)])
    for operation in ("ctlz", "cttz", "ctpop", "absi"):
        check(tile, f"math.{operation}", ["i32"], "i32", [values("i32", 0)])


def test_division_of_indices(tile):
    """An index split by numbers, as reshapes need it: 32-bit lanes give the same as 64-bit ones."""
    body = """
%k = "arith.constant"() <{value = 700 : i64}> : () -> i64
%seven = "arith.constant"() <{value = 7 : i64}> : () -> i64
%four = "arith.constant"() <{value = 4 : i64}> : () -> i64
%three = "arith.constant"() <{value = 3 : i64}> : () -> i64
for vector %i = %z to %k {
%t = "arith.muli"(%i, %three) : (i64, i64) -> i64
%q = "arith.floordivsi"(%t, %seven) : (i64, i64) -> i64
%r = "arith.remsi"(%t, %seven) : (i64, i64) -> i64
%s = "arith.divui"(%q, %four) : (i64, i64) -> i64
%x = load %a[%q, %r] [1, 50] + 0 : f32
store %x, %o[%i] [1] + 0 : f32
store %s, %p[%i] [1] + 0 : i64
}
"""
    kernel = tile.load(tile.text(HEAD + body, "%a: f32, %o: f32, %p: i64", "s0"))
    a, out, whole = np.arange(1000, dtype=np.float32), np.zeros(700, np.float32), np.zeros(700, np.int64)
    kernel(a, out, whole, symbols=(1,))
    t = 3 * np.arange(700)
    assert np.array_equal(out, a[t // 7 + 50 * (t % 7)]) and np.array_equal(whole, t // 7 // 4)


@pytest.mark.parametrize("predicate", [0, 1, 2, 3, 4, 5])
def test_comparing_an_index_with_a_bound(tile, predicate):
    body = f"""
for serial %k = %z to %n {{
for vector %i = %z to %n {{
%m = "arith.cmpi"(%i, %k) <{{predicate = {predicate} : i64}}> : (i64, i64) -> i1
store %m, %o[%k, %i] ["s0", 1] + 0 : i1
}}
}}
"""
    kernel = tile.load(tile.text(HEAD + body, "%o: i1", "s0"))
    functions = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
    for n in (1, 17, 70):
        out = np.zeros((n, n), bool)
        kernel(out, symbols=(n,))
        k, i = np.indices((n, n))
        assert np.array_equal(out, functions[predicate](i, k))


@pytest.mark.parametrize("features", [64, 48, 20])
@pytest.mark.parametrize("n", [192, 200, 10])
def test_an_index_split_where_lanes_stay_together(tile, features, n):
    """Heads and features: whole vectors where the features are a multiple of the lanes in flight, gathers elsewhere."""
    body = f"""
%k = "arith.constant"() <{{value = {n} : i64}}> : () -> i64
%f = "arith.constant"() <{{value = {features} : i64}}> : () -> i64
for parallel %t = %z to %n {{
for vector %i = %z to %k {{
%at = "arith.addi"(%i, %z) : (i64, i64) -> i64
%q = "arith.divui"(%at, %f) : (i64, i64) -> i64
%r = "arith.remui"(%at, %f) : (i64, i64) -> i64
%x = load %a[%t, %q, %r] [{n}, 1000, 1] + 0 : f32
store %x, %o[%t, %i] [{n}, 1] + 0 : f32
}}
}}
"""
    kernel = tile.load(tile.text(HEAD + body, "%a: f32, %o: f32", "s0"))
    a, out = np.arange(20000, dtype=np.float32), np.zeros((3, n), np.float32)
    kernel(a, out, symbols=(3,))
    i = np.arange(n)
    assert np.array_equal(out, a[np.arange(3)[:, None] * n + i // features * 1000 + i % features])
    if features == 64 and n == 192:
        assert "vgather" not in kernel.compiled.assembly
