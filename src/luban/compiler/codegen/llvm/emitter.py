"""Builds LLVM IR as text.

Text, not llvmlite.ir: LLVM's own parser reads a kernel in a fraction of a millisecond, while building llvmlite's Python
objects costs more than compiling them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Module:
    """Functions, declarations and constants of one LLVM module; `text()` is what LLVM parses.

    `features` are the LLVM features that its code may count on.
    """

    functions: dict[str, str] = field(default_factory=dict)
    declarations: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    metadata: list[str] = field(default_factory=list)
    features: frozenset[str] = frozenset()

    def declare(self, name: str, returns: str, arguments: list[str], attributes: str = "") -> str:
        """Declares an external function or intrinsic once; returns `@name`."""
        self.declarations.setdefault(name, f"declare {returns} @{name}({', '.join(arguments)}) {attributes}".rstrip())
        return f"@{name}"

    def constant(self, name: str, value: str) -> str:
        """A private constant, `value` with its type as LLVM writes it; returns `@name`."""
        self.constants.setdefault(name, f"@{name} = private unnamed_addr constant {value}")
        return f"@{name}"

    def note(self, text: str) -> str:
        """A metadata node, once for equal texts; returns its name."""
        if text not in self.metadata:
            self.metadata.append(text)
        return f"!{self.metadata.index(text)}"

    def add(self, function: Function) -> None:
        """Adds a finished function."""
        self.functions[function.name] = function.text()

    def text(self) -> str:
        notes = [f"!{number} = !{{{text}}}" for number, text in enumerate(self.metadata)]
        parts = [*self.constants.values(), *self.declarations.values(), *self.functions.values(), *notes]
        return "\n".join(parts) + "\n"


class Function:
    """One function under construction; instructions go to the current block.

    `parameters` are (type, name) pairs; values are LLVM operand texts such as `%t3` or `0.0`.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        returns: str,
        parameters: list[tuple[str, str]],
        linkage: str = "",
        attributes: str = "",
    ):
        self.module, self.name = module, name
        listed = ", ".join(f"{ty} %{arg}" for ty, arg in parameters)
        self.head = " ".join(w for w in ("define", linkage, returns, f"@{name}({listed})", attributes, "{") if w)
        self.lines: list[str] = ["entry:"]
        self.allocas: list[str] = []
        self.current = "entry"
        self._count = 0
        self._blocks: dict[str, int] = {}

    def fresh(self, hint: str = "t") -> str:
        """A new value name."""
        self._count += 1
        return f"%{hint}{self._count}"

    def op(self, text: str) -> str:
        """Appends `%tN = text` and returns `%tN`."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def emit(self, text: str) -> None:
        """Appends an instruction without a result."""
        self.lines.append(f"  {text}")

    def new_block(self, hint: str) -> str:
        """A fresh block label (not yet placed)."""
        n = self._blocks.get(hint, 0)
        self._blocks[hint] = n + 1
        return f"{hint}.{n}"

    def place(self, label: str) -> None:
        """Starts the block `label` here."""
        self.lines.append(f"{label}:")
        self.current = label

    def branch(self, label: str) -> None:
        self.emit(f"br label %{label}")

    def branch_if(self, condition: str, then: str, otherwise: str) -> None:
        self.emit(f"br i1 {condition}, label %{then}, label %{otherwise}")

    def call(self, returns: str, callee: str, arguments: list[tuple[str, str]], flags: str = "") -> str:
        """Calls `@name`; returns the result's name, or '' for void."""
        listed = ", ".join(f"{ty} {value}" for ty, value in arguments)
        text = f"call {flags + ' ' if flags else ''}{returns} {callee}({listed})"
        if returns == "void":
            self.emit(text)
            return ""
        return self.op(text)

    def intrinsic(self, name: str, returns: str, arguments: list[tuple[str, str]], flags: str = "") -> str:
        """Declares and calls an intrinsic whose full, mangled name is given."""
        return self.call(returns, self.module.declare(name, returns, [ty for ty, _ in arguments]), arguments, flags)

    def alloca(self, ty: str, align: int) -> str:
        """Stack memory, placed in the entry block."""
        name = self.fresh("slot")
        self.allocas.append(f"  {name} = alloca {ty}, align {align}")
        return name

    def splat(self, scalar_type: str, value: str, width: int) -> str:
        """A vector of `width` equal lanes from a scalar value (constant or register); the scalar itself when width is 1."""
        if width == 1:
            return value
        if not value.startswith("%"):
            return f"splat ({scalar_type} {value})"
        vector = f"<{width} x {scalar_type}>"
        first = self.op(f"insertelement {vector} poison, {scalar_type} {value}, i64 0")
        return self.op(f"shufflevector {vector} {first}, {vector} poison, <{width} x i32> zeroinitializer")

    def text(self) -> str:
        return "\n".join([self.head, self.lines[0], *self.allocas, *self.lines[1:], "}"])
