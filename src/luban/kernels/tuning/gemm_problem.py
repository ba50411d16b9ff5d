"""A contraction to be tuned: C (batch, m, n) = sum over k of A (batch, m, k) * B (batch, n, k), as it lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir import dtypes, graph
from luban.compiler.ir.attributes import Access, Dims, TensorType
from luban.kernels.tuning.workload import Workload, strides_of

# What a result may be off, over the sum of the products' magnitudes.
TOLERANCE = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 1e-2, "float16": 2e-3}
PRECISION = {"highest": 0.0, "high": 2**-16, "medium": 1e-2}


@dataclass(frozen=True)
class GemmProblem:
    """See `programs.Problem`; `steps` are the batch strides of A and B, both dense."""

    workload: Workload
    names: tuple[str, ...]
    extents: tuple[int, ...]
    steps: tuple[int, int]

    def operation(self, operands: list[SSAValue]) -> Operation:
        batch, m, n, k = self.workload.shape
        (a_m, a_k), (b_n, b_k) = strides_of(self.workload)
        many = [batch] if batch > 1 else []
        a_step, b_step = ([step] if batch > 1 else [] for step in self.steps)
        element = dtypes.from_name(self.workload.dtypes[0])
        properties: dict[str, Attribute] = {
            "domain": Dims((*many, m, n, k)),
            "counts": ArrayAttr([IntAttr(c) for c in (len(many), 1, 1, 1)]),
            "accesses": ArrayAttr([Access.of((*a_step, a_m, 0, a_k)), Access.of((*b_step, 0, b_n, b_k))]),
        }
        if set(self.names) != {self.workload.dtypes[0]}:
            properties["element"] = element
        if self.workload.precision != "highest":
            properties["precision"] = StringAttr(self.workload.precision)
        result = TensorType.of((*many, m, n), element)
        return graph.ContractOp.create(operands=operands, result_types=[result], properties=properties)

    def operands(self) -> list[Tensor]:
        return [torch.randn(n).to(getattr(torch, name)) for n, name in zip(self.extents, self.names)]

    def reference(self, operands: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        batch, m, n, k = self.workload.shape
        name = self.workload.dtypes[0]
        element = getattr(torch, name)
        outer = ((m, k), (n, k))
        a, b = (
            torch.as_strided(o, (batch, *sizes), (step, *strides)).to(element).double()
            for o, sizes, step, strides in zip(operands, outer, self.steps, strides_of(self.workload))
        )
        exact, scale = a @ b.mT, a.abs() @ b.abs().mT
        allowed = (TOLERANCE[name] + PRECISION[self.workload.precision]) * scale + 1e-30
        shape = (m, n) if batch == 1 else (batch, m, n)
        kept = torch.float64 if name == "float64" else torch.float32  # half the memory, and exact enough
        return [(exact.to(kept).view(shape), allowed.to(kept).view(shape))]


def gemm(workload: Workload) -> GemmProblem:
    """The problem of a workload."""
    batch, m, n, k = workload.shape
    sizes = tuple(
        1 + (count - 1) * strides[0] + (k - 1) * strides[1]
        for count, strides in zip((m, n), strides_of(workload), strict=True)
    )
    return GemmProblem(workload, workload.dtypes[1:], tuple(batch * size for size in sizes), (sizes[0], sizes[1]))
