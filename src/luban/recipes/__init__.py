"""Recipes: whole trainings that a person can start with one command. One package a recipe, one line of the table each.

A recipe's `options` module offers `configure(parser)` and `resolve(args) -> options`, and imports nothing heavy;
its `module` offers `train(options, progress) -> report` where `progress(total, done)` makes a progress display.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What `luban train` needs to know of a recipe; `options` and `module` are module names."""

    name: str
    trains: str
    options: str
    module: str


RECIPES = {
    r.name: r
    for r in (
        Recipe(
            "gpt",
            "a small GPT on the Python library's sources or any text",
            "luban.recipes.gpt.options",
            "luban.recipes.gpt.train",
        ),
    )
}


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every recipe takes. Those not given stay None, so that a resumed run keeps its own."""
    parser.add_argument("--quick", action="store_true", help="a small size that ends within minutes on two cores")
    parser.add_argument("--backend", choices=("luban", "eager", "inductor"), help="who runs the step (default: luban)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="bfloat16 runs under autocast (default: float32)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps in all")
    parser.add_argument("--seed", type=int, metavar="N", help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="run directory (default: a new one under runs/)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in --out, or of the newest run"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes; this version trains in one")
    parser.add_argument(
        "--detect-nan",
        action="store_true",
        help="stop at the first NaN and name the kernel (of Luban) and the module that made it",
    )
