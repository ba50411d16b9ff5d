"""`luban bench NAME`: measures Luban beside its peers."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from luban.bench import BENCHES
from luban.cli import output
from luban.cli.main import add_json
from luban.cli.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    """One subcommand a bench."""
    choices = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for bench in BENCHES.values():
        own = choices.add_parser(bench.name, help=bench.measures, description=bench.measures)
        importlib.import_module(bench.module).configure(own)
        add_json(own)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """{"bench", "machine", "rows", "summary"}; every ratio above 1 means that Luban is better.

    Where Luban itself failed, "ok" is False; a peer that cannot run here leaves a gap.
    """
    opened: list[Progress] = []

    def progress(total: int) -> Progress:
        opened.append(Progress(args.bench, total))
        return opened[-1]

    try:
        result: dict[str, Any] = importlib.import_module(BENCHES[args.bench].module).run(args, progress)
    finally:
        for one in opened:
            one.close()
    ok = not any("failed" in row or "error" in _of_luban(row) for row in result["rows"])
    return {"ok": ok, **result}


def _of_luban(row: dict[str, Any]) -> dict[str, Any]:
    found = row.get("luban")
    return found if isinstance(found, dict) else {}


def text(result: dict[str, Any]) -> str:
    """The table, what failed, the summary and the machine."""
    lines = [output.columns(importlib.import_module(BENCHES[result["bench"]].module).table(result)), ""]
    lines += [message for row in result["rows"] for message in _failures(row)]
    known = [(name.replace("_", " "), f"{value:.2f}") for name, value in result["summary"].items() if value is not None]
    lines += [output.columns(known), "", ", ".join(f"{k} {v}" for k, v in result["machine"].items())]
    if "svg" in result:
        lines.append(f"wrote {result['svg']}")
    return "\n".join(lines) + "\nratios above 1 mean that Luban is better"


def _failures(row: dict[str, Any]) -> list[str]:
    """What went wrong in a row: for all of it, or for one peer."""
    name = f"{row.get('model') or row.get('case')} {row['dtype']}"
    peers = [
        f"{name}, {peer}: {found['error']}"
        for peer, found in row.items()
        if isinstance(found, dict) and "error" in found
    ]
    return [f"{name}: {row['failed']}", *peers] if "failed" in row else peers
