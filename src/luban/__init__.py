"""Luban: one open training stack for any chip. The public names, nothing else.

`import luban` imports no torch: each name is looked up in its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from luban.errors import (
    ConfigError,
    LubanError,
    NanError,
    OutOfMemoryError,
    TargetError,
    UnsupportedOperatorError,
    VerificationError,
)

if TYPE_CHECKING:
    from luban import compiler, events, kernels, targets
    from luban.compiler.frontend.api import compile, train_step
    from luban.runtime.report import report

__version__ = "0.1.0"

# public name -> module that defines it
_NAMES = {
    "compile": "luban.compiler.frontend.api",
    "train_step": "luban.compiler.frontend.api",
    "report": "luban.runtime.report",
}
_MODULES = ("compiler", "events", "kernels", "runtime", "targets")

__all__ = [
    "ConfigError",
    "LubanError",
    "NanError",
    "OutOfMemoryError",
    "TargetError",
    "UnsupportedOperatorError",
    "VerificationError",
    "compile",
    "compiler",
    "events",
    "kernels",
    "report",
    "targets",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"luban.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'luban' has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_MODULES})
