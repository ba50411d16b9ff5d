"""`luban recipes`: what can be trained."""

from __future__ import annotations

import argparse
from typing import Any

from luban import recipes
from luban.cli import output


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes no arguments of its own."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every recipe with what it trains and the command for it."""
    listed = [
        {"name": r.name, "trains": r.trains, "command": f"luban train {r.name} --quick"}
        for r in recipes.RECIPES.values()
    ]
    return {"recipes": listed}


def text(result: dict[str, Any]) -> str:
    """One recipe a line."""
    return output.columns((r["name"], r["trains"], r["command"]) for r in result["recipes"])
