"""Vectorised elementary functions for every architecture, written once as LLVM IR text.

`call` brings a function into a module and calls it, `names` lists what there is. A function is generic in the vector
width and uses only portable LLVM IR; float32 results are within 2 ulp of the exact value over the whole range.
"""

from luban.compiler.codegen.llvm.mathlib import (
    error_function,
    exponential,
    gamma,
    hyperbolic,
    inverse_trigonometric,
    logarithm,
    power,
    trigonometric,
)
from luban.compiler.codegen.llvm.mathlib.registry import call, elementary, names

__all__ = [
    "call",
    "elementary",
    "error_function",
    "exponential",
    "gamma",
    "hyperbolic",
    "inverse_trigonometric",
    "logarithm",
    "names",
    "power",
    "trigonometric",
]
