"""Register-level matrix micro-kernels, one file a unit of arithmetic, and the packing of their operands.

`emitter_for(spec.unit)(module, name, spec)` adds an internal LLVM function; `DotSpec` says what it computes and how it is
called. `pack.emit_pack` adds the functions that bring operands into its panels.
"""

from __future__ import annotations

from collections.abc import Callable

from luban.compiler.codegen.llvm.dots.amx import AMX_A_GROUP, emit_amx
from luban.compiler.codegen.llvm.dots.bf16_dot import emit_bf16_dot, emit_bfdot
from luban.compiler.codegen.llvm.dots.fma import emit_fma
from luban.compiler.codegen.llvm.dots.pack import PackSpec, emit_pack
from luban.compiler.codegen.llvm.dots.spec import DotSpec
from luban.compiler.codegen.llvm.emitter import Module
from luban.errors import ConfigError

Emitter = Callable[[Module, str, DotSpec], None]

_EMITTERS: dict[str, Emitter] = {
    "fma": emit_fma,
    "bf16_dot": emit_bf16_dot,
    "bfdot": emit_bfdot,
    "amx": emit_amx,
}

# values of K that lie side by side in a packed panel: (of A, of B)
GROUPS: dict[str, tuple[int, int]] = {"fma": (1, 1), "bf16_dot": (2, 2), "bfdot": (2, 2), "amx": (AMX_A_GROUP, 2)}


def emitter_for(unit: str) -> Emitter:
    """The emitter of a unit of arithmetic; ConfigError names the known ones."""
    if unit not in _EMITTERS:
        raise ConfigError(f"dot unit {unit!r} is unknown; use one of {sorted(_EMITTERS)}")
    return _EMITTERS[unit]


def register(unit: str, emitter: Emitter, groups: tuple[int, int]) -> None:
    """Adds a unit: its emitter, and how many values of K lie side by side in packed A and B."""
    _EMITTERS[unit] = emitter
    GROUPS[unit] = groups


__all__ = ["GROUPS", "DotSpec", "Emitter", "PackSpec", "emit_pack", "emitter_for", "register"]
