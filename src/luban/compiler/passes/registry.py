"""The passes by name. A pass is found lazily: importing this module imports no pass.

A pass is a frozen dataclass registered with `@register`; its class attribute `name` is what pipelines call it, its
fields are its options and `apply(module)` rewrites a module in place. The pass "merge-views" lives in merge_views.py of
passes/graph or passes/tile.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import typing
from typing import Any, Protocol, TypeVar

from xdsl.dialects.builtin import ModuleOp

from luban.errors import ConfigError

PACKAGES = ("luban.compiler.passes.graph", "luban.compiler.passes.tile")


class Pass(Protocol):
    """What the pipeline runs."""

    @property
    def name(self) -> str:
        """What pipelines call it."""
        ...

    def apply(self, module: ModuleOp) -> None:
        """Rewrites the module in place."""
        ...


_PASSES: dict[str, type] = {}
P = TypeVar("P", bound=type)


def register(cls: P) -> P:
    """Makes a pass class known under its `name`; use it as the outermost decorator."""
    _PASSES[vars(cls)["name"]] = cls
    return cls


def names() -> list[str]:
    """The names of all passes. Imports every module of the pass packages, so only messages and help use it."""
    for package in PACKAGES:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{found.name}")
    return sorted(_PASSES)


def find(name: str) -> type:
    """The class of the pass `name`. Raises ConfigError listing the passes when there is none."""
    if name not in _PASSES and name.replace("-", "_").isidentifier():
        for package in PACKAGES:
            module = f"{package}.{name.replace('-', '_')}"
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
                break
    if name not in _PASSES:
        raise ConfigError(f"there is no pass {name!r}; use one of {', '.join(names())}")
    return _PASSES[name]


def create(name: str, options: dict[str, str]) -> Pass:
    """A pass with its options read from text. Raises ConfigError for an unknown pass or option, or a wrong value."""
    cls = find(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in fields:
            has = f"use one of {', '.join(fields)}" if fields else "it takes none"
            raise ConfigError(f"the pass {name} has no option {key!r}; {has}")
        values[key] = _read(name, key, text, hints[key])
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(
            f"the pass {name} cannot be made from text: {error}; give every option that it needs"
        ) from error


_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _read(name: str, key: str, text: str, kind: Any) -> Any:
    """An option's value from text by the field's type; of a union (`int | None`) the first type that fits."""
    kinds = [k for k in typing.get_args(kind) if k is not type(None)] if typing.get_args(kind) else [kind]
    for k in kinds:
        try:
            if k is bool:
                return _BOOLS[text.lower()]
            if k in (int, float, str):
                return k(text)
        except (KeyError, ValueError):
            continue
    wanted = " or ".join(getattr(k, "__name__", str(k)) for k in kinds)
    raise ConfigError(f"the pass {name} cannot read {key}={text}; the option is of type {wanted}")
