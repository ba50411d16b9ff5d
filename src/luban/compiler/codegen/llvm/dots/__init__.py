"""Register-level matrix micro-kernels, one file a unit of arithmetic, and the packing of their operands.

`emitter_for(spec.unit)(module, name, spec)` adds an internal LLVM function; `DotSpec` says what it computes and how it
is called. `emit_pack` adds the functions that bring operands into its panels. Both write code that needs no further
optimisation: LLVM's passes over a micro-kernel cost more than its code generation and gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots.amx import AMX_A_GROUP, AMX_B_COLUMNS, emit_amx
from luban.compiler.codegen.llvm.dots.bf16_dot import emit_bf16_dot, emit_bfdot
from luban.compiler.codegen.llvm.dots.fma import emit_fma
from luban.compiler.codegen.llvm.dots.int8_dot import emit_imul, emit_sdot, emit_vpdpbusd, emit_vpdpwssd, emit_vpmaddwd
from luban.compiler.codegen.llvm.dots.pack import emit_pack
from luban.compiler.codegen.llvm.dots.pack_spec import PackSpec
from luban.compiler.codegen.llvm.dots.spec import DotSpec
from luban.compiler.codegen.llvm.emitter import Module
from luban.errors import ConfigError

Emitter = Callable[[Module, str, DotSpec], None]

_EMITTERS: dict[str, Emitter] = {
    "fma": emit_fma,
    "bf16_dot": emit_bf16_dot,
    "bfdot": emit_bfdot,
    "amx": emit_amx,
    "amx_int8": emit_amx,
    "vpdpbusd": emit_vpdpbusd,
    "vpdpwssd": emit_vpdpwssd,
    "vpmaddwd": emit_vpmaddwd,
    "sdot": emit_sdot,
    "imul": emit_imul,
}


@dataclass(frozen=True)
class Panels:
    """How a unit wants its packed operands: values of K side by side in A and in B; both pad K to `k_multiple`.

    A panel of B has `b_columns` columns, those of a register tile where that is 0.
    """

    a_group: int
    b_group: int
    k_multiple: int
    b_columns: int = 0


PANELS: dict[str, Panels] = {
    "fma": Panels(1, 1, 1),
    "bf16_dot": Panels(2, 2, 2),
    "bfdot": Panels(2, 2, 2),
    "amx": Panels(AMX_A_GROUP, 2, AMX_A_GROUP, AMX_B_COLUMNS),
    "amx_int8": Panels(2 * AMX_A_GROUP, 4, 2 * AMX_A_GROUP, AMX_B_COLUMNS),
    "vpdpbusd": Panels(4, 4, 4),
    "vpdpwssd": Panels(2, 2, 2),
    "vpmaddwd": Panels(2, 2, 2),
    "sdot": Panels(4, 4, 4),
    "imul": Panels(1, 1, 1),
}


def emitter_for(unit: str) -> Emitter:
    """The emitter of a unit of arithmetic; ConfigError names the known ones."""
    if unit not in _EMITTERS:
        raise ConfigError(f"dot unit {unit!r} is unknown; use one of {sorted(_EMITTERS)}")
    return _EMITTERS[unit]


def register(unit: str, emitter: Emitter, panels: Panels) -> None:
    """Adds a unit: its emitter and the panels that it reads."""
    _EMITTERS[unit] = emitter
    PANELS[unit] = panels


__all__ = ["PANELS", "DotSpec", "Emitter", "PackSpec", "Panels", "emit_pack", "emitter_for", "register"]
