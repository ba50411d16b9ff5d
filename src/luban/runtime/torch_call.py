"""One call on torch tensors, with as little Python as can be: about half a microsecond an input and one an output."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from luban.errors import ConfigError
from luban.runtime import pools
from luban.runtime.program import ITEM_BYTES, Plan, Tensor

if TYPE_CHECKING:
    from luban.runtime.loaded import LoadedProgram

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_shape, _dtype, _is_cpu = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_data_ptr, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


class _Prepared:
    """A plan in torch's terms: what the inputs must be, and how each output is made."""

    __slots__ = ("plan", "shapes", "strides", "small", "own", "saved", "slab", "aliases")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.shapes = [t.shape for t in plan.inputs]
        self.strides = [t.strides for t in plan.inputs]
        made = [(i, _DTYPES[t.dtype], t.shape, t.strides, t.bytes, t.offset) for i, t in plan.own]
        slab = pools.size_class(plan.slab_bytes)
        if plan.slab_bytes < pools.SMALL:
            made += [(i, _DTYPES[t.dtype], t.shape, t.strides, t.bytes, t.offset) for i, t, _ in plan.saved]
            self.saved, self.slab = [], 0
        else:
            self.saved = [
                (i, _DTYPES[t.dtype], t.shape, t.strides, at, at // ITEM_BYTES[t.dtype] + t.offset)
                for i, t, at in plan.saved
            ]
            self.slab = slab
        plain = {i for i, t in (*plan.own, *((i, t) for i, t, _ in plan.saved)) if t.bytes < pools.SMALL and _fills(t)}
        self.small = [entry[:4] for entry in made if entry[0] in plain]
        self.own = [(i, d, s, st, pools.size_class(n), o) for i, d, s, st, n, o in made if i not in plain]
        self.aliases = [(i, j, t.shape, t.strides, offset) for i, j, t, offset in plan.aliases]


def _fills(t: Tensor) -> bool:
    """Whether a tensor made of just its sizes and strides has all the memory that the program writes."""
    extent = 0 if 0 in t.shape else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
    return t.offset == 0 and extent * ITEM_BYTES[t.dtype] >= t.bytes


class TorchCall:
    """Runs a loaded program on torch tensors."""

    def __init__(self, loaded: LoadedProgram):
        self.loaded = loaded
        entries = loaded.signature.inputs
        self.count = len(entries)
        positions = [i for i, e in enumerate(entries) if e["kind"] == "tensor"]
        self.positions = positions
        self.dtypes = [_DTYPES[entries[i]["dtype"]] for i in positions]
        self.complex = [i for i in positions if entries[i]["dtype"].startswith("complex")]
        self.pick: Any
        if len(positions) == self.count:
            self.pick = list
        elif len(positions) == 1:
            self.pick = lambda inputs: [inputs[positions[0]]]
        elif positions:
            self.pick = itemgetter(*positions)
        else:
            self.pick = lambda inputs: []
        layout = "".join("Q" if e["kind"] == "tensor" else "8x" for e in entries)
        self.outputs = len(loaded.signature.outputs)
        self.pack = struct.Struct(f"{layout}{self.outputs}Q").pack
        self.fixed = None if loaded.signature.symbols else _Prepared(loaded.plan(()))
        self.by_values: dict[tuple[int, ...], _Prepared] = {}

    def __call__(self, inputs: Sequence) -> list:
        if len(inputs) != self.count:
            name = self.loaded.program.name
            raise ConfigError(f"{name} takes {self.count} inputs, not {len(inputs)}; pass those it was compiled for")
        ready = self.fixed or self._prepare(inputs)
        tensors = self.pick(inputs)
        try:
            pointers = list(map(_data_ptr, tensors))
            right = (
                list(map(_shape, tensors)) == ready.shapes
                and list(map(_stride, tensors)) == ready.strides
                and list(map(_dtype, tensors)) == self.dtypes
                and all(map(_is_cpu, tensors))
            )
        except (TypeError, RuntimeError, AttributeError):
            right = False
        if not right or self.complex or ready.plan.symbol_inputs:
            self._check(inputs, ready)
        results = list(ready.plan.template)
        addresses = [0] * self.outputs
        self._allocate(ready, inputs, results, addresses)
        self.loaded.run(self.pack(*pointers, *addresses), ready.plan)
        return results

    def _prepare(self, inputs: Sequence) -> _Prepared:
        values = self.loaded.symbol_values(inputs)
        found = self.by_values.get(values)
        if found is None:
            if len(self.by_values) >= 256:
                self.by_values.clear()
            found = self.by_values[values] = _Prepared(self.loaded.plan(values))
        return found

    @staticmethod
    def _allocate(ready: _Prepared, inputs: Sequence, results: list, addresses: list[int]) -> None:
        pool = pools.outputs
        view = pools.view
        pool.tick()
        empty = pools.empty
        for i, dtype, shape, strides in ready.small:
            made = results[i] = empty(shape, strides, dtype)
            addresses[i] = made.data_ptr()
        for i, dtype, shape, strides, size, offset in ready.own:
            block = pool.take(size)
            results[i] = view(block.base(dtype), shape, strides, offset)
            addresses[i] = block.address
            pool.give(block)
        if ready.saved:
            block = pool.take(ready.slab)
            start = block.address
            for i, dtype, shape, strides, at, elements in ready.saved:
                results[i] = view(block.base(dtype), shape, strides, elements)
                addresses[i] = start + at
            pool.give(block)
        for i, j, shape, strides, offset in ready.aliases:
            source = inputs[j] if j >= 0 else results[~j]
            same = offset == 0 and source.shape == shape and source.stride() == strides
            results[i] = source if same else view(source, shape, strides, offset)

    def _check(self, inputs: Sequence, ready: _Prepared) -> None:
        """The slow look at inputs that differ: strides of dims of size 1 do not count; all else is a ConfigError."""
        for position, want in zip(self.positions, ready.plan.inputs, strict=True):
            given = inputs[position]
            problem = _mismatch(given, want)
            if problem:
                raise ConfigError(
                    f"input {position} of {self.loaded.program.name} {problem}; "
                    "pass inputs like those it was compiled for, or compile it for these"
                )
        for position, value in ready.plan.symbol_inputs:
            if inputs[position] != value:
                raise ConfigError(
                    f"input {position} of {self.loaded.program.name} is {inputs[position]!r}, "
                    f"but the sizes of the other inputs ask for {value}"
                )


def _mismatch(given: object, want: Tensor) -> str:
    if not isinstance(given, torch.Tensor):
        return f"is a {type(given).__name__}, not a tensor"
    if not given.is_cpu or given.layout != torch.strided:
        return f"is a {given.layout} tensor on {given.device}, not a dense one on the CPU".replace("torch.", "")
    if given.dtype != _DTYPES[want.dtype]:
        return f"has dtype {given.dtype}, not {want.dtype}".replace("torch.", "")
    if tuple(given.shape) != want.shape:
        return f"has shape {tuple(given.shape)}, not {want.shape}"
    differ = any(d > 1 and a != b for d, a, b in zip(want.shape, given.stride(), want.strides, strict=True))
    if differ and 0 not in want.shape:
        return f"has strides {given.stride()}, not {want.strides}"
    return "is a lazy conjugate, which the program would read unconjugated" if given.is_conj() else ""
