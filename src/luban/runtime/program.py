"""What a compiled program is: metadata and object bytes, and the call plan that a set of symbol values gives.

Nothing here needs torch or NumPy, so that a cache hit can be read without them.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luban import symbolic
from luban.errors import ConfigError, LubanError

VERSION = 1
ENTRY = "luban_entry"
ALIGN = 64

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A compiled program: `metadata` is plain JSON data (dims are ints or texts of `luban.symbolic`), `object` an
    ELF object.

    The entry point is `void luban_entry(ptr args, ptr syms, ptr arena, ptr offsets, ptr rt)`.
    """

    metadata: dict[str, Any]
    object: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The name in errors and spans."""
        return self.metadata.get("name", "a compiled program")

    @property
    def target(self) -> str:
        """The name of the target it was compiled for."""
        return self.metadata["target"]

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """One entry a kernel: name, kind ("generated" or "library"), flops, bytes (dims where sizes are open)."""
        return self.metadata["kernels"]


def work(kernel: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """The flops and bytes of one call of a kernel, where known, for values of the symbols.

    A size without a value (one that depends on data) leaves the number out.
    """
    found = {}
    for key in ("flops", "bytes"):
        with contextlib.suppress(KeyError, ConfigError):
            found[key] = symbolic.evaluate(symbolic.parse(kernel[key]), sizes)
    return found


@dataclass(frozen=True)
class Tensor:
    """A tensor of a call plan: dtype name, sizes, strides in elements, bytes of its memory, and its first element there."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int
    offset: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything of a call that depends only on the symbols' values.

    `inputs` holds the tensor inputs in order. The output lists hold (output position, ...): `own` and `saved` tensors
    (the latter with their byte offset among all of them, `slab_bytes` in sum), `aliases` (position, source: input i or
    output ~i, tensor, offset in elements from the input's first).
    `template` has a value for each output: the symbol's value, or None where a tensor comes.
    """

    symbols: bytes
    offsets: bytes
    arena_bytes: int
    inputs: tuple[Tensor, ...]
    symbol_inputs: tuple[tuple[int, int], ...]
    own: tuple[tuple[int, Tensor], ...]
    saved: tuple[tuple[int, Tensor, int], ...]
    slab_bytes: int
    aliases: tuple[tuple[int, int, Tensor, int], ...]
    template: tuple[int | None, ...]


@dataclass(frozen=True)
class Signature:
    """The metadata with every dim parsed; `plan` turns it into numbers."""

    name: str
    symbols: tuple[str, ...]
    sources: tuple[tuple[str, int, int], ...]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    arena: dict[str, Any]


def signature(program: Program) -> Signature:
    """Reads a program's metadata. Raises LubanError when it is of another version or incomplete."""
    meta = program.metadata
    if meta.get("version") != VERSION:
        raise LubanError(
            f"{program.name} has format version {meta.get('version')!r}, this Luban reads {VERSION}; compile it again"
        )
    try:
        sources = tuple(_source(meta["symbol_sources"][name]) for name in meta["symbols"])
        inputs = tuple(_parsed(entry) for entry in meta["inputs"])
        outputs = tuple(_parsed(entry) for entry in meta["outputs"])
        return Signature(program.name, tuple(meta["symbols"]), sources, inputs, outputs, _parsed(meta["arena"]))
    except (KeyError, TypeError) as error:
        raise LubanError(f"the metadata of {program.name} lacks {error}; compile or export it again") from None


def plan(sig: Signature, values: Sequence[int]) -> Plan:
    """The call plan for symbol values in the order of `sig.symbols`."""
    env = dict(zip(sig.symbols, values, strict=True))

    def number(dim: symbolic.Dim) -> int:
        return dim if isinstance(dim, int) else symbolic.evaluate(dim, env)

    def tensor(entry: dict[str, Any], dtype: str) -> Tensor:
        shape = tuple(number(d) for d in entry["shape"])
        strides = tuple(number(d) for d in entry["strides"])
        elements = number(entry["size"]) if "size" in entry else _extent(shape, strides)
        return Tensor(dtype, shape, strides, elements * ITEM_BYTES[dtype], number(entry.get("offset", 0)))

    own, saved, aliases, template, slab = [], [], [], [], 0
    for position, entry in enumerate(sig.outputs):
        kind = entry["kind"]
        template.append(number(entry["expr"]) if kind == "symbol" else None)
        if kind == "alias":
            source, owner = _alias_source(sig, entry)
            offset = number(entry.get("offset", 0)) - (number(owner.get("offset", 0)) if source < 0 else 0)
            aliases.append((position, source, tensor(entry, owner["dtype"]), offset))
        elif kind == "buffer":
            made = tensor(entry, entry["dtype"])
            if entry.get("pool", "own") == "saved":
                saved.append((position, made, slab))
                slab += -(-made.bytes // ALIGN) * ALIGN
            else:
                own.append((position, made))
    offsets = [number(d) for d in sig.arena["offsets"]]
    return Plan(
        symbols=struct.pack(f"{len(values)}q", *values),
        offsets=struct.pack(f"{len(offsets)}q", *offsets),
        arena_bytes=number(sig.arena["bytes"]),
        inputs=tuple(tensor(entry, entry["dtype"]) for entry in sig.inputs if entry["kind"] == "tensor"),
        symbol_inputs=tuple((i, number(e["name"])) for i, e in enumerate(sig.inputs) if e["kind"] == "symbol"),
        own=tuple(own),
        saved=tuple(saved),
        slab_bytes=slab,
        aliases=tuple(aliases),
        template=tuple(template),
    )


def _alias_source(sig: Signature, entry: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What an alias is a window on: input i, or output ~i as a negative number; and that one's metadata."""
    if "output" in entry:
        return ~entry["output"], sig.outputs[entry["output"]]
    return entry["input"], sig.inputs[entry["input"]]


def _source(entry: Sequence) -> tuple[str, int, int]:
    return entry[0], int(entry[1]), int(entry[2]) if len(entry) > 2 else 0


def _parsed(entry: dict[str, Any]) -> dict[str, Any]:
    """A copy of a metadata entry with its dims as `luban.symbolic` dims."""
    result = dict(entry)
    for key in ("shape", "strides", "offsets"):
        if key in entry:
            result[key] = tuple(symbolic.parse(d) for d in entry[key])
    for key in ("offset", "expr", "bytes", "size"):
        if key in entry:
            result[key] = symbolic.parse(entry[key])
    if entry.get("kind") == "symbol" and "name" in entry:
        result["name"] = symbolic.parse(entry["name"])
    return result


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True))
