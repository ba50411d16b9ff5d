"""Division by a number that all lanes share: rounded as a division is, whatever the two numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

TYPES = {"f32": np.float32, "f64": np.float64}
TINY = {"f32": 2.0**-149, "f64": 2.0**-1074}


def divide(ty: str, count: int, divisor: str) -> str:
    return f"""
%z = "arith.constant"() <{{value = 0 : i64}}> : () -> i64
%n = "arith.constant"() <{{value = {count} : i64}}> : () -> i64
{divisor}
for vector %i = %z to %n {{
%x = load %a[%i] [1] + 0 : {ty}
%w = "arith.divf"(%x, %y) : ({ty}, {ty}) -> {ty}
store %w, %o[%i] [1] + 0 : {ty}
}}
"""


def dividends(ty: str) -> np.ndarray:
    """All magnitudes, both signs, and what is special."""
    rng, dtype = np.random.default_rng(2), TYPES[ty]
    info = np.finfo(dtype)
    exponents = rng.integers(int(np.log2(info.tiny)) - 24, int(np.log2(info.max)), 4000).astype(dtype)
    wild = np.ldexp(rng.uniform(1, 2, 4000), exponents.astype(np.int32)).astype(dtype) * rng.choice([-1, 1], 4000)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.tiny, TINY[ty], -TINY[ty], 1.0]
    return np.concatenate([wild, special, rng.standard_normal(4001)]).astype(dtype)


def divisors(ty: str) -> list[float]:
    info = np.finfo(TYPES[ty])
    edges = [info.max, info.tiny, info.tiny / 2, 1 / info.tiny, 1.5 / info.tiny, TINY[ty], 5 * TINY[ty], info.eps]
    return [1.0, -3.0, 7.25, 1 / 3, 1e-30, -1e30, 0.0, -0.0, np.inf, -np.inf, np.nan, *edges]


def distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """In units of the last place; infinite where only one is NaN or infinite or the sign differs."""
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    with np.errstate(all="ignore"):
        away = np.abs(got - want) / np.spacing(np.abs(want))
    return np.where(same, 0, np.where(np.isfinite(got) & np.isfinite(want), away, np.inf))


@pytest.mark.parametrize("target", ["native", "x86-64-avx2"])
@pytest.mark.parametrize("ty", TYPES)
def test_any_number_by_any_shared_number(tile, ty, target):
    a = dividends(ty)
    load = f"%y = load %d[%z] [1] + 0 : {ty}"
    kernel = tile.load(tile.text(divide(ty, len(a), load), f"%a: {ty}, %d: {ty}, %o: {ty}"), target)
    for divisor in divisors(ty):
        d, out = np.array([divisor], TYPES[ty]), np.full(len(a), 7, TYPES[ty])
        kernel(a, d, out)
        with np.errstate(all="ignore"):
            want = a / d
        away = distance(out, want)
        assert away.max() <= 1, (divisor, a[away.argmax()], out[away.argmax()], want[away.argmax()])
        tiny = np.finfo(TYPES[ty]).tiny
        normal = (np.abs(a) > tiny * 2.0**30) & (np.abs(want) > tiny)
        assert (away[normal] == 0).all(), divisor


@pytest.mark.parametrize("divisor", [3.0, -0.1, 8.0, 1e-38, 3e38])
def test_by_a_constant(tile, divisor):
    a = dividends("f32")
    constant = f'%y = "arith.constant"() <{{value = {divisor:.9e} : f32}}> : () -> f32'
    kernel = tile.load(tile.text(divide("f32", len(a), constant), "%a: f32, %o: f32"))
    out = np.zeros_like(a)
    kernel(a, out)
    with np.errstate(all="ignore"):
        assert distance(out, a / np.float32(divisor)).max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats_round_once_more(machine, dtype):
    x = (torch.randn(300, 77) * 10).to(dtype)
    machine.check(lambda x: x / x.amax(1, keepdim=True), x, tolerance=1e-3)
    machine.check(lambda x: (x / 3, x / x.sum()), x, tolerance=1e-3)
