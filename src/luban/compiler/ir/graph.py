"""The `graph` dialect: pure tensor programs that know no chip.

Every tensor is dense and row-major; an operation reads its operands through linear accesses over its own iteration
domain, so that views (transpose, slice, expand, most reshapes) cost no operation. Bodies are scalar `arith` and `math`.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, BoolAttr, IntAttr, StringAttr, f32
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import IsTerminator, Pure

from luban.compiler.ir.attributes import INDEX, Access, Dims, Indirect, TensorType
from luban.compiler.ir.dtypes import bytes_of, is_float
from luban.compiler.ir.graph_attention import AttentionBackwardOp, AttentionOp, key_heads, shared_heads
from luban.compiler.ir.rules import (
    require,
    require_signs,
    verify_accesses,
    verify_body,
    verify_results,
    verify_window,
)
from luban.symbolic import product

REDUCTIONS = ("add", "mul", "max", "min", "and", "or", "argmax", "argmin")
SCATTERS = ("add", "mul", "max", "min", "set")
RANDOMS = ("uniform", "normal", "bits")
TURN = "turn"  # an attribute, a number: the operation's kernel runs after those of all operations with lower ones


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends a body with its scalars, or a group with its tensors."""

    name = "graph.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator())


@irdl_op_definition
class IndexOp(IRDLOperation):
    """The iteration index along one dimension of the enclosing operation's domain, as i64."""

    name = "graph.index"
    dim = prop_def(IntAttr)
    result = result_def(INDEX)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        parent = self.parent_op()
        if parent is not None:
            domain = parent.properties.get("domain")
            require(self, isinstance(domain, Dims), "stands in the body of an operation with a domain")
            require(self, 0 <= self.dim.data < len(domain.data), "names a dim of the domain")


@irdl_op_definition
class DimOp(IRDLOperation):
    """The value of a symbolic dim inside a body, as i64."""

    name = "graph.dim"
    value = prop_def(Dims)
    result = result_def(INDEX)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, len(self.value.data) == 1, "gives one dim")


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Inside a body: the element of an indirect operand at a computed flat index.

    With `checked`, an index outside the tensor marks the run as failed and reads element 0 instead of stray memory.
    """

    name = "graph.load"
    table = operand_def()
    index = operand_def(INDEX)
    checked = prop_def(BoolAttr)
    result = result_def()

    def verify_(self) -> None:
        require(
            self,
            isinstance(self.table.type, TensorType),
            "reads a tensor that the body receives whole (an indirect operand)",
        )
        require(self, self.result.type == self.table.type.dtype, "gives the element type of its table")


@irdl_op_definition
class RandomOp(IRDLOperation):
    """Inside a body: a Philox4x32-10 random number from a seed (i64) and a counter (i64).

    kind is "uniform" (float32 in [0, 1)), "normal" (float32, Box-Muller) or "bits" (32 random bits in an i64).
    """

    name = "graph.random"
    kind = prop_def(StringAttr)
    seed = operand_def(INDEX)
    counter = operand_def(INDEX)
    result = result_def()
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, self.kind.data in RANDOMS, f"has a kind among {', '.join(RANDOMS)}")
        require(
            self,
            self.result.type == (INDEX if self.kind.data == "bits" else f32),
            "gives f32, or i64 when its kind is bits",
        )


@irdl_op_definition
class MapOp(IRDLOperation):
    """Pointwise: results[d] = body(operands at their accesses of d) for every d in the domain."""

    name = "graph.map"
    ins = var_operand_def()
    domain = prop_def(Dims)
    accesses = prop_def(ArrayAttr)
    outs = var_result_def(TensorType)
    body = region_def("single_block")
    traits = traits_def(Pure())

    def verify_(self) -> None:
        verify_accesses(self, self.ins, self.accesses, self.domain)
        verify_body(self, self.ins, self.accesses)
        verify_results(self, self.domain.data, [v.type for v in yielded(self)])


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """Reduction over the last `reduced` dims of the domain of what the body yields; one kind a result.

    Sums accumulate in the yielded type. argmax and argmin give the first flat position in the reduced dims, as i64.
    """

    name = "graph.reduce"
    ins = var_operand_def()
    domain = prop_def(Dims)
    reduced = prop_def(IntAttr)
    kinds = prop_def(ArrayAttr)
    accesses = prop_def(ArrayAttr)
    outs = var_result_def(TensorType)
    body = region_def("single_block")
    traits = traits_def(Pure())

    def verify_(self) -> None:
        verify_accesses(self, self.ins, self.accesses, self.domain)
        verify_body(self, self.ins, self.accesses)
        require(
            self,
            0 < self.reduced.data <= len(self.domain.data),
            "reduces at least one and at most all dims of its domain",
        )
        require(self, len(self.kinds) == len(self.outs), "names one kind for each result")
        require(self, len(self.kinds) == len(yielded(self)), "yields one value for each result")
        types = []
        for kind, value in zip(self.kinds, yielded(self), strict=True):
            require(
                self,
                isinstance(kind, StringAttr) and kind.data in REDUCTIONS,
                f"has kinds among {', '.join(REDUCTIONS)}",
            )
            types.append(INDEX if kind.data.startswith("arg") else value.type)
        verify_results(self, self.parallel, types)

    @property
    def parallel(self) -> tuple:
        """The dims that remain."""
        return self.domain.data[: len(self.domain.data) - self.reduced.data]


@irdl_op_definition
class ContractOp(IRDLOperation):
    """out[b, m, n] = sum over k of a * b, accumulated in float32 (float64 in its own type, integers in the result's).

    `counts` says how many dims of the domain are batch, m, n and k, in this order; the result is row-major over
    (batch, m, n). Convolutions without padding are contractions too: an access may stride one operand by several dims.
    `element`, where given, is the float type to which both operands are converted before they are multiplied.
    `precision` "high" or "medium" lets a target multiply float32 as sums of two bfloats, or rounded to bfloat16, where
    that is faster; the interpreter multiplies exactly.
    Integers are widened to the result's type and wrap there; `unsigned` ("a", "b" or "ab") names the operands without
    a sign.
    `window` makes a contraction a convolution with padding: four lists (extent, n_step, k_step, pad) of one number for
    each spatial dim, which are the last dims of n and of k. `b` counts as 0, and is not read, where the position
    n_step * n + k_step * k - pad lies outside [0, extent) along any of them. The result of such a contraction may have all
    dims of n in one.
    """

    name = "graph.contract"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    domain = prop_def(Dims)
    counts = prop_def(ArrayAttr)
    accesses = prop_def(ArrayAttr)
    element = opt_prop_def(Attribute)
    precision = opt_prop_def(StringAttr)
    unsigned = opt_prop_def(StringAttr)
    window = opt_prop_def(ArrayAttr)
    out = result_def(TensorType)
    traits = traits_def(Pure())

    @property
    def multiplied(self) -> Attribute:
        """The element type in which the operands are multiplied."""
        return self.a.type.dtype if self.element is None else self.element  # type: ignore[attr-defined]

    def verify_(self) -> None:
        read = [self.a] if self.window else [self.a, self.b]
        verify_accesses(self, read, ArrayAttr(self.accesses.data[: len(read)]), self.domain)
        require(
            self,
            len(self.counts) == 4 and all(isinstance(c, IntAttr) for c in self.counts),
            "has four counts: batch, m, n and k",
        )
        require(self, all(isinstance(a, Access) for a in self.accesses), "reads both operands through #graph.access")
        require(
            self,
            self.precision is None or self.precision.data in ("highest", "high", "medium"),
            "has a precision among highest, high, medium",
        )
        require_signs(self)
        nb, nm, nn, nk = (c.data for c in self.counts)
        require(self, nb + nm + nn + nk == len(self.domain.data), "counts every dim of its domain once")
        if self.window is not None:
            verify_window(self, self.window, min(nn, nk))
        shape = self.domain.data[: nb + nm + nn]
        if self.window is not None and len(self.out.type.shape) == nb + nm + 1:
            shape = (*shape[: nb + nm], product(shape[nb + nm :]))
        verify_results(self, shape, [self.out.type.dtype])
        for access, zero, what in (
            (self.accesses.data[0], range(nb + nm, nb + nm + nn), "n"),
            (self.accesses.data[1], range(nb, nb + nm), "m"),
        ):
            require(
                self,
                all(access.strides[i] == 0 for i in zero),
                f"has one operand that does not move along its {what} dims",
            )


@irdl_op_definition
class ScatterOp(IRDLOperation):
    """A copy of `init`, or one number everywhere, combined at computed flat positions with values.

    The body yields (position, value). Duplicate positions combine in domain order; with kind "set" the last one stays.
    Values combine in the type of `init` and are rounded once where the result's floats are narrower.
    """

    name = "graph.scatter"
    init = operand_def(TensorType)
    ins = var_operand_def()
    domain = prop_def(Dims)
    kind = prop_def(StringAttr)
    accesses = prop_def(ArrayAttr)
    out = result_def(TensorType)
    body = region_def("single_block")
    traits = traits_def(Pure())

    def verify_(self) -> None:
        verify_accesses(self, self.ins, self.accesses, self.domain)
        verify_body(self, self.ins, self.accesses)
        require(self, self.kind.data in SCATTERS, f"has a kind among {', '.join(SCATTERS)}")
        whole = self.init.type.shape in ((), self.out.type.shape)
        require(self, whole, "has an init of its result's shape, or one number")
        wide, narrow = self.init.type.dtype, self.out.type.dtype
        require(
            self, wide == narrow or is_narrowing(wide, narrow), "gives elements like its init's, or narrower floats"
        )
        require(self, len(yielded(self)) == 2, "yields a position and a value")
        position, value = yielded(self)
        require(
            self,
            position.type == INDEX and value.type == wide,
            "yields an i64 position and a value of its init's element type",
        )


def is_narrowing(wide: Attribute, narrow: Attribute) -> bool:
    """Whether one float type rounds to another."""
    return is_float(wide) and is_float(narrow) and bytes_of(narrow) < bytes_of(wide)


@irdl_op_definition
class ConcatOp(IRDLOperation):
    """Pieces joined along one axis of the result; piece i covers `extents[i]` of it and is read through its access."""

    name = "graph.concat"
    ins = var_operand_def(TensorType)
    axis = prop_def(IntAttr)
    extents = prop_def(Dims)
    accesses = prop_def(ArrayAttr)
    out = result_def(TensorType)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(
            self,
            len(self.ins) == len(self.accesses) == len(self.extents.data),
            "has one access and one extent for each piece",
        )
        rank = len(self.out.type.shape)
        require(self, 0 <= self.axis.data < rank, "joins along an axis of its result")
        require(
            self,
            sum(self.extents.data) == self.out.type.shape[self.axis.data],
            "has extents that add up to the result's axis",
        )
        require(
            self,
            all(v.type.dtype == self.out.type.dtype for v in self.ins),
            "joins pieces of its result's element type",
        )
        for piece, extent, access in zip(self.ins, self.extents.data, self.accesses, strict=True):
            shape = list(self.out.type.shape)
            shape[self.axis.data] = extent
            verify_accesses(self, [piece], ArrayAttr([access]), Dims(tuple(shape)))


@irdl_op_definition
class AssignOp(IRDLOperation):
    """Writes a value into a function argument's memory, after every read of the old value (parameters, buffers)."""

    name = "graph.assign"
    target = operand_def(TensorType)
    value = operand_def(TensorType)

    def verify_(self) -> None:
        a, b = self.target.type, self.value.type
        require(self, a.dtype == b.dtype, "assigns a value of its target's element type")
        require(self, product(a.shape) == product(b.shape), "assigns as many elements as its target has")
        block = self.target.owner
        in_function = isinstance(block, Block) and (block.parent_op() is None or isinstance(block.parent_op(), FuncOp))
        require(self, in_function, "writes into an argument of its function")


@irdl_op_definition
class GroupOp(IRDLOperation):
    """Operations that become one kernel. Reads values from outside directly; yields what others need."""

    name = "graph.group"
    label = prop_def(StringAttr)
    outs = var_result_def(TensorType)
    body = region_def("single_block")
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, [r.type for r in self.outs] == [v.type for v in yielded(self)], "yields what its results promise")


@irdl_op_definition
class ReturnOp(IRDLOperation):
    """Ends a function: each value with the shape and access under which the caller sees it."""

    name = "graph.return"
    values = var_operand_def(TensorType)
    shapes = prop_def(ArrayAttr)
    accesses = prop_def(ArrayAttr)
    traits = traits_def(IsTerminator())

    def verify_(self) -> None:
        require(
            self,
            len(self.values) == len(self.shapes) == len(self.accesses),
            "has one shape and one access for each value",
        )
        for value, shape, access in zip(self.values, self.shapes, self.accesses, strict=True):
            require(
                self,
                isinstance(shape, Dims) and isinstance(access, Access),
                "shows values through #graph.dims and #graph.access",
            )
            verify_accesses(self, [value], ArrayAttr([access]), shape)


@irdl_op_definition
class FuncOp(IRDLOperation):
    """A tensor program: block arguments are its inputs; `symbols` names the dims unknown until run time."""

    name = "graph.func"
    sym_name = prop_def(StringAttr)
    symbols = opt_prop_def(ArrayAttr)
    body = region_def("single_block")

    def verify_(self) -> None:
        require(self, isinstance(self.body.block.last_op, ReturnOp), "ends with graph.return")


def yielded(op: Operation) -> Sequence[SSAValue]:
    """What the body of a map, reduce, scatter or group yields."""
    last = op.regions[0].block.last_op
    require(op, isinstance(last, YieldOp), "ends its body with graph.yield")
    return last.operands


GRAPH = Dialect(
    "graph",
    [
        YieldOp,
        IndexOp,
        DimOp,
        LoadOp,
        RandomOp,
        MapOp,
        ReduceOp,
        ContractOp,
        ScatterOp,
        ConcatOp,
        AttentionOp,
        AttentionBackwardOp,
    ]
    + [AssignOp, GroupOp, ReturnOp, FuncOp],
    [Dims, Access, Indirect, TensorType],
)

__all__ = ["GRAPH", "Attribute", "Region", "key_heads", "shared_heads", "yielded"]
