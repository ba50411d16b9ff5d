"""Building the scalar bodies of graph operations: `arith` and `math` ops, constants made once a body."""

from __future__ import annotations

import functools
import math as pymath
from collections.abc import Sequence
from typing import Any

import torch
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import BoolAttr, FloatAttr, IntAttr, IntegerAttr, StringAttr, f32, f64, i1, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

from luban.compiler.frontend.torch.dtypes import COMPUTE, ELEMENT, FLOATS
from luban.compiler.frontend.torch.views import View
from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Dims
from luban.symbolic import Dim, product

_NO_FLAGS = {"fastmath": arith.FastMathFlagsAttr("none")}
_NO_WRAP = {"overflowFlags": arith.IntegerOverflowAttr("none")}
_FLOAT_TYPES = frozenset(ELEMENT[d] for d in FLOATS)
_CMPF = {"eq": 1, "gt": 2, "ge": 3, "lt": 4, "le": 5, "ne": 13}
_CMPI = {"eq": 0, "ne": 1, "lt": 2, "le": 3, "gt": 4, "ge": 5, "ult": 6, "ule": 7, "ugt": 8, "uge": 9}
_RANDOM_TYPES = {"uniform": f32, "normal": f32, "bits": i64}


@functools.lru_cache(maxsize=4096)
def _constant(value: Any, kind: str, sign: float, element: Attribute) -> dict[str, Attribute]:
    if element in _FLOAT_TYPES:
        return {"value": FloatAttr(float(value), element)}  # type: ignore[type-var]
    return {"value": IntegerAttr(int(value), element, truncate_bits=True)}  # type: ignore[call-overload]


@functools.lru_cache(maxsize=64)
def _predicate(code: int) -> IntegerAttr:
    return IntegerAttr(code, 64)


def _unary(op: type[Operation]) -> Any:
    def build(self: Body, x: SSAValue) -> SSAValue:
        return self.op(op, (x,), x.type, _NO_FLAGS)

    return build


def _arithmetic(
    on_float: type[Operation] | None, on_int: type[Operation], on_bool: type[Operation], wraps: bool = True
) -> Any:
    def build(self: Body, x: SSAValue, y: SSAValue) -> SSAValue:
        element = x.type
        if element in _FLOAT_TYPES:
            assert on_float is not None
            return self.op(on_float, (x, y), element, _NO_FLAGS)
        if element is i1 or element == i1:
            return self.op(on_bool, (x, y), element)
        return self.op(on_int, (x, y), element, _NO_WRAP if wraps else None)

    return build


class Body:
    """A scalar body under construction. Values are SSA scalars; `args` are what the operation passes in.

    `axes[d]` is the domain's dim for dim d as the rule counts them, or -1 where that has size 1 and was left out.
    """

    __slots__ = ("block", "args", "axes", "_known")

    def __init__(self, types: Sequence[Attribute], axes: Sequence[int]):
        self.block = Block(arg_types=types)
        self.args = self.block.args
        self.axes = axes
        self._known: dict[Any, SSAValue] = {}

    def op(
        self, kind: type[Operation], operands: Sequence[SSAValue], result: Attribute, properties: Any = None
    ) -> SSAValue:
        """Appends one operation and gives its result."""
        made = kind.create(operands=operands, result_types=(result,), properties=properties or {})
        self.block.add_op(made)
        return made.results[0]

    def constant(self, value: Any, dtype: torch.dtype) -> SSAValue:
        """A number of the element type of `dtype` (integers wrap to it, floats are rounded to it)."""
        element = ELEMENT[dtype]
        sign = pymath.copysign(1.0, value) if isinstance(value, float) else 1.0
        properties = _constant(value, type(value).__name__, sign, element)
        key = properties["value"]
        found = self._known.get(id(key))
        if found is None:
            found = self._known[id(key)] = self.op(arith.ConstantOp, (), element, properties)
        return found

    def like(self, x: SSAValue, value: Any) -> SSAValue:
        """A number of the type of x."""
        return self.constant(value, _DTYPE_OF[x.type])

    def index_constant(self, value: int) -> SSAValue:
        return self.constant(value, torch.int64)

    add = _arithmetic(arith.AddfOp, arith.AddiOp, arith.OrIOp)
    sub = _arithmetic(arith.SubfOp, arith.SubiOp, arith.XOrIOp)
    mul = _arithmetic(arith.MulfOp, arith.MuliOp, arith.AndIOp)
    div = _arithmetic(arith.DivfOp, arith.DivSIOp, arith.AndIOp, wraps=False)
    floordiv_int = _arithmetic(None, arith.FloorDivSIOp, arith.AndIOp, wraps=False)
    rem_int = _arithmetic(None, arith.RemSIOp, arith.AndIOp, wraps=False)
    maximum = _arithmetic(arith.MaximumfOp, arith.MaxSIOp, arith.OrIOp, wraps=False)
    minimum = _arithmetic(arith.MinimumfOp, arith.MinSIOp, arith.AndIOp, wraps=False)
    fmax = _arithmetic(arith.MaxnumfOp, arith.MaxSIOp, arith.OrIOp, wraps=False)
    fmin = _arithmetic(arith.MinnumfOp, arith.MinSIOp, arith.AndIOp, wraps=False)
    and_ = _arithmetic(None, arith.AndIOp, arith.AndIOp, wraps=False)
    or_ = _arithmetic(None, arith.OrIOp, arith.OrIOp, wraps=False)
    xor = _arithmetic(None, arith.XOrIOp, arith.XOrIOp, wraps=False)
    shl = _arithmetic(None, arith.ShLIOp, arith.AndIOp)
    shr = _arithmetic(None, arith.ShRSIOp, arith.AndIOp, wraps=False)
    exp, exp2, expm1 = _unary(math.ExpOp), _unary(math.Exp2Op), _unary(math.ExpM1Op)
    log, log2, log10, log1p = _unary(math.LogOp), _unary(math.Log2Op), _unary(math.Log10Op), _unary(math.Log1pOp)
    sin, cos, tan = _unary(math.SinOp), _unary(math.CosOp), _unary(math.TanOp)
    asin, acos, atan = _unary(math.AsinOp), _unary(math.AcosOp), _unary(math.AtanOp)
    sinh, cosh, tanh = _unary(math.SinhOp), _unary(math.CoshOp), _unary(math.TanhOp)
    asinh, acosh, atanh = _unary(math.AsinhOp), _unary(math.AcoshOp), _unary(math.AtanhOp)
    erf, sqrt, rsqrt = _unary(math.ErfOp), _unary(math.SqrtOp), _unary(math.RsqrtOp)
    floor, ceil, trunc, round = (
        _unary(math.FloorOp),
        _unary(math.CeilOp),
        _unary(math.TruncOp),
        _unary(math.RoundEvenOp),
    )

    def pow(self, x: SSAValue, y: SSAValue) -> SSAValue:
        if x.type in _FLOAT_TYPES:
            return self.op(math.PowFOp, (x, y), x.type, _NO_FLAGS)
        return self.op(math.IPowIOp, (x, y), x.type)

    def atan2(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.op(math.Atan2Op, (x, y), x.type, _NO_FLAGS)

    def copysign(self, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.op(math.CopySignOp, (x, y), x.type, _NO_FLAGS)

    def neg(self, x: SSAValue) -> SSAValue:
        if x.type in _FLOAT_TYPES:
            return self.op(arith.NegfOp, (x,), x.type, _NO_FLAGS)
        return self.sub(self.like(x, 0), x)

    def abs(self, x: SSAValue) -> SSAValue:
        if x.type in _FLOAT_TYPES:
            return self.op(math.AbsFOp, (x,), x.type, _NO_FLAGS)
        return self.maximum(x, self.neg(x)) if x.type != i1 else x

    def not_(self, x: SSAValue) -> SSAValue:
        return self.xor(x, self.like(x, 1 if x.type == i1 else -1))

    def reciprocal(self, x: SSAValue) -> SSAValue:
        return self.div(self.like(x, 1), x)

    def cmp(self, predicate: str, x: SSAValue, y: SSAValue) -> SSAValue:
        """x ? y as i1, for eq, ne, lt, le, gt, ge (and ult... on integers); NaN is unequal to everything."""
        if x.type in _FLOAT_TYPES:
            properties = {"predicate": _predicate(_CMPF[predicate]), **_NO_FLAGS}
            return self.op(arith.CmpfOp, (x, y), i1, properties)
        if x.type == i1 and len(predicate) == 2 and predicate not in ("eq", "ne"):
            predicate = "u" + predicate
        return self.op(arith.CmpiOp, (x, y), i1, {"predicate": _predicate(_CMPI[predicate])})

    def isnan(self, x: SSAValue) -> SSAValue:
        return self.cmp("ne", x, x)

    def select(self, condition: SSAValue, x: SSAValue, y: SSAValue) -> SSAValue:
        return self.op(arith.SelectOp, (condition, x, y), x.type)

    def clamp(self, x: SSAValue, low: Any, high: Any) -> SSAValue:
        return self.minimum(self.maximum(x, self.like(x, low)), self.like(x, high))

    def cast(self, x: SSAValue, source: torch.dtype, target: torch.dtype) -> SSAValue:
        """A stored or computed value of one dtype as another (the dtype says whether 8 bits are signed)."""
        if source is target:
            return x
        if target is torch.bool:
            return self.cmp("ne", x, self.like(x, 0))
        if source in FLOATS:
            return self._from_float(x, target)
        if target in FLOATS:
            if target not in (torch.float32, torch.float64):
                return self._from_float(self.cast(x, source, torch.float32), target)
            unsigned = source in (torch.bool, torch.uint8)
            return self.op(arith.UIToFPOp if unsigned else arith.SIToFPOp, (x,), ELEMENT[target])
        return self._resize(x, source, target)

    def _from_float(self, x: SSAValue, target: torch.dtype) -> SSAValue:
        element = ELEMENT[target]
        if x.type == element:
            return x
        if target in FLOATS:
            have, want = _WIDTH[x.type], _WIDTH[element]
            if have == want:  # bf16 <-> f16
                return self._from_float(self.op(arith.ExtFOp, (x,), f32), target)
            return self.op(arith.ExtFOp if have < want else arith.TruncFOp, (x,), element)
        if _WIDTH[x.type] == 16:
            x = self.op(arith.ExtFOp, (x,), f32)
        if target is torch.uint8:  # through a wider integer: negative values wrap as torch's do
            return self._resize(self.op(arith.FPToSIOp, (x,), i64), torch.int64, target)
        return self.op(arith.FPToSIOp, (x,), element)

    def _resize(self, x: SSAValue, source: torch.dtype, target: torch.dtype) -> SSAValue:
        element = ELEMENT[target]
        have, want = x.type.width.data, element.width.data  # type: ignore[attr-defined]
        if have == want:
            return x
        if have > want:
            return self.op(arith.TruncIOp, (x,), element)
        return self.op(arith.ExtUIOp if source in (torch.bool, torch.uint8) else arith.ExtSIOp, (x,), element)

    def load_cast(self, x: SSAValue, stored: torch.dtype, compute: torch.dtype) -> SSAValue:
        """An operand as the body received it, in a compute dtype."""
        return x if stored is compute else self.cast(x, stored, compute)

    def store_cast(self, x: SSAValue, computed: torch.dtype, stored: torch.dtype) -> SSAValue:
        """A computed value in the form in which a dtype is stored."""
        return x if computed is stored else self.cast(x, computed, stored)

    def index(self, d: int) -> SSAValue:
        """The iteration index along dim d, i64."""
        axis = self.axes[d]
        if axis < 0:
            return self.index_constant(0)
        found = self._known.get(("index", axis))
        if found is None:
            found = self._known["index", axis] = self.op(graph.IndexOp, (), i64, {"dim": IntAttr(axis)})
        return found

    def indices(self, count: int) -> list[SSAValue]:
        """The iteration indices of the first `count` dims."""
        return [self.index(d) for d in range(count)]

    def dim(self, value: Dim) -> SSAValue:
        """A size as i64: a constant where it is a number."""
        if isinstance(value, int):
            return self.index_constant(value)
        found = self._known.get(value)
        if found is None:
            found = self._known[value] = self.op(graph.DimOp, (), i64, {"value": Dims((value,))})
        return found

    def dim_as(self, value: Dim, dtype: torch.dtype) -> SSAValue:
        """A size as a number of `dtype`."""
        return self.constant(value, dtype) if isinstance(value, int) else self.cast(self.dim(value), torch.int64, dtype)

    def linear(self, offset: Dim, strides: Sequence[Dim], indices: Sequence[SSAValue]) -> SSAValue:
        """offset + sum(stride * index), i64."""
        total: SSAValue | None = None
        for stride, index in zip(strides, indices):
            if stride == 0:
                continue
            term = index if stride == 1 else self.mul(index, self.dim(stride))
            total = term if total is None else self.add(total, term)
        if total is None:
            return self.dim(offset)
        return total if offset == 0 else self.add(total, self.dim(offset))

    def load(self, table: SSAValue, view: View, indices: Sequence[SSAValue], checked: Sequence[int] = ()) -> SSAValue:
        """The element of a whole (indirect) operand that `view` has at computed indices, as it is stored.

        checked: the dims whose indices come from data; one outside its dim fails the run, and reads no neighbour.
        """
        if len(checked) > 1 or (checked and not _is_outermost(view, checked[0])):
            size = product(table.type.shape)  # type: ignore[attr-defined]
            indices = [self.or_far(i, view.shape[d], size) if d in checked else i for d, i in enumerate(indices)]
        position = self.linear(view.offset, view.strides, indices)
        element = table.type.dtype  # type: ignore[attr-defined]
        return self.op(graph.LoadOp, (table, position), element, {"checked": BoolAttr.from_bool(bool(checked))})

    def or_far(self, index: SSAValue, size: Dim, far: Dim) -> SSAValue:
        """The index, or `far` when it is not within 0..size-1.

        With the tensor's number of elements as `far`, the flat position leaves the tensor, so that its check refuses
        it, and stays a plain sum of products.
        """
        return self.select(self.cmp("ult", index, self.dim(size)), index, self.dim(far))

    def random(self, kind: str, seed: SSAValue, counter: SSAValue) -> SSAValue:
        """uniform or normal float32, or 32 bits as i64."""
        return self.op(graph.RandomOp, (seed, counter), _RANDOM_TYPES[kind], {"kind": StringAttr(kind)})

    def bitcast(self, x: SSAValue, element: Attribute) -> SSAValue:
        return self.op(arith.BitcastOp, (x,), element)

    def finish(self, values: Sequence[SSAValue]) -> None:
        """Ends the body."""
        self.block.add_op(graph.YieldOp.create(operands=values))


def _is_outermost(view: View, d: int) -> bool:
    """Whether an index outside dim d leaves the tensor, so that the check of the flat position suffices."""
    size = product(view.base.type.shape)  # type: ignore[attr-defined]
    rest = [s * (n - 1) for i, (s, n) in enumerate(zip(view.strides, view.shape)) if i != d]
    reach = view.strides[d] * view.shape[d]
    return view.offset == 0 and reach == size and sum(rest) + 1 == view.strides[d]


_DTYPE_OF = {ELEMENT[d]: d for d in ELEMENT if d is not torch.uint8}
_WIDTH = {ELEMENT[d]: d.itemsize * 8 for d in FLOATS}
assert f64 in _FLOAT_TYPES and all(COMPUTE[d] in ELEMENT for d in ELEMENT)
