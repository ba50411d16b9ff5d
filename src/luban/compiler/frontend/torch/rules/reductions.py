"""Reductions over dims. Sums of bfloat16 and float16 accumulate in float32 and are rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.ir import SSAValue

from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.builder import Builder
from luban.compiler.frontend.torch.dtypes import COMPUTE
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.views import View, moved, permute
from luban.symbolic import Dim, product


def normal_dims(dims: Any, rank: int) -> list[int]:
    """Dims to reduce as non-negative numbers, in order; none given means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)} if rank else [])


def keep_dims(view: View, shape: Sequence[Dim], dims: Sequence[int]) -> View:
    """A reduction's result with the reduced dims of `shape` back, of size 1."""
    out, strides, rest = [], [], iter(zip(view.shape, view.strides))
    for d in range(len(shape)):
        n, s = (1, 0) if d in dims else next(rest)
        out.append(n)
        strides.append(s)
    return moved(view, out, strides)


def fold(
    cx: Builder,
    inputs: Sequence[View],
    dims: Sequence[int],
    body: Callable[..., Any],
    kinds: Sequence[str],
    dtypes: Sequence[torch.dtype],
    keepdim: bool = False,
) -> tuple[View, ...]:
    """graph.reduce of inputs of one shape over `dims`; `body` receives scalars as they are stored."""
    shape = inputs[0].shape
    kept = [d for d in range(len(shape)) if d not in dims]
    order = [*kept, *dims]
    found = cx.reduce(
        [shape[d] for d in kept], [shape[d] for d in dims], [permute(v, order) for v in inputs], body, kinds, dtypes
    )
    return tuple(keep_dims(v, shape, dims) for v in found) if keepdim else found


def total(cx: Builder, x: View, dims: Sequence[int], compute: torch.dtype, keepdim: bool = False) -> View:
    """The sum over dims in `compute`."""
    return fold(cx, [x], dims, lambda b, v: b.cast(v, x.dtype, compute), ["add"], [compute], keepdim)[0]


@rule("aten.sum.default", "aten.sum.dim_IntList", "prims.sum.default")
def sum_(cx: Builder, node: Node, x: View, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    dtype = cx.meta(node).dtype
    return cx.cast(total(cx, x, normal_dims(dim, len(x.shape)), COMPUTE[dtype], keepdim), dtype)


@rule("aten.mean.default", "aten.mean.dim")
def mean(cx: Builder, node: Node, x: View, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    dims = normal_dims(dim, len(x.shape))
    compute = COMPUTE[cx.meta(node).dtype]
    return cx.pointwise(node, scaled_down, (total(cx, x, dims, compute, keepdim), count(x, dims)), compute)


def count(x: View, dims: Sequence[int]) -> Dim:
    """How many elements a reduction over dims takes."""
    return product(x.shape[d] for d in dims)


def scaled_down(b: Body, value: SSAValue, n: SSAValue) -> SSAValue:
    return b.div(value, n)


def _register_extreme(name: str, kind: str) -> None:
    @rule(f"aten.a{name}.default", f"prims.a{name}.default")
    def extreme(cx: Builder, node: Node, x: View, dim: Any = None, keepdim: bool = False) -> View:
        return _extreme(cx, x, normal_dims(dim, len(x.shape)), kind, keepdim)

    @rule(f"aten.{name}.default")
    def whole(cx: Builder, node: Node, x: View) -> View:
        return _extreme(cx, x, normal_dims(None, len(x.shape)), kind, False)

    @rule(f"aten.{name}.dim")
    def along(cx: Builder, node: Node, x: View, dim: int, keepdim: bool = False) -> tuple[View, View]:
        compute = COMPUTE[x.dtype]
        value, where = fold(
            cx, [x], normal_dims(dim, len(x.shape)), lambda b, v: [b.cast(v, x.dtype, compute)] * 2,
            [kind, f"arg{kind}"], [compute, torch.int64], keepdim,
        )  # fmt: skip
        return cx.cast(value, x.dtype), where

    @rule(f"aten.arg{name}.default")
    def position(cx: Builder, node: Node, x: View, dim: int | None = None, keepdim: bool = False) -> View:
        compute = COMPUTE[x.dtype]
        return fold(
            cx, [x], normal_dims(dim, len(x.shape)), lambda b, v: b.cast(v, x.dtype, compute), [f"arg{kind}"],
            [torch.int64], keepdim,
        )[0]  # fmt: skip


def _extreme(cx: Builder, x: View, dims: Sequence[int], kind: str, keepdim: bool) -> View:
    if x.dtype is torch.bool:
        kind = "or" if kind == "max" else "and"
    compute = COMPUTE[x.dtype]
    found = fold(cx, [x], dims, lambda b, v: b.cast(v, x.dtype, compute), [kind], [compute], keepdim)[0]
    return cx.cast(found, x.dtype)


_register_extreme("max", "max")
_register_extreme("min", "min")


@rule("aten.aminmax.default")
def aminmax(cx: Builder, node: Node, x: View, *, dim: Any = None, keepdim: bool = False) -> tuple[View, View]:
    compute, dims = COMPUTE[x.dtype], normal_dims(dim, len(x.shape))
    low, high = fold(
        cx, [x], dims, lambda b, v: [b.cast(v, x.dtype, compute)] * 2, ["min", "max"], [compute] * 2, keepdim
    )
    return cx.cast(low, x.dtype), cx.cast(high, x.dtype)


@rule("aten.prod.default", "aten.prod.dim_int", "prims.prod.default")
def prod(cx: Builder, node: Node, x: View, dim: Any = None, keepdim: bool = False, **_: Any) -> View:
    dtype = cx.meta(node).dtype
    compute = COMPUTE[dtype]
    found = fold(
        cx, [x], normal_dims(dim, len(x.shape)), lambda b, v: b.cast(v, x.dtype, compute), ["mul"], [compute], keepdim
    )
    return cx.cast(found[0], dtype)


def _register_logic(name: str, kind: str) -> None:
    @rule(f"aten.{name}.default", f"aten.{name}.dim", f"aten.{name}.dims")
    def logic(cx: Builder, node: Node, x: View, dim: Any = None, keepdim: bool = False) -> View:
        found = fold(
            cx,
            [x],
            normal_dims(dim, len(x.shape)),
            lambda b, v: b.cast(v, x.dtype, torch.bool),
            [kind],
            [torch.bool],
            keepdim,
        )
        return cx.cast(found[0], cx.meta(node).dtype)


_register_logic("any", "or")
_register_logic("all", "and")


def moments(cx: Builder, x: View, dims: Sequence[int], compute: torch.dtype) -> tuple[View, View]:
    """The mean and the sum of squared deviations over dims (kept, of size 1), in two passes."""
    n = count(x, dims)
    total_ = total(cx, x, dims, compute, True)
    mean_ = cx.elementwise(scaled_down, [total_, n], compute, None, total_.shape, compute)

    def deviation(b: Body, v: SSAValue, m: SSAValue) -> SSAValue:
        d = b.sub(b.cast(v, x.dtype, compute), m)
        return b.mul(d, d)

    wide = moved(mean_, x.shape, mean_.strides)
    return mean_, fold(cx, [x, wide], dims, deviation, ["add"], [compute], True)[0]


def _variance(
    cx: Builder, node: Node, x: View, dim: Any, correction: Any, keepdim: bool, root: bool, with_mean: bool
) -> Any:
    dims = normal_dims(dim, len(x.shape))
    compute = COMPUTE[x.dtype]
    if compute not in (torch.float32, torch.float64):
        raise Unsupported("integers")
    metas = cx.metas(node) if with_mean else [cx.meta(node)]
    mean_, squares = moments(cx, x, dims, compute)
    shape = metas[0].shape  # type: ignore[union-attr]
    if not keepdim:
        mean_, squares = (cx.reshape(v, shape) for v in (mean_, squares))
    n = count(x, dims)
    freedom = max(n - correction, 0) if isinstance(n, int) else n - correction

    def body(b: Body, s: SSAValue, n: SSAValue) -> SSAValue:
        return b.sqrt(b.div(s, n)) if root else b.div(s, n)

    found = cx.elementwise(body, [squares, freedom], compute, None, shape, x.dtype)
    return (found, cx.cast(mean_, x.dtype)) if with_mean else found


def _register_variance(name: str, root: bool, with_mean: bool) -> None:
    @rule(f"aten.{name}.correction", "prims.var.default" if name == "var" else f"aten.{name}.names_correction")
    def corrected(
        cx: Builder, node: Node, x: View, dim: Any = None, *more: Any, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        correction = more[0] if more else 1 if correction is None else correction
        return _variance(cx, node, x, dim, correction, keepdim, root, with_mean)

    @rule(f"aten.{name}.default", f"aten.{name}.dim")
    def unbiased(
        cx: Builder, node: Node, x: View, dim: Any = None, unbiased: bool = True, keepdim: bool = False
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        return _variance(cx, node, x, dim, int(unbiased), keepdim, root, with_mean)


_register_variance("var", False, False)
_register_variance("std", True, False)
_register_variance("var_mean", False, True)
_register_variance("std_mean", True, True)


@rule("aten.logsumexp.default")
def logsumexp(cx: Builder, node: Node, x: View, dim: Any, keepdim: bool = False) -> View:
    compute = COMPUTE[cx.meta(node).dtype]
    dims = normal_dims(dim, len(x.shape))
    top = fold(cx, [x], dims, lambda b, v: b.cast(v, x.dtype, compute), ["max"], [compute], True)[0]

    def shift(b: Body, m: SSAValue) -> SSAValue:
        finite = b.cmp("lt", b.abs(m), b.like(m, math.inf))
        return b.select(finite, m, b.like(m, 0.0))

    safe = cx.elementwise(shift, [top], compute, None, top.shape, compute)
    wide = moved(safe, x.shape, safe.strides)
    powers = fold(
        cx, [x, wide], dims, lambda b, v, m: b.exp(b.sub(b.cast(v, x.dtype, compute), m)), ["add"], [compute], keepdim
    )[0]
    safe = safe if keepdim else cx.reshape(safe, powers.shape)
    return cx.pointwise(node, lambda b, s, m: b.add(b.log(s), m), (powers, safe), compute)


@rule("aten.linalg_vector_norm.default")
def vector_norm(
    cx: Builder, node: Node, x: View, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> View:
    compute = COMPUTE[cx.meta(node).dtype]
    dims = normal_dims(dim, len(x.shape))
    each, kind, last = _norm_parts(float(ord))

    def body(b: Body, v: SSAValue) -> SSAValue:
        return each(b, b.abs(b.cast(v, x.dtype, compute)))

    found = fold(cx, [x], dims, body, [kind], [compute], keepdim)[0]
    return cx.pointwise(node, last, (found,), compute)


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dim")
def norm(cx: Builder, node: Node, x: View, p: Any = 2, dim: Any = None, keepdim: bool = False) -> View:
    return vector_norm(cx, node, x, 2 if p is None else p, dim, keepdim)


def _norm_parts(p: float) -> tuple[Any, str, Any]:
    """(what is reduced of |x|, how, what follows) for the p-norm."""
    same: Any = lambda b, v: v  # noqa: E731
    if p == math.inf or p == -math.inf:
        return same, "max" if p > 0 else "min", same
    if p == 0:
        return (lambda b, v: b.select(b.cmp("ne", v, b.like(v, 0.0)), b.like(v, 1.0), b.like(v, 0.0))), "add", same
    if p == 1:
        return same, "add", same
    if p == 2:
        return (lambda b, v: b.mul(v, v)), "add", Body.sqrt
    return (lambda b, v: b.pow(v, b.like(v, p))), "add", lambda b, v: b.pow(v, b.like(v, 1 / p))
