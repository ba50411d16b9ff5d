"""The compute library: kernels written once as tile programs, and what can be called directly on torch tensors."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {"linear_cross_entropy": "luban.compiler.frontend.linear_loss"}  # public name -> module that defines it


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'luban.kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
