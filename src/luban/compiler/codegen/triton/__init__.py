"""Tile kernels as Triton source, for GPUs and NPUs: `generate`, and ways to check what it gives."""

from luban.compiler.codegen.triton.generate import generate
from luban.compiler.codegen.triton.interpreted import launch_interpreted
from luban.compiler.codegen.triton.kernel import Argument, Entry, TritonKernel
from luban.compiler.codegen.triton.offline import compile_offline
from luban.compiler.codegen.triton.subset import check_subset

__all__ = ["Argument", "Entry", "TritonKernel", "check_subset", "compile_offline", "generate", "launch_interpreted"]
