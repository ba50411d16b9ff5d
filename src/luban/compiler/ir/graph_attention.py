"""Attention in the `graph` dialect, forward and backward, and which heads share keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, BoolAttr, FloatAttr, IntAttr, f32
from xdsl.ir import Operation
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.traits import Pure

from luban.compiler.ir.attributes import Access, Dims, TensorType
from luban.compiler.ir.rules import require, verify_accesses
from luban.symbolic import Dim, divide_exact


@irdl_op_definition
class AttentionOp(IRDLOperation):
    """Scaled dot-product attention over domain (batch, heads, query length, key length, head size).

    q, k and v are read through accesses over (batch, head, position, feature), the optional additive bias over
    (batch, head, query, key). Results: out over (batch, head, query, feature), and the float32 log-sum-exp a query row.
    With `shared` = s, heads s * i to s * i + s - 1 share head i of k and v, which have heads / s of them.
    """

    name = "graph.attention"
    ins = var_operand_def(TensorType)
    domain = prop_def(Dims)
    accesses = prop_def(ArrayAttr)
    scale = prop_def(FloatAttr)
    causal = prop_def(BoolAttr)
    shared = opt_prop_def(IntAttr)
    out = result_def(TensorType)
    lse = result_def(TensorType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, len(self.domain.data) == 5, "has five dims in its domain: batch, heads, queries, keys, head size")
        b, h, q, k, d = self.domain.data
        keys = (b, key_heads(self), k, d)
        _verify_attention(self, [(b, h, q, d), keys, keys, (b, h, q, k)])
        require(self, self.out.type.shape == (b, h, q, d), "gives out over (batch, head, query, feature)")
        require(
            self,
            self.lse.type == TensorType.of((b, h, q), f32),
            "gives a float32 log-sum-exp over (batch, head, query)",
        )


@irdl_op_definition
class AttentionBackwardOp(IRDLOperation):
    """Gradients of `graph.attention`; operands: grad_out, q, k, v, out, lse and the optional bias.

    With `shared` the gradients of k and v are sums over the heads that share theirs.
    """

    name = "graph.attention_backward"
    ins = var_operand_def(TensorType)
    domain = prop_def(Dims)
    accesses = prop_def(ArrayAttr)
    scale = prop_def(FloatAttr)
    causal = prop_def(BoolAttr)
    shared = opt_prop_def(IntAttr)
    grad_q = result_def(TensorType)
    grad_k = result_def(TensorType)
    grad_v = result_def(TensorType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, len(self.domain.data) == 5, "has five dims in its domain: batch, heads, queries, keys, head size")
        b, h, q, k, d = self.domain.data
        rows, keys = (b, h, q, d), (b, key_heads(self), k, d)
        _verify_attention(self, [rows, rows, keys, keys, rows, (b, h, q), (b, h, q, k)])
        shapes = [r.type.shape for r in self.results]
        require(self, shapes == [rows, keys, keys], "gives gradients over (batch, head, position, feature)")


def shared_heads(op: Operation) -> int:
    """How many heads of an attention share one head of keys and values."""
    shared = op.properties.get("shared")
    return shared.data if isinstance(shared, IntAttr) else 1


def key_heads(op: Operation) -> Dim:
    """How many heads the keys and values of an attention have."""
    heads, shared = op.properties["domain"].data[1], shared_heads(op)  # type: ignore[union-attr]
    found = divide_exact(heads, shared)
    require(op, shared > 0 and found is not None, "shares its keys among a number of heads that divides all of them")
    return found  # type: ignore[return-value]


def _verify_attention(op: AttentionOp | AttentionBackwardOp, domains: Sequence[tuple]) -> None:
    """Each operand (the last one, the bias, may be missing) is read over its own part of the domain."""
    require(
        op, len(op.ins) in (len(domains) - 1, len(domains)), f"has {len(domains) - 1} operands and an optional bias"
    )
    require(op, len(op.accesses) == len(op.ins), "has one access for each operand")
    for operand, access, domain in zip(op.ins, op.accesses, domains, strict=False):
        require(op, isinstance(access, Access), "reads its operands through #graph.access")
        verify_accesses(op, [operand], ArrayAttr([access]), Dims(domain))
