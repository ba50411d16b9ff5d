"""Schedules as plain JSON, whatever fields their dataclass has.

Numbers, texts and flags are written as they are, a register tile as its unit and size: reading finds it among those of
the chip. A space is named after its fields, so that entries of another version's schedules are not looked up.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, TypeVar

from luban.kernels.register_tiles import RegisterTile

S = TypeVar("S", bound=Any)
PLAIN = (int, float, str, bool, type(None))


def encode(schedule: Any) -> dict[str, Any]:
    """A schedule's fields."""
    fields = {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule)}
    return {name: _tile_text(value) if isinstance(value, RegisterTile) else value for name, value in fields.items()}


def decode(base: S, data: dict[str, Any], tiles: Iterable[RegisterTile]) -> S | None:
    """The schedule that `encode` wrote, of the type of `base`; None where a field is missing, unknown or of another type,
    or a tile is none of those given.
    """
    values: dict[str, Any] = {}
    by_text = {_tile_text(t): t for t in tiles}
    fields = dataclasses.fields(base)
    if set(data) != {f.name for f in fields}:
        return None
    for field in fields:
        value, like = data[field.name], getattr(base, field.name)
        if isinstance(like, RegisterTile):
            value = by_text.get(value) if isinstance(value, str) else None
            if value is None:
                return None
        elif isinstance(like, tuple) and isinstance(value, (list, tuple)):  # JSON has lists only
            value = tuple(value)
        elif type(value) is not type(like) and not (None in (value, like) and type(value) in PLAIN):
            return None
        values[field.name] = value
    return dataclasses.replace(base, **values)


def space_of(name: str, version: int, schedule: type) -> str:
    """The name of a kernel family's space of schedules.

    `version` is raised when the meaning of a field changes; fields that come or go change the name by themselves.
    """
    listed = " ".join(sorted(f.name for f in dataclasses.fields(schedule)))
    return f"{name} {version}.{hashlib.sha256(listed.encode()).hexdigest()[:6]}"


def _tile_text(t: RegisterTile) -> str:
    return f"{t.unit} {t.mr}x{t.nr}"
