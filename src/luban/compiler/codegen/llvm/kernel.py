"""tile.kernel -> LLVM functions."""

from __future__ import annotations

from luban.compiler.codegen.llvm import (  # noqa: F401 (they register emitters)
    checks,
    conversions,
    division,
    dot,
    integer_ops,
    loops,
    memory,
    packing,
    patches,
    quotients,
    random,
    scalar_ops,
    scratch,
)
from luban.compiler.codegen.llvm.context import Context, emit_block
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.lanes import features_of, function_attributes
from luban.compiler.codegen.llvm.values import Buffer, Uniform, scalar_type
from luban.compiler.ir.attributes import BufferType
from luban.compiler.ir.tile import KernelOp
from luban.targets import Target


def emit_kernel(module: Module, kernel: KernelOp, target: Target) -> str:
    """Adds `void @name(ptr b0, ..., i64 s0, ..., ptr rt)` and the functions of its parallel loops; returns the name.

    All are internal. Buffers come in the order of the kernel's block arguments, symbols in the order of `symbols`.
    Raises ConfigError for an operation or a type that the CPU code generator does not know.
    """
    name = kernel.sym_name.data
    block = kernel.body.block
    buffers = [arg for arg in block.args if isinstance(arg.type, BufferType)]
    symbols = [arg for arg in block.args if not isinstance(arg.type, BufferType)]
    names = [symbol.data for symbol in kernel.symbols]
    parameters = [("ptr", f"b{i}") for i in range(len(buffers))] + [("i64", f"s.{s}") for s in names] + [("ptr", "rt")]
    fn = Function(module, name, "void", parameters, "internal", f"noinline {function_attributes(target)}")
    module.features = features_of(target)
    module.functions[name] = ""  # keeps kernels before their bodies in the text
    ctx = Context(module, fn, target, {s: f"%s.{s}" for s in names}, "%rt")
    ctx.values.update({arg: Buffer(scalar_type(arg.type), f"%b{i}") for i, arg in enumerate(buffers)})
    ctx.values.update({arg: Uniform("i64", f"%s.{s}") for arg, s in zip(symbols, names, strict=True)})
    entry_lines = len(fn.lines)
    emit_block(ctx, block)
    ctx.finish(entry_lines)
    return name
