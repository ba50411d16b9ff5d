"""What all benches share: the machine, means, and how models and dtypes are chosen."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Protocol

from luban.bench.workloads import OWN, TRANSFORMERS
from luban.errors import ConfigError

DTYPES = ("float32", "bfloat16")
TURN_SECONDS = 1e-3  # what is timed runs at least so long, so that starting threads (some us) does not count


class Progress(Protocol):
    """Where a bench says how far it is."""

    def update(self, done: int, *facts: str) -> None:
        """So many pieces are done."""
        ...


def machine() -> dict[str, Any]:
    """The chip and the versions that a measurement depends on."""
    try:
        with open("/proc/cpuinfo") as lines:
            cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        cpu = ""
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": metadata.version("torch"),
    }


def geomean(ratios: Iterable[float | None]) -> float | None:
    """The geometric mean of what is there; None for nothing."""
    known = [r for r in ratios if r is not None and r > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def least(ratios: Iterable[float | None]) -> float | None:
    """The smallest of what is there; None for nothing."""
    return min((r for r in ratios if r is not None), default=None)


def add_choices(parser: argparse.ArgumentParser) -> None:
    """--models, --dtypes and --quick."""
    every = ",".join([*TRANSFORMERS, *OWN])
    parser.add_argument(
        "--models", type=comma_list, metavar="LIST", help=f"some of {every} (default: {','.join(TRANSFORMERS)})"
    )
    parser.add_argument("--dtypes", type=comma_list, metavar="LIST", help=f"some of {','.join(DTYPES)} (default: both)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see that it works")


def positive(text: str) -> int:
    """A command line's whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def chosen(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The models and dtypes of a command line. Raises ConfigError for unknown ones and where a package is missing."""
    models = args.models or list(OWN if args.quick else TRANSFORMERS)
    dtypes = args.dtypes or list(DTYPES[:1] if args.quick else DTYPES)
    one_of("model", models, [*TRANSFORMERS, *OWN])
    one_of("dtype", dtypes, DTYPES)
    wanting = [m for m in models if m in TRANSFORMERS]
    if wanting and find_spec("transformers") is None:
        raise ConfigError(
            f"{', '.join(wanting)} need the package transformers, which is not installed; "
            f"run `pip install transformers`, or choose --models {','.join(OWN)}"
        )
    return models, dtypes


def one_of(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for a name that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r} to measure; choose among {', '.join(known)}")


def comma_list(text: str) -> list[str]:
    """A command line's list of names."""
    found = list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def number(value: float | None, form: int | str) -> str:
    """A cell of a table: so many digits after the point, or a format such as "1e" (one digit, with exponent)."""
    if value is None:
        return "-"
    return f"{value:.{form}f}" if isinstance(form, int) else f"{value:.{form}}"
