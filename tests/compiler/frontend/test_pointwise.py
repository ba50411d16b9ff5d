"""Pointwise operators: values, special values, type promotion and gradients."""

import pytest
import torch
import torch.nn.functional as F

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 88.0, -104.0, 1e-30, float("inf"), float("-inf"), float("nan")]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: (2e-6, 1e-7),
    torch.float64: (1e-12, 1e-14),
    torch.bfloat16: (8e-3, 1e-7),
    torch.float16: (1e-3, 1e-7),
}


def special(dtype):
    return torch.cat([torch.tensor(SPECIAL), torch.randn(8) * 3]).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary_functions_on_special_values(check, dtype):
    def f(x):
        return (
            x.exp(),
            x.exp2(),
            x.expm1(),
            x.log(),
            x.log2(),
            x.log10(),
            x.log1p(),
            x.sin(),
            x.cos(),
            x.tanh(),
            x.erf(),
            x.sqrt(),
            x.rsqrt(),
            x.reciprocal(),
            x.abs(),
            x.neg(),
            x.floor(),
            x.ceil(),
            x.trunc(),
            x.round(),
            x.sigmoid(),
            x.sign(),
            x.square(),
            x.isnan(),
            x.isinf(),
            x.isfinite(),
            x[:-9].signbit(),
            x.logical_not(),
            x.nan_to_num(),
            x.frac(),
            x.atan(),
            x.asinh(),
            torch.relu(x),
            F.silu(x),
            F.gelu(x[:9]),
            F.gelu(x, approximate="tanh"),
            F.hardtanh(x),
            F.leaky_relu(x, 0.1),
            F.relu6(x),
            F.elu(x),
            F.softplus(x),
            F.mish(x),
            F.hardswish(x),
            F.hardsigmoid(x),
            F.logsigmoid(x),
        )

    rtol, atol = TOLERANCE[dtype]
    check(f, special(dtype), rtol=rtol, atol=max(atol, rtol))


@pytest.mark.parametrize(
    "f",
    [
        torch.tanh,
        torch.sigmoid,
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.relu,
        F.hardtanh,
        F.elu,
        F.softplus,
        F.mish,
        F.hardswish,
        F.logsigmoid,
        F.leaky_relu,
        F.hardshrink,
        F.softshrink,
        F.glu,
        F.celu,
        F.selu,
        lambda x: F.threshold(x, 0.1, 2.0),
        lambda x: F.prelu(x, x[0, :1].abs()),
        lambda x: x.exp().sqrt().log1p().rsqrt(),
        lambda x: x.clamp(-0.5, 0.7) + x.clamp_min(0) * x.pow(3),
        lambda x: torch.lerp(x, x * 2, 0.3) + torch.addcmul(x, x, x, value=2),
        lambda x: torch.where(x > 0, x, x * 0.1).masked_fill(x > 1, 0.0),
        lambda x: x.abs().pow(1.5) + x.square().add(1).pow(-0.5),
    ],
)
def test_gradients_in_float64(check, f):
    check(f, (torch.randn(4, 6, dtype=torch.float64) * 2).requires_grad_(), rtol=1e-10, atol=1e-12)


def test_hard_sigmoid_gradient(check):
    check(F.hardsigmoid, torch.randn(4, 6, requires_grad=True))  # eager's float64 gradient holds 1/6 in float32


def test_activations_and_gradients_in_bfloat16(check):
    x = (torch.randn(5, 7) * 2).to(torch.bfloat16).requires_grad_()
    check(lambda x: (F.silu(x), F.gelu(x), torch.tanh(x)), x, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "a", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool], ids=str
)
def test_promotion_of_pairs_and_scalars(check, a):
    def f(x, *others):
        out = []
        for y in others:
            out += [x + y, x * y, x == y, x < y, torch.where(x > y, x, y)]
        out += [x + 2, x * 1.5, x / 3, x > 0, 2 - x.to(torch.int32), x.pow(2), x + others[0][0, 0]]
        return out

    make = lambda d: torch.randint(0, 5, (2, 3)).to(d)  # noqa: E731
    others = [
        make(d)
        for d in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool)
    ]
    check(f, make(a), *others, rtol=1e-6)


def test_conversions(check):
    x = torch.tensor([-3.7, -1.0, -0.2, 0.0, 0.4, 1.0, 2.5, 100.9])
    targets = [
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.bool,
    ]
    check(lambda x: [x.to(d).to(torch.float32) for d in targets] + [x.abs().to(torch.uint8)], x)
    whole = torch.arange(-130, 130, 13)
    check(lambda x: [x.to(d) for d in (torch.int8, torch.uint8, torch.bool, torch.float32, torch.bfloat16)], whole)
    check(
        lambda x: [x.to(d) for d in (torch.int64, torch.int16, torch.float32, torch.bool)] + [x + x, ~x, x >> 1],
        torch.tensor([0, 1, 127, 128, 200, 255], dtype=torch.uint8),
    )


def test_integer_arithmetic_wraps_and_rounds_as_torch(check):
    x = torch.tensor([-7, -5, -1, 0, 1, 5, 7, 120])
    y = torch.tensor([3, -3, 2, 5, -2, 4, -4, 7])

    def f(x, y):
        return (
            x // y,
            x % y,
            torch.fmod(x, y),
            torch.div(x, y, rounding_mode="trunc"),
            x & y,
            x | y,
            x ^ y,
            ~x,
            x << 2,
            x >> 1,
            (x.to(torch.int8) * 3),
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.abs(),
            x.sign(),
            x.pow(3),
            x.clamp(-2, 5),
            -x,
        )

    check(f, x, y)


def test_float_remainders(check):
    x = torch.cat([torch.randn(40) * 100, torch.tensor([5.0, -5.0, 6.0, 1e8, float("inf"), 3.0])])
    y = torch.cat([torch.randn(40), torch.tensor([2.5, 2.5, -3.0, 3.0, 2.0, float("inf")])])
    check(
        lambda x, y: (x % y, torch.fmod(x, y), torch.floor_divide(x, y), torch.div(x, y, rounding_mode="trunc")),
        x,
        y,
        rtol=1e-6,
    )


def test_maximum_and_minimum_carry_nan(check):
    x = torch.tensor([1.0, float("nan"), -1.0, float("nan")])
    y = torch.tensor([float("nan"), 2.0, 3.0, float("nan")])
    check(
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y), x.clamp(0, 2)), x, y
    )


def test_broadcast_expanded_flipped_and_empty_operands(check):
    x = torch.randn(3, 1, 5)
    check(lambda x, y: (x + y, x.flip(2) * y.flip(0), x[:0].exp(), x[:, :0] + y[:0]), x, torch.randn(4, 5))
    check(lambda x, y: x.expand(3, 4, 5) * y + 1.0, x, torch.randn(1, 1).expand(4, 5))


def test_creation(check):
    def f(x):
        n = x.shape[0]
        return (
            torch.arange(n),
            torch.arange(2, 11, 3),
            torch.arange(0.0, 1.0, 0.25),
            torch.linspace(-1, 1, 7),
            torch.eye(3, 4),
            torch.full((2, 3), 7),
            torch.zeros_like(x),
            x.new_ones(2, dtype=torch.bool),
            torch.tril(x),
            torch.triu(x, 1),
            x.tril(-1),
            torch.full_like(x, 0.1, dtype=torch.bfloat16),
            torch.ones(2, 2) * x[0, 0],
            torch.zeros(0, 3),
            torch.triu_indices(3, 3, 1),
        )

    check(f, torch.randn(4, 4))
