"""Text form of modules: printing, parsing and verifying."""

from __future__ import annotations

import io

from xdsl.context import Context
from xdsl.dialects.arith import Arith
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.dialects.math import Math
from xdsl.ir import Operation
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from luban.compiler.ir.graph import GRAPH
from luban.compiler.ir.tile import TILE
from luban.errors import ConfigError, VerificationError


def context() -> Context:
    """An xDSL context that knows the dialects a Luban module may hold."""
    ctx = Context()
    for dialect in (Builtin, Arith, Math, Func, GRAPH, TILE):
        ctx.load_dialect(dialect)
    return ctx


def to_text(op: Operation) -> str:
    """The module as text that `parse` reads back."""
    out = io.StringIO()
    Printer(stream=out).print_op(op)
    return out.getvalue() + "\n"


def parse(text: str, name: str = "<text>") -> ModuleOp:
    """A module from its text. Raises ConfigError naming the place where it cannot be read."""
    try:
        return Parser(context(), text, name).parse_module()
    except ParseError as error:
        line = text.count("\n", 0, error.span.start) + 1
        raise ConfigError(f"cannot read the IR in {name}, line {line}: {error.msg.splitlines()[0]}") from error
    except (ConfigError, VerifyException, ValueError) as error:  # a bad dim, property or name
        reason = " ".join(str(a) for a in error.args) or type(error).__name__
        raise ConfigError(f"cannot read the IR in {name}: {reason}") from error


def verify(op: Operation) -> None:
    """Checks every rule of the module. Raises VerificationError naming the operation and the rule."""
    try:
        op.verify()
    except VerifyException as error:
        raise VerificationError(str(error)) from error
