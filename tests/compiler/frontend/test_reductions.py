"""Reductions, softmax, norms and losses, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

NAN, INF = float("nan"), float("inf")


def real(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dims", [None, 0, -1, (0, 2), [1]], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_and_moments(check, dims, keepdim):
    def f(x):
        if dims is None:
            return x.sum(), x.mean(), x.var(), x.std(), x.amax(), torch.var_mean(x)[1]
        k = {"keepdim": keepdim}
        return (
            x.sum(dims, **k),
            x.mean(dims, **k),
            x.var(dims, **k),
            x.std(dims, correction=0, **k),
            x.amax(dims, **k),
            x.logsumexp(dims, **k),
            torch.linalg.vector_norm(x, dim=dims, **k),
            torch.linalg.vector_norm(x, 3, dim=dims, **k),
        )

    check(f, real(3, 4, 5), rtol=1e-9, atol=1e-10)


def test_extremes_and_positions(check):
    x = torch.tensor([[1.0, 5.0, 5.0, -2.0], [NAN, 3.0, INF, 0.0], [-INF, -INF, -1.0, -1.0]])

    def f(x):
        return x.max(1), x.min(0), x.argmax(1), x.argmin(), x.amin(1, keepdim=True), x.max(), torch.aminmax(x)

    check(f, x)
    check(
        lambda x: (x.max(1), x.argmin(0, keepdim=True), x.amax(), x.min()),
        torch.randint(0, 255, (3, 5), dtype=torch.uint8),
    )


def test_integers_booleans_and_low_precision(check):
    x = torch.randint(-9, 9, (4, 6))
    check(
        lambda x: (x.sum(1), x.sum(), x.prod(0), (x > 0).sum(1), (x > 5).any(1), (x > -9).all(0), x.any(), x.amax(0)), x
    )
    check(lambda x: (x.sum(1, dtype=torch.int32), x.float().mean(), x.bool().any(0)), x.to(torch.uint8))
    # eager accumulates bfloat16 in float32 as well, in another order
    check(lambda x: (x.sum(1), x.mean(), x.softmax(1)), (torch.randn(3, 400) + 1).bfloat16(), rtol=1e-2)


def test_empty_and_single(check):
    check(lambda x: (x.sum(0), x.sum(), x.prod(1), x.mean(0)), torch.randn(0, 3))
    check(lambda x: (x.sum(0), x.max(0), x.softmax(0), x.var(1), x.mean()), torch.randn(1, 4))
    check(lambda x: (x.sum(), x.mean(), x.softmax(0), x.max()), torch.tensor(3.0))


def test_running_sums(check):
    check(lambda x: (x.cumsum(0), x.cumsum(-1)), real(3, 7), rtol=1e-9)
    check(lambda x: x.cumsum(1), torch.randint(0, 5, (2, 700)))
    check(lambda x: x.cumsum(0), torch.rand(5) > 0.5)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(check, dim):
    check(lambda x: (x.softmax(dim), x.log_softmax(dim)), real(3, 4, 5), rtol=1e-9, atol=1e-12)


def test_softmax_of_extremes_and_low_precision(check):
    x = torch.tensor([[1e4, -1e4, 0.0], [INF, 0.0, 1.0], [-INF, -INF, 0.0], [NAN, 0.0, 0.0]])
    check(lambda x: (x.softmax(1), x.log_softmax(1)), x)
    check(
        lambda x: (x.softmax(1), x.log_softmax(1, dtype=torch.float32)),
        real(3, 9, dtype=torch.bfloat16),
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize("affine", [True, False])
def test_norms(check, affine):
    w, b = (real(6), real(6)) if affine else (None, None)
    x = real(4, 6, 3, 5)
    check(
        lambda x, *p: F.layer_norm(x.transpose(1, 3), (6,), *p), x, *([w, b] if affine else []), rtol=1e-8, atol=1e-10
    )
    check(lambda x, *p: F.rms_norm(x.transpose(1, 3), (6,), *p), x, *([w] if affine else []), rtol=1e-8, atol=1e-10)
    check(lambda x, *p: F.group_norm(x, 3, *p), x, *([w, b] if affine else []), rtol=1e-8, atol=1e-10)
    check(lambda x, *p: F.instance_norm(x, None, None, *p), x, *([w, b] if affine else []), rtol=1e-8, atol=1e-10)
    check(lambda x: F.layer_norm(x, (3, 5)), x, rtol=1e-8, atol=1e-10)


def test_layer_norm_in_bfloat16(check):
    x, w, b = real(6, 32, dtype=torch.bfloat16), real(32, dtype=torch.bfloat16), real(32, dtype=torch.bfloat16)
    check(lambda x, w, b: F.layer_norm(x, (32,), w, b), x, w, b, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(check, training):
    x, w, b = real(4, 3, 5, 2), real(3), real(3)
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5

    def f(x, w, b, mean, var):
        return F.batch_norm(x, mean.clone(), var.clone(), w, b, training), F.batch_norm(
            x, mean.clone(), var.clone(), None, None, training
        )

    check(f, x, w, b, mean, var, rtol=1e-8, atol=1e-10)
    check(lambda x: F.batch_norm(x, None, None, training=True), x, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(check, reduction):
    x, y = real(5, 7), torch.randint(0, 7, (5,))
    y[2] = 3
    weight = torch.rand(7, dtype=torch.float64)
    k = {"reduction": reduction}
    near = {"rtol": 1e-9, "atol": 1e-12}
    check(
        lambda x, y, w: (
            F.cross_entropy(x, y, **k),
            F.cross_entropy(x, y, w, ignore_index=3, label_smoothing=0.1, **k),
        ),
        x,
        y,
        weight,
        **near,
    )
    t = torch.rand(5, 7, dtype=torch.float64)
    check(
        lambda x, t: (
            F.mse_loss(x, t, **k),
            F.l1_loss(x, t, **k),
            F.smooth_l1_loss(x, t, beta=0.5, **k),
            F.huber_loss(x, t, **k),
        ),
        x,
        t,
        **near,
    )
    check(lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=w, **k), x, t, weight, **near)
    check(lambda x, t: F.binary_cross_entropy(x.sigmoid(), t, **k), x, t, **near)
    check(
        lambda x, t: (
            F.kl_div(x.log_softmax(1), t.softmax(1), **k)
            if reduction != "mean"
            else F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean")
        ),
        x,
        t,
        **near,
    )  # noqa: E501


def test_classes_in_the_middle_and_all_ignored(check):
    check(
        lambda x, y: F.cross_entropy(x, y, ignore_index=1), real(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3)), rtol=1e-9
    )
    check(lambda x, y: F.cross_entropy(x, y), real(4), torch.tensor(2), rtol=1e-9)
    check(lambda x, y: F.cross_entropy(x, y, ignore_index=1), torch.randn(3, 4), torch.ones(3, dtype=torch.int64))


LABELS = {
    "rows": lambda: (torch.randn(40, 33), torch.randint(0, 33, (40,))),
    "places": lambda: (torch.randn(3, 17, 5, 2), torch.randint(0, 17, (3, 5, 2))),
    "classes last in memory": lambda: (torch.randn(3, 6, 17).transpose(1, 2), torch.randint(0, 17, (3, 6))),
    "one row": lambda: (torch.randn(17), torch.tensor(3)),
    "certain": lambda: (torch.randn(4, 9).masked_fill(torch.arange(9) != 2, float("-inf")), torch.tensor([2, 2, 1, 0])),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LABELS)
def test_cross_entropy_reads_what_it_wants(machine, name, reduction):
    """Without gradients nobody wants the other classes' logarithms: they are neither computed nor stored."""
    scores, labels = LABELS[name]()
    weight = torch.rand(scores.shape[1] if scores.dim() > 1 else scores.shape[0])
    machine.check(lambda z, y: F.cross_entropy(z, y, reduction=reduction), scores, labels)
    machine.check(lambda z, y, w: F.cross_entropy(z, y, w, ignore_index=2, reduction=reduction), scores, labels, weight)
    machine.check(lambda z, y: (F.nll_loss(F.log_softmax(z, -1), y), F.log_softmax(z, 0)), *LABELS["rows"]())


def test_cross_entropy_of_bfloat16_and_its_bytes(machine):
    scores, labels = torch.randn(64, 512), torch.randint(0, 512, (64,))
    compiled = machine.check(F.cross_entropy, scores, labels)
    assert max(k["bytes"] for k in compiled.program.kernels) < 1.1 * scores.nbytes
    machine.check(F.cross_entropy, scores.bfloat16(), labels, tolerance=5e-3)
