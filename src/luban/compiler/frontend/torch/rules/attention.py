"""Scaled dot-product attention: one operation where the kernels take it, its parts (attention_parts.py) elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from xdsl.dialects.builtin import ArrayAttr, BoolAttr, FloatAttr, f32, f64
from xdsl.ir import Operation

from luban.compiler.frontend.torch.builder import Builder, tensor_type
from luban.compiler.frontend.torch.dtypes import COMPUTE, ELEMENT
from luban.compiler.frontend.torch.registry import Unsupported, rule
from luban.compiler.frontend.torch.rules.attention_parts import attention_gradients, attention_of
from luban.compiler.frontend.torch.views import View, dense, expand, moved
from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Dims
from luban.symbolic import Dim, floordiv


def _checked(q: View, k: View, v: View, dropout: float) -> tuple[Dim, ...]:
    """The domain (batch, heads, query length, key length, head size)."""
    if dropout:
        raise Unsupported("dropout, which torch's own decomposition replaces")
    if q.shape[-1] != v.shape[-1]:
        raise Unsupported("values of another size than the queries'")
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _in_parts(domain: Sequence[Dim], dtype: torch.dtype) -> bool:
    """Whether the kernels refuse it: they accumulate in float32 and are written for one head size."""
    return dtype is torch.float64 or not isinstance(domain[4], int)


def _shared(heads: Dim, view: View) -> Dim:
    """How many query heads share one head of keys or values (torch has seen to it that they divide)."""
    return 1 if heads == view.shape[1] else floordiv(heads, view.shape[1])


def _repeated(cx: Builder, view: View, heads: Dim) -> View:
    """Keys or values with a head for each query head."""
    times = _shared(heads, view)
    if times == 1:
        return view
    n, h, t, d = view.shape
    wide = moved(view, (n, h, times, t, d), (*view.strides[:2], 0, *view.strides[2:]))
    return cx.reshape(wide, (n, heads, t, d))


def _summed(cx: Builder, grad: View, like: View) -> View:
    """The gradient of `_repeated`: a sum over the query heads that shared a head."""
    times = _shared(grad.shape[1], like)
    if times == 1:
        return grad
    n, h, t, d = like.shape
    s = grad.strides
    parts = moved(grad, (n, h, t, d, times), (s[0], s[1] * times, s[2], s[3], s[1]))
    compute = COMPUTE[grad.dtype]
    found = cx.reduce((n, h, t, d), (times,), [parts], lambda b, g: b.cast(g, grad.dtype, compute), ["add"], [compute])
    return cx.cast(found[0], grad.dtype)


def _properties(domain: Sequence[Dim], operands: Sequence[View], scale: float | None, causal: bool) -> dict[str, Any]:
    value = 1 / math.sqrt(domain[4]) if scale is None else float(scale)  # type: ignore[arg-type]
    return {
        "domain": Dims(tuple(domain)),
        "accesses": ArrayAttr([v.access for v in operands]),
        "scale": FloatAttr(value, f64),
        "causal": BoolAttr.from_bool(causal),
    }


def _bias(mask: View | None, domain: Sequence[Dim]) -> list[View]:
    if mask is None:
        return []
    if mask.dtype is torch.bool:
        raise Unsupported("a mask of booleans")
    return [expand(mask, domain[:4])]


@rule("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(
    cx: Builder, node: Node, q: View, k: View, v: View, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: View | None = None, scale: float | None = None,
) -> tuple[View, View]:  # fmt: skip
    domain = _checked(q, k, v, dropout_p)
    metas = cx.metas(node)
    wide_k, wide_v = (_repeated(cx, x, q.shape[1]) for x in (k, v))
    order = metas[0].order  # type: ignore[union-attr]
    if _in_parts(domain, q.dtype):
        made, sums = attention_of(cx, q, wide_k, wide_v, attn_mask, scale, is_causal)
        return made if order is None else cx.dense(made, order), cx.cast(sums, metas[1].dtype)  # type: ignore[union-attr]
    operands = [q, wide_k, wide_v, *_bias(attn_mask, domain)]
    batch, heads, rows, _, size = domain
    op = graph.AttentionOp.create(
        operands=[o.base for o in operands],
        result_types=[
            tensor_type((batch, heads, rows, size), ELEMENT[q.dtype]),
            tensor_type((batch, heads, rows), f32),
        ],
        properties=_properties(domain, operands, scale, is_causal),
    )
    cx.add(op)
    out, lse = _results(op, [(batch, heads, rows, size), (batch, heads, rows)], [q.dtype, torch.float32])
    if order is not None:  # once here, rather than at each reshape and output that want torch's layout
        out = cx.dense(out, order)
    return out, cx.cast(lse, metas[1].dtype)  # type: ignore[union-attr]


@rule("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(
    cx: Builder, node: Node, grad: View, q: View, k: View, v: View, out: View, lse: View, dropout_p: float,
    is_causal: bool, *, attn_mask: View | None = None, scale: float | None = None,
) -> tuple[View, View, View]:  # fmt: skip
    domain = _checked(q, k, v, dropout_p)
    wide_k, wide_v = (_repeated(cx, x, q.shape[1]) for x in (k, v))
    orders = [m.order for m in cx.metas(node)]  # type: ignore[union-attr]
    if _in_parts(domain, q.dtype):
        gradients = attention_gradients(cx, grad, q, wide_k, wide_v, out, attn_mask, scale, is_causal)
        return _shaped(cx, gradients, (q, k, v), orders)
    operands = [grad, q, wide_k, wide_v, out, cx.cast(lse, torch.float32), *_bias(attn_mask, domain)]
    batch, heads, rows, keys, size = domain
    shapes = [(batch, heads, rows, size), (batch, heads, keys, size), (batch, heads, keys, size)]
    op = graph.AttentionBackwardOp.create(
        operands=[o.base for o in operands],
        result_types=[tensor_type(s, ELEMENT[q.dtype]) for s in shapes],
        properties=_properties(domain, operands, scale, is_causal),
    )
    cx.add(op)
    return _shaped(cx, _results(op, shapes, [q.dtype] * 3), (q, k, v), orders)


def _shaped(
    cx: Builder, gradients: Sequence[View], like: Sequence[View], orders: Sequence[Any]
) -> tuple[View, View, View]:
    """Gradients summed over heads that shared keys, in the memory order that torch promises."""
    found = [_summed(cx, g, x) for g, x in zip(gradients, like)]
    return tuple(g if o is None else cx.dense(g, o) for g, o in zip(found, orders))  # type: ignore[return-value]


def _results(op: Operation, shapes: Sequence[Sequence[Dim]], dtypes: Sequence[torch.dtype]) -> list[View]:
    return [dense(r, s, d) for r, s, d in zip(op.results, shapes, dtypes)]
