"""Nearest-neighbour resampling and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder, Whole
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import rule
from luban.compiler.frontend.torch.views import View, moved
from luban.compiler.ir.attributes import contiguous
from luban.symbolic import Dim, divide_exact


def source(b: Body, o: SSAValue, inside: Dim, outside: Dim, scale: float | None, exact: bool) -> SSAValue:
    """The input index that output index o reads, computed as torch does, in float32."""
    factor = divide_exact(outside, inside)
    if factor == 1:
        return o
    if isinstance(factor, int) and (scale is None or scale == factor):
        return b.div(o, b.index_constant(factor))
    f32 = torch.float32
    if scale is not None and scale > 0:
        step = b.constant(1.0 / scale, f32)
    else:
        step = b.div(b.dim_as(inside, f32), b.dim_as(outside, f32))
    at = b.cast(o, torch.int64, f32)
    if exact:
        at = b.add(at, b.constant(0.5, f32))
    found = b.cast(b.floor(b.mul(at, step)), f32, torch.int64)
    return b.minimum(found, b.dim(inside - 1))


def _scales(arguments: Sequence[Any], rank: int) -> list[float | None]:
    """Scales a dim from what follows the output size: one argument a dim, or one list for all."""
    flat = [v for a in arguments for v in (a if isinstance(a, (list, tuple)) else [a])]
    return [None if v is None else float(v) for v in flat[:rank]] + [None] * (rank - len(flat))


def _register(rank: int, name: str, exact: bool) -> None:
    @rule(f"aten.{name}{rank}d.default", f"aten.{name}{rank}d.vec")
    def nearest(cx: Builder, node: Node, x: View, size: Any = None, *more: Any, **named: Any) -> View:
        shape = cx.meta(node).shape
        scales = _scales(more or list(named.values()), rank)

        def body(b: Body, table: SSAValue) -> SSAValue:
            where = b.indices(2)
            for d in range(rank):
                where.append(source(b, b.index(2 + d), x.shape[2 + d], shape[2 + d], scales[d], exact))
            return b.load(table, x, where)

        return cx.map(shape, [Whole(x)], body, x.dtype)

    @rule(f"aten.{name}{rank}d_backward.default", f"aten.{name}{rank}d_backward.vec")
    def gradient(cx: Builder, node: Node, grad: View, size: Any, input_size: Any, *more: Any, **named: Any) -> View:
        shape = cx.meta(node).shape
        return _gradient(cx, grad, shape, _scales(more or list(named.values()), rank), exact)


def _gradient(cx: Builder, grad: View, shape: Sequence[Dim], scales: Sequence[float | None], exact: bool) -> View:
    rank = len(shape) - 2
    compute = COMPUTE[grad.dtype]
    found_factors = [divide_exact(o, n) for o, n in zip(grad.shape[2:], shape[2:])]
    factors = [f for f, s in zip(found_factors, scales) if isinstance(f, int) and (s is None or s == f)]
    if len(factors) == rank:
        steps = [s * f for s, f in zip(grad.strides[2:], factors)]
        blocks = moved(grad, (*shape, *factors), (*grad.strides[:2], *steps, *grad.strides[2:]))
        found = cx.reduce(
            shape,
            factors,
            [blocks],
            lambda b, g: b.cast(g, grad.dtype, compute),
            ["add"],
            [compute],
        )
        return cx.cast(found[0], grad.dtype)
    strides = contiguous(shape)

    def body(b: Body, g: SSAValue) -> list[SSAValue]:
        where = b.indices(2)
        for d in range(rank):
            where.append(source(b, b.index(2 + d), shape[2 + d], grad.shape[2 + d], scales[d], exact))
        return [b.linear(0, strides, where), b.cast(g, grad.dtype, compute)]

    return cx.cast(cx.scatter(cx.fill(0, shape, compute), grad.shape, [grad], body, "add"), grad.dtype)


for _rank in (1, 2, 3):
    _register(_rank, "upsample_nearest", False)
    _register(_rank, "_upsample_nearest_exact", True)
