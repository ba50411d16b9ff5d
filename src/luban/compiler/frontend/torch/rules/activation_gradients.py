"""Gradients of activation functions; operands are named as in ATen, the gradient first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.activations import (
    SQRT_HALF,
    TANH_CUBE,
    TANH_SCALE,
    gelu_tanh_argument,
    stable_softplus,
)
from luban.compiler.frontend.torch.rules.unary import sigmoid
from luban.compiler.frontend.torch.views import View

Scalar2 = Callable[[Body, SSAValue, SSAValue], SSAValue]


def _register(name: str, function: Scalar2) -> None:
    @rule(f"aten.{name}.default")
    def gradient(cx: Builder, node: Node, grad: View, x: View) -> View:
        return cx.pointwise(node, function, (grad, x))


def _one_minus(b: Body, v: SSAValue) -> SSAValue:
    return b.sub(b.like(v, 1.0), v)


def _silu(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    s = sigmoid(b, x)
    return b.mul(g, b.mul(s, b.add(b.like(x, 1.0), b.mul(x, _one_minus(b, s)))))


def _mish(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    t, s = b.tanh(stable_softplus(b, x)), sigmoid(b, x)
    return b.mul(g, b.add(t, b.mul(b.mul(x, s), _one_minus(b, b.mul(t, t)))))


def _hardswish(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    inner = b.mul(g, b.add(b.div(x, b.like(x, 3.0)), b.like(x, 0.5)))
    low = b.select(b.cmp("lt", x, b.like(x, -3.0)), b.like(x, 0.0), inner)
    return b.select(b.cmp("le", x, b.like(x, 3.0)), low, g)


def _hardsigmoid(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    inside = b.and_(b.cmp("gt", x, b.like(x, -3.0)), b.cmp("lt", x, b.like(x, 3.0)))
    return b.select(inside, b.div(g, b.like(g, 6.0)), b.like(g, 0.0))


_register("tanh_backward", lambda b, g, y: b.mul(g, _one_minus(b, b.mul(y, y))))
_register("sigmoid_backward", lambda b, g, y: b.mul(g, b.mul(_one_minus(b, y), y)))
_register("silu_backward", _silu)
_register("mish_backward", _mish)
_register("hardswish_backward", _hardswish)
_register("hardsigmoid_backward", _hardsigmoid)


@rule("aten.threshold_backward.default")
def threshold_backward(cx: Builder, node: Node, grad: View, x: View, threshold: Any) -> View:
    return cx.pointwise(node, lambda b, g, v, t: b.select(b.cmp("le", v, t), b.like(g, 0), g), (grad, x, threshold))


@rule("aten.gelu_backward.default")
def gelu_backward(cx: Builder, node: Node, grad: View, x: View, approximate: str = "none") -> View:
    return cx.pointwise(node, _gelu_tanh if approximate == "tanh" else _gelu_erf, (grad, x))


def _gelu_erf(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    cdf = b.mul(b.like(x, 0.5), b.add(b.like(x, 1.0), b.erf(b.mul(x, b.like(x, SQRT_HALF)))))
    pdf = b.mul(b.exp(b.mul(b.mul(x, x), b.like(x, -0.5))), b.like(x, 1 / math.sqrt(2 * math.pi)))
    return b.mul(g, b.add(cdf, b.mul(x, pdf)))


def _gelu_tanh(b: Body, g: SSAValue, x: SSAValue) -> SSAValue:
    half, one = b.like(x, 0.5), b.like(x, 1.0)
    t = b.tanh(gelu_tanh_argument(b, x))
    inner = b.mul(b.like(x, TANH_SCALE), b.add(one, b.mul(b.like(x, 3 * TANH_CUBE), b.mul(x, x))))
    right = b.mul(b.mul(half, x), b.mul(_one_minus(b, b.mul(t, t)), inner))
    return b.mul(g, b.add(b.mul(half, b.add(one, t)), right))


@rule("aten.leaky_relu_backward.default")
def leaky_relu_backward(cx: Builder, node: Node, grad: View, x: View, slope: Any, is_result: bool) -> View:
    return cx.pointwise(
        node, lambda b, g, v, s: b.select(b.cmp("gt", v, b.like(v, 0)), g, b.mul(g, s)), (grad, x, slope)
    )


@rule("aten._prelu_kernel_backward.default")
def prelu_backward(cx: Builder, node: Node, grad: View, x: View, weight: View) -> tuple[View, View]:
    first, second = cx.metas(node)
    assert first is not None and second is not None
    positive: Any = lambda b, v: b.cmp("gt", v, b.like(v, 0))  # noqa: E731
    compute = COMPUTE[first.dtype]
    return (
        cx.elementwise(lambda b, g, v, w: b.select(positive(b, v), g, b.mul(w, g)), [grad, x, weight], compute, None,
                       first.shape, first.dtype, first.order),
        cx.elementwise(lambda b, g, v: b.select(positive(b, v), b.like(g, 0), b.mul(v, g)), [grad, x], compute, None,
                       second.shape, second.dtype, second.order),
    )  # fmt: skip


@rule("aten.elu_backward.default")
def elu_backward(
    cx: Builder, node: Node, grad: View, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: View
) -> View:
    def body(b: Body, g: SSAValue, v: SSAValue) -> SSAValue:
        if is_result:
            slope = b.mul(b.add(v, b.like(v, alpha * scale)), b.like(v, input_scale))
        else:
            slope = b.mul(b.exp(b.mul(v, b.like(v, input_scale))), b.like(v, input_scale * alpha * scale))
        return b.mul(g, b.select(b.cmp("le", v, b.like(v, 0.0)), slope, b.like(v, scale)))

    return cx.pointwise(node, body, (grad, x))


@rule("aten.hardtanh_backward.default")
def hardtanh_backward(cx: Builder, node: Node, grad: View, x: View, low: Any, high: Any) -> View:
    def body(b: Body, g: SSAValue, v: SSAValue, lo: SSAValue, hi: SSAValue) -> SSAValue:
        outside = b.or_(b.cmp("le", v, lo), b.cmp("ge", v, hi))
        return b.select(outside, b.like(g, 0), g)

    return cx.pointwise(node, body, (grad, x, low, high))


@rule("aten.softplus_backward.default")
def softplus_backward(cx: Builder, node: Node, grad: View, x: View, beta: Any, threshold: Any) -> View:
    def body(b: Body, g: SSAValue, v: SSAValue, scale: SSAValue, limit: SSAValue) -> SSAValue:
        z = b.mul(v, scale)
        return b.select(b.cmp("gt", z, limit), g, b.mul(g, sigmoid(b, z)))

    return cx.pointwise(node, body, (grad, x, beta, threshold))


@rule("aten.hardshrink_backward.default", "aten.softshrink_backward.default")
def shrink_backward(cx: Builder, node: Node, grad: View, x: View, lambd: Any) -> View:
    return cx.pointwise(
        node, lambda b, g, v, t: b.select(b.cmp("le", b.abs(v), t), b.like(g, 0.0), g), (grad, x, lambd)
    )


@rule("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(cx: Builder, node: Node, grad: View, x: View, buffer: View) -> View:
    return cx.pointwise(node, lambda b, g, v: b.mul(g, sigmoid(b, b.neg(v))), (grad, x))


@rule("aten.glu_backward.default")
def glu_backward(cx: Builder, node: Node, grad: View, x: View, dim: int) -> View:
    d = dim % len(x.shape)
    half, compute = grad.shape[d], COMPUTE[x.dtype]
    left, right = views.slice_dim(x, d, 0, half), views.slice_dim(x, d, half, half)

    def gate(b: Body, g: SSAValue, v: SSAValue, w: SSAValue) -> SSAValue:
        s = sigmoid(b, w)
        return b.mul(g, b.mul(v, b.mul(s, _one_minus(b, s))))

    first = cx.elementwise(lambda b, g, w: b.mul(g, sigmoid(b, w)), [grad, right], compute, None, grad.shape, x.dtype)
    second = cx.elementwise(gate, [grad, left, right], compute, None, grad.shape, x.dtype)
    return cx.concat([first, second], d)
