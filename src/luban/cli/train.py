"""`luban train RECIPE`: trains a recipe and says how it went."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from luban import recipes
from luban.cli.main import add_json
from luban.cli.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    """One subcommand a recipe, each with its own options beside the common ones."""
    choices = parser.add_subparsers(dest="recipe", metavar="RECIPE", required=True)
    for recipe in recipes.RECIPES.values():
        own = choices.add_parser(recipe.name, help=recipe.trains, description=recipe.trains)
        recipes.common_arguments(own)
        importlib.import_module(recipe.options).configure(own)
        add_json(own)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains; the recipe's report has at least steps, loss_first, loss_last, tokens_per_s, seconds, metric, run_dir."""
    recipe = recipes.RECIPES[args.recipe]
    options = importlib.import_module(recipe.options).resolve(args)
    return importlib.import_module(recipe.module).train(options, lambda total, done: Progress(recipe.name, total, done))


def text(result: dict[str, Any]) -> str:
    """The report in a few lines, with the generated sample when there is one."""
    rows = [
        ("steps", result["steps"]),
        ("loss", _number(result["loss_first"]) + " -> " + _number(result["loss_last"])),
        ("held-out loss", _number(result["metric"])),
        ("speed", f"{result['tokens_per_s']:,.0f} tokens/s"),
        ("time", f"{result['seconds']:.1f} s"),
        ("run", result["run_dir"]),
    ]
    lines = [f"{name:<14} {value}" for name, value in rows]
    if result.get("sample"):
        lines += ["", "sample:", *(f"  | {line}" for line in _printable(result["sample"]).split("\n"))]
    if result.get("interrupted"):
        lines += [
            "",
            f"interrupted and saved; continue with: luban train {result['recipe']} --resume --out {result['run_dir']}",
        ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """A loss, or a dash when there was no step to measure it in."""
    return "-" if value is None else f"{value:.4f}"


def _printable(sample: str) -> str:
    """A sample without the control characters that a model draws at will and a terminal obeys."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in sample)
