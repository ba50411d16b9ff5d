"""The chips that Luban knows: `names()`, `get(name)`.

A package adds its own through the entry point group "luban.targets": each entry point gives a `Target`, a list of
them, or a function that returns either.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from luban.errors import TargetError
from luban.targets import aarch64, loongarch64, riscv64, triton, x86_64
from luban.targets.target import Cache, DotUnit, Target

__all__ = ["Cache", "DotUnit", "Target", "get", "names", "register"]

ENTRY_POINTS = "luban.targets"
_FAMILIES = (x86_64, aarch64, riscv64, loongarch64, triton)
_known: dict[str, Target] = {t.name: t for family in _FAMILIES for t in family.TARGETS}


def names() -> list[str]:
    """The names of all targets: "native" first, then Luban's own by family, then those of other packages."""
    _load_plugins()
    return ["native", *_known]


def get(name: str | Target) -> Target:
    """The target of a name ("native" is this machine's chip); a `Target` passes through.

    Raises TargetError for an unknown name, listing close ones, and for "native" on a chip that cannot be used.
    """
    if isinstance(name, Target):
        return name
    if name == "native":
        from luban.targets import host

        return host.native()
    if name not in _known:
        _load_plugins()
    if name not in _known:
        import difflib

        close = difflib.get_close_matches(str(name), names(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}" if close else f"known are {', '.join(names())}"
        raise TargetError(f"there is no target named {name!r}: {hint}; `luban targets` lists them")
    return _known[name]


def register(target: Target) -> None:
    """Adds a target, or changes one of the same name, in this process."""
    _known[target.name] = target


@functools.cache
def _load_plugins() -> None:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=ENTRY_POINTS):
        try:
            for target in _listed(point.load()):
                _known.setdefault(target.name, target)
        except Exception as error:
            raise TargetError(
                f"the entry point {point.name!r} of {ENTRY_POINTS} gives no targets ({error}); "
                "update or remove the package that has it"
            ) from error


def _listed(found: Any) -> Iterable[Target]:
    found = found() if callable(found) else found
    targets = [found] if isinstance(found, Target) else list(found)
    if not all(isinstance(t, Target) for t in targets):
        raise TypeError("not all of them are luban.targets.Target")
    return targets
