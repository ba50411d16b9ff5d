"""An attention to be tuned, forward or backward: heads beside each other in a row of positions, or one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr, BoolAttr, FloatAttr, IntAttr, f32
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir import dtypes, graph
from luban.compiler.ir.attributes import Access, Dims, TensorType, contiguous
from luban.kernels.tuning.workload import ATTENTION, Workload, rows_of, shared_of

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}  # of the largest value of a result


@dataclass(frozen=True)
class AttentionProblem:
    """See `programs.Problem`; `views` are sizes and strides of the row operands over (batch, head, position, feature)."""

    workload: Workload
    names: tuple[str, ...]
    extents: tuple[int, ...]
    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def scale(self) -> float:
        """That of models: one over the root of the head size."""
        return 1 / math.sqrt(self.workload.shape[4])

    @property
    def causal(self) -> bool:
        return self.workload.layout[0] == "causal"

    def operation(self, operands: list[SSAValue]) -> Operation:
        batch, heads, queries, keys, size = self.workload.shape
        shared = shared_of(self.workload)
        accesses = [Access.of(strides) for _, strides in self.views]
        properties: dict[str, Attribute] = {
            "domain": Dims(self.workload.shape),
            "scale": FloatAttr(self.scale, f32),
            "causal": BoolAttr.from_bool(self.causal),
            **({"shared": IntAttr(shared)} if shared > 1 else {}),
        }
        element = dtypes.from_name(self.workload.dtypes[0])
        rows = TensorType.of((batch, heads, queries, size), element)
        sums = TensorType.of((batch, heads, queries), f32)
        if self.workload.op == ATTENTION:
            properties["accesses"] = ArrayAttr(accesses)
            return graph.AttentionOp.create(operands=operands, result_types=[rows, sums], properties=properties)
        properties["accesses"] = ArrayAttr([*accesses, Access.of(contiguous(sums.shape))])
        theirs = TensorType.of((batch, heads // shared, keys, size), element)
        return graph.AttentionBackwardOp.create(
            operands=operands, result_types=[rows, theirs, theirs], properties=properties
        )

    def operands(self) -> list[Tensor]:
        dtype = getattr(torch, self.workload.dtypes[0])
        flat = [torch.randn(n).to(dtype) for n in self.extents[: len(self.views)]]
        if self.workload.op == ATTENTION:
            return flat
        _, q, k, v, out = self._rows(flat)
        entries = [self._forward(*(r[i : i + 1].double() for r in (q, k, v))) for i in range(self.workload.shape[0])]
        out.copy_(torch.cat([exact for exact, _ in entries]))
        return [*flat, torch.cat([sums for _, sums in entries]).float().reshape(-1)]

    def reference(self, operands: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        rows = self._rows(operands[: len(self.views)])
        entries = [self._right([r[i : i + 1].double() for r in rows]) for i in range(self.workload.shape[0])]
        right = [torch.cat(parts) for parts in zip(*entries, strict=True)]
        allowed = TOLERANCE[self.workload.dtypes[0]]
        return [(want.float(), allowed * want.abs().max().float().clamp_min(1e-30)) for want in right]

    def _right(self, rows: list[Tensor]) -> tuple[Tensor, ...]:
        """The results of one batch entry: all scores of all of them may not fit the memory."""
        if self.workload.op == ATTENTION:
            return self._forward(*rows)
        grad, *rest = rows[:4]
        leaves = [r.requires_grad_() for r in rest]
        return torch.autograd.grad(self._forward(*leaves)[0], leaves, grad)

    def _rows(self, flat: list[Tensor]) -> list[Tensor]:
        return [torch.as_strided(t, *view) for t, view in zip(flat, self.views, strict=True)]

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shared = shared_of(self.workload)
        if shared > 1:
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = q @ k.mT * self.scale
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def attention(workload: Workload) -> AttentionProblem:
    """The problem of a workload."""
    batch, heads, queries, keys, size = workload.shape
    few = heads // shared_of(workload)
    wide, narrow = (heads, queries), (few, keys)
    kinds = (wide, narrow, narrow) if workload.op == ATTENTION else (wide, wide, narrow, narrow, wide)
    views = tuple(
        ((batch, count, length, size), _strides(count, length, size, step))
        for (count, length), step in zip(kinds, rows_of(workload), strict=True)
    )
    extents = [1 + sum((n - 1) * s for n, s in zip(*view)) for view in views]
    names = [workload.dtypes[0]] * len(views)
    if workload.op != ATTENTION:
        extents, names = [*extents, batch * heads * queries], [*names, "float32"]
    return AttentionProblem(workload, tuple(names), tuple(extents), views)


def _strides(heads: int, length: int, size: int, step: int) -> tuple[int, int, int, int]:
    """Heads lie in a row of positions where that is long enough for all of them, else one after the other."""
    if heads > 1 and step >= heads * size:
        return length * step, size, step, 1
    return heads * length * step, length * step, step, 1
