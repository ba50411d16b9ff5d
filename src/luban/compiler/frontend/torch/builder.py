"""What import rules build with: maps, reductions, contractions and the other graph operations over Views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, i64
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from luban.compiler.frontend.torch import dims as torch_dims
from luban.compiler.frontend.torch.body import Body
from luban.compiler.frontend.torch.dtypes import COMPUTE, ELEMENT, FLOATS
from luban.compiler.frontend.torch.registry import Unsupported
from luban.compiler.frontend.torch.views import View, dense, expand, is_dense, moved, try_reshape
from luban.compiler.ir import graph
from luban.compiler.ir.attributes import Access, Dims, Indirect, TensorType, contiguous
from luban.compiler.ir.window import Window
from luban.symbolic import Dim, Expr, product

INDIRECT = Indirect()
RANDOM_STRIDE = 1 << 40  # counters between the random operations of one program

tensor_type = functools.lru_cache(maxsize=8192)(TensorType.of)
int_attr = functools.lru_cache(maxsize=256)(IntAttr)
string_attr = functools.lru_cache(maxsize=64)(StringAttr)

Operand = View | bool | int | float | Expr
Scalars = Any  # one SSA scalar, or a sequence of them


@dataclass(frozen=True, slots=True)
class Whole:
    """An operand that a body reads at computed indices: it receives the tensor and passes it to `Body.load`."""

    view: View


@dataclass(frozen=True, slots=True)
class Meta:
    """What tracing says about a tensor. `order`: dims from the slowest to the fastest in memory, None for row-major."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    strides: tuple[Dim, ...]
    order: tuple[int, ...] | None


def meta_of(value: torch.Tensor) -> Meta:
    """The shape, dtype and layout of a fake tensor. Raises Unsupported for what is not a plain strided tensor."""
    if value.dtype not in ELEMENT:
        raise Unsupported(f"dtype {str(value.dtype)[6:]}")
    if value.layout is not torch.strided:
        raise Unsupported(f"layout {value.layout}")
    raw = value.stride()
    shape, strides = torch_dims.dims(value.shape), torch_dims.dims(raw)
    if all(type(s) is int for s in strides):
        hints: Sequence[int] = strides  # type: ignore[assignment]
    else:
        hints = [torch_dims.hint(s) for s in raw]
    falling = all(a >= b or n == 1 or m == 1 for a, b, n, m in zip(hints, hints[1:], shape, shape[1:]))
    order = None if falling else tuple(sorted(range(len(shape)), key=lambda i: (-hints[i], i)))
    return Meta(shape, value.dtype, strides, order)


@dataclass(frozen=True)
class LogSoftmax:
    """What a log-softmax was made of: its input, and along `dim` the maximum and the sum of the powers."""

    x: View
    dim: int
    top: View
    powers: View


class Builder:
    """Appends graph operations to a function's block."""

    def __init__(self, block: Block):
        self.block = block
        self.seed: View | None = None
        self.randoms = 0
        self._dense: dict[View, View] = {}
        self.log_softmaxes: dict[View, LogSoftmax] = {}
        self.turn: int | None = None  # of the reductions and contractions that follow, see `next_turn`
        self.turns = 0

    # -- what FX says -------------------------------------------------------------------------------------------------

    def meta(self, node: Node) -> Meta:
        """The meta of a node with one tensor as result."""
        return meta_of(node.meta["val"])

    def metas(self, node: Node) -> list[Meta | None]:
        """The metas of a node with several results; None for missing ones."""
        return [meta_of(v) if isinstance(v, torch.Tensor) else None for v in node.meta["val"]]

    # -- operations ---------------------------------------------------------------------------------------------------

    def add(self, op: Operation) -> Operation:
        if self.turn is not None and isinstance(op, (graph.ContractOp, graph.ReduceOp)):
            op.attributes[graph.TURN] = int_attr(self.turn)
        self.block.add_op(op)
        return op

    def next_turn(self) -> None:
        """What follows runs when all that came before in turns is done; `turn = None` ends that."""
        self.turns += 1
        self.turn = self.turns

    def map(
        self,
        shape: Sequence[Dim],
        inputs: Sequence[View | Whole],
        body: Callable[..., Scalars],
        dtypes: torch.dtype | Sequence[torch.dtype],
        order: Sequence[int] | None = None,
    ) -> Any:
        """graph.map over `shape`. `body(b, *scalars)` gives scalars as they are stored; inputs broadcast to the shape.

        Gives a View, or a tuple when `dtypes` is a sequence. `order` is the memory order of the results' dims.
        """
        keep = [d for d in (range(len(shape)) if order is None else order) if shape[d] != 1]
        domain = tuple(shape[d] for d in keep)
        single = isinstance(dtypes, torch.dtype)
        kinds = [dtypes] if single else list(dtypes)  # type: ignore[arg-type,list-item]
        op = self._with_body(
            graph.MapOp, shape, keep, inputs, body, [tensor_type(domain, ELEMENT[d]) for d in kinds], {}
        )
        strides: list[Dim] = [0] * len(shape)
        for d, s in zip(keep, contiguous(domain)):
            strides[d] = s
        results = [View(r, tuple(shape), tuple(strides), 0, d) for r, d in zip(op.results, kinds)]
        return results[0] if single else tuple(results)

    def reduce(
        self,
        parallel: Sequence[Dim],
        reduced: Sequence[Dim],
        inputs: Sequence[View | Whole],
        body: Callable[..., Scalars],
        kinds: Sequence[str],
        dtypes: Sequence[torch.dtype],
    ) -> tuple[View, ...]:
        """graph.reduce; inputs broadcast to (*parallel, *reduced). Gives Views of the shape `parallel`."""
        shape, n = (*parallel, *reduced), len(parallel)
        keep = [d for d in range(n) if shape[d] != 1]
        inner = [d for d in range(n, len(shape)) if shape[d] != 1]
        if not inner:
            if not reduced:
                shape = (*shape, 1)
                inputs = [i if isinstance(i, Whole) else moved(i, (*i.shape, 1), (*i.strides, 0)) for i in inputs]
            inner = [len(shape) - 1]
        domain = tuple(shape[d] for d in keep)
        properties = {"reduced": int_attr(len(inner)), "kinds": ArrayAttr([string_attr(k) for k in kinds])}
        types = [tensor_type(domain, ELEMENT[d]) for d in dtypes]
        op = self._with_body(graph.ReduceOp, shape, keep + inner, inputs, body, types, properties)
        strides: list[Dim] = [0] * n
        for d, s in zip(keep, contiguous(domain)):
            strides[d] = s
        return tuple(View(r, tuple(parallel), tuple(strides), 0, d) for r, d in zip(op.results, dtypes))

    def scatter(
        self,
        init: View,
        shape: Sequence[Dim],
        inputs: Sequence[View | Whole],
        body: Callable[..., Sequence[SSAValue]],
        kind: str,
        dtype: torch.dtype | None = None,
    ) -> View:
        """graph.scatter into a copy of `init` over the domain `shape`; the body gives (flat position, stored value).

        Values combine in the type of `init`; the result is rounded to `dtype` where one is given.
        """
        start = init if self._is_number(init) else self.dense(init)
        keep = [d for d in range(len(shape)) if shape[d] != 1] or list(range(min(1, len(shape))))
        if not keep:
            shape, keep = (1,), [0]
            inputs = [i if isinstance(i, Whole) else moved(i, (1,), (0,)) for i in inputs]
        out = tensor_type(init.shape, ELEMENT[dtype or init.dtype])
        op = self._with_body(
            graph.ScatterOp, shape, keep, inputs, body, [out], {"kind": string_attr(kind)}, [start.base]
        )
        return dense(op.results[0], init.shape, dtype or init.dtype)

    @staticmethod
    def _is_number(view: View) -> bool:
        """Whether a view shows one number everywhere."""
        return view.base.type.shape == () and view.offset == 0  # type: ignore[attr-defined]

    def _with_body(
        self,
        kind: type[Operation],
        shape: Sequence[Dim],
        keep: Sequence[int],
        inputs: Sequence[View | Whole],
        body: Callable[..., Scalars],
        types: Sequence[Attribute],
        properties: dict[str, Attribute],
        leading: Sequence[SSAValue] = (),
    ) -> Operation:
        """An operation with a scalar body; equal inputs are passed once."""
        operands: list[SSAValue] = []
        accesses: list[Attribute] = []
        elements: list[Attribute] = []
        slots: list[int] = []
        seen: dict[Any, int] = {}
        for item in inputs:
            whole = isinstance(item, Whole)
            key = (True, item.view.base) if whole else item  # type: ignore[union-attr]
            slot = seen.get(key)
            if slot is None:
                slot = seen[key] = len(operands)
                if whole:
                    operands.append(item.view.base)  # type: ignore[union-attr]
                    accesses.append(INDIRECT)
                    elements.append(item.view.base.type)  # type: ignore[union-attr]
                else:
                    view = expand(item, shape)  # type: ignore[arg-type]
                    operands.append(view.base)
                    accesses.append(Access.of(tuple([view.strides[d] for d in keep]), view.offset))  # type: ignore[arg-type]
                    elements.append(ELEMENT[view.dtype])
            slots.append(slot)
        axes = [-1] * len(shape)
        for position, d in enumerate(keep):
            axes[d] = position
        b = Body(elements, axes)
        values = body(b, *[b.args[s] for s in slots])
        b.finish((values,) if isinstance(values, SSAValue) else tuple(values))
        properties["domain"] = Dims(tuple([shape[d] for d in keep]))
        properties["accesses"] = ArrayAttr(accesses)
        op = kind.create(
            operands=[*leading, *operands], result_types=types, properties=properties, regions=[Region(b.block)]
        )
        return self.add(op)

    def contract(
        self,
        a: View,
        b: View,
        counts: Sequence[int],
        domain: Sequence[Dim],
        accesses: Sequence[Sequence[Dim]],
        dtype: torch.dtype,
        window: Window | None = None,
    ) -> View:
        """graph.contract with explicit strides over the domain (batch, m, n, k); batch dims of size 1 are left out.

        Gives a View over (batch, m, n). bfloat16 and float16 operands may give a float32 result. `window`: see
        graph.contract.
        """
        nb = counts[0]
        keep = [d for d in range(len(domain)) if d >= nb or domain[d] != 1]
        counts = (len(keep) - (len(domain) - nb), *counts[1:])
        size = tuple(domain[d] for d in keep)
        out = size[: sum(counts[:3])]
        op = graph.ContractOp.create(
            operands=[a.base, b.base],
            result_types=[tensor_type(out, ELEMENT[dtype])],
            properties={
                "domain": Dims(size),
                "counts": ArrayAttr([int_attr(c) for c in counts]),
                "accesses": ArrayAttr(
                    [Access.of(tuple(s[d] for d in keep), v.offset) for v, s in zip((a, b), accesses)]
                ),
            },
        )
        unsigned = "".join(name for v, name in ((a, "a"), (b, "b")) if v.dtype is torch.uint8)
        if unsigned and dtype is not torch.uint8:
            op.properties["unsigned"] = StringAttr(unsigned)
        precision = torch.get_float32_matmul_precision()
        if precision != "highest" and dtype == torch.float32:
            op.properties["precision"] = StringAttr(precision)
        if window is not None:
            op.properties["window"] = window.attribute
        self.add(op)
        return dense(op.results[0], domain[: len(domain) - counts[3]], dtype)

    def concat(self, pieces: Sequence[View], axis: int) -> View:
        """graph.concat of Views of one dtype along an axis."""
        if len(pieces) == 1:
            return pieces[0]
        extents = [p.shape[axis] for p in pieces]
        total: Dim = 0
        for e in extents:
            total = total + e
        shape = (*pieces[0].shape[:axis], total, *pieces[0].shape[axis + 1 :])
        keep = [d for d in range(len(shape)) if d == axis or shape[d] != 1]
        out = tuple(shape[d] for d in keep)
        op = graph.ConcatOp.create(
            operands=[p.base for p in pieces],
            result_types=[tensor_type(out, ELEMENT[pieces[0].dtype])],
            properties={
                "axis": int_attr(keep.index(axis)),
                "extents": Dims(tuple(extents)),
                "accesses": ArrayAttr([Access.of(tuple(p.strides[d] for d in keep), p.offset) for p in pieces]),
            },
        )
        self.block.add_op(op)
        return dense(op.results[0], shape, pieces[0].dtype)

    # -- values -------------------------------------------------------------------------------------------------------

    def fill(self, value: Any, shape: Sequence[Dim], dtype: torch.dtype) -> View:
        """A tensor of one known value: a scalar tensor seen through strides of 0."""
        if isinstance(value, Expr):
            scalar = self.map((), (), lambda b: b.dim_as(value, dtype), dtype)
            return moved(scalar, shape, (0,) * len(shape))
        known = convert(value, dtype)
        scalar = self.map((), (), lambda b: b.constant(known, dtype), dtype)
        return View(scalar.base, tuple(shape), (0,) * len(shape), 0, dtype, known)

    def dense(self, view: View, order: Sequence[int] | None = None) -> View:
        """The same values in a row-major tensor without gaps (in the given memory order of dims), copied if needed."""
        if order is None:
            size = view.base.type.dims.data  # type: ignore[attr-defined]
            if view.offset == 0 and is_dense(view.shape, view.strides) and product(size) == view.numel:
                return view
        key = moved(view, view.shape, view.strides) if order is None else None
        found = self._dense.get(key) if key is not None else None
        if found is None:
            found = self.map(view.shape, [view], lambda b, x: x, view.dtype, order)
            if key is not None:
                self._dense[key] = found
        return found

    def reshape(self, view: View, shape: Sequence[Dim]) -> View:
        """The elements in row-major order under another shape, copied only where strides cannot say it."""
        seen = try_reshape(view, shape)
        if seen is not None:
            return seen
        return moved(self.dense(view), shape, contiguous(shape))

    def pointwise(
        self,
        node: Node,
        body: Callable[..., SSAValue],
        operands: Sequence[Operand],
        compute: torch.dtype | Sequence[torch.dtype] | None = None,
        result: torch.dtype | None = None,
    ) -> View:
        """A map with the result that tracing promises. Operands are cast to `compute` (one dtype, or one an operand).

        compute: the dtype in which `body` works; the compute dtype of the result unless given. result: the dtype of
        what the body gives, `compute` unless given.
        """
        meta = self.meta(node)
        compute = compute or COMPUTE[meta.dtype]
        return self.elementwise(body, operands, compute, result, meta.shape, meta.dtype, meta.order)

    def elementwise(
        self,
        body: Callable[..., SSAValue],
        operands: Sequence[Operand],
        compute: torch.dtype | Sequence[torch.dtype],
        result: torch.dtype | None,
        shape: Sequence[Dim],
        dtype: torch.dtype,
        order: Sequence[int] | None = None,
    ) -> View:
        """`pointwise` with the result's shape and dtype given. Dims along which nothing varies are computed once."""
        each = [compute] * len(operands) if isinstance(compute, torch.dtype) else compute
        final = result or each[0]
        views = [expand(o, shape) for o in operands if isinstance(o, View) and o.fill is None]

        def whole(b: Body, *scalars: SSAValue) -> SSAValue:
            rest = iter(scalars)
            values = [_operand(b, o, c, rest) for o, c in zip(operands, each)]
            return b.store_cast(body(b, *values), final, dtype)

        constant = {d for d, n in enumerate(shape) if n != 1 and all(v.strides[d] == 0 for v in views)}
        if not constant or 0 in shape:
            return self.map(shape, views, whole, dtype, order)
        small = [1 if d in constant else n for d, n in enumerate(shape)]
        inner = self.map(small, [moved(v, small, v.strides) for v in views], whole, dtype, order)
        return moved(inner, shape, inner.strides)

    def cast(self, view: View, dtype: torch.dtype) -> View:
        """The values in another dtype; the same View where that is its dtype already."""
        if view.dtype is dtype:
            return view
        if view.fill is not None:
            return self.fill(view.fill, view.shape, dtype)
        source = view.dtype
        return self.elementwise(lambda b, x: b.cast(x, source, dtype), [view], source, dtype, view.shape, dtype)

    def random_source(self) -> tuple[View, int]:
        """The seed (a scalar int64 tensor) and the first counter of a new random operation."""
        if self.seed is None:
            argument = self.block.insert_arg(tensor_type((), i64), len(self.block.args))
            self.seed = dense(argument, (), torch.int64)
        self.randoms += 1
        return self.seed, (self.randoms - 1) * RANDOM_STRIDE


def _operand(b: Body, operand: Operand, compute: torch.dtype, scalars: Any) -> SSAValue:
    if isinstance(operand, View):
        if operand.fill is None:
            return b.cast(next(scalars), operand.dtype, compute)
        return b.constant(convert(operand.fill, compute), compute)
    if isinstance(operand, Expr):
        return b.dim_as(operand, compute)
    return b.constant(convert(operand, compute), compute)


def convert(value: Any, dtype: torch.dtype) -> bool | int | float:
    """A Python number as a tensor of `dtype` would hold it."""
    if dtype is torch.bool:
        return bool(value)
    if dtype in FLOATS:
        return ELEMENT[dtype].round(float(value))  # type: ignore[attr-defined]
    return int(value)
