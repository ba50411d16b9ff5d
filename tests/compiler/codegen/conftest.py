"""Short texts of tile kernels, and running them as machine code through Luban's own loader."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from luban import targets
from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.codegen.llvm.emitter import Module
from luban.compiler.codegen.llvm.kernel import emit_kernel
from luban.compiler.codegen.llvm.program import Call, emit_entry
from luban.compiler.ir.interpret_tile import run_kernel
from luban.compiler.ir.text import parse, verify
from luban.runtime import elf, externals
from luban.symbolic import symbol

# Shorthand lines of the tests -> xDSL's generic form:
#   %x = load %a[%i, %j] [8, 1] + 0 if %m : f32          store %x, %o[%i] [1] + 0 if %m combine add : f32
#   %r = for vector %i = %lo to %hi carry %acc = %init combine add : f32 { ... yield %next : f32 ... }
_LOAD = re.compile(r"^(%\w+) = load (%\w+)\[([^\]]*)\] \[([^\]]*)\] \+ (.+?)(?: if (%\w+))? : (\w+)$")
_STORE = re.compile(
    r"^store (%\w+), (%\w+)\[([^\]]*)\] \[([^\]]*)\] \+ (.+?)(?: if (%\w+))?(?: combine (\w+))? : (\w+)$"
)
_FOR = re.compile(
    r"^(?:([%\w, ]+) = )?for (\w+) (%\w+) = (%\w+) to (%\w+)(?: carry (.+?) = (.+?) combine (.+?) : (.+?))? \{$"
)


def listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _load(match: re.Match) -> str:
    result, buffer, indices, strides, offset, mask, ty = match.groups()
    names = listed(indices)
    operands = ", ".join([buffer, *names, *([mask] if mask else [])])
    types = ", ".join([f"!tile.buf<{ty}>", *["i64"] * len(names), *(["i1"] if mask else [])])
    segments = f"array<i32: 1, {len(names)}, {int(bool(mask))}>"
    props = f"strides = #graph.dims<[{strides}]>, offset = #graph.dims<[{offset}]>, operandSegmentSizes = {segments}"
    return f'{result} = "tile.load"({operands}) <{{{props}}}> : ({types}) -> {ty}'


def _store(match: re.Match) -> str:
    value, buffer, indices, strides, offset, mask, combine, ty = match.groups()
    names = listed(indices)
    operands = ", ".join([value, buffer, *names, *([mask] if mask else [])])
    types = ", ".join([ty, f"!tile.buf<{ty}>", *["i64"] * len(names), *(["i1"] if mask else [])])
    segments = f"array<i32: 1, 1, {len(names)}, {int(bool(mask))}>"
    props = (
        f"strides = #graph.dims<[{strides}]>, offset = #graph.dims<[{offset}]>, "
        f'combine = "{combine or "none"}", operandSegmentSizes = {segments}'
    )
    return f'"tile.store"({operands}) <{{{props}}}> : ({types}) -> ()'


def expand(body: str) -> str:
    """The shorthand as generic text."""
    lines, ends = [], []
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if match := _LOAD.match(line):
            line = _load(match)
        elif match := _STORE.match(line):
            line = _store(match)
        elif match := _FOR.match(line):
            results, role, index, low, high, names, inits, combines, types = match.groups()
            kinds = listed(types or "")
            arguments = ", ".join([f"{index}: i64", *(f"{n}: {t}" for n, t in zip(listed(names or ""), kinds))])
            operands = ", ".join([low, high, *listed(inits or "")])
            combine = ", ".join(f'"{c}"' for c in listed(combines or ""))
            head = f"{results} = " if results else ""
            # generic results are not named one by one ("%r, %s = "): a pack is named, and its elements are %r#0, %r#1
            head = f"{listed(results)[0]}:{len(kinds)} = " if results and "," in results else head
            line = f'{head}"tile.for"({operands}) <{{role = "{role}", combines = [{combine}]}}> ({{\n^bb0({arguments}):'
            ends.append((kinds, False))
        elif line.startswith("yield"):
            values, _, types = line.removeprefix("yield").partition(":")
            line = f'"tile.yield"({values.strip()}) : ({types.strip()}) -> ()'
            ends[-1] = (ends[-1][0], True)
        elif line == "}":
            kinds, yielded = ends.pop()
            types = ", ".join(["i64", "i64", *kinds])
            line = ("" if yielded else '"tile.yield"() : () -> ()\n') + f"}}) : ({types}) -> ({', '.join(kinds)})"
        lines.append(line)
    return "\n".join(lines)


def kernel_text(body: str, buffers: str, symbols: str = "", name: str = "k") -> str:
    """A module with one kernel; buffers like "%a: f32, %o: f32", symbols like "s0, s1" (as values %s0, %s1)."""
    arguments = [f"{n.split(':')[0].strip()}: !tile.buf<{n.split(':')[1].strip()}>" for n in listed(buffers)]
    arguments += [f"%{s}: i64" for s in listed(symbols)]
    names = ", ".join(f'"{s}"' for s in listed(symbols))
    head = f'"tile.kernel"() <{{sym_name = "{name}", symbols = [{names}]}}> ({{\n^bb0({", ".join(arguments)}):'
    return f'"builtin.module"() ({{\n{head}\n{expand(body)}\n}}) : () -> ()\n}}) : () -> ()\n'


def kernel_of(text: str):
    module = parse(text)
    verify(module)
    return next(iter(module.ops))


def llvm_text(text: str, target: targets.Target, calls: list[Call] | None = None) -> str:
    """The LLVM module of a kernel and an entry that calls it with its buffers as arguments 0, 1, ..."""
    kernel = kernel_of(text)
    module = Module()
    emit_kernel(module, kernel, target)
    names = [s.data for s in kernel.symbols]
    count = len(kernel.body.block.args) - len(names)
    pointers = tuple(("arg", i, 0) for i in range(count))
    calls = calls or [Call(kernel.sym_name.data, pointers, tuple(symbol(s) for s in names))]
    emit_entry(module, calls, names)
    return module.text()


class Loaded:
    """A kernel as machine code: call it with flat arrays and symbol values; `status` is that of the last call."""

    def __init__(self, text: str, target: str = "native", calls: list[Call] | None = None):
        self.compiled = compile_module(llvm_text(text, targets.get(target), calls), targets.get(target))
        self.image = elf.load(self.compiled.object, externals.resolve)
        self.entry = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5)(self.image.lookup("luban_entry"))
        self.status = 0

    def __call__(
        self, *arrays: np.ndarray, symbols: tuple[int, ...] = (), threads: int = 1, temps=(), stamps=None
    ) -> None:
        args = (ctypes.c_void_p * max(1, len(arrays)))(*[a.ctypes.data for a in arrays])
        syms = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        arena = np.zeros(1 << 16, np.uint8)
        offsets = (ctypes.c_int64 * max(1, len(temps)))(*temps)
        status = ctypes.c_int64(0)
        stamps_at = stamps.ctypes.data if stamps is not None else 0
        rt = (ctypes.c_int64 * 3)(threads, stamps_at, ctypes.addressof(status))
        self.entry(args, syms, arena.ctypes.data, offsets, ctypes.addressof(rt))
        self.status = status.value


@pytest.fixture(scope="session")
def tile():
    """The helpers above, for tests of this directory."""
    return SimpleNamespace(
        text=kernel_text,
        load=Loaded,
        kernel=kernel_of,
        expand=expand,
        interpret=lambda text, *a, **s: run_kernel(kernel_of(text), a, s),
        llvm=llvm_text,
    )
