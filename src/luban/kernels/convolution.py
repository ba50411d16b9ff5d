"""Convolutions: contractions with a window, and the maps fused into their store."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import SSAValue

from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.contraction_kernel import lower_contraction
from luban.kernels.convolution_depthwise import Depthwise, DepthwiseWeights, is_depthwise
from luban.kernels.convolution_forward import Forward
from luban.kernels.convolution_kernel import ConvolutionKernel
from luban.kernels.convolution_problem import convolution_of
from luban.kernels.convolution_weights import Weights


def lower(request: Request) -> Lowered:
    """The kernel of a convolution."""
    return lower_contraction(request, _kernel)


def _kernel(request: Request, group: Group, leaving: Sequence[SSAValue]) -> ConvolutionKernel:
    problem = convolution_of(group.members[0].op)
    if is_depthwise(problem):
        return (Depthwise if problem.points_are_n else DepthwiseWeights)(request, group, problem, leaving)
    kind = Forward if problem.points_are_n else Weights
    return kind(request, group, problem, leaving)
