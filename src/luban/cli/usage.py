"""A parser of command lines whose complaints are errors like all others: one sentence with the way to the help."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from luban.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse prints the usage on stderr and exits. Its subcommands' parsers do the same."""

    def __init__(self, **settings: Any):
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """The sentence for what argparse found."""
        if message.startswith("the following arguments are required"):
            message += self._choices()
        raise ConfigError(f"{' '.join(message.split())}; see `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]  # argparse types it by overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does, but arguments that are left over are an error of this parser and not of the outermost one.

        So `luban train gpt --stepz 3` points to the help of `luban train gpt`.
        """
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(f"unrecognized arguments: {' '.join(extras)}{self._hint(extras)}")
        return found, extras

    def _choices(self) -> str:
        """What a missing subcommand could be."""
        known = [name for a in self._actions if isinstance(a, argparse._SubParsersAction) for name in a.choices]
        return f" ({' or '.join(known)})" if known else ""

    def _hint(self, extras: Sequence[str]) -> str:
        wrong = next((e.split("=")[0] for e in extras if e.startswith("--")), None)
        near = wrong and difflib.get_close_matches(wrong, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""
