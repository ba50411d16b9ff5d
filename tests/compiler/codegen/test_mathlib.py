"""The vectorised elementary functions against float64 (float32 functions) and mpmath (float64 functions)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import llvmlite.binding as llvm
import mpmath
import numpy as np
import pytest
import torch

from luban.compiler.codegen.llvm import mathlib
from luban.compiler.codegen.llvm.emitter import Function, Module

SIZES = {"float": np.float32, "double": np.float64}


def kernel_text(name: str, scalar_type: str, width: int, arity: int) -> str:
    """A loop that applies the function to arrays, `width` elements at a time."""
    module = Module()
    pointers = [("ptr", f"in{i}") for i in range(arity)] + [("ptr", "out"), ("i64", "count")]
    fn = Function(module, "apply", "void", pointers)
    vector = scalar_type if width == 1 else f"<{width} x {scalar_type}>"
    size = np.dtype(SIZES[scalar_type]).itemsize
    fn.branch("loop")
    fn.place("loop")
    fn.emit("%i = phi i64 [ 0, %entry ], [ %next, %latch ]")
    loaded = []
    for i in range(arity):
        address = fn.op(f"getelementptr {scalar_type}, ptr %in{i}, i64 %i")
        loaded.append(fn.op(f"load {vector}, ptr {address}, align {size}"))
    result = mathlib.call(fn, name, scalar_type, width, loaded)
    address = fn.op(f"getelementptr {scalar_type}, ptr %out, i64 %i")
    fn.emit(f"store {vector} {result}, ptr {address}, align {size}")
    fn.branch("latch")
    fn.place("latch")
    fn.emit(f"%next = add i64 %i, {width}")
    fn.branch_if(fn.op("icmp ult i64 %next, %count"), "loop", "done")
    fn.place("done")
    fn.emit("ret void")
    module.add(fn)
    return module.text()


def optimised(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


@lru_cache(maxsize=None)
def host_kernel(name: str, scalar_type: str, width: int) -> tuple[Callable[..., None], llvm.ExecutionEngine]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    arity = mathlib.registry.lookup(name).arity
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    module = optimised(kernel_text(name, scalar_type, width, arity), machine)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (arity + 1), ctypes.c_int64)
    return signature(engine.get_function_address("apply")), engine


def apply(name: str, scalar_type: str, *arrays: np.ndarray, width: int = 16) -> np.ndarray:
    """The function on whole arrays; the tail is padded with ones."""
    run, _ = host_kernel(name, scalar_type, width)
    count = len(arrays[0])
    padded = -(-count // width) * width
    inputs = [np.ones(padded, SIZES[scalar_type]) for _ in arrays]
    for target, source in zip(inputs, arrays, strict=True):
        target[:count] = source
    out = np.full(padded, 777.0, SIZES[scalar_type])
    run(*(a.ctypes.data for a in [*inputs, out]), padded)
    return out[:count]
