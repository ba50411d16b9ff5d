"""Convolutions as machine code beside float64: shapes, strides, padding, dilation, groups, layouts, gradients, edges."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

CALLS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}

# image, weights, options: around the lanes, the register tiles, the passes over channels and the blocks of points
CASES = [
    ((2, 8, 12, 12), (16, 8, 3, 3), {"padding": 1}),
    ((3, 5, 7, 7), (13, 5, 3, 3), {"padding": 1}),
    ((2, 3, 33, 29), (17, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((2, 3, 33, 29), (17, 3, 7, 7), {"padding": 3, "stride": 3}),
    ((2, 8, 30, 30), (12, 8, 3, 3), {"padding": 2, "dilation": 2}),
    ((2, 8, 30, 30), (12, 4, 3, 3), {"padding": 1, "groups": 2}),
    ((2, 6, 9, 11), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((2, 6, 9, 11), (12, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((2, 8, 100), (16, 8, 3), {"padding": 4, "dilation": 4}),
    ((2, 4, 8, 9, 10), (6, 4, 3, 3, 3), {"padding": 1}),
    ((2, 3, 5, 6, 7), (4, 3, 2, 3, 1), {"stride": (1, 2, 3), "padding": (0, 1, 0)}),
    ((1, 32, 7, 7), (64, 32, 7, 7), {}),
    ((2, 16, 14, 14), (32, 16, 1, 1), {}),
    ((2, 16, 14, 14), (32, 16, 1, 1), {"stride": 2}),
    ((2, 16, 14, 14), (32, 16, 1, 1), {"padding": 2}),
    ((2, 4, 40, 40), (8, 4, 20, 18), {"padding": 5}),
    ((2, 6, 13, 11), (8, 6, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 6, 12, 13), (8, 3, 2, 5), {"padding": (0, 2), "stride": (3, 2), "groups": 2}),
    ((2, 6, 15, 15), (8, 6, 3, 3), {"padding": 2, "stride": 2, "dilation": 2}),
    ((2, 6, 11, 9), (8, 6, 2, 2), {"stride": 4}),
    ((2, 200, 9, 9), (20, 200, 3, 3), {"padding": 1}),
    ((2, 6, 26, 30), (5, 6, 3, 3), {"padding": 5}),
    ((1, 1, 5), (1, 1, 3), {}),
    ((2, 4, 960), (8, 4, 3), {"padding": 1}),
    ((2, 3, 20, 40), (3, 1, 7, 7), {"padding": 3, "groups": 3}),
    ((2, 3, 19, 40), (3, 1, 3, 5), {"padding": (1, 2), "groups": 3, "stride": 2}),
    ((1, 3, 19, 20), (3, 1, 3, 5), {"padding": (1, 2), "groups": 3, "stride": (1, 2)}),
    ((2, 3, 40), (3, 1, 4), {"groups": 3, "dilation": 3}),
    ((2, 3, 5, 6, 7), (3, 1, 3, 3, 3), {"groups": 3, "padding": 1}),
    ((0, 8, 12, 12), (16, 8, 3, 3), {"padding": 1}),
]  # fmt: skip


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="luban", dynamic=False)


def close(got, want, tolerance=4e-6):
    for a, b in zip(got, want, strict=True):
        scale = b.abs().max().item() if b.numel() else 1.0
        assert (
            a.shape == b.shape and (a.double() - b).abs().max().item() <= tolerance * max(scale, 1e-30)
            if b.numel()
            else True
        )


def with_gradients(f, tensors):
    tensors = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    out = f(*tensors)
    torch.manual_seed(1)
    seed = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, seed)]


def beside_float64(f, tensors, tolerance=4e-6):
    close(with_gradients(compiled(f), tensors), with_gradients(f, [t.double() for t in tensors]), tolerance)


@pytest.mark.parametrize("image, weights, options", CASES, ids=str)
def test_forward_and_both_gradients(machine, image, weights, options):
    torch.manual_seed(0)
    f = CALLS[len(image)]
    x, w, b = torch.randn(image), torch.randn(weights), torch.randn(weights[0])
    beside_float64(lambda x, w, b: F.relu(f(x, w, b, **options)), (x, w, b))


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2, "groups": 2}], ids=str
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed(machine, rank, options):
    torch.manual_seed(0)
    x, w = torch.randn(2, 8, *[6, 5, 4][:rank]), torch.randn(8, 6, *[3, 3, 2][:rank])
    beside_float64(lambda x, w: TRANSPOSED[rank + 2](x, w, **options), (x, w))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("image, weights, options", [
    ((2, 5, 11, 13), (5, 1, 3, 3), {"padding": 1, "groups": 5}),
    ((2, 3, 9, 10), (3, 1, 3, 3), {"padding": 1, "groups": 3, "stride": 2}),
    ((2, 3, 9, 10), (3, 1, 3, 3), {"padding": 1, "groups": 3, "stride": (1, 2)}),
    ((2, 3, 3, 3), (3, 1, 3, 3), {"groups": 3}),
    ((2, 3, 5, 5), (3, 1, 5, 5), {"padding": 1, "groups": 3}),
    ((1, 2, 16, 16), (2, 1, 13, 12), {"padding": 2, "groups": 2}),
], ids=str)  # fmt: skip
def test_narrow_depthwise(machine, image, weights, options, dtype, tolerance):
    torch.manual_seed(0)
    x, w = torch.randn(image).to(dtype), torch.randn(weights).to(dtype)
    beside_float64(lambda x, w: F.conv2d(x, w, **options), (x, w), tolerance)


@pytest.mark.parametrize("layout", ["channels_last", "strided", "expanded"])
def test_layouts_of_the_image(machine, layout):
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, 12, 10), torch.randn(9, 6, 3, 3)
    if layout == "channels_last":
        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    elif layout == "strided":
        x = torch.randn(2, 6, 12, 20)[..., ::2]
    else:
        x = torch.randn(1, 6, 12, 10).expand(2, 6, 12, 10)
    f = compiled(lambda x, w: F.conv2d(x, w, padding=1))
    close([f(x, w)], [F.conv2d(x.double(), w.double(), padding=1)])


def test_what_is_fused_into_the_store(machine):
    torch.manual_seed(0)
    x, w, b, scale = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3), torch.randn(8), torch.randn(8)

    def f(x, w, b, scale):
        return F.gelu(F.conv2d(x, w, b, padding=1) * scale[:, None, None] + x)

    beside_float64(f, (x, w, b, scale), 1e-5)


def test_the_image_is_a_join(machine):
    torch.manual_seed(0)
    a, b, w = torch.randn(2, 3, 9, 9), torch.randn(2, 5, 9, 9), torch.randn(6, 8, 3, 3)
    beside_float64(lambda a, b, w: F.conv2d(torch.cat([a, b], 1), w, padding=1), (a, b, w))
    beside_float64(lambda a, b, w: F.conv2d(torch.cat([b, b, a], 1)[:, :8], w, padding=2), (a, b, w))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_value_reaches_only_what_it_touches(machine, bad):
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 10, 10), torch.randn(5, 4, 3, 3)
    x[1, 2, 0, 9] = bad
    got, want = compiled(lambda x, w: F.conv2d(x, w, padding=1))(x, w), F.conv2d(x, w, padding=1)
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    close([got[torch.isfinite(want)]], [want[torch.isfinite(want)].double()])


def test_a_bad_value_reaches_only_the_taps_of_a_depthwise_gradient_that_touch_it(machine):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6), torch.randn(3, 1, 3, 3)
    x[1, 1, 0, 0] = float("inf")

    def f(x, w):
        return F.conv2d(x, w, padding=1, groups=3)

    got, want = (torch.isfinite(with_gradients(g, (x, w))[2]) for g in (compiled(f), f))
    assert torch.equal(got, want)


def test_a_kernel_larger_than_the_padded_input_is_torchs_error():
    with pytest.raises(Exception, match="Kernel size can't be greater than actual input size"):
        compiled(lambda x, w: F.conv2d(x, w, padding=1))(torch.randn(1, 2, 3, 3), torch.randn(2, 2, 6, 6))


def test_geometries_at_random(machine):
    generator = torch.Generator().manual_seed(7)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _, rank in itertools.product(range(4), (1, 2, 3)):
        groups, kernel = pick(1, 2), [pick(1, 4) for _ in range(rank)]
        stride, dilation = [pick(1, 3) for _ in range(rank)], [pick(1, 2) for _ in range(rank)]
        padding = [pick(0, 3) for _ in range(rank)]
        space = [
            max(1, (k - 1) * d + 1 - 2 * p) + pick(0, 9) for k, d, p in zip(kernel, dilation, padding, strict=True)
        ]
        x = torch.randn(pick(1, 3), groups * pick(1, 5), *space, generator=generator)
        w = torch.randn(groups * pick(1, 20), x.shape[1] // groups, *kernel, generator=generator)
        f = CALLS[rank + 2]
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        beside_float64(lambda x, w, f=f, options=options: f(x, w, **options), (x, w))


def test_float64_and_dynamic_batches(machine):
    torch.manual_seed(0)
    torch._dynamo.reset()
    f = torch.compile(lambda x, w: F.conv2d(x, w, padding=1), backend="luban", dynamic=True)
    w = torch.randn(8, 4, 3, 3)
    for n in (2, 5, 3):
        x = torch.randn(n, 4, 11, 7)
        close([f(x, w)], [F.conv2d(x.double(), w.double(), padding=1)])
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    beside_float64(lambda x, w: F.conv2d(x, w, padding=1), (x, w.double()), 1e-14)
