"""PyTorch's front end: FX graphs of ATen operators become `graph` modules.

Names are found on first use: the decompositions are wanted at every start, the importer (and xDSL) only when something
has to be compiled.
"""

from importlib import import_module
from typing import Any

_HOMES = {"table": "decompositions", "Imported": "importer", "import_graph": "importer", "unsupported": "importer"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
