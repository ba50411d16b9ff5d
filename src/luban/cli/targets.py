"""`luban targets`: the chips that Luban compiles for, or all that is known of one."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import Any

from luban.cli import output
from luban.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """An optional name shows one chip in full."""
    parser.add_argument("name", nargs="?", help="show everything known of this chip")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The facts of every target, or of the one asked for. Raises ConfigError for an unknown name."""
    from luban import targets

    if args.name and args.name not in targets.names():
        near = difflib.get_close_matches(args.name, targets.names(), n=1)
        hint = f"did you mean {near[0]}?" if near else "`luban targets` lists them"
        raise ConfigError(f"there is no target named {args.name!r}; {hint}")
    names = [args.name] if args.name else targets.names()
    return {"targets": [{**_plain(targets.get(name)), "name": name} for name in names], "detailed": bool(args.name)}


def _plain(value: Any) -> Any:
    """Data as JSON types: dataclasses become objects, sets sorted lists, anything else odd its text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def text(result: dict[str, Any]) -> str:
    """A table of all targets, or one target's facts a line each."""
    found = result["targets"]
    if result["detailed"]:
        return output.columns((key, _short(value) or "-") for key, value in found[0].items())
    rows = [("name", "family", "vector bits", "matrix unit", "verified")]
    for t in found:
        rows.append(
            (t["name"], t["family"], str(t["vector_bits"]), _short(t["matrix_unit"]) or "-", _short(t["verified"]))
        )
    return output.columns(rows)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return str(value["name"]) if "name" in value else ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_short(v) for v in value)
    return "" if value is None else str(value)
