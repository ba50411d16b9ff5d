"""`luban cache`: the compiled programs kept on disk."""

from __future__ import annotations

import argparse
import datetime
import os
from typing import Any

from luban.cli import output
from luban.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    """--clear empties the cache."""
    parser.add_argument("--clear", action="store_true", help="remove every entry")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The entries of the cache, or how many were removed. Raises LubanError when the folder cannot be used."""
    from luban.runtime import cache

    folder = str(cache.directory())
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is a file, where the cache needs a folder; set LUBAN_CACHE_DIR to one")
    if args.clear:
        return {"directory": folder, "removed": cache.clear()}
    entries = [
        {"key": e.key, "bytes": e.bytes, "modified": _seconds(e.modified), "target": e.target, "valid": e.valid}
        for e in cache.entries()
    ]
    return {"directory": folder, "bytes": sum(e["bytes"] for e in entries), "entries": entries}


def _seconds(moment: Any) -> float:
    return moment.timestamp() if isinstance(moment, datetime.datetime) else float(moment)


def text(result: dict[str, Any]) -> str:
    """The folder, then one entry a line, newest last."""
    if "removed" in result:
        return f"removed {result['removed']} entries from {result['directory']}"
    entries = sorted(result["entries"], key=lambda e: e["modified"])
    lines = [f"{result['directory']}: {len(entries)} programs, {output.size(result['bytes'])}"]
    for e in entries:
        when = datetime.datetime.fromtimestamp(e["modified"]).strftime("%Y-%m-%d %H:%M")
        damage = "" if e["valid"] else "  damaged"
        lines.append(f"  {e['key'][:16]}  {output.size(e['bytes']):>10}  {when}  {e['target']}{damage}")
    return "\n".join(lines)
