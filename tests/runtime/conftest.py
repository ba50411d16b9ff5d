"""Small objects from LLVM text, and programs around them."""

from __future__ import annotations

import pytest

from luban.compiler.codegen.llvm.emitter import Module
from luban.compiler.codegen.llvm.python_call import add_python_call
from luban.runtime.program import Program

llvm = pytest.importorskip("llvmlite.binding")

TRIPLES = {
    "native": None,
    "x86-64": "x86_64-unknown-linux-gnu",
    "aarch64": "aarch64-unknown-linux-gnu",
    "riscv64": "riscv64-unknown-linux-gnu",
    "loongarch64": "loongarch64-unknown-linux-gnu",
}
ENTRY = "define void @luban_entry(ptr %args, ptr %syms, ptr %arena, ptr %offsets, ptr %rt)"


def emit(text: str, family: str = "native", relocation: str = "pic", model: str = "small") -> bytes:
    """The relocatable object of LLVM text."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = TRIPLES[family] or llvm.get_default_triple()
    module = llvm.parse_assembly(text)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, reloc=relocation, codemodel=model)
    return machine.emit_object(module)


def callable_text(text: str) -> str:
    """LLVM text with an entry, and the way in from Python that the compiler adds to every program."""
    module = Module()
    add_python_call(module, "luban_entry")
    return f"{text}\n{module.text()}"


def describe(*, inputs=(), outputs=(), symbols=None, arena=0, offsets=(), kernels=(), **extra) -> dict:
    """Metadata of a program; `symbols` maps names to sources."""
    symbols = symbols or {}
    return {
        "version": 1,
        "target": "native",
        "symbols": list(symbols),
        "symbol_sources": symbols,
        "inputs": list(inputs),
        "outputs": list(outputs),
        "temps": [],
        "arena": {"bytes": arena, "offsets": list(offsets)},
        "kernels": list(kernels),
        **extra,
    }


def tensor(shape, strides, dtype="float32", **extra) -> dict:
    """A tensor entry of the metadata; give kind="buffer" for an output."""
    return {"kind": "tensor", "dtype": dtype, "shape": list(shape), "strides": list(strides), **extra}


SCALE = f"""
{ENTRY} {{
entry:
  %out.at = getelementptr ptr, ptr %args, i64 1
  %in = load ptr, ptr %args
  %out = load ptr, ptr %out.at
  %n = load i64, ptr %syms
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %p = getelementptr float, ptr %in, i64 %i
  %q = getelementptr float, ptr %out, i64 %i
  %x = load float, ptr %p
  %y = fmul float %x, 3.0
  store float %y, ptr %q
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""


@pytest.fixture(scope="session")
def build():
    """`emit`, `describe`, `tensor` and the texts as one namespace."""

    class Build:
        pass

    Build.emit, Build.describe, Build.tensor = staticmethod(emit), staticmethod(describe), staticmethod(tensor)
    Build.callable_text = staticmethod(callable_text)
    Build.ENTRY, Build.SCALE = ENTRY, SCALE
    return Build


@pytest.fixture(scope="session")
def scale() -> Program:
    """y = 3 * x for a vector x of s0 floats."""
    meta = describe(
        inputs=[tensor(["s0"], [1])],
        outputs=[tensor(["s0"], [1], kind="buffer")],
        symbols={"s0": ["size", 0, 0]},
        name="scale",
    )
    return Program(meta, emit(callable_text(SCALE)))
