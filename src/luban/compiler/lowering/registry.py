"""Which builder turns a fusion group of each kind into a tile kernel.

The compute library registers its builders here through the entry point group `luban.lowerings`; the compiler knows kinds
of groups, never the library by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from xdsl.ir import SSAValue

from luban.compiler.ir import graph, tile
from luban.errors import UnsupportedOperatorError
from luban.symbolic import Dim
from luban.targets.target import Target


@dataclass(frozen=True)
class Request:
    """What a builder gets: the group, the kernel's name, the program's symbols and the chip.

    `tile_size` is the side of the cache blocks that a person asks for; None leaves it to the builder.
    """

    group: graph.GroupOp
    name: str
    symbols: tuple[str, ...]
    target: Target
    tile_size: int | None = None


@dataclass(frozen=True)
class Lowered:
    """A kernel and what its buffers stand for: graph values read, results written, then workspaces of so many bytes.

    `flops` and `bytes` are the work and the traffic of one call, expressions where sizes are open. `schedules` says
    what it asked the tables of tuned schedules (see `runtime/schedules.py`).
    """

    kernel: tile.KernelOp
    inputs: tuple[SSAValue, ...]
    outputs: tuple[SSAValue, ...]
    workspaces: tuple[Dim, ...] = field(default=())
    flops: Dim = 0
    bytes: Dim = 0
    schedules: Mapping[str, str | None] = field(default_factory=dict)


Builder = Callable[[Request], Lowered]
_BUILTIN = {
    "loop": "luban.compiler.lowering.loops:lower",
    "graph.scatter": "luban.compiler.lowering.scatter:lower",
    "graph.concat": "luban.compiler.lowering.concat:lower",
}
_loaded: dict[str, Builder] = {}


def builder(kind: str) -> Builder:
    """The builder for groups of this kind. Raises UnsupportedOperatorError if nobody registered one."""
    if kind not in _loaded:
        _loaded[kind] = _find(kind)
    return _loaded[kind]


def _find(kind: str) -> Builder:
    if kind in _BUILTIN:
        module, _, attribute = _BUILTIN[kind].partition(":")
        return getattr(import_module(module), attribute)
    for entry in entry_points(group="luban.lowerings"):
        if entry.name == kind:
            loaded: Any = entry.load()
            return loaded
    raise UnsupportedOperatorError([f"{kind} (no builder registered under the entry point group luban.lowerings)"])
