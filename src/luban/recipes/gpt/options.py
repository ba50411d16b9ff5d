"""What can be chosen for `luban train gpt`, and how the choice is completed. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luban.errors import ConfigError
from luban.recipes import rundir


@dataclass(frozen=True)
class Options:
    """One training, complete. Sizes in tokens or features, `lr` is the peak learning rate, `text` a path or None."""

    run_dir: str
    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    lr: float
    warmup: int
    eval_every: int
    checkpoint_every: int
    weight_decay: float = 0.1
    clip: float = 1.0
    text: str | None = None
    tokenizer: str = "byte"
    vocab: int = 1024
    backend: str = "luban"
    dtype: str = "float32"
    seed: int = 0
    workers: int = 1
    detect_nan: bool = False
    resume: bool = False


_QUICK = dict(
    layers=4,
    heads=3,
    width=192,
    context=128,
    batch=16,
    steps=300,
    lr=2e-3,
    warmup=30,
    eval_every=50,
    checkpoint_every=100,
)
_FULL = dict(
    layers=6,
    heads=6,
    width=384,
    context=256,
    batch=16,
    steps=2000,
    lr=6e-4,
    warmup=100,
    eval_every=100,
    checkpoint_every=250,
)

# What a resumed run may change; anything else would make it another training.
_MAY_CHANGE = {"steps", "backend", "eval_every", "checkpoint_every", "detect_nan", "resume", "run_dir", "workers"}
_POSITIVE = (
    *("layers", "heads", "width", "context", "batch", "steps", "eval_every", "checkpoint_every", "workers"),
    *("lr", "clip"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the recipe's own options."""
    parser.add_argument(
        "--text", metavar="PATH", help="a text file or a folder (default: the Python library's sources)"
    )
    parser.add_argument(
        "--tokenizer", choices=("byte", "bpe"), help="bytes, or byte pairs learnt from the text (default: byte)"
    )
    parser.add_argument("--vocab", type=int, metavar="N", help="tokens of the byte-pair vocabulary (default: 1024)")
    for name, what in (
        ("layers", "transformer blocks"),
        ("heads", "attention heads"),
        ("width", "features of a token"),
        ("context", "tokens that the model sees"),
        ("batch", "sequences a step"),
        ("warmup", "steps until the learning rate reaches its peak"),
        ("eval-every", "steps between held-out losses"),
        ("checkpoint-every", "steps between checkpoints"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument("--lr", type=float, metavar="X", help="peak learning rate")
    parser.add_argument("--clip", type=float, metavar="X", help="largest norm of all gradients together (default: 1.0)")


def resolve(args: argparse.Namespace) -> Options:
    """Complete options from a command line: given ones over a resumed run's over the size's. Raises ConfigError."""
    for name in ("text", "out"):
        if getattr(args, name) == "":
            raise ConfigError(f"--{name} is empty; name a path or leave the option out")
    fields = {f.name for f in dataclasses.fields(Options)}
    given = {k: v for k, v in vars(args).items() if k in fields and v is not None}
    if args.resume:
        folder = rundir.find(args.out, "gpt")
        base: dict[str, Any] = rundir.read_json(folder / "config.json")
        _refuse_changes(given, base, folder)
    else:
        folder = Path(args.out) if args.out else rundir.fresh("gpt")
        base = dict(_QUICK if args.quick else _FULL)
    try:
        options = Options(**{**base, **given, "run_dir": str(folder)})
        check(options)
    except TypeError as e:
        raise ConfigError(f"{folder}/config.json is not of this recipe or version ({e}); start a new run") from e
    return options


def of_size(quick: bool, **chosen: Any) -> Options:
    """The default size, or the quick one, without a run directory."""
    return Options(**{**(_QUICK if quick else _FULL), "run_dir": "", **chosen})


def check(options: Options) -> None:
    """Raises ConfigError, in one sentence, for a choice that cannot work."""
    if options.workers > 1:
        raise ConfigError(
            f"--workers {options.workers}: data-parallel training is not part of this version; use --workers 1"
        )
    for name in _POSITIVE:
        _check_positive(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.warmup < 0:
        raise ConfigError(f"--warmup must be at least 0, not {options.warmup}")
    if not -(2**63) <= options.seed < 2**63:
        raise ConfigError(f"--seed must fit 64 bits, and {options.seed} does not; choose a smaller one")
    if options.width % options.heads:
        raise ConfigError(f"--width {options.width} is not a multiple of --heads {options.heads}; choose one that is")
    if options.tokenizer == "bpe" and not 256 < options.vocab <= 65536:
        raise ConfigError(f"--vocab must lie between 257 and 65536, not {options.vocab}")


def _check_positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):  # also refuses NaN
        raise ConfigError(f"{option} must be above 0 and finite, not {value}")
    if isinstance(value, int) and value >= 2**31:  # sizes multiply, and products must fit 64 bits
        raise ConfigError(f"{option} {value} is too large; {2**31 - 1} is the most")


def _refuse_changes(given: dict[str, Any], base: dict[str, Any], folder: Path) -> None:
    for name, value in given.items():
        if name not in _MAY_CHANGE and value != base.get(name):
            raise ConfigError(
                f"the run in {folder} was started with {name} {base.get(name)}, not {value}; "
                "leave the option out or start a new run"
            )
