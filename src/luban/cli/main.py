"""`luban COMMAND ...`: finds the command's module, parses, runs, prints.

A command is one line of `COMMANDS` and one module that offers
    configure(parser)      adds its arguments; imports nothing heavy, so that --help stays quick
    run(args) -> dict      does the work and returns a JSON object; "ok": False in it makes the exit code 1
    text(result) -> str    the same object for people; what it returns is printed
`--json` is added to every command here and prints the object alone on stdout; whatever the work prints meanwhile goes
to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from luban import __version__
from luban.cli import output
from luban.cli.usage import Parser
from luban.errors import ConfigError, LubanError, memory_wanted

_SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# name -> what it does; the module is luban.cli.NAME
COMMANDS = {
    "doctor": "check the installation, the chip and the optional parts",
    "train": "train a recipe",
    "recipes": "list the recipes",
    "bench": "measure Luban beside eager and Inductor",
    "targets": "list the chips that Luban compiles for",
    "ir": "print, transform, verify and interpret an IR file",
    "tune": "search faster schedules for this chip and keep them",
    "cache": "look at the cache of compiled programs, or clear it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"luban {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `luban --help`"
        return _fail(ConfigError(f"there is no command {name!r}; {hint}"), json_wanted="--json" in argv)
    try:
        command = importlib.import_module(f"luban.cli.{name}")
        args = _parser(name, command).parse_args(argv[1:])
        return _run(command, args)
    except SystemExit as e:  # argparse ends this way after --help
        return e.code if isinstance(e.code, int) else 2
    except BrokenPipeError:  # the reader of our output is gone, as in `luban ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", 130, "--json" in argv)
    except Exception as e:
        return _fail(e, json_wanted="--json" in argv)


def _parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    parser = Parser(prog=f"luban {name}", description=COMMANDS[name])
    command.configure(parser)
    add_json(parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json; a command with subcommands calls this for each of its own parsers."""
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print one JSON object and nothing else on stdout",
    )


def _run(command: ModuleType, args: argparse.Namespace) -> int:
    args.json = getattr(args, "json", False)
    with _stdout_kept(args.json), _plain_warnings():
        result: dict[str, Any] = command.run(args)
    print(json.dumps(_finite(result), allow_nan=False) if args.json else command.text(result))
    sys.stdout.flush()
    if result.get("interrupted"):
        return 130
    return 0 if result.get("ok", True) else 1


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities: JSON has none, and its readers refuse Python's spelling of them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _stdout_kept(wanted: bool) -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Luban's own warnings as one line for people; those of other packages keep Python's form."""
    python_form = warnings.formatwarning

    def form(
        message: Warning | str, category: type[Warning], filename: str, number: int, line: str | None = None
    ) -> str:
        if filename.startswith(_SOURCE):
            return f"{output.paint('luban:', 'yellow', sys.stderr)} {message}\n"
        return python_form(message, category, filename, number, line)

    warnings.formatwarning = form  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = python_form


def _fail(error: Exception, json_wanted: bool = False) -> int:
    """Says what went wrong in one sentence; a traceback only when asked for."""
    if os.environ.get("LUBAN_DEBUG") == "1":
        traceback.print_exception(error)
    wanted = memory_wanted(error)
    if isinstance(error, LubanError):
        message = str(error)
    elif wanted is not None:
        message = f"out of memory: {wanted}; ask for less (a smaller batch or model) or end other programs"
    else:
        reason = " ".join(str(error).split())[:300]
        message = f"unexpected {type(error).__name__}: {reason}; LUBAN_DEBUG=1 shows where"
    return _say(message, 2 if isinstance(error, ConfigError) else 1, json_wanted)


def _say(message: str, code: int, json_wanted: bool) -> int:
    """One line on stderr, for a script also one object on stdout; gives the exit code back."""
    print(f"{output.paint('luban:', 'red', sys.stderr)} {message}", file=sys.stderr)
    if json_wanted:
        print(json.dumps({"ok": False, "error": message}))
    return code


def _overview() -> str:
    return "\n".join(
        [
            f"luban {__version__}: one open training stack for any chip",
            "",
            "usage: luban COMMAND [options]        luban COMMAND --help",
            "",
            output.columns((f"  {name}", text) for name, text in COMMANDS.items()),
            "",
            "Every command takes --json. LUBAN_DEBUG=1 shows tracebacks.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
