"""Matrix products as machine code, beside float64: layouts, odd sizes, batches, dtypes, epilogues."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

FLOAT = {torch.float32: 4e-6, torch.bfloat16: 1e-2}
FLOATS = pytest.mark.parametrize("dtype", FLOAT, ids=str)

# around the register tile (8 x 48 on AVX-512, 6 x 16 on AVX2), the column panels, the passes over k (768, 1152), threads
SIZES = [
    (1, 1, 1), (1, 1, 1300), (2, 3, 1), (7, 23, 5), (8, 48, 16), (9, 49, 17), (15, 47, 31), (16, 96, 33), (17, 97, 2),
    (64, 400, 64), (65, 385, 769), (100, 1, 50), (1, 100, 50), (33, 17, 1201), (130, 50, 2500), (3, 500, 768),
    (257, 63, 1153), (64, 64, 1152),
]  # fmt: skip


def matrix(layout, rows, columns, dtype):
    """A matrix that lies in memory by rows, by columns, in every second element, or with gaps between rows."""
    if layout == "columns":
        return torch.randn(columns, rows).to(dtype).t()
    if layout == "second":
        return torch.randn(rows, columns * 2).to(dtype)[:, ::2]
    if layout == "gaps":
        return torch.randn(rows, columns + 3).to(dtype)[:, 1:-2]
    return torch.randn(rows, columns).to(dtype)


@FLOATS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_and_layouts(machine, size, dtype):
    m, n, k = size
    for left, right in (
        ("rows", "rows"),
        ("columns", "rows"),
        ("rows", "columns"),
        ("columns", "columns"),
        ("second", "gaps"),
    ):
        a, b = matrix(left, m, k, dtype), matrix(right, k, n, dtype)
        run = machine.check(torch.mm, a, b, tolerance=FLOAT[dtype])
        assert all("contract" in name for name in run.kernels[-1:])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("size", [(5, 7, 3), (17, 50, 33), (70, 20, 1300)], ids=str)
def test_other_floats(machine, size, dtype, tolerance):
    m, n, k = size
    x, w, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype) / 8, torch.randn(n).to(dtype)
    machine.check(lambda x, w, b: (x @ w.t(), F.gelu(F.linear(x, w, b))), x, w, b, tolerance=tolerance)


@FLOATS
def test_batches(machine, dtype):
    r = lambda *s: torch.randn(*s).to(dtype)  # noqa: E731
    near = {"tolerance": FLOAT[dtype]}
    machine.check(torch.matmul, r(3, 9, 17), r(3, 17, 50), **near)
    machine.check(torch.matmul, r(2, 3, 9, 17), r(3, 17, 50), **near)
    machine.check(torch.matmul, r(2, 3, 9, 17), r(17, 50), **near)
    machine.check(torch.matmul, r(1, 9, 17).expand(4, 9, 17), r(4, 17, 50), **near)
    machine.check(torch.matmul, r(1, 17).expand(9, 17), r(17, 1).expand(17, 50), **near)
    machine.check(lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b), r(2, 9, 4, 8), r(2, 11, 4, 8), **near)


@FLOATS
def test_vectors_and_one_matrix_as_both_operands(machine, dtype):
    a, v = torch.randn(40, 40).to(dtype), torch.randn(40).to(dtype)
    f = lambda a, v: (a @ a, a @ a.t(), a.t() @ a, a @ v, v @ a, torch.outer(v, v), torch.dot(v, v))  # noqa: E731
    machine.check(f, a, v, tolerance=FLOAT[dtype])


@pytest.mark.parametrize(
    "shapes", [((9, 0), (0, 5)), ((0, 4), (4, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (0, 4, 5))], ids=str
)
def test_nothing_to_multiply(machine, shapes):
    machine.check(lambda a, b: (a @ b + 1, a @ b), *(torch.randn(s) for s in shapes))


def test_nan_and_infinity_stay_in_their_rows(machine):
    a = torch.randn(20, 30)
    a[3, 4], a[5, 6] = float("nan"), float("inf")
    machine.check(torch.mm, a, torch.randn(30, 60))


EPILOGUES = {
    "bias": lambda x, w, b, s: F.linear(x, w, b),
    "gelu": lambda x, w, b, s: F.gelu(F.linear(x, w, b)),
    "tanh gelu": lambda x, w, b, s: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "residual": lambda x, w, b, s: F.linear(x, w, b) + s,
    "several results": lambda x, w, b, s: (lambda y: (y, y.relu(), (y + s) * 2, y.float().exp()))(F.linear(x, w, b)),
    "a factor for each row": lambda x, w, b, s: (x @ w.t()) * s[:, :1],
    "stored transposed": lambda x, w, b, s: (x @ w.t()).t().contiguous(),
    "stored as heads": lambda x, w, b, s: F.linear(x, w, b).view(x.shape[0], 4, -1).transpose(0, 1) * 2,
    "gated": lambda x, w, b, s: F.silu(x @ w.t()) * (x @ w.flip(0).t()),
    "chain": lambda x, w, b, s: F.linear(F.linear(x, w, b).relu(), w.t()),
    "joined": lambda x, w, b, s: torch.cat([x @ w.t(), (x @ w.t()) * 2], 1),
    "cut": lambda x, w, b, s: (x @ w.t())[1:, ::2] + 1,
}


@FLOATS
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(machine, name, dtype):
    for m, n, k in ((5, 8, 3), (33, 100, 64), (64, 500, 1300)):
        x, w = torch.randn(m, k).to(dtype), (torch.randn(n, k) / 10).to(dtype)
        b, s = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
        machine.check(EPILOGUES[name], x, w, b, s, tolerance=4 * FLOAT[dtype])


def test_bias_and_activation_need_no_kernel_of_their_own(machine):
    x, w, b = torch.randn(64, 96), torch.randn(80, 96), torch.randn(80)
    assert len(machine.check(lambda x, w, b: F.gelu(F.linear(x, w, b)) + 1, x, w, b, tolerance=1e-5).kernels) == 1


def test_an_update_in_the_store_of_a_gradient(machine):
    """The new weight takes over the old one's memory, which the same kernel reads."""
    import luban

    layer = torch.nn.Linear(96, 80, bias=False)
    x, y = torch.randn(33, 96), torch.randn(33, 80)
    weight = layer.weight.detach().double().requires_grad_()
    ((x.double() @ weight.t() - y.double()) ** 2).mean().backward()
    step = luban.train_step(layer, F.mse_loss, torch.optim.SGD(layer.parameters(), lr=0.5))
    step(x, y)
    assert machine.error(layer.weight, weight - 0.5 * weight.grad) < 2e-6
