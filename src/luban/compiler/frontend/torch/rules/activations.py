"""Activation functions."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch import views
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.rules.unary import sigmoid
from luban.compiler.frontend.torch.views import View

SQRT_HALF = math.sqrt(0.5)
TANH_SCALE = math.sqrt(2 / math.pi)  # of the tanh form of GELU
TANH_CUBE = 0.044715


@rule("aten.relu.default")
def relu(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: b.maximum(v, b.like(v, 0)), (x,))


@rule("aten.relu6.default")
def relu6(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: b.clamp(v, 0, 6), (x,))


@rule("aten.silu.default")
def silu(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: b.div(v, b.add(b.like(v, 1.0), b.exp(b.neg(v)))), (x,))


@rule("aten.gelu.default")
def gelu(cx: Builder, node: Node, x: View, approximate: str = "none") -> View:
    return cx.pointwise(node, _gelu_tanh if approximate == "tanh" else _gelu_erf, (x,))


def _gelu_erf(b: Body, v: SSAValue) -> SSAValue:
    return b.mul(b.mul(v, b.like(v, 0.5)), b.add(b.like(v, 1.0), b.erf(b.mul(v, b.like(v, SQRT_HALF)))))


def gelu_tanh_argument(b: Body, v: SSAValue) -> SSAValue:
    """sqrt(2/pi) * (v + 0.044715 v^3)."""
    cube = b.mul(b.mul(v, v), v)
    return b.mul(b.like(v, TANH_SCALE), b.add(v, b.mul(b.like(v, TANH_CUBE), cube)))


def _gelu_tanh(b: Body, v: SSAValue) -> SSAValue:
    return b.mul(b.mul(v, b.like(v, 0.5)), b.add(b.like(v, 1.0), b.tanh(gelu_tanh_argument(b, v))))


@rule("aten.leaky_relu.default")
def leaky_relu(cx: Builder, node: Node, x: View, slope: Any = 0.01) -> View:
    return cx.pointwise(node, lambda b, v, s: b.select(b.cmp("gt", v, b.like(v, 0)), v, b.mul(v, s)), (x, slope))


@rule("aten.prelu.default", "aten._prelu_kernel.default")
def prelu(cx: Builder, node: Node, x: View, weight: View) -> View:
    return cx.pointwise(node, lambda b, v, w: b.select(b.cmp("gt", v, b.like(v, 0)), v, b.mul(v, w)), (x, weight))


@rule("aten.elu.default")
def elu(cx: Builder, node: Node, x: View, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> View:
    def body(b: Body, v: SSAValue) -> SSAValue:
        grown = b.mul(b.expm1(b.mul(v, b.like(v, input_scale))), b.like(v, alpha * scale))
        return b.select(b.cmp("gt", v, b.like(v, 0)), b.mul(v, b.like(v, scale)), grown)

    return cx.pointwise(node, body, (x,))


@rule("aten.hardsigmoid.default")
def hardsigmoid(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: hard_gate(b, v), (x,))


@rule("aten.hardswish.default")
def hardswish(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: b.mul(v, hard_gate(b, v)), (x,))


def hard_gate(b: Body, v: SSAValue) -> SSAValue:
    """clamp(v + 3, 0, 6) / 6."""
    return b.div(b.clamp(b.add(v, b.like(v, 3.0)), 0.0, 6.0), b.like(v, 6.0))


@rule("aten.softplus.default")
def softplus(cx: Builder, node: Node, x: View, beta: Any = 1, threshold: Any = 20) -> View:
    def body(b: Body, v: SSAValue, scale: SSAValue, limit: SSAValue) -> SSAValue:
        z = b.mul(v, scale)
        return b.select(b.cmp("gt", z, limit), v, b.div(b.log1p(b.exp(z)), scale))

    return cx.pointwise(node, body, (x, beta, threshold))


def stable_softplus(b: Body, v: SSAValue) -> SSAValue:
    """log(1 + exp(v)) without overflow."""
    return b.add(b.maximum(v, b.like(v, 0.0)), b.log1p(b.exp(b.neg(b.abs(v)))))


@rule("aten.mish.default")
def mish(cx: Builder, node: Node, x: View) -> View:
    return cx.pointwise(node, lambda b, v: b.mul(v, b.tanh(stable_softplus(b, v))), (x,))


@rule("aten.threshold.default")
def threshold(cx: Builder, node: Node, x: View, limit: Any, value: Any) -> View:
    return cx.pointwise(node, lambda b, v, t, w: b.select(b.cmp("le", v, t), w, v), (x, limit, value))


@rule("aten.hardshrink.default")
def hardshrink(cx: Builder, node: Node, x: View, lambd: Any = 0.5) -> View:
    def body(b: Body, v: SSAValue, limit: SSAValue) -> SSAValue:
        return b.select(b.cmp("le", b.abs(v), limit), b.like(v, 0.0), v)

    return cx.pointwise(node, body, (x, lambd))


@rule("aten.softshrink.default")
def softshrink(cx: Builder, node: Node, x: View, lambd: Any = 0.5) -> View:
    def body(b: Body, v: SSAValue, limit: SSAValue) -> SSAValue:
        zero = b.like(v, 0.0)
        down = b.select(b.cmp("lt", v, b.neg(limit)), b.add(v, limit), b.mul(v, zero))
        return b.select(b.cmp("gt", v, limit), b.sub(v, limit), down)

    return cx.pointwise(node, body, (x, lambd))


@rule("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(cx: Builder, node: Node, x: View) -> tuple[View, View]:
    meta, buffer = cx.metas(node)
    assert meta is not None and buffer is not None
    value = cx.elementwise(
        lambda b, v: b.neg(stable_softplus(b, b.neg(v))),
        [x],
        COMPUTE[meta.dtype],
        None,
        meta.shape,
        meta.dtype,
        meta.order,
    )
    return value, cx.fill(0, buffer.shape, buffer.dtype)  # which our backward rule does not read


@rule("aten.glu.default")
def glu(cx: Builder, node: Node, x: View, dim: int = -1) -> View:
    d = dim % len(x.shape)
    half = cx.meta(node).shape[d]
    left, right = views.slice_dim(x, d, 0, half), views.slice_dim(x, d, half, half)
    return cx.pointwise(node, lambda b, v, g: b.mul(v, sigmoid(b, g)), (left, right))
