"""Writes tile kernels: an insertion point, loops as context managers, constants and dims made once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, StringAttr, UnitAttr, i1, i32
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from luban.compiler.ir import tile
from luban.compiler.ir.attributes import INDEX, BufferType, Dims
from luban.symbolic import Dim


@dataclass
class Loop:
    """A loop under construction: set `yields` to the next carried values before the block ends."""

    index: SSAValue
    carried: Sequence[SSAValue]
    yields: Sequence[SSAValue] = ()
    results: Sequence[SSAValue] = field(default_factory=tuple)


class KernelBuilder:
    """Builds one `tile.kernel` with the given buffer element types; `symbols` are passed to every kernel alike."""

    def __init__(self, name: str, dtypes: Sequence[Attribute], symbols: Sequence[str]):
        self.name, self.symbols = name, list(symbols)
        self.entry = Block(arg_types=[*(BufferType(t) for t in dtypes), *(INDEX for _ in symbols)])
        self.buffers = list(self.entry.args[: len(dtypes)])
        self._block = self.entry
        self._dims: dict[Dim, SSAValue] = {}
        self._constants: dict[tuple[object, Attribute], SSAValue] = {}
        self._hoisted: Operation | None = None
        self.unrounded: dict[SSAValue, SSAValue] = {}  # a value rounded to a small float -> what it was before

    def finish(self) -> tile.KernelOp:
        """The finished kernel."""
        names = ArrayAttr([StringAttr(s) for s in self.symbols])
        return tile.KernelOp.create(
            properties={"sym_name": StringAttr(self.name), "symbols": names}, regions=[Region(self.entry)]
        )

    def insert(self, op: Operation) -> SSAValue:
        """Adds an operation at the insertion point; gives its first result."""
        self._block.add_op(op)
        return op.results[0] if op.results else None  # type: ignore[return-value]

    def _hoist(self, op: Operation) -> SSAValue:
        """Adds an operation at the kernel's start, behind those hoisted before."""
        if self._hoisted is None:
            first = self.entry.first_op
            self.entry.add_op(op) if first is None else self.entry.insert_op_before(op, first)
        else:
            self.entry.insert_op_after(op, self._hoisted)
        self._hoisted = op
        return op.results[0]

    def dim(self, value: Dim) -> SSAValue:
        """The value of a dim, as i64."""
        if value not in self._dims:
            self._dims[value] = self._hoist(
                tile.DimOp.create(properties={"value": Dims((value,))}, result_types=[INDEX])
            )
        return self._dims[value]

    def constant(self, value: float | int | bool, ty: Attribute) -> SSAValue:
        """A number of a scalar type."""
        key = (repr(value), ty)
        if key not in self._constants:
            is_float = ty.name in ("f16", "f32", "f64", "bf16")
            attribute = FloatAttr(float(value), ty) if is_float else IntegerAttr(int(value), ty)  # type: ignore[arg-type]
            self._constants[key] = self._hoist(
                arith.ConstantOp.create(properties={"value": attribute}, result_types=[ty])
            )
        return self._constants[key]

    def binary(self, op: type[Operation], a: SSAValue, b: SSAValue) -> SSAValue:
        """An arith operation of two equal types."""
        return self.insert(op.create(operands=[a, b], result_types=[a.type]))

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.binary(arith.AddiOp, a, b)

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.binary(arith.MuliOp, a, b)

    def minimum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.binary(arith.MinSIOp, a, b)

    def maximum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.binary(arith.MaxSIOp, a, b)

    def less(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """a < b, signed."""
        return self.insert(
            arith.CmpiOp.create(operands=[a, b], properties={"predicate": IntegerAttr(2, INDEX)}, result_types=[i1])
        )

    def select(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.SelectOp.create(operands=[condition, a, b], result_types=[a.type]))

    @contextmanager
    def loop(
        self, lower: SSAValue, upper: SSAValue, role: str, init: Sequence[SSAValue] = (), combines: Sequence[str] = ()
    ) -> Iterator[Loop]:
        """A loop; what is built inside the `with` becomes its body, `results` are set when it ends."""
        body = Block(arg_types=[INDEX, *(v.type for v in init)])
        loop = Loop(body.args[0], body.args[1:])
        with self.inside(body):
            yield loop
            self.insert(tile.YieldOp.create(operands=list(loop.yields)))
        op = tile.ForOp.create(
            operands=[lower, upper, *init],
            result_types=[v.type for v in init],
            properties={"role": StringAttr(role), "combines": ArrayAttr([StringAttr(c) for c in combines])},
            regions=[Region(body)],
        )
        self.insert(op)
        loop.results = op.results

    @contextmanager
    def inside(self, block: Block) -> Iterator[None]:
        """What is built inside the `with` goes into `block`."""
        outer, self._block = self._block, block
        yield
        self._block = outer

    def alloc(self, elements: Dim, dtype: Attribute) -> SSAValue:
        """Scratch memory of the current iteration."""
        return self.insert(
            tile.AllocOp.create(properties={"elements": Dims((elements,))}, result_types=[BufferType(dtype)])
        )

    def pairs(self, buffer: SSAValue) -> SSAValue:
        """A bfloat16 buffer's memory as i32, two elements in each."""
        return self.insert(tile.PairsOp.create(operands=[buffer], result_types=[BufferType(i32)]))

    def load(
        self,
        buffer: SSAValue,
        indices: Sequence[SSAValue],
        strides: Sequence[Dim],
        offset: Dim = 0,
        mask: SSAValue | None = None,
        ahead: bool = False,
    ) -> SSAValue:
        """The element at offset + sum(index * stride); `ahead`: fetch what lies further on, too."""
        kept = [(i, s) for i, s in zip(indices, strides) if s != 0]
        return self.insert(
            tile.LoadOp.build(
                operands=[buffer, [i for i, _ in kept], mask],
                properties={
                    "strides": Dims(tuple(s for _, s in kept)),
                    "offset": Dims((offset,)),
                    **({"ahead": UnitAttr()} if ahead else {}),
                },
                result_types=[buffer.type.dtype],  # type: ignore[attr-defined]
            )
        )

    def store(
        self,
        value: SSAValue,
        buffer: SSAValue,
        indices: Sequence[SSAValue],
        strides: Sequence[Dim],
        offset: Dim = 0,
        mask: SSAValue | None = None,
        combine: str = "none",
        streams: bool = False,
    ) -> None:
        """Writes, or combines, one element; `streams`: past the caches."""
        kept = [(i, s) for i, s in zip(indices, strides) if s != 0]
        self.insert(
            tile.StoreOp.build(
                operands=[value, buffer, [i for i, _ in kept], mask],
                properties={
                    "strides": Dims(tuple(s for _, s in kept)),
                    "offset": Dims((offset,)),
                    "combine": StringAttr(combine),
                    **({"streams": UnitAttr()} if streams else {}),
                },
            )
        )

    def check(self, index: SSAValue, bound: Dim) -> SSAValue:
        """`index` if it lies in [0, bound), else 0 with the run marked as failed."""
        return self.insert(
            tile.CheckOp.create(operands=[index], properties={"bound": Dims((bound,))}, result_types=[INDEX])
        )

    def digits(self, flat: SSAValue, sizes: Sequence[Dim]) -> list[SSAValue]:
        """A flat row-major index as one index for each size."""
        result: list[SSAValue] = []
        for n, size in enumerate(reversed(sizes)):
            if n == len(sizes) - 1:
                result.append(flat)
            else:
                result.append(self.binary(arith.RemUIOp, flat, self.dim(size)))
                flat = self.binary(arith.DivUIOp, flat, self.dim(size))
        return result[::-1]


__all__ = ["KernelBuilder", "Loop"]
