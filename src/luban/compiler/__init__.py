"""The compiler. The three steps from tensors to a binary are here; the stages behind them are in the packages below."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luban.compiler.stepwise import apply_arch_specific_opts, compile_to_binary, generate_tiled_ir

__all__ = ["apply_arch_specific_opts", "compile_to_binary", "generate_tiled_ir"]


def __getattr__(name: str) -> Any:
    """The steps, imported when first used: `import luban.compiler` loads neither xDSL nor LLVM."""
    if name not in __all__:
        raise AttributeError(f"module 'luban.compiler' has no attribute {name!r}")
    value = getattr(importlib.import_module("luban.compiler.stepwise"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
