"""Copies the scalar bodies of graph operations into a tile kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Attribute, Operation, SSAValue

from luban.compiler.ir import tile
from luban.compiler.lowering.builder import KernelBuilder
from luban.symbolic import product

EXPENSIVE = (
    "exp",
    "log",
    "tanh",
    "erf",
    "pow",
    "sin",
    "cos",
    "tan",
    "sqrt",
    "divf",
    "random",
    "load",
    "sinh",
    "cosh",
    "atan",
)


def copy_body(
    b: KernelBuilder, op: Operation, args: Sequence[SSAValue], index: Callable[[int], SSAValue]
) -> list[SSAValue]:
    """Inlines the body of `op`; `args` stand for its block arguments (a buffer for an indirect operand).

    `index(d)` gives the iteration index along dimension d. Returns what the body yields.
    """
    block = op.regions[0].block
    values: dict[SSAValue, SSAValue] = dict(zip(block.args, args))
    for inner in block.ops:
        if inner.name == "graph.yield":
            return [values[v] for v in inner.operands]
        copier = _COPIERS.get(inner.name, _copy_plain)
        operands = [values[v] for v in inner.operands]
        made = values[inner.results[0]] = copier(b, inner, operands, index)
        if inner.name == "arith.truncf" and not is_cast(op):
            b.unrounded[made] = operands[0]
    raise AssertionError(f"the body of {op.name} has no graph.yield")


def is_cast(op: Operation) -> bool:
    """Whether the body only converts: a rounding that the program asks for, not one that ends a computation."""
    return len(list(op.regions[0].block.ops)) == 2


def is_expensive(op: Operation) -> bool:
    """Whether computing the body again costs more than a load and a store."""
    names = [inner.name.rpartition(".")[2] for inner in op.regions[0].block.ops]
    return any(n.startswith(EXPENSIVE) for n in names) or len(names) > 24


def uses_index(op: Operation) -> bool:
    """Whether the body asks for its position in the domain."""
    return any(inner.name == "graph.index" for inner in op.regions[0].block.ops) if op.regions else False


def reduction_kind(op: Operation, i: int) -> str:
    """How result `i` of a reduction combines. Booleans are one bit, for which a signed maximum would be the minimum."""
    kind = op.properties["kinds"].data[i].data  # type: ignore[union-attr]
    one_bit = getattr(getattr(op.results[i].type.dtype, "width", None), "data", 0) == 1  # type: ignore[attr-defined]
    return {"max": "or", "min": "and"}.get(kind, kind) if one_bit else kind


def identity(b: KernelBuilder, kind: str, ty: Attribute) -> SSAValue:
    """The neutral element of a reduction."""
    is_float = ty.name in ("f16", "f32", "f64", "bf16")
    if kind in ("add", "or"):
        return b.constant(0, ty)
    if kind in ("mul", "and"):
        return b.constant(1 if ty.name != "integer_type" or kind == "mul" or ty.width.data == 1 else -1, ty)  # type: ignore[attr-defined]
    if is_float:
        return b.constant(float("-inf") if kind == "max" else float("inf"), ty)
    bits = ty.width.data  # type: ignore[attr-defined]
    if bits == 1:
        return b.constant(0 if kind == "max" else 1, ty)
    return b.constant(-(1 << (bits - 1)) if kind == "max" else (1 << (bits - 1)) - 1, ty)


def combine(b: KernelBuilder, kind: str, a: SSAValue, v: SSAValue) -> SSAValue:
    """a combined with v."""
    is_float = a.type.name in ("f16", "f32", "f64", "bf16")  # type: ignore[attr-defined]
    return b.binary((_FLOAT_COMBINES if is_float else _INTEGER_COMBINES)[kind], a, v)


_FLOAT_COMBINES = {"add": arith.AddfOp, "mul": arith.MulfOp, "max": arith.MaximumfOp, "min": arith.MinimumfOp}
_INTEGER_COMBINES = {
    "add": arith.AddiOp,
    "mul": arith.MuliOp,
    "max": arith.MaxSIOp,
    "min": arith.MinSIOp,
    "and": arith.AndIOp,
    "or": arith.OrIOp,
}


def _copy_plain(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    if op.name == "arith.constant":
        value = op.properties["value"]
        if isinstance(value, (FloatAttr, IntegerAttr)):
            return b.constant(value.value.data, op.results[0].type)
    return b.insert(
        type(op).create(
            operands=operands,
            result_types=[r.type for r in op.results],
            properties=dict(op.properties),
            attributes=dict(op.attributes),
        )
    )


def _copy_index(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    return index(op.properties["dim"].data)  # type: ignore[union-attr]


def _copy_dim(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    return b.dim(op.properties["value"].data[0])  # type: ignore[union-attr]


def _copy_load(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    table, position = operands
    if op.properties["checked"].value.data:  # type: ignore[union-attr]
        position = b.check(position, product(op.operands[0].type.shape))  # type: ignore[attr-defined]
    return b.load(table, [position], [1])


def _copy_random(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    return b.insert(
        tile.RandomOp.create(
            operands=operands, properties={"kind": op.properties["kind"]}, result_types=[op.results[0].type]
        )
    )


def _copy_widening(b: KernelBuilder, op: Operation, operands: list[SSAValue], index) -> SSAValue:
    """Widens a value again that this kernel computed wider: the exact value serves (what is stored is rounded).

    Eager rounds to bfloat16 after every operation because it must store; within a kernel that costs three instructions
    an operation (GPT-2's kernels in bfloat16: 275 ms a step with all roundings, 262 without) and precision.
    """
    exact = b.unrounded.get(operands[0])
    return exact if exact is not None and exact.type == op.results[0].type else _copy_plain(b, op, operands, index)


_COPIERS = {
    "arith.extf": _copy_widening,
    "graph.index": _copy_index,
    "graph.dim": _copy_dim,
    "graph.load": _copy_load,
    "graph.random": _copy_random,
}

__all__ = ["copy_body", "combine", "identity", "is_expensive", "reduction_kind", "uses_index"]
