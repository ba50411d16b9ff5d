"""Random numbers: Philox from the program's seed and a counter that no two elements of a program share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Operand
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.views import View, expand
from luban.compiler.ir.attributes import contiguous
from luban.symbolic import Dim


def drawn(
    cx: Builder, shape: Sequence[Dim], kind: str, inputs: Sequence[View], body: Any, dtypes: Any, order: Any = None
) -> Any:
    """A map whose body receives one random number (b, number, *scalars) and gives stored scalars."""
    seed, first = cx.random_source()
    strides = contiguous(shape)

    def whole(b: Body, s: SSAValue, *scalars: SSAValue) -> Any:
        counter = b.linear(first, strides, b.indices(len(shape)))
        return body(b, b.random(kind, s, counter), *scalars)

    return cx.map(shape, [expand(seed, shape), *inputs], whole, dtypes, order)


def _register(kind: str, *names: str) -> None:
    @rule(*names)
    def made(cx: Builder, node: Node, *_: Any, **__: Any) -> View:
        meta = cx.meta(node)
        return drawn(
            cx, meta.shape, kind, [], lambda b, r: b.cast(r, torch.float32, meta.dtype), meta.dtype, meta.order
        )


_register("uniform", "aten.rand.default", "aten.rand_like.default")
_register("normal", "aten.randn.default", "aten.randn_like.default")


@rule("aten.uniform.default")
def uniform(cx: Builder, node: Node, x: View, low: float = 0.0, high: float = 1.0, **_: Any) -> View:
    meta, f32 = cx.meta(node), torch.float32

    def body(b: Body, r: SSAValue) -> SSAValue:
        return b.cast(b.add(b.mul(r, b.constant(high - low, f32)), b.constant(low, f32)), f32, meta.dtype)

    return drawn(cx, meta.shape, "uniform", [], body, meta.dtype, meta.order)


@rule("aten.normal_functional.default", "prims.normal.default")
def normal(cx: Builder, node: Node, x: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> View:
    meta, f32 = cx.meta(node), torch.float32

    def body(b: Body, r: SSAValue) -> SSAValue:
        return b.cast(b.add(b.mul(r, b.constant(std, f32)), b.constant(mean, f32)), f32, meta.dtype)

    return drawn(cx, meta.shape, "normal", [], body, meta.dtype, meta.order)


@rule("aten.randint.default", "aten.randint_like.default")
def randint(cx: Builder, node: Node, *arguments: Any, **_: Any) -> View:
    high = arguments[1] if isinstance(arguments[0], View) else arguments[0]
    return _integers(cx, node, 0, high)


@rule("aten.randint.low", "aten.randint_like.low_dtype")
def randint_low(cx: Builder, node: Node, *arguments: Any, **_: Any) -> View:
    rest = arguments[1:] if isinstance(arguments[0], View) else arguments
    return _integers(cx, node, rest[0], rest[1])


def _integers(cx: Builder, node: Node, low: Operand, high: Operand) -> View:
    """32 random bits scaled to the range, as bits * range >> 32."""
    meta, i64 = cx.meta(node), torch.int64

    def body(b: Body, bits: SSAValue) -> SSAValue:
        start = b.dim(low)  # type: ignore[arg-type]
        width = b.sub(b.dim(high), start)  # type: ignore[arg-type]
        return b.cast(b.add(start, b.shr(b.mul(bits, width), b.index_constant(32))), i64, meta.dtype)

    return drawn(cx, meta.shape, "bits", [], body, meta.dtype)


@rule("aten.bernoulli.default")
def bernoulli(cx: Builder, node: Node, p: View, **_: Any) -> View:
    meta = cx.meta(node)
    compute = COMPUTE[p.dtype]

    def body(b: Body, r: SSAValue, chance: SSAValue) -> SSAValue:
        hit = b.cmp("lt", b.cast(r, torch.float32, compute), b.cast(chance, p.dtype, compute))
        return b.cast(hit, torch.bool, meta.dtype)

    return drawn(cx, meta.shape, "uniform", [p], body, meta.dtype, meta.order)


@rule("aten.bernoulli.p")
def bernoulli_p(cx: Builder, node: Node, x: View, p: float = 0.5, **_: Any) -> View:
    meta = cx.meta(node)

    def body(b: Body, r: SSAValue) -> SSAValue:
        return b.cast(b.cmp("lt", r, b.constant(p, torch.float32)), torch.bool, meta.dtype)

    return drawn(cx, meta.shape, "uniform", [], body, meta.dtype, meta.order)


@rule("aten.native_dropout.default")
def native_dropout(cx: Builder, node: Node, x: View, p: float, train: Any = True) -> tuple[View, View]:
    """x / (1 - p) where the mask is true, which it is with probability 1 - p."""
    meta = cx.metas(node)[0]
    assert meta is not None
    if train is False or p == 0:
        return x, cx.fill(True, x.shape, torch.bool)
    if p == 1:
        return cx.elementwise(Body.mul, [x, 0.0], COMPUTE[x.dtype], None, x.shape, x.dtype), cx.fill(
            False, x.shape, torch.bool
        )
    compute = COMPUTE[x.dtype]

    def body(b: Body, r: SSAValue, v: SSAValue) -> list[SSAValue]:
        keep = b.cmp("lt", r, b.constant(1 - p, torch.float32))
        scale = b.select(keep, b.constant(1 / (1 - p), compute), b.constant(0.0, compute))
        return [b.cast(b.mul(b.cast(v, x.dtype, compute), scale), compute, x.dtype), keep]

    return drawn(cx, x.shape, "uniform", [x], body, (x.dtype, torch.bool), meta.order)


@rule("aten.native_dropout_backward.default")
def native_dropout_backward(cx: Builder, node: Node, grad: View, mask: View, scale: float) -> View:
    return cx.pointwise(node, lambda b, g, m, s: b.mul(b.mul(g, m), s), (grad, mask, scale))
