"""Convolutions: contractions with a window, and the maps fused into their store."""

from __future__ import annotations

from xdsl.ir import SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.schedule import merge_axes, place_group
from luban.compiler.passes.graph.grouping import Group
from luban.kernels.convolution_depthwise import Depthwise, DepthwiseWeights, is_depthwise
from luban.kernels.convolution_forward import Forward
from luban.kernels.convolution_kernel import ConvolutionKernel
from luban.kernels.convolution_problem import Convolution, convolution_of
from luban.kernels.convolution_weights import Weights
from luban.symbolic import product


def lower(request: Request) -> Lowered:
    """The kernel of a convolution."""
    group = place_group(request.group)
    yields = request.group.body.block.last_op
    leaving = list(dict.fromkeys(yields.operands))  # type: ignore[union-attr]
    problem = convolution_of(group.members[0].op)
    merge_axes(group, lambda outer, inner: any(outer in axes and inner in axes for axes in group.members[0].axes))
    kernel = _kernel(request, group, problem, leaving)
    kernel.emit()
    results = {v: r for v, r in zip(yields.operands, request.group.results, strict=True)}  # type: ignore[union-attr]
    outputs = tuple(results[v] for v in leaving)
    products = product((*problem.batch, problem.m, problem.points.count, problem.taps.count))
    moved = [product(v.type.shape) * bytes_of(v.type.dtype) for v in (*kernel.external, *outputs)]  # type: ignore[attr-defined]
    return Lowered(kernel.b.finish(), tuple(kernel.external), outputs, (), products * 2, sum(moved))


def _kernel(request: Request, group: Group, problem: Convolution, leaving: list[SSAValue]) -> ConvolutionKernel:
    if is_depthwise(problem):
        return (Depthwise if problem.points_are_n else DepthwiseWeights)(request, group, problem, leaving)
    kind = Forward if problem.points_are_n else Weights
    return kind(request, group, problem, leaving)
