"""One call on torch tensors, with as little Python as can be: a microsecond, 25 ns an input and half one an output."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch

from luban import events
from luban.errors import ConfigError
from luban.runtime import arena, donation, native_call, pools, threads
from luban.runtime.program import ITEM_BYTES, Plan, Tensor

if TYPE_CHECKING:
    from luban.runtime.loaded import LoadedProgram

_SLAB = 16 << 20  # bytes of kept values in one block
Saved = Sequence[tuple[int, Tensor, int]]

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_shape, _dtype, _is_cpu = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_data_ptr, _stride, _is_neg = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_neg


class _Prepared:
    """A plan in torch's terms: what the inputs must be, and how each output is made."""

    __slots__ = ("plan", "about", "shapes", "strides", "small", "own", "saved", "same", "aliases", "donation")

    def __init__(self, plan: Plan, positions: Sequence[int], about: native_call.Description | None):
        self.plan, self.about = plan, about
        self.shapes = [t.shape for t in plan.inputs]
        self.strides = [t.strides for t in plan.inputs]
        made = [(i, _DTYPES[t.dtype], t.shape, t.strides, t.bytes, t.offset) for i, t in plan.own]
        if plan.slab_bytes < pools.SMALL:
            made += [(i, _DTYPES[t.dtype], t.shape, t.strides, t.bytes, t.offset) for i, t, _ in plan.saved]
            self.saved = []
        else:
            self.saved = [_slab(part) for part in _parts(plan.saved)]
        plain = {i for i, t in (*plan.own, *((i, t) for i, t, _ in plan.saved)) if t.bytes < pools.SMALL and _fills(t)}
        self.small = [entry[:4] for entry in made if entry[0] in plain]
        self.own = [(i, d, s, st, pools.size_class(n), o) for i, d, s, st, n, o in made if i not in plain]
        sources = dict(zip(positions, plan.inputs)) | {~i: t for i, t in plan.own}
        self.same = [(i, j) for i, j, t, offset in plan.aliases if offset == 0 and _is_all_of(sources.get(j), t)]
        kept = {i for i, _ in self.same}
        self.aliases = [(i, j, t.shape, t.strides, offset) for i, j, t, offset in plan.aliases if i not in kept]
        self.donation: donation.Donation | None = None


def _parts(saved: Saved) -> Sequence[Saved]:
    """Kept values in runs of at most _SLAB bytes, or one value that is larger: who holds one value holds all of its run."""
    parts: list[list[tuple[int, Tensor, int]]] = []
    for entry in saved:
        _, t, at = entry
        if not parts or at + t.bytes - parts[-1][0][2] > _SLAB:
            parts.append([])
        parts[-1].append(entry)
    return parts


def _slab(saved: Saved) -> tuple[int, list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]]]:
    """The size of the block for a run of kept values; and output, dtype, sizes, strides, first byte and element of each."""
    start, (_, last, end) = saved[0][2], saved[-1]
    made = [
        (i, _DTYPES[t.dtype], t.shape, t.strides, at - start, (at - start) // ITEM_BYTES[t.dtype] + t.offset)
        for i, t, at in saved
    ]
    return pools.size_class(end + last.bytes - start), made


def _is_all_of(source: Tensor | None, t: Tensor) -> bool:
    """Whether a window on a tensor is the tensor itself. An input's stride may be any where the size is 1."""
    return source is not None and (source.shape, source.strides) == (t.shape, t.strides) and 1 not in t.shape


def _fills(t: Tensor) -> bool:
    """Whether a tensor made of just its sizes and strides has all the memory that the program writes."""
    extent = 0 if 0 in t.shape else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
    return t.offset == 0 and extent * ITEM_BYTES[t.dtype] >= t.bytes


def _maker(ready: _Prepared) -> Callable[[], tuple[torch.Tensor, Any]]:
    """Makes the one output of a program: the tensor, and where the program writes."""
    if ready.small:
        [(_, dtype, shape, strides)] = ready.small
        empty = pools.empty

        def make() -> tuple[torch.Tensor, Any]:
            made = empty(shape, strides, dtype)
            return made, made

        return make
    [(_, dtype, shape, strides, size, offset)] = ready.own
    pool, view = pools.outputs, pools.view

    def take() -> tuple[torch.Tensor, Any]:
        pool.tick()
        block = pool.take(size)
        made = view(block.base(dtype), shape, strides, offset)
        pool.give(block)
        return made, block.address

    return take


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
        self.outputs = len(loaded.signature.outputs)
        layout = "".join("Q" if e["kind"] == "tensor" else "8x" for e in entries)
        self.pack = struct.Struct(f"{layout}{self.outputs}Q").pack
        self.native: Any = None if self.complex else loaded.native()
        self.parallel = loaded.parallel
        self.fixed = None if loaded.signature.symbols else self._ready(loaded.plan(()))
        self.by_values: dict[tuple[int, ...], _Prepared] = {}

    def __call__(self, inputs: Sequence) -> list:
        if len(inputs) != self.count:
            name = self.loaded.program.name
            raise ConfigError(f"{name} takes {self.count} inputs, not {len(inputs)}; pass those it was compiled for")
        ready = self.fixed or self._prepare(inputs)
        results = self._run_natively(ready, inputs)
        return self._run_looking(ready, inputs) if results is None else results

    def _run_natively(self, ready: _Prepared, inputs: Sequence) -> list | None:
        """The call through the program's own machine code; None if it cannot: for a recording, or an input that is wrong
        or of a kind that only Python can read. Nothing has run then."""
        plan, about = ready.plan, ready.about
        if about is None or events.enabled:
            return None
        if plan.symbol_inputs and any(inputs[i] != value for i, value in plan.symbol_inputs):
            return None
        results = list(plan.template)
        given: list[Any] = [0] * self.outputs
        self._allocate(ready, inputs, results, given)
        base = arena.address(plan.arena_bytes) if plan.arena_bytes else 0
        count = threads.num_threads() if self.parallel else 1
        status = self.native(about.address, base, count, *inputs, *given)
        if status:
            if status < 0:
                return None
            self.loaded.fail(status)
        self._alias(ready, inputs, results)
        return results

    def _run_looking(self, ready: _Prepared, inputs: Sequence) -> list:
        """The call with its checks in Python, which name what is wrong."""
        tensors = self.pick(inputs)
        try:
            pointers = list(map(_data_ptr, tensors))
            right = (
                list(map(_shape, tensors)) == ready.shapes
                and list(map(_stride, tensors)) == ready.strides
                and list(map(_dtype, tensors)) == self.dtypes
                and all(map(_is_cpu, tensors))
                and not any(map(_is_neg, tensors))
            )
        except (TypeError, RuntimeError, AttributeError):
            right = False
        if not right or self.complex or ready.plan.symbol_inputs:
            self._check(inputs, ready)
        results = list(ready.plan.template)
        given: list[Any] = [0] * self.outputs
        self._allocate(ready, inputs, results, given)
        addresses = [at if type(at) is int else at.data_ptr() for at in given]
        self.loaded.run(self.pack(*pointers, *addresses), ready.plan)
        self._alias(ready, inputs, results)
        return results

    def pair(self, otherwise: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """f(a, b) -> the output, for a program of two tensors of fixed sizes and one output.

        It gives otherwise(a, b) when a or b is not what the program takes.
        """
        ready = self.fixed
        assert ready is not None and self.outputs == 1 and self.positions == [0, 1]
        if ready.about is None or ready.plan.arena_bytes:

            def run(a: Any, b: Any) -> Any:
                made = self._run_natively(ready, (a, b))
                return otherwise(a, b) if made is None else made[0]

            return run
        make = _maker(ready)
        native, about, parallel = self.native, ready.about.address, self.parallel

        def run_at_once(a: Any, b: Any) -> Any:  # no lists: all of it takes as long as an empty torch.mm
            out, place = make()
            count = threads.num_threads() if parallel else 1
            if events.enabled or native(about, 0, count, a, b, place):
                return otherwise(a, b)
            return out

        return run_at_once

    def _prepare(self, inputs: Sequence) -> _Prepared:
        values = self.loaded.symbol_values(inputs)
        found = self.by_values.get(values)
        if found is None:
            if len(self.by_values) >= 256:
                self.by_values.clear()
            found = self.by_values[values] = self._ready(self.loaded.plan(values))
        return found

    def _ready(self, plan: Plan) -> _Prepared:
        kinds = [entry["kind"] for entry in self.loaded.signature.inputs]
        ready = _Prepared(plan, self.positions, self.native and native_call.Description(plan, kinds, self.outputs))
        last, first = self.loaded.donated_inputs(), self.loaded.first_writers()
        found = donation.Donation(plan, self.positions, last, first)
        ready.donation = found if found else None
        return ready

    @staticmethod
    def _allocate(ready: _Prepared, inputs: Sequence, results: list, given: list) -> None:
        """Makes the outputs: in `results` the tensors, in `given` where the program writes, an address or a tensor."""
        empty = pools.empty
        for i, dtype, shape, strides in ready.small:
            results[i] = given[i] = empty(shape, strides, dtype)
        if not ready.own and not ready.saved:
            return
        pool = pools.outputs
        view = pools.view
        pool.tick()
        places = {i: (block, at) for i, block, at in ready.donation.places(inputs)} if ready.donation else {}
        for i, dtype, shape, strides, size, offset in ready.own:
            if i in places:
                block, at = places[i]
                results[i] = view(block.base(dtype), shape, strides, at // dtype.itemsize + offset)
                given[i] = block.address + at
                continue
            block = pool.take(size)
            results[i] = view(block.base(dtype), shape, strides, offset)
            given[i] = block.address
            pool.give(block)
        for size, made in ready.saved:
            block = pool.take(size)
            pool.saved[block.storage_id] = block
            start = block.address
            for i, dtype, shape, strides, at, elements in made:
                results[i] = view(block.base(dtype), shape, strides, elements)
                given[i] = start + at
            pool.give(block)

    @staticmethod
    def _alias(ready: _Prepared, inputs: Sequence, results: list) -> None:
        for i, j in ready.same:
            results[i] = inputs[j] if j >= 0 else results[~j]
        for i, j, shape, strides, offset in ready.aliases:
            source = inputs[j] if j >= 0 else results[~j]
            same = offset == 0 and source.shape == shape and source.stride() == strides
            results[i] = source if same else pools.view(source, shape, strides, offset)

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
    if given.is_neg():
        return "is a lazy negation, which the program would read unnegated"
    return "is a lazy conjugate, which the program would read unconjugated" if given.is_conj() else ""
