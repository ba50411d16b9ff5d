"""Writes tile.dot operations with their packing: what GEMM, attention and convolution share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, UnitAttr
from xdsl.ir import Attribute, Block, Region, SSAValue

from luban.compiler.ir import tile
from luban.compiler.ir.attributes import INDEX, Dims
from luban.compiler.lowering.builder import KernelBuilder
from luban.kernels.register_tiles import RegisterTile
from luban.symbolic import Dim


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory: element (i, p) at base + i * outer + p * k; packed panels when `panel` is not 0.

    A panel of a right operand has room for `depth` values of k, or for those of the product where that is 0.
    `unsigned`: its integers have no sign.
    """

    buffer: SSAValue
    base: SSAValue
    outer: Dim
    k: Dim
    panel: int = 0
    depth: int = 0
    unsigned: bool = False


def pack_a(
    b: KernelBuilder, t: RegisterTile, source: Matrix, count: SSAValue, k: SSAValue, scratch: SSAValue
) -> Matrix:
    """Packs `count` rows of the left operand by k values into scratch memory, as the unit reads them."""
    return _pack(b, t, source, (t.mr, t.a_kk, t.parts_a), count, k, scratch)


def pack_b(
    b: KernelBuilder,
    t: RegisterTile,
    source: Matrix,
    count: SSAValue,
    k: SSAValue,
    scratch: SSAValue,
    at: SSAValue | None = None,
) -> Matrix:
    """Packs `count` columns of the right operand by k values into scratch memory (from element `at` on), as the unit
    reads them.
    """
    return _pack(b, t, source, (t.panel_b or t.nr, t.kk, t.parts_b), count, k, scratch, at)


def _pack(
    b: KernelBuilder,
    t: RegisterTile,
    source: Matrix,
    form: tuple[int, int, tuple[str, ...]],
    count: SSAValue,
    k: SSAValue,
    scratch: SSAValue,
    at: SSAValue | None = None,
) -> Matrix:
    panel, kk, parts = form
    properties: dict[str, Attribute] = {
        "strides": Dims((source.outer, source.k)),
        "panel": IntAttr(panel),
        "kk": IntAttr(kk),
    }
    if t.k_multiple != kk:
        properties["k_multiple"] = IntAttr(t.k_multiple)
    if parts:
        properties["parts"] = ArrayAttr([StringAttr(part) for part in parts])
    wider = source.unsigned and source.buffer.type.dtype != t.element  # type: ignore[attr-defined]
    if wider:
        properties["unsigned"] = UnitAttr()
    operands = [source.buffer, source.base, count, k, scratch, *([] if at is None else [at])]
    b.insert(tile.PackOp.create(operands=operands, properties=properties))
    start, unsigned = b.dim(0) if at is None else at, source.unsigned and not wider
    return replace(source, buffer=scratch, base=start, outer=0, k=0, panel=panel, unsigned=unsigned)


def panel_elements(t: RegisterTile, panel: int, count: int, k: int) -> int:
    """Scratch elements that packing `count` x `k` takes."""
    return -(-count // panel) * panel * packed_depth(t, k)


def packed_depth(t: RegisterTile, k: int) -> int:
    """Values of k in a packed panel: all parts of k rounded up to what the unit takes."""
    return -(-k // t.k_multiple) * t.k_multiple * t.terms


@dataclass(frozen=True)
class Passes:
    """How a dot goes through k and its tiles: see tile.DotOp for `partial`, `depth` and `order`."""

    partial: SSAValue | None = None
    depth: int | None = None
    order: str = "columns"
    keeps: bool = False
    resumes: bool = False


def dot(
    b: KernelBuilder,
    t: RegisterTile,
    left: Matrix,
    right: Matrix,
    extents: tuple[SSAValue, SSAValue, SSAValue],
    body: Callable[[SSAValue, SSAValue, SSAValue], None],
    passes: Passes = Passes(),
) -> None:
    """left (m x k) times right (k x n, given as n rows): `body(sum, i, j)` writes what becomes of each result."""
    block = Block(arg_types=[t.accumulator, INDEX, INDEX])
    with b.inside(block):
        if not passes.keeps:
            body(*block.args)
        b.insert(tile.YieldOp.create())
    partial = [] if passes.partial is None else [passes.partial]
    unsigned = "a" * left.unsigned + "b" * right.unsigned
    b.insert(
        tile.DotOp.create(
            operands=[left.buffer, left.base, right.buffer, right.base, *extents, *partial],
            properties={
                "a_strides": Dims((left.outer, left.k)),
                "b_strides": Dims((right.outer, right.k)),
                "a_panel": IntAttr(left.panel),
                "b_panel": IntAttr(right.panel),
                "kk": IntAttr(t.kk),
                "unit": StringAttr(t.unit),
                "rows": IntAttr(t.mr),
                "columns": IntAttr(t.nr),
                **_panel_properties(t),
                **({"unsigned": StringAttr(unsigned)} if unsigned else {}),
                **({"b_depth": IntAttr(right.depth)} if right.depth else {}),
                **_pass_properties(passes),
            },
            regions=[Region(block)],
        )
    )


def _pass_properties(passes: Passes) -> dict[str, Attribute]:
    said: dict[str, Attribute] = {}
    if passes.depth is not None:
        said["depth"] = IntAttr(passes.depth)
    if passes.order != "columns":
        said["order"] = StringAttr(passes.order)
    for name in ("keeps", "resumes"):
        if getattr(passes, name):
            said[name] = UnitAttr()
    return said


def _panel_properties(t: RegisterTile) -> dict[str, IntAttr]:
    """What a dot says of its panels beyond kk, for units whose two sides differ."""
    said = {"a_kk": (t.a_kk, t.kk), "k_multiple": (t.k_multiple, t.kk)}
    return {name: IntAttr(value) for name, (value, usual) in said.items() if value != usual}
