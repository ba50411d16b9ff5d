"""A program in memory, ready to run: one call of native code for each call, on torch tensors or NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from luban import events
from luban.errors import ConfigError, LubanError, NanError
from luban.runtime import arena, elf, externals, threads
from luban.runtime import program as programs
from luban.runtime.program import Plan, Program

_ENTRY_TYPE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
_PLANS_KEPT = 256
_STATUS = ((1, "an index is out of range"),)
_NAN_SHIFT = 8  # above these bits: the number of the NaN check that failed, plus 1


class _Call(threading.local):
    """The runtime struct that native code gets, one a thread: thread count, stamps, address of the status word."""

    def __init__(self) -> None:
        self.status = ctypes.c_int64(0)
        self.struct = (ctypes.c_int64 * 3)(1, 0, ctypes.addressof(self.status))
        self.address = ctypes.addressof(self.struct)


_call = _Call()


class LoadedProgram:
    """Callable on a list of inputs (torch tensors on the CPU, ints for symbols); returns the list of outputs.

    Inputs must have the dtypes, shapes and strides that the program was compiled for: anything else is a ConfigError
    before any native code runs. Calls from several threads at once are safe.
    """

    def __init__(self, program: Program, image: elf.Image):
        self.program = program
        self.signature = programs.signature(program)
        self._image = image
        self._entry = _ENTRY_TYPE(image.lookup(programs.ENTRY))
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._facts: dict[bytes, list[dict[str, Any]]] = {}
        self._sources = self.signature.sources
        self.donated: frozenset[int] = frozenset()  # inputs whose memory the results may take, see donation.py
        self.parallel = b"GOMP_parallel" in program.object  # the name stands in the symbol table of code that calls it

    def __call__(self, inputs: Sequence) -> list:
        return self.on_torch(inputs)

    @functools.cached_property
    def on_torch(self) -> Any:
        """The same call without a layer around it; made at the first use, which imports torch."""
        from luban.runtime.torch_call import TorchCall

        return TorchCall(self)

    def donated_inputs(self) -> dict[int, int]:
        """Donated inputs that no result is a window on, with the position of their last kernel."""
        shown = {entry.get("input") for entry in self.signature.outputs if entry["kind"] == "alias"}
        entries = enumerate(self.signature.inputs)
        return {i: e["last"] for i, e in entries if i in self.donated and i not in shown and "last" in e}

    def first_writers(self) -> dict[int, int]:
        """Results of memory of their own, with the position of the first kernel that writes them."""
        return {i: e["first"] for i, e in enumerate(self.signature.outputs) if e["kind"] == "buffer" and "first" in e}

    def native(self) -> Callable[..., int] | None:
        """The program's call without ctypes (see `native_call`), or None."""
        from luban.runtime import native_call

        return native_call.function(self._image, self.program.name)

    def call_numpy(self, inputs: Sequence) -> list:
        """The same on NumPy arrays; bfloat16 is `ml_dtypes.bfloat16` or raw uint16."""
        from luban.runtime import numpy_call

        return numpy_call.call(self, inputs)

    def symbol_values(self, inputs: Sequence) -> tuple[int, ...]:
        """The values of the program's symbols for these inputs."""
        values = []
        try:
            for kind, i, d in self._sources:
                if kind == "size":
                    values.append(inputs[i].shape[d])
                elif kind == "input":
                    values.append(int(inputs[i]))
                else:
                    values.append(_stride(inputs[i], d))
        except (IndexError, AttributeError, TypeError, ValueError):
            given = describe(inputs[i]) if i < len(inputs) else "missing"
            raise ConfigError(
                f"input {i} of {self.program.name} is {given}, which does not give the size "
                f"{self.signature.symbols[len(values)]}; pass inputs like those it was compiled for"
            ) from None
        return tuple(values)

    def plan(self, values: tuple[int, ...]) -> Plan:
        """The call plan for symbol values; computed once for each."""
        found = self._plans.get(values)
        if found is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            found = self._plans[values] = programs.plan(self.signature, values)
        return found

    def run(self, arguments: bytes, plan: Plan) -> None:
        """Calls the native entry on the packed pointer array. Raises LubanError when a kernel met bad data."""
        call = _call
        call.struct[0] = threads.num_threads()
        base = arena.address(plan.arena_bytes) if plan.arena_bytes else 0
        if events.enabled:
            self._run_recorded(arguments, plan, base)
        else:
            self._entry(arguments, plan.symbols, base, plan.offsets, call.address)
        if call.status.value:
            status, call.status.value = call.status.value, 0
            self.fail(status)

    def _run_recorded(self, arguments: bytes, plan: Plan, base: int) -> None:
        kernels = self.program.kernels
        stamps = (ctypes.c_int64 * (2 * len(kernels)))()
        _call.struct[1] = ctypes.addressof(stamps)
        try:
            self._entry(arguments, plan.symbols, base, plan.offsets, _call.address)
        finally:
            _call.struct[1] = 0
        for i, (kernel, facts) in enumerate(zip(kernels, self._facts_of(plan), strict=True)):
            if not stamps[2 * i + 1]:
                break  # the program stopped before
            events.span(kernel["name"], "kernel", stamps[2 * i], stamps[2 * i + 1], program=self.program.name, **facts)

    def _facts_of(self, plan: Plan) -> list[dict[str, Any]]:
        """What the spans of the kernels say besides their times; computed once for each set of sizes."""
        found = self._facts.get(plan.symbols)
        if found is None:
            if len(self._facts) >= _PLANS_KEPT:
                self._facts.clear()
            names = self.signature.symbols
            sizes = dict(zip(names, struct.unpack(f"{len(names)}q", plan.symbols), strict=True))
            found = self._facts[plan.symbols] = [
                {**({"kind": k["kind"]} if "kind" in k else {}), **programs.work(k, sizes)}
                for k in self.program.kernels
            ]
        return found

    def fail(self, status: int) -> None:
        """Raises the LubanError that a status word other than 0 stands for."""
        if status >> _NAN_SHIFT:
            self._fail_on_nan(self.program.metadata["nan_checks"][(status >> _NAN_SHIFT) - 1])
        met = [text for bit, text in _STATUS if status & bit] or [f"status {status}"]
        raise LubanError(f"{self.program.name} stopped on bad data: {' and '.join(met)}; check the indices it is given")

    def _fail_on_nan(self, check: dict[str, Any]) -> None:
        shown = f"{check['type']}[{', '.join(map(str, check['shape']))}]"
        if check["call"] < 0:
            what = f"input {check['position']} ({shown}) of {self.program.name} holds a NaN before the first kernel"
            raise NanError(
                f"{what} ({self.program.kernels[0]['name']}) runs; look at the data and the parameters", None
            )
        kernel = self.program.kernels[check["call"]]["name"]
        raise NanError(
            f"the kernel {kernel} of {self.program.name} is the first to make a NaN, in its output {check['position']} "
            f"({shown}); look at what it computes with LUBAN_DUMP=DIR",
            kernel,
        )


def load(program: Program) -> LoadedProgram:
    """Maps a program's code into this process.

    Raises LubanError for a damaged or foreign object, TargetError when it needs features that this chip lacks.
    """
    required = program.metadata.get("requires")
    if required:
        from luban.targets import host

        host.require(required, program.name)
    return LoadedProgram(program, elf.load(program.object, externals.resolve, program.name))


def _stride(value: Any, d: int) -> int:
    return value.stride(d) if callable(getattr(value, "stride", None)) else value.strides[d] // value.itemsize


def describe(value: object) -> str:
    """A value in an error message: dtype, shape and strides of a tensor, else its type."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    return f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')} of shape {tuple(shape)}"
