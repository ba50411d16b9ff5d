"""Scalar operations against Python, NumPy and torch; the random generator against its published vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luban.compiler.ir.scalar_semantics import FUNCTIONS, evaluate, philox, random
from luban.compiler.ir.text import context, parse
from luban.errors import ConfigError

SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 3e38, 1e-40], np.float32)
CMPF = [
    "false",
    "oeq",
    "ogt",
    "oge",
    "olt",
    "ole",
    "one",
    "ord",
    "ueq",
    "ugt",
    "uge",
    "ult",
    "ule",
    "une",
    "uno",
    "true",
]
CMPI = ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"]


def apply(line: str, *operands):
    """The results of the one operation in `line`, whose operands are %a, %b, %c."""
    arguments = "".join(
        f'%{c} = "test.value"() : () -> {t}\n' for c, t in zip("abc", line.split("//")[1].split(), strict=False)
    )
    ctx = context()
    ctx.allow_unregistered = True
    from xdsl.parser import Parser

    op = list(Parser(ctx, arguments + line.split("//")[0]).parse_module().ops)[-1]
    results = evaluate(op, operands)
    return results[0] if len(results) == 1 else results


def pairs():
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    return a.reshape(-1), b.reshape(-1)


@pytest.mark.parametrize("predicate", CMPF)
def test_float_comparisons_with_nan(predicate):
    a, b = pairs()
    nan = np.isnan(a) | np.isnan(b)
    base = {"eq": a == b, "gt": a > b, "ge": a >= b, "lt": a < b, "le": a <= b, "ne": (a != b) & ~nan}
    if predicate in ("false", "true"):
        want = np.full(a.shape, predicate == "true")
    elif predicate in ("ord", "uno"):
        want = nan if predicate == "uno" else ~nan
    else:
        want = base[predicate[1:]] & ~nan if predicate[0] == "o" else base[predicate[1:]] | nan
    np.testing.assert_array_equal(apply(f"%r = arith.cmpf {predicate}, %a, %b : f32 // f32 f32", a, b), want)


@pytest.mark.parametrize("predicate", CMPI)
@pytest.mark.parametrize("dtype, ty", [(np.int32, "i32"), (np.bool_, "i1")])
def test_integer_comparisons(predicate, dtype, ty):
    values = np.array([0, 1] if dtype is np.bool_ else [0, 1, -1, 7, -(2**31), 2**31 - 1])
    a, b = (x.reshape(-1).astype(dtype) for x in np.meshgrid(values, values))
    bits = 1 if dtype is np.bool_ else 32
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    if predicate.startswith("u"):
        wide_a, wide_b = wide_a % (1 << bits), wide_b % (1 << bits)
    elif dtype is np.bool_:  # a signed i1 is 0 or -1
        wide_a, wide_b = -wide_a, -wide_b
    f = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    np.testing.assert_array_equal(
        apply(f"%r = arith.cmpi {predicate}, %a, %b : {ty} // {ty} {ty}", a, b), f[predicate[-2:]](wide_a, wide_b)
    )


def test_max_and_min_with_nan_and_signed_zero():
    a, b = pairs()
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    got = {
        name: apply(f"%r = arith.{name} %a, %b : f32 // f32 f32", a, b)
        for name in ("maximumf", "minimumf", "maxnumf", "minnumf")
    }
    np.testing.assert_array_equal(got["maximumf"], torch.maximum(ta, tb).numpy())
    np.testing.assert_array_equal(got["minimumf"], torch.minimum(ta, tb).numpy())
    np.testing.assert_array_equal(got["maxnumf"], torch.fmax(ta, tb).numpy())
    np.testing.assert_array_equal(got["minnumf"], torch.fmin(ta, tb).numpy())
    zeros = (a == 0) & (b == 0)
    assert (np.signbit(got["maximumf"][zeros]) == (np.signbit(a[zeros]) & np.signbit(b[zeros]))).all()
    assert (np.signbit(got["minimumf"][zeros]) == (np.signbit(a[zeros]) | np.signbit(b[zeros]))).all()


ELEMENTARY = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sinh cosh asin acos atan asinh acosh atanh sqrt rsqrt erf"
)


@pytest.mark.parametrize("name", ELEMENTARY.split())
def test_elementary_functions_are_rounded_once(name):
    x = np.concatenate([SPECIAL, np.linspace(-4, 4, 101, dtype=np.float32)])
    want = getattr(torch, name)(torch.from_numpy(x).double()).float().numpy()
    np.testing.assert_array_max_ulp(
        apply(f"%r = math.{name} %a : f32 // f32", x)[~np.isnan(want)], want[~np.isnan(want)], 1
    )
    np.testing.assert_array_equal(np.isnan(apply(f"%r = math.{name} %a : f32 // f32", x)), np.isnan(want))


def test_rounding_functions():
    x = np.array([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609.0, -0.0, np.inf, np.nan], np.float32)
    t = torch.from_numpy(x)
    for name, want in (
        ("floor", t.floor()),
        ("ceil", t.ceil()),
        ("trunc", t.trunc()),
        ("roundeven", t.round()),
        ("absf", t.abs()),
    ):
        got = apply(f"%r = math.{name} %a : f32 // f32", x)
        np.testing.assert_array_equal(got, want.numpy())
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want.numpy()))
    np.testing.assert_array_equal(
        apply("%r = math.round %a : f32 // f32", x),
        np.array([1, 2, 3, -1, -3, 0, 8388609.0, -0.0, np.inf, np.nan], np.float32),
    )


def test_integer_division_follows_its_name():
    a, b = (x.reshape(-1).astype(np.int64) for x in np.meshgrid([7, -7, 6, -6, 0], [2, -2, 3, -3]))
    truncated = torch.div(torch.from_numpy(a), torch.from_numpy(b), rounding_mode="trunc").numpy()
    want = {
        "divsi": truncated, "remsi": a - truncated * b, "floordivsi": a // b, "ceildivsi": -(-a // b),
    }  # fmt: skip
    for name, w in want.items():
        np.testing.assert_array_equal(apply(f"%r = arith.{name} %a, %b : i64 // i64 i64", a, b), w, err_msg=name)
    u, v = a.astype(np.int8), b.astype(np.int8)
    wide_u, wide_v = u.astype(np.int64) % 256, v.astype(np.int64) % 256
    for name, w in (("divui", wide_u // wide_v), ("remui", wide_u % wide_v), ("maxui", np.maximum(wide_u, wide_v)),
                    ("minui", np.minimum(wide_u, wide_v)), ("shrui", wide_u >> 2)):  # fmt: skip
        right = np.full_like(v, 2) if name == "shrui" else v
        np.testing.assert_array_equal(
            apply(f"%r = arith.{name} %a, %b : i8 // i8 i8", u, right), w.astype(np.uint8).view(np.int8)
        )


def test_wrapping_and_bits():
    a = np.array([127, -128, 5], np.int8)
    np.testing.assert_array_equal(apply("%r = arith.addi %a, %a : i8 // i8", a, a), (a.astype(int) * 2).astype(np.int8))
    bits = np.array([0, 1, 0, 1], bool), np.array([0, 0, 1, 1], bool)
    np.testing.assert_array_equal(apply("%r = arith.addi %a, %b : i1 // i1 i1", *bits), bits[0] ^ bits[1])
    np.testing.assert_array_equal(apply("%r = arith.muli %a, %b : i1 // i1 i1", *bits), bits[0] & bits[1])
    x = np.array([0, 1, 0x0F00, -1], np.int32)
    np.testing.assert_array_equal(apply("%r = math.ctpop %a : i32 // i32", x), [0, 1, 4, 32])
    np.testing.assert_array_equal(apply("%r = math.ctlz %a : i32 // i32", x), [32, 31, 20, 0])
    np.testing.assert_array_equal(apply("%r = math.cttz %a : i32 // i32", x), [32, 0, 8, 0])
    low, high = apply("%r, %h = arith.mulsi_extended %a, %b : i32 // i32 i32", x, np.full(4, 2**30, np.int32))
    np.testing.assert_array_equal(
        (high.astype(np.int64) << 32) | (low.astype(np.int64) & 0xFFFFFFFF), x.astype(np.int64) << 30
    )
    total, carry = apply("%r, %h = arith.addui_extended %a, %b : i32, i1 // i32 i32", x, np.full(4, 1, np.int32))
    np.testing.assert_array_equal(total, [1, 2, 0x0F01, 0])
    np.testing.assert_array_equal(carry, [False, False, False, True])
    base, exponent = np.array([2, -1, 3, 1], np.int32), np.array([5, -3, -1, -2], np.int32)
    np.testing.assert_array_equal(apply("%r = math.ipowi %a, %b : i32 // i32 i32", base, exponent), [32, -1, 0, 1])


def test_casts():
    flags = np.array([False, True])
    np.testing.assert_array_equal(apply("%r = arith.extsi %a : i1 to i32 // i1", flags), [0, -1])
    np.testing.assert_array_equal(apply("%r = arith.extui %a : i1 to i32 // i1", flags), [0, 1])
    np.testing.assert_array_equal(apply("%r = arith.uitofp %a : i1 to f32 // i1", flags), [0.0, 1.0])
    np.testing.assert_array_equal(apply("%r = arith.sitofp %a : i1 to f32 // i1", flags), [0.0, -1.0])
    np.testing.assert_array_equal(
        apply("%r = arith.trunci %a : i32 to i8 // i32", np.array([257, -1], np.int32)), [1, -1]
    )
    np.testing.assert_array_equal(
        apply("%r = arith.trunci %a : i32 to i1 // i32", np.array([2, 3], np.int32)), [False, True]
    )
    np.testing.assert_array_equal(
        apply("%r = arith.uitofp %a : i8 to f32 // i8", np.array([-1, 3], np.int8)), [255.0, 3.0]
    )
    np.testing.assert_array_equal(
        apply("%r = arith.fptosi %a : f32 to i32 // f32", np.array([2.9, -2.9], np.float32)), [2, -2]
    )
    np.testing.assert_array_equal(
        apply("%r = arith.fptoui %a : f32 to i8 // f32", np.array([200.5], np.float32)).view(np.uint8), [200]
    )
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    got = apply("%r = arith.truncf %a : f32 to bf16 // f32", x)
    np.testing.assert_array_equal(got, torch.from_numpy(x).bfloat16().float().numpy())
    np.testing.assert_array_equal(
        apply("%r = arith.bitcast %a : bf16 to i16 // bf16", got),
        torch.from_numpy(got).bfloat16().view(torch.int16).numpy(),
    )
    np.testing.assert_array_equal(apply("%r = arith.bitcast %a : i32 to f32 // i32", x.view(np.int32)), x)
    bits = torch.from_numpy(got).bfloat16().view(torch.int16).numpy()
    np.testing.assert_array_equal(apply("%r = arith.bitcast %a : i16 to bf16 // i16", bits), got)


def test_low_precision_arithmetic_is_rounded_after_every_operation():
    generator = torch.Generator().manual_seed(0)
    for ty, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        x, y = torch.randn(2, 500, generator=generator).to(dtype)
        a, b = (t.float().numpy() if ty == "bf16" else t.numpy() for t in (x, y))
        for name, want in (("addf", x + y), ("mulf", x * y), ("divf", x / y)):
            np.testing.assert_array_equal(
                apply(f"%r = arith.{name} %a, %b : {ty} // {ty} {ty}", a, b), want.float().numpy()
            )


def test_every_operation_of_the_dialects_has_a_meaning():
    from xdsl.dialects.arith import Arith
    from xdsl.dialects.math import Math

    named = {op.name for op in [*Arith.operations, *Math.operations]}
    assert not {n for n in named if n not in FUNCTIONS}


def test_an_operation_without_a_meaning_is_named():
    op = next(iter(parse("builtin.module { builtin.module {} }").ops))
    with pytest.raises(ConfigError, match="no meaning for builtin.module"):
        evaluate(op, [])


def test_philox_gives_the_published_vectors():
    assert [int(w) for w in philox(0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_against_a_plain_implementation():
    def plain(seed, counter):
        c, k = [counter & 0xFFFFFFFF, counter >> 32 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(q >> 32) ^ c[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ k[1], p & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return c

    seeds, counters = np.array([0, 1, -5, 2**40 + 3]), np.array([7, 2**33 + 1, -1, 12])
    got = philox(seeds, counters)
    for i, (s, c) in enumerate(zip(seeds.tolist(), counters.tolist(), strict=True)):
        assert [int(w[i]) for w in got] == plain(s % 2**64, c % 2**64)


def test_random_kinds_follow_their_definition():
    w0, w1, _, _ = (w.astype(np.float64) for w in philox(3, np.arange(1000)))
    u1, u2 = (np.floor(w0 / 256) + 1) / 2**24, np.floor(w1 / 256) / 2**24
    np.testing.assert_array_equal(random("bits", 3, np.arange(1000)), w0)
    np.testing.assert_array_equal(random("uniform", 3, np.arange(1000)), np.floor(w0 / 256) / 2**24)
    np.testing.assert_allclose(
        random("normal", 3, np.arange(1000)), np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2), rtol=1e-12
    )
    with pytest.raises(ConfigError, match="no random kind 'cauchy'"):
        random("cauchy", 0, 0)
