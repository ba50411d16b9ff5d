"""Compiles kernels for a GPU without one: what `triton` can check of a source on any machine."""

from __future__ import annotations

import re
from typing import Any

from luban.compiler.codegen.triton.kernel import Entry, TritonKernel
from luban.compiler.codegen.triton.load import imported
from luban.errors import LubanError, TargetError
from luban.targets.target import Target

_SHORT = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "int1": "i1",
}  # fmt: skip


def compile_offline(kernel: TritonKernel, target: Target) -> dict[str, dict[str, Any]]:
    """Triton's stages ("ttir", ..., "ptx" or "amdgcn") of every entry, by entry name.

    Raises TargetError for a target that this Triton has no compiler for, LubanError with Triton's message otherwise.
    """
    with imported(kernel) as module:
        try:
            return {e.name: _compile(kernel, e, getattr(module, e.name), _gpu(target)) for e in kernel.entries}
        except TargetError:
            raise
        except Exception as error:
            raise LubanError(
                f"Triton cannot compile {kernel.name} for {target.name}: {type(error).__name__}: {error}"
            ) from error


def _gpu(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.triple.startswith("nvptx"):
        return GPUTarget("cuda", int(re.sub(r"\D", "", target.llvm_cpu)), 32)
    if target.triple.startswith("amdgcn"):
        return GPUTarget("hip", target.llvm_cpu, 64)
    raise TargetError(
        f"triton itself has no compiler for {target.name}; compile its source with the vendor's own Triton"
    )


def _compile(kernel: TritonKernel, entry: Entry, function: Any, gpu: Any) -> dict[str, Any]:
    import triton
    from triton.compiler import ASTSource

    known = {a.name: a for a in kernel.arguments}
    signature = {
        n: "i64" if known[n].kind == "symbol" else f"*{_SHORT[known[n].dtype.removeprefix('tl.')]}"
        for n in entry.arguments
    }
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 2):  # which numbered the arguments
        source = ASTSource(fn=function, signature=dict(enumerate(signature.values())))
    else:
        source = ASTSource(fn=function, signature=signature)
    return dict(triton.compile(source, target=gpu, options={"num_warps": entry.warps, "enable_fp_fusion": True}).asm)
