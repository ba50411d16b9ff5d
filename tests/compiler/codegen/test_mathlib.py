"""The vectorised elementary functions against float64 (float32 functions) and mpmath (float64 functions)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import mpmath
import numpy as np
import pytest
import torch

from luban.compiler.codegen.llvm import mathlib
from luban.compiler.codegen.llvm.emitter import Function, Module

SIZES = {"float": np.float32, "double": np.float64}


def kernel_text(name: str, scalar_type: str, width: int, arity: int, features: frozenset[str] = frozenset()) -> str:
    """A loop that applies the function to arrays, `width` elements at a time."""
    module = Module(features=features)
    pointers = [("ptr", f"in{i}") for i in range(arity)] + [("ptr", "out"), ("i64", "count")]
    fn = Function(module, "apply", "void", pointers)
    vector = scalar_type if width == 1 else f"<{width} x {scalar_type}>"
    size = np.dtype(SIZES[scalar_type]).itemsize
    fn.branch("loop")
    fn.place("loop")
    fn.emit("%i = phi i64 [ 0, %entry ], [ %next, %latch ]")
    loaded = []
    for i in range(arity):
        address = fn.op(f"getelementptr {scalar_type}, ptr %in{i}, i64 %i")
        loaded.append(fn.op(f"load {vector}, ptr {address}, align {size}"))
    result = mathlib.call(fn, name, scalar_type, width, loaded)
    address = fn.op(f"getelementptr {scalar_type}, ptr %out, i64 %i")
    fn.emit(f"store {vector} {result}, ptr {address}, align {size}")
    fn.branch("latch")
    fn.place("latch")
    fn.emit(f"%next = add i64 %i, {width}")
    fn.branch_if(fn.op("icmp ult i64 %next, %count"), "loop", "done")
    fn.place("done")
    fn.emit("ret void")
    module.add(fn)
    return module.text()


def optimised(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


HOST_FEATURES = frozenset(n for n, there in llvm.get_host_cpu_features().items() if there)


@cache
def host_kernel(
    name: str, scalar_type: str, width: int, features: frozenset[str] = frozenset()
) -> tuple[Callable[..., None], llvm.ExecutionEngine]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    arity = mathlib.registry.lookup(name).arity
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    module = optimised(kernel_text(name, scalar_type, width, arity, features), machine)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (arity + 1), ctypes.c_int64)
    return signature(engine.get_function_address("apply")), engine


def apply(
    name: str, scalar_type: str, *arrays: np.ndarray, width: int = 16, features: frozenset[str] = frozenset()
) -> np.ndarray:
    """The function on whole arrays; the tail is padded with ones."""
    run, _ = host_kernel(name, scalar_type, width, features)
    count = len(arrays[0])
    padded = -(-count // width) * width
    inputs = [np.ones(padded, SIZES[scalar_type]) for _ in arrays]
    for target, source in zip(inputs, arrays, strict=True):
        target[:count] = source
    out = np.full(padded, 777.0, SIZES[scalar_type])
    run(*(a.ctypes.data for a in [*inputs, out]), padded)
    return out[:count]


def from_torch(function: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    return lambda *arrays: function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)).numpy()


REFERENCES: dict[str, Callable[..., np.ndarray]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "cos": np.cos,
    "cosh": np.cosh,
    "digamma": from_torch(torch.digamma),
    "erf": from_torch(torch.erf),
    "erfc": from_torch(torch.erfc),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "lgamma": from_torch(torch.lgamma),
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: np.where(x < 0, np.exp(-np.abs(x)), 1) / (1 + np.exp(-np.abs(x))),
    "sin": np.sin,
    "sinh": np.sinh,
    "tan": np.tan,
    "tanh": np.tanh,
}


def float_sweep(arity: int) -> list[np.ndarray]:
    """Every 4096th float32 bit pattern, negative ones, denormals and NaN included; random pairs for two arguments."""
    if arity == 1:
        return [np.arange(7, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32).view(np.float32)]
    random = np.random.default_rng(3)
    wild = [random.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(2)]
    tame = [random.uniform(-20, 20, 200_000).astype(np.float32) for _ in range(2)]
    return [np.concatenate(pair) for pair in zip(wild, tame, strict=True)]


def ulps(got: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance in units of float32's last place; infinite where only one of the two is NaN or infinity."""
    with np.errstate(all="ignore"):
        rounded = reference.astype(np.float32)
        place = np.maximum(np.spacing(np.abs(rounded)).astype(np.float64), 2.0**-149)
        distance = np.abs(got.astype(np.float64) - reference) / place
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    distance = np.where(np.isfinite(rounded), distance, np.where(same, 0.0, np.inf))
    return np.where(np.isnan(distance), np.inf, distance)


def pow_in_range(count: int) -> list[np.ndarray]:
    """Pairs whose power spreads over all magnitudes of float32."""
    random = np.random.default_rng(5)
    x = np.abs(random.integers(1, 0x7F800000, count).astype(np.uint32).view(np.float32))
    exponent = random.uniform(-150, 128, count)
    with np.errstate(all="ignore"):
        return [x, (exponent / np.log2(x.astype(np.float64))).astype(np.float32)]


def test_every_function_has_a_reference() -> None:
    assert sorted(REFERENCES) == mathlib.names()


# Without any feature, and with the host's: some functions have instructions of their own there, a whole register at once.
FEATURES = pytest.mark.parametrize("features", [frozenset(), HOST_FEATURES], ids=["plain", "host"])


@FEATURES
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_float32_within_two_ulp(name: str, features: frozenset[str]) -> None:
    inputs = float_sweep(mathlib.registry.lookup(name).arity)
    if name == "pow":
        inputs = [np.concatenate(pair) for pair in zip(inputs, pow_in_range(400_000), strict=True)]
    got = apply(name, "float", *inputs, features=features)
    with np.errstate(all="ignore"):
        reference = REFERENCES[name](*(a.astype(np.float64) for a in inputs))
    error = ulps(got, reference)
    worst = int(np.argmax(error))
    assert error[worst] <= 2.0, f"{name}({[float(a[worst]) for a in inputs]}) = {got[worst]}, not {reference[worst]}"


INF, NAN, TINY, BIG = np.inf, np.nan, 1e-45, 3.4028234663852886e38
SPECIAL = {
    "acos": [(1, 0), (1.0000001, NAN), (-1.0000001, NAN), (NAN, NAN)],
    "acosh": [(1, 0), (0.5, NAN), (-2, NAN), (INF, INF), (NAN, NAN)],
    "asin": [(0.0, 0.0), (-0.0, -0.0), (2, NAN), (-INF, NAN), (NAN, NAN), (TINY, TINY)],
    "asinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (NAN, NAN), (-TINY, -TINY)],
    "atan": [(0.0, 0.0), (-0.0, -0.0), (INF, np.float32(np.pi / 2)), (-INF, np.float32(-np.pi / 2)), (NAN, NAN)],
    "atanh": [(-0.0, -0.0), (1, INF), (-1, -INF), (1.5, NAN), (NAN, NAN), (TINY, TINY)],
    "cos": [(0.0, 1), (-0.0, 1), (INF, NAN), (-INF, NAN), (NAN, NAN)],
    "cosh": [(0.0, 1), (INF, INF), (-INF, INF), (-90, INF), (NAN, NAN)],
    "digamma": [(0.0, -INF), (-0.0, INF), (-3, NAN), (INF, INF), (NAN, NAN)],
    "erf": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (NAN, NAN)],
    "erfc": [(0.0, 1), (INF, 0), (-INF, 2), (11, 0), (NAN, NAN)],
    "exp": [(0.0, 1), (-0.0, 1), (INF, INF), (-INF, 0), (88.8, INF), (-104, 0), (BIG, INF), (-BIG, 0), (NAN, NAN)],
    "exp2": [
        (-149, TINY),
        (-126, 2.0**-126),
        (127, 2.0**127),
        (128, INF),
        (-151, 0),
        (-INF, 0),
        (INF, INF),
        (NAN, NAN),
    ],
    "expm1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -1), (-BIG, -1), (NAN, NAN)],
    "lgamma": [(1, 0.0), (2, 0.0), (0.0, INF), (-0.0, INF), (-2, INF), (INF, INF), (-INF, INF), (NAN, NAN)],
    "log": [(1, 0.0), (0.0, -INF), (-0.0, -INF), (-1, NAN), (INF, INF), (-INF, NAN), (NAN, NAN)],
    "log10": [(1, 0.0), (0.0, -INF), (-0.0, -INF), (-TINY, NAN), (INF, INF), (NAN, NAN)],
    "log1p": [(0.0, 0.0), (-0.0, -0.0), (-1, -INF), (-1.5, NAN), (INF, INF), (-INF, NAN), (NAN, NAN)],
    "log2": [(1, 0.0), (TINY, -149), (2.0**127, 127), (0.0, -INF), (-1, NAN), (INF, INF), (NAN, NAN)],
    "rsqrt": [(0.0, INF), (-0.0, -INF), (INF, 0.0), (-1, NAN), (4, 0.5), (NAN, NAN)],
    "sigmoid": [(0.0, 0.5), (INF, 1), (-INF, 0), (-BIG, 0), (BIG, 1), (NAN, NAN)],
    "sin": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (-TINY, -TINY)],
    "sinh": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (-90, -INF), (NAN, NAN)],
    "tan": [(0.0, 0.0), (-0.0, -0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (-TINY, -TINY)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (INF, 1), (-INF, -1), (BIG, 1), (NAN, NAN), (-TINY, -TINY)],
}


@FEATURES
@pytest.mark.parametrize("scalar_type", ["float", "double"])
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_special_values(name: str, scalar_type: str, features: frozenset[str]) -> None:
    cases = SPECIAL[name]
    if scalar_type == "double":  # the same, without what is special about float32's range and rounding
        cases = [(x, y) for x, y in cases if not np.isfinite(x) or x in (0, 0.5, 1, 1.5, 2, -1, -1.5)]
        cases = [(x, y) for x, y in cases if name != "atan" or abs(x) != INF]
    x, expected = (np.array(column, SIZES[scalar_type]) for column in zip(*cases, strict=True))
    got = apply(name, scalar_type, x, width=64 // SIZES[scalar_type]().itemsize, features=features)
    np.testing.assert_array_equal(got, expected)
    ordered = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[ordered], np.signbit(expected)[ordered])


@pytest.mark.parametrize("scalar_type", ["float", "double"])
@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_special_values_of_two_arguments(name: str, scalar_type: str) -> None:
    values = [0.0, -0.0, 1, -1, INF, -INF, NAN, 2, -2, 3, -3, 0.5, -0.5, 1e30, -1e30, 16777217.0, -7, 1e-30]
    x, y = (a.ravel().astype(SIZES[scalar_type]) for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        expected = REFERENCES[name](x, y)
    got = apply(name, scalar_type, x, y)
    np.testing.assert_allclose(got, expected, rtol=3e-7 if scalar_type == "float" else 1e-15)
    ordered = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[ordered], np.signbit(expected)[ordered])


EXACT: dict[str, tuple[Callable[..., mpmath.mpf], tuple[float, float]]] = {
    "cos": (mpmath.cos, (-1e6, 1e6)),
    "cosh": (mpmath.cosh, (-20, 20)),
    "erf": (mpmath.erf, (-6, 6)),
    "exp": (mpmath.exp, (-745, 709)),
    "exp2": (lambda x: mpmath.mpf(2) ** x, (-1074, 1023)),
    "expm1": (mpmath.expm1, (-30, 30)),
    "log": (mpmath.log, (1e-3, 1e3)),
    "log10": (mpmath.log10, (1e-3, 1e3)),
    "log1p": (mpmath.log1p, (-0.99, 5)),
    "log2": (lambda x: mpmath.log(x, 2), (1e-3, 1e3)),
    "rsqrt": (lambda x: 1 / mpmath.sqrt(x), (1e-3, 1e3)),
    "sigmoid": (lambda x: 1 / (1 + mpmath.exp(-x)), (-700, 700)),
    "sin": (mpmath.sin, (-1e6, 1e6)),
    "sinh": (mpmath.sinh, (-20, 20)),
    "tan": (mpmath.tan, (-1e6, 1e6)),
    "tanh": (mpmath.tanh, (-20, 20)),
    "erfc": (mpmath.erfc, (-6, 26)),
}


def double_ulps(got: np.ndarray, exact: list[mpmath.mpf]) -> float:
    place = [float(np.spacing(abs(float(e)))) for e in exact]
    return max(float(abs(mpmath.mpf(float(g)) - e)) / p for g, e, p in zip(got, exact, place, strict=True))


@FEATURES
@pytest.mark.parametrize("name", sorted(EXACT))
def test_float64_within_a_few_ulp(name: str, features: frozenset[str]) -> None:
    exact, (low, high) = EXACT[name]
    random = np.random.default_rng(11)
    around = min(1.0, -low if low < 0 else 0.3)
    near = random.uniform(-around, around, 300) + (1.0 if low > 0 else 0.0)
    x = np.concatenate([random.uniform(low, high, 300), near])
    with mpmath.workdps(40):
        worst = double_ulps(
            apply(name, "double", x, width=8, features=features), [exact(mpmath.mpf(float(v))) for v in x]
        )
    assert worst <= 4.0


def test_float64_pow_within_two_ulp() -> None:
    random = np.random.default_rng(12)
    x = np.concatenate([np.exp(random.uniform(-700, 700, 300)), random.uniform(0.7, 1.4, 300)])
    y = random.uniform(-1070, 1020, 600) / np.log2(x)
    with mpmath.workdps(40):
        exact = [mpmath.power(mpmath.mpf(float(a)), mpmath.mpf(float(b))) for a, b in zip(x, y, strict=True)]
        assert double_ulps(apply("pow", "double", x, y), exact) <= 2.0


@pytest.mark.parametrize("scalar_type", ["float", "double"])
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_width_does_not_change_a_result(name: str, scalar_type: str) -> None:
    random = np.random.default_rng(13)
    arity = mathlib.registry.lookup(name).arity
    inputs = [
        np.concatenate([random.normal(size=400) * 10.0 ** random.integers(-3, 7, 400), [0.0, -0.0, INF, -INF, NAN]])
        for _ in range(arity)
    ]
    widest = apply(name, scalar_type, *inputs, width=16)
    for width in (1, 4, 8):
        np.testing.assert_array_equal(apply(name, scalar_type, *inputs, width=width), widest)


# What a vector instruction looks like, and how wide the target's registers are in floats.
FOREIGN = {
    "aarch64-linux-gnu": ("", r"fmla\tv\d+\.4s", 4),
    "riscv64-linux-gnu": ("+m,+a,+f,+d,+c,+v,+zvl256b", r"vf(madd|macc|nmsub|nmsac|msub|msac)\.vv", 8),
    "loongarch64-linux-gnu": ("+64bit,+f,+d,+lsx,+lasx", r"xvf(madd|nmsub|msub)\.s", 8),
    "x86_64-linux-gnu": ("+avx2,+fma", r"vfn?m(add|sub)\d+ps", 8),
}


@cache
def foreign_machine(triple: str) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(triple).create_target_machine(features=FOREIGN[triple][0], opt=2, reloc="pic")


@pytest.mark.parametrize("triple", sorted(FOREIGN))
@pytest.mark.parametrize("name", [n for n in sorted(REFERENCES) if n not in ("cbrt", "rsqrt")])
def test_vector_instructions_on_every_architecture(name: str, triple: str) -> None:
    _, pattern, width = FOREIGN[triple]
    machine = foreign_machine(triple)
    text = f'target triple = "{triple}"\n' + kernel_text(name, "float", width, mathlib.registry.lookup(name).arity)
    assembly = machine.emit_assembly(optimised(text, machine))
    wide = pattern if name not in IN_DOUBLE else pattern.replace("4s", "2d").replace(r"\.s", r"\.d").replace("ps", "pd")
    assert re.search(wide, assembly), assembly[:2000]
    assert not re.search(r"\b(call|bl|jal)\b.*\b(fmaf?|expf?|logf?|ldexpf?)\b", assembly)


IN_DOUBLE = ("acosh", "asinh", "atanh", "digamma", "erfc", "lgamma")


def test_a_function_is_added_once_and_arguments_are_counted() -> None:
    module = Module()
    fn = Function(module, "twice", "void", [("<8 x float>", "x")])
    first = mathlib.call(fn, "exp", "float", 8, ["%x"])
    mathlib.call(fn, "exp", "float", 8, [first])
    assert list(module.functions) == ["luban.exp.float.8"]
    with pytest.raises(ValueError, match="pow takes 2 argument"):
        mathlib.call(fn, "pow", "float", 8, ["%x"])
    with pytest.raises(KeyError, match="no elementary function 'exp3'"):
        mathlib.call(fn, "exp3", "float", 8, ["%x"])
