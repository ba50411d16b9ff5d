"""Matrix products, convolutions, attention and recurrent layers."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


def real(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


NEAR = {"rtol": 1e-9, "atol": 1e-10}


def test_products(check):
    def f(a, b, c, v):
        return (
            a @ b,
            torch.addmm(c, a, b, beta=0.5, alpha=2),
            F.linear(a, b.t(), v),
            a.t() @ a,
            v @ v,
            a @ b @ v,
            a @ b[:, 0],
            torch.einsum("ij,jk,k->i", a, b, v),
            a[:0] @ b,
            a[:, :0] @ b[:0],
            torch.outer(v, v),
            torch.addmv(a[:, 0], a, b[:, 1]),
        )

    check(f, real(3, 4), real(4, 5), real(5), real(5), **NEAR)


def test_batched_products(check):
    def f(a, b, c):
        return (
            a @ b,
            torch.baddbmm(c, a, b),
            torch.bmm(a[:1], b[:1]),
            torch.einsum("bij,bjk->ki", a, b),
            torch.addbmm(c, a, b),
            a @ b[0],
        )

    check(f, real(2, 3, 4), real(2, 4, 5), real(3, 5), **NEAR)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integer_products_wrap_as_torch_has_them(check, dtype):
    info = torch.iinfo(dtype)
    draw = lambda *s: torch.randint(info.min, info.max, s, dtype=dtype)  # noqa: E731

    def f(a, b, c, v):
        return (
            a @ b,
            a[None] @ b[None],
            a @ v,
            v @ v,
            F.linear(a, b.t()),
            F.linear(a, b.t(), c),
            torch.addmm(c, a, b, beta=3, alpha=5),
            torch.baddbmm(c, a[None], b[None], alpha=3),
            torch.einsum("ij,jk,k->i", a, b, c),
            torch.addmv(a[:, 0], a, v, alpha=7),
            torch.outer(v, v),
            a[:, :0] @ b[:0],
            torch.tensordot(a, b, 1),
        )

    check(f, draw(3, 40), draw(40, 5), draw(5), draw(40))


def test_products_of_integers_and_bfloat16(check):
    a, b = torch.randint(-5, 5, (3, 4)), torch.randint(-5, 5, (4, 2))
    check(lambda a, b: a @ b, a, b)
    x, w, v = (torch.randn(*s).bfloat16().requires_grad_() for s in ((6, 32), (8, 32), (8,)))
    check(lambda x, w, v: (F.linear(x, w, v), x @ w.t()), x, w, v, rtol=2e-2, atol=3e-2)


CONVOLUTIONS = [
    (1, {}),
    (1, {"stride": 2, "padding": 2, "dilation": 2}),
    (2, {}),
    (2, {"stride": 2, "padding": 1}),
    (2, {"padding": (2, 0), "dilation": (1, 2)}),
    (2, {"groups": 2, "padding": 1}),
    (2, {"stride": (3, 2)}),
    (3, {"padding": 1}),
    (2, {"groups": 4, "padding": 1}),
]


@pytest.mark.parametrize("rank,options", CONVOLUTIONS, ids=str)
def test_convolutions(check, rank, options):
    f = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    groups = options.get("groups", 1)
    x, w, b = real(2, 4, *[7] * rank), real(8, 4 // groups, *[3, 2, 3][:rank]), real(8)
    check(lambda x, w, b: (f(x, w, b, **options), f(x, w, **options)), x, w, b, strides=False, **NEAR)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "dilation": 2, "padding": 3}],
    ids=str,
)
def test_transposed_convolutions(check, options):
    groups = options.get("groups", 1)
    check(
        lambda x, w, b: F.conv_transpose2d(x, w, b, **options),
        real(2, 4, 5, 4),
        real(4, 6 // groups, 3, 3),
        real(6),
        strides=False,
        **NEAR,
    )


@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bool", "grouped", "cross", "narrow"])
def test_attention(check, kind):
    q, k, v = (real(2, 4, 5, 8) for _ in range(3))
    if kind in ("grouped", "cross"):
        k, v = (real(2, 2 if kind == "grouped" else 4, 5 if kind == "grouped" else 7, 8) for _ in range(2))
    options = {"is_causal": kind in ("causal", "grouped"), "enable_gqa": kind == "grouped"}
    masks = {"mask": torch.randn(2, 1, 5, 5, dtype=torch.float64), "bool": torch.rand(5, 5) > 0.3}
    v = real(2, 4, 5, 3) if kind == "narrow" else v

    def f(q, k, v, *mask):
        return F.scaled_dot_product_attention(q, k, v, *mask, **options).transpose(1, 2).flatten(2)

    check(f, q, k, v, *([masks[kind]] if kind in masks else []), rtol=1e-6, atol=1e-6)  # the log-sum-exp is float32


def test_attention_in_bfloat16(check):
    q, k, v = (torch.randn(1, 2, 6, 16).bfloat16().requires_grad_() for _ in range(3))
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "module,shape",
    [
        (nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), (2, 3, 3)),
        (nn.GRU(3, 4), (3, 2, 3)),
        (nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True, activation="gelu"), (2, 5, 8)),
    ],
    ids=["lstm", "gru", "encoder"],
)
def test_layers(check, module, shape):
    module = module.double()
    parameters = {k: p.detach().clone().requires_grad_() for k, p in module.named_parameters()}

    def f(x, *p):
        out = functional_call(module, dict(zip(parameters, p, strict=True)), (x,))
        return out[0] if isinstance(out, tuple) else out

    check(f, real(*shape), *parameters.values(), rtol=1e-5, atol=1e-6, strides=False)
