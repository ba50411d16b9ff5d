"""The state of one entry while it is written: lines, names, values, lanes, and what is known of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from xdsl.ir import Attribute, Block, Operation, SSAValue

from luban.compiler.codegen.triton.blocks import Blocks
from luban.compiler.codegen.triton.expressions import ATOM, Value, plain_number, tl_type
from luban.compiler.codegen.triton.hazards import Hazards
from luban.errors import ConfigError
from luban.symbolic import Dim

INLINE = 56  # a longer expression gets a line of its own

OpEmitter = Callable[["Context", Any], None]
_EMITTERS: dict[str, OpEmitter] = {}


def emits(*names: str) -> Callable[[OpEmitter], OpEmitter]:
    """Registers the emitter of the operations with these names."""

    def register(emitter: OpEmitter) -> OpEmitter:
        _EMITTERS.update({name: emitter for name in names})
        return emitter

    return register


@dataclass(frozen=True)
class Lanes:
    """One axis of the current block: the index along it as text, its mask (None where all lanes live), its size."""

    index: str
    mask: str | None
    size: int


@dataclass
class Context:
    """Everything that emitting an operation needs.

    `axes` are the axes of the block in flight (none outside of vector loops and dots). `scopes` remember, for each open
    Python block, texts that have a name there already, and known contents of memory. `program` is the program's number
    where there are several. `read_back` are the buffers that are stored and loaded; `skip` holds operations that become
    nothing, `sources` what dots read instead of a packed copy; with `dot_tiles` the tiles of a dot are programs.
    """

    kernel: str
    blocks: Blocks
    buffers: dict[SSAValue, str]
    values: dict[SSAValue, Value] = field(default_factory=dict)
    axes: tuple[Lanes, ...] = ()
    lines: list[str] = field(default_factory=list)
    indent: int = 1
    scopes: list[dict[Any, Any]] = field(default_factory=lambda: [{}])
    counts: dict[str, int] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)
    scratch: dict[SSAValue, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    widest: int = 1
    hazards: Hazards = field(default_factory=Hazards)
    program: str | None = None
    new_workspace: Callable[[SSAValue, Dim], str] = lambda buffer, elements: ""
    read_back: frozenset[SSAValue] = frozenset()
    skip: frozenset[Operation] = frozenset()
    sources: dict[tuple[Operation, str], Any] = field(default_factory=dict)
    dot_tiles: bool = False
    reserved: frozenset[str] = frozenset()

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def name(self, hint: str) -> str:
        """A new variable."""
        while True:
            number = self.counts.get(hint, 0)
            self.counts[hint] = number + 1
            name = f"{hint}{number}" if number or hint in _NUMBERED else hint
            if name not in self.reserved:
                return name

    def assign(self, hint: str, text: str) -> str:
        """A new variable that holds a text's value."""
        name = self.name(hint)
        self.line(f"{name} = {text}")
        return name

    def once(self, hint: str, text: str) -> str:
        """The variable that holds a text's value; written only where no open block has it already."""
        for scope in self.scopes:
            if text in scope:
                return scope[text]
        self.scopes[-1][text] = found = self.assign(hint, text)
        return found

    def held(self, value: Value, hint: str = "t") -> Value:
        """The value as a variable or literal, so that its text may stand several times."""
        if value.number is not None or re.fullmatch(r"\w+", value.text):
            return value
        return replace(value, text=self.assign(hint, value.text), level=ATOM)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """An indented Python block under a line."""
        self.line(head)
        self.indent += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.indent -= 1

    def use_argument(self, name: str) -> str:
        """Makes `name` an argument of this entry."""
        if name not in self.arguments:
            self.arguments.append(name)
        return name

    def helper(self, name: str) -> str:
        """Makes a function of helpers.py part of the source."""
        self.helpers.add(name)
        return name

    # ---- values

    def buffer(self, value: SSAValue) -> str:
        """The pointer to a buffer: an argument, or a variable in `scratch`."""
        own = self.scratch.get(value)
        return own if isinstance(own, str) else self.use_argument(self.buffers[value])

    def give(self, result: SSAValue, value: Value, hint: str = "t") -> None:
        """Defines an IR value: in place where it is short and used once, right here, else as a variable."""
        if value.number is None and not re.fullmatch(r"\w+", value.text):
            uses = list(result.uses)
            near = len(uses) == 1 and uses[0].operation.parent_block() is result.owner.parent_block()  # type: ignore[union-attr]
            if not near or len(value.text) > INLINE:
                value = self.held(value, hint)
        self.values[result] = value

    def scalar(self, value: SSAValue, what: str) -> Value:
        """A value that is the same in all lanes. Raises ConfigError for one that differs."""
        found = self.values[value]
        if found.axes:
            raise ConfigError(
                f"{what} in kernel {self.kernel} differs among lanes; it has to be the same for all of them"
            )
        return found

    # ---- lanes

    @property
    def shape(self) -> str:
        """The shape of the block in flight, as text."""
        return "[" + ", ".join(str(a.size) for a in self.axes) + "]"

    @property
    def all_axes(self) -> frozenset[int]:
        return frozenset(range(len(self.axes)))

    def filled(self, value: Value, ty: Attribute) -> str:
        """A value as a tensor of the whole block's shape: what a variable that a loop changes starts from."""
        if value.axes and value.axes != self.all_axes:
            return f"tl.broadcast_to({value.text}, {self.shape})"
        if value.axes or (not self.axes and value.number is None):
            return value.text
        text = value.text if value.number is None else plain_number(value.number, ty)
        return f"tl.full({self.shape}, {text}, {tl_type(ty)})"

    @contextmanager
    def lanes(self, *axes: Lanes) -> Iterator[None]:
        """Code written inside runs as a block with these axes."""
        saved, self.axes = self.axes, axes
        size = 1
        for a in axes:
            size *= a.size
        self.widest = max(self.widest, size)
        yield
        self.axes = saved


_NUMBERED = {"t", "x", "i"}


def emit_block(ctx: Context, block: Block) -> list[SSAValue]:
    """Writes every operation of a body; returns the operands of its terminator."""
    for op in block.ops:
        if op.name == "tile.yield":
            return list(op.operands)
        if op not in ctx.skip:
            emit_op(ctx, op)
    return []


def emit_op(ctx: Context, op: Operation) -> None:
    """Writes one operation. Raises ConfigError for one that this code generator does not know."""
    emitter = _EMITTERS.get(op.name)
    if emitter is None:
        raise ConfigError(
            f"the Triton code generator has no rule for {op.name} (kernel {ctx.kernel}); "
            "lower it to operations that it has"
        )
    emitter(ctx, op)
