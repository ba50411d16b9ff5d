"""What the Triton code generator gives: source text, its entries, and what each of them takes."""

from __future__ import annotations

from dataclasses import dataclass

from luban.symbolic import Dim


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel's entries.

    kind: "buffer" and "symbol" are the tile kernel's own, in its order; "workspace" is memory of `elements` elements
    that `launch` allocates; "status" one int64 that an index out of range sets to 1. `dtype` as in `tl.float32`.
    """

    name: str
    kind: str
    dtype: str
    elements: Dim = 1


@dataclass(frozen=True)
class Entry:
    """One Triton function: its grid as dims in the kernel's symbols, the names of its arguments, and its warps."""

    name: str
    grid: tuple[Dim, ...]
    arguments: tuple[str, ...]
    warps: int


@dataclass(frozen=True)
class TritonKernel:
    """A tile kernel as one Python file; `launch(buffers..., symbols...)` in it runs the entries in order."""

    name: str
    source: str
    entries: tuple[Entry, ...]
    arguments: tuple[Argument, ...]

    @property
    def entry_names(self) -> tuple[str, ...]:
        return tuple(e.name for e in self.entries)

    def of_kind(self, kind: str) -> tuple[Argument, ...]:
        """The arguments of a kind, in order."""
        return tuple(a for a in self.arguments if a.kind == kind)
