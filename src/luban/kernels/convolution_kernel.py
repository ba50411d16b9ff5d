"""What the kernels of convolutions share: patches of the image."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import IntAttr
from xdsl.ir import SSAValue

from luban.compiler.ir import tile
from luban.compiler.ir.attributes import Dims
from luban.compiler.lowering.registry import Request
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.contraction_kernel import ContractionKernel
from luban.kernels.convolution_problem import Convolution, Side
from luban.symbolic import Dim, product


class ConvolutionKernel(ContractionKernel):
    """A convolution's kernel under construction."""

    def __init__(self, request: Request, group: Group, problem: Convolution, leaving: Sequence[SSAValue]):
        super().__init__(request, group, leaving)
        self.problem = problem

    @property
    def products(self) -> Dim:
        p = self.problem
        return product((*p.batch, p.m, p.points.count, p.taps.count))

    def patches(
        self, base: SSAValue, first: SSAValue, count: SSAValue, taps: Side, panel: int, scratch: SSAValue
    ) -> None:
        """Copies `count` points of the image, from `first` on, into panels."""
        p = self.problem
        self.b.insert(
            tile.PatchesOp.create(
                operands=[self.buffer[p.b], base, first, count, scratch],
                properties={
                    "points": Dims(p.points.sizes),
                    "point_strides": Dims(p.points.strides),
                    "taps": Dims(taps.sizes),
                    "tap_strides": Dims(taps.strides),
                    "window": p.window.attribute,
                    "panel": IntAttr(panel),
                },
            )
        )
