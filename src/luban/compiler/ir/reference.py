"""The reference of the two dialects, made from the operations themselves: `python -m luban.compiler.ir.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from xdsl.ir import Dialect, Operation
from xdsl.irdl import (
    IRDLOperation,
    OptOperandDef,
    OptPropertyDef,
    VarOperandDef,
    VarResultDef,
)

from luban.compiler.ir import attributes, graph, tile

INTRODUCTION = """# The IR, operation by operation

Made from the docstrings by `python -m luban.compiler.ir.reference > docs/reference/ir.md`; a test holds the two equal.

A module is text in xDSL's generic form. `graph` says what is computed, on whole tensors; `tile` says in which order, in
loops over flat buffers. Neither knows a chip. Scalars inside bodies are the standard dialects `arith` and `math`. In the
lists below `name...` may stand for several values and `name?` may be left out; a body is the operation's region.
`luban ir FILE` prints, checks, transforms and interprets such files.

A dim is a number, a symbol (`s0`) or an expression of both (`"s0*4"`); symbols get their values at run time.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION, "## Attributes and types\n", *map(_attribute, _attributes())]
    for dialect, module in ((graph.GRAPH, graph), (tile.TILE, tile)):
        parts += [f"## The `{dialect.name}` dialect\n", _text(module.__doc__) + "\n"]
        parts += [_operation(op) for op in _in_order(dialect)]
    return "\n".join(parts)


def _attributes() -> Iterable[Any]:
    return (
        attributes.Dims,
        attributes.Access,
        attributes.Indirect,
        attributes.TensorType,
        attributes.BufferType,
    )


def _attribute(cls: Any) -> str:
    return f"### `{cls.name}`\n\n{_text(cls.__doc__)}\n"


def _in_order(dialect: Dialect) -> list[type[Operation]]:
    """As they stand in the source."""
    return sorted(dialect.operations, key=lambda op: inspect.getsourcelines(op)[1])


def _operation(op: type[Operation]) -> str:
    assert issubclass(op, IRDLOperation)
    definition = op.get_irdl_definition()
    rows = [
        ("operands", _names(definition.operands)),
        ("properties", _names(sorted(definition.properties.items()))),
        ("results", _names(definition.results)),
        ("regions", _names(definition.regions)),
    ]
    listed = [f"{kind}: {names}" for kind, names in rows if names]
    lines = [f"### `{op.name}`", ""]
    if listed:
        lines += [" · ".join(listed), ""]
    return "\n".join([*lines, _text(op.__doc__), ""])


def _names(found: Sequence[tuple[str, Any]]) -> str:
    marks = ((VarOperandDef, "..."), (VarResultDef, "..."), (OptOperandDef, "?"), (OptPropertyDef, "?"))
    shown = []
    for name, definition in found:
        if name == "operandSegmentSizes":
            continue  # how the generic form tells optional operands apart
        mark = next((m for kind, m in marks if isinstance(definition, kind)), "")
        shown.append(f"`{name}{mark}`")
    return ", ".join(shown)


def _text(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "")


if __name__ == "__main__":
    print(reference(), end="")
