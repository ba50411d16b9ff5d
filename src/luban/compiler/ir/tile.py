"""The `tile` dialect: one kernel as loops with roles over flat buffers. It knows loops and memory, but no chip.

Scalars are `arith` and `math`; a loop's role says how its iterations may run, and a target's code generator decides
what that becomes: vector lanes and masks on a CPU, block dimensions and program ids in Triton.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp, StringAttr, UnitAttr, bf16, f32, i1, i32
from xdsl.ir import Dialect, Operation
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import IsTerminator, NoTerminator, Pure

from luban.compiler.ir.attributes import INDEX, BufferType, Dims
from luban.compiler.ir.rules import require, require_signs, verify_window

ROLES = ("serial", "parallel", "vector", "unroll")
COMBINES = ("add", "mul", "max", "min", "and", "or", "none")
RANDOMS = ("uniform", "normal", "bits")
ORDERS = ("columns", "rows")
PARTS = ("high", "low", "finite")


@irdl_op_definition
class YieldOp(IRDLOperation):
    """Ends a loop body with the next values of what the loop carries, or an epilogue."""

    name = "tile.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator())


@irdl_op_definition
class DimOp(IRDLOperation):
    """The value of a dim (a number or an expression in the kernel's symbols), as i64."""

    name = "tile.dim"
    value = prop_def(Dims)
    result = result_def(INDEX)
    traits = traits_def(Pure())

    def verify_(self) -> None:
        require(self, len(self.value.data) == 1, "gives one dim")


@irdl_op_definition
class ForOp(IRDLOperation):
    """for iv in [lower, upper): body. Block arguments: iv, then what is carried; results: the last carried values.

    role: "serial"; "parallel" (iterations are independent and may run on any thread; carries nothing; only at the top
    of a kernel); "vector" (iterations may run as lanes: each carried value is a reduction by its `combines` kind, which
    the lanes may reorder); "unroll" (serial with numbers as bounds, written out by the code generator).
    With combine "none" a carried value is an ordinary loop-carried scalar, which only serial and unroll loops may have.
    """

    name = "tile.for"
    lower = operand_def(INDEX)
    upper = operand_def(INDEX)
    init = var_operand_def()
    role = prop_def(StringAttr)
    combines = prop_def(ArrayAttr)
    outs = var_result_def()
    body = region_def("single_block")

    def verify_(self) -> None:
        require(self, self.role.data in ROLES, f"has a role among {', '.join(ROLES)}")
        types = [v.type for v in self.init]
        block = self.body.block
        require(
            self, [a.type for a in block.args] == [INDEX, *types], "passes its index and what it carries to its body"
        )
        require(self, isinstance(block.last_op, YieldOp), "ends its body with tile.yield")
        require(self, [v.type for v in block.last_op.operands] == types, "yields the next value of all that it carries")
        require(self, [r.type for r in self.outs] == types, "gives the last value of all that it carries")
        require(self, len(self.combines) == len(types), "names one combine for each carried value")
        require(
            self,
            all(isinstance(c, StringAttr) and c.data in COMBINES for c in self.combines),
            f"has combines among {', '.join(COMBINES)}",
        )
        if self.role.data == "parallel":
            require(
                self,
                not types and isinstance(self.parent_op(), KernelOp),
                "is parallel only at the top of a kernel and carries nothing",
            )
        if self.role.data == "vector":
            require(
                self, all(c.data != "none" for c in self.combines), "carries only reductions when it is a vector loop"
            )


@irdl_op_definition
class LoadOp(IRDLOperation):
    """buffer[offset + sum of stride * index], 0 where the optional i1 mask is false (memory is not read there).

    With `ahead` what lies further on may be fetched early.
    """

    name = "tile.load"
    buffer = operand_def(BufferType)
    indices = var_operand_def(INDEX)
    mask = opt_operand_def()
    strides = prop_def(Dims)
    offset = prop_def(Dims)
    ahead = opt_prop_def(UnitAttr)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def verify_(self) -> None:
        require(self, len(self.indices) == len(self.strides.data), "has one stride for each index")
        require(self, len(self.offset.data) == 1, "has one offset")
        require(self, self.mask is None or self.mask.type == i1, "has a mask of type i1")
        require(self, self.result.type == self.buffer.type.dtype, "gives its buffer's element type")


@irdl_op_definition
class StoreOp(IRDLOperation):
    """buffer[offset + sum of stride * index] = value, where the optional i1 mask is true.

    `combine` "none" overwrites; "add", "mul", "max", "min" combine with what is there, and lanes of one vector that hit
    the same place combine too (the code generator goes lane by lane). With `streams` whole vectors may go past the
    caches.
    """

    name = "tile.store"
    value = operand_def()
    buffer = operand_def(BufferType)
    indices = var_operand_def(INDEX)
    mask = opt_operand_def()
    strides = prop_def(Dims)
    offset = prop_def(Dims)
    combine = prop_def(StringAttr)
    streams = opt_prop_def(UnitAttr)
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    def verify_(self) -> None:
        require(self, len(self.indices) == len(self.strides.data), "has one stride for each index")
        require(self, len(self.offset.data) == 1, "has one offset")
        require(self, self.mask is None or self.mask.type == i1, "has a mask of type i1")
        require(self, self.value.type == self.buffer.type.dtype, "stores its buffer's element type")
        require(self, self.combine.data in COMBINES, f"has a combine among {', '.join(COMBINES)}")


@irdl_op_definition
class AllocOp(IRDLOperation):
    """Scratch memory of one iteration of the enclosing loop nest, on one thread; contents undefined."""

    name = "tile.alloc"
    elements = prop_def(Dims)
    buffer = result_def(BufferType)

    def verify_(self) -> None:
        require(self, len(self.elements.data) == 1, "has one number of elements")


@irdl_op_definition
class PairsOp(IRDLOperation):
    """The memory of a bfloat16 buffer as i32: element i is the elements 2 i (its low half) and 2 i + 1."""

    name = "tile.pairs"
    source = operand_def(BufferType)
    buffer = result_def(BufferType)

    def verify_(self) -> None:
        require(self, self.source.type.dtype == bf16, "takes a buffer of bfloat16")
        require(self, self.buffer.type.dtype == i32, "gives a buffer of i32")


@irdl_op_definition
class CheckOp(IRDLOperation):
    """index where 0 <= index < bound, else 0 with the run marked as failed (status bit 1)."""

    name = "tile.check"
    index = operand_def(INDEX)
    bound = prop_def(Dims)
    result = result_def(INDEX)

    def verify_(self) -> None:
        require(self, len(self.bound.data) == 1, "has one bound")


@irdl_op_definition
class RandomOp(IRDLOperation):
    """A Philox4x32-10 random number from a seed and a counter; kinds as in graph.random."""

    name = "tile.random"
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


def _require_padding(op: PackOp | DotOp, groups: tuple[int, ...]) -> None:
    whole = all(kk > 0 and op.padding % kk == 0 for kk in groups)
    require(op, op.padding > 0 and whole, "pads k to a multiple of the values that lie side by side")


@irdl_op_definition
class PackOp(IRDLOperation):
    """Copies an (outer, k) block into zero-padded panels: dst[outer // panel][k // kk][outer % panel][k % kk].

    The source element (i, p) is source[base + i * strides[0] + p * strides[1]]; it is converted to dst's element type.
    A panel holds k rounded up to a multiple of `k_multiple` (of kk where it is left out), zeros behind the last value.
    The first panel starts at element `target_base` of dst, at 0 where that is left out.

    Given `parts`, a panel holds several of the bfloat16 parts of float32 or float16 values one after the other, each
    with all of k: "high" (the value rounded to bfloat16, at most the largest), "low" (what that leaves, rounded) and
    "finite" (the high part); the last two are 0 for an infinity or NaN. A dot over all of them multiplies part by part.
    Integers that dst holds in more bits are extended by their sign, by zeros where they are `unsigned`.
    """

    name = "tile.pack"
    source = operand_def(BufferType)
    base = operand_def(INDEX)
    outer = operand_def(INDEX)
    k = operand_def(INDEX)
    target = operand_def(BufferType)
    target_base = opt_operand_def(INDEX)
    strides = prop_def(Dims)
    panel = prop_def(IntAttr)
    kk = prop_def(IntAttr)
    k_multiple = opt_prop_def(IntAttr)
    parts = opt_prop_def(ArrayAttr)
    unsigned = opt_prop_def(UnitAttr)

    @property
    def padding(self) -> int:
        """What k is rounded up to a multiple of."""
        return self.kk.data if self.k_multiple is None else self.k_multiple.data

    @property
    def parts_of(self) -> tuple[str, ...]:
        """The names of what a panel holds; "whole" is the values themselves."""
        return ("whole",) if self.parts is None else tuple(p.data for p in self.parts)

    def verify_(self) -> None:
        require(self, len(self.strides.data) == 2, "has two strides: outer and k")
        require(self, self.parts is None or set(self.parts_of) <= set(PARTS), f"has parts among {', '.join(PARTS)}")
        require(self, self.panel.data > 0 and self.kk.data > 0, "has a panel and a kk of at least 1")
        _require_padding(self, (self.kk.data,))


@irdl_op_definition
class PatchesOp(IRDLOperation):
    """Copies patches of a padded image into panels: the columns of a convolution, a block of them at a time.

    A column is a point (a flat index into `points`, from `first` on, `count` of them), a row one of `taps`, both row-major.
    Element (i, p) of the matrix lies at base + point * point_strides + tap * tap_strides; it counts as 0 where it falls
    outside the `window` (see graph.contract; n_step belongs to the last points, k_step to the last taps). It goes to
    dst[i // panel][p][i % panel], converted to dst's element type; what a panel has behind the last column is 0.
    """

    name = "tile.patches"
    source = operand_def(BufferType)
    base = operand_def(INDEX)
    first = operand_def(INDEX)
    count = operand_def(INDEX)
    target = operand_def(BufferType)
    points = prop_def(Dims)
    point_strides = prop_def(Dims)
    taps = prop_def(Dims)
    tap_strides = prop_def(Dims)
    window = prop_def(ArrayAttr)
    panel = prop_def(IntAttr)

    def verify_(self) -> None:
        sizes, steps = (self.points, self.taps), (self.point_strides, self.tap_strides)
        same = all(len(n.data) == len(s.data) for n, s in zip(sizes, steps, strict=True))
        require(self, same, "has one stride for each dim of its points and taps")
        known = all(isinstance(n, int) for n in (*self.points.data[1:], *self.taps.data))
        require(self, known, "has numbers as sizes, but for the first of its points")
        require(self, self.panel.data > 0, "has a panel of at least 1")
        verify_window(self, self.window, min(len(self.points.data), len(self.taps.data)))


@irdl_op_definition
class DotOp(IRDLOperation):
    """acc[i, j] = sum over p < k of a(i, p) * b(p, j), i < m, j < n; body(acc, i, j) uses it.

    An operand is strided, element (i, p) at base + i * strides[0] + p * strides[1] - for b, element (p, j) at
    base + j * strides[0] + p * strides[1] - or, with panel > 0, packed as tile.pack writes it: with kk values of k side
    by side (`a_kk` in panels of a, where that is given) and `k_multiple` as tile.pack has it. Panels of b have room for
    `b_depth` values of k, for k of them where it is left out.
    Sums accumulate in the type that the body receives: float32, float64 for float64 operands, or int32 for 8- and 16-bit
    integers, which wraps; `unsigned` ("a", "b" or "ab") names the operands whose 8-bit integers have no sign. `unit`
    names the target's dot unit; rows and columns give the register tile. The body runs once for each (i, j), in any order, with j
    as lanes; it must not carry anything.

    `partial` is scratch for sums, in a layout of the code generator's own: at least m x n accumulators, rounded up to
    whole register tiles. Given `depth`, the sums are built in passes over that many values of k, between which they
    wait there. With `keeps` they stay there instead of reaching the body, and with `resumes` they begin with what the
    dot before kept there, which has the same n and register tile, and as many rows or a part of them. `order` says
    which tiles come one after the other: those of a column of them ("columns", where it is left out) or of a row
    ("rows").
    """

    name = "tile.dot"
    a = operand_def(BufferType)
    a_base = operand_def(INDEX)
    b = operand_def(BufferType)
    b_base = operand_def(INDEX)
    m = operand_def(INDEX)
    n = operand_def(INDEX)
    k = operand_def(INDEX)
    a_strides = prop_def(Dims)
    b_strides = prop_def(Dims)
    a_panel = prop_def(IntAttr)
    b_panel = prop_def(IntAttr)
    kk = prop_def(IntAttr)
    a_kk = opt_prop_def(IntAttr)
    k_multiple = opt_prop_def(IntAttr)
    b_depth = opt_prop_def(IntAttr)
    unsigned = opt_prop_def(StringAttr)
    unit = prop_def(StringAttr)
    rows = prop_def(IntAttr)
    columns = prop_def(IntAttr)
    partial = opt_operand_def(BufferType)
    depth = opt_prop_def(IntAttr)
    keeps = opt_prop_def(UnitAttr)
    resumes = opt_prop_def(UnitAttr)
    order = opt_prop_def(StringAttr)
    body = region_def("single_block")

    @property
    def groups(self) -> tuple[int, int]:
        """Values of k side by side in packed panels of a and of b."""
        return self.kk.data if self.a_kk is None else self.a_kk.data, self.kk.data

    @property
    def padding(self) -> int:
        """What k is rounded up to a multiple of in packed panels."""
        return self.kk.data if self.k_multiple is None else self.k_multiple.data

    def verify_(self) -> None:
        require(self, len(self.a_strides.data) == len(self.b_strides.data) == 2, "has two strides for each operand")
        require_signs(self)
        packed = self.a_panel.data > 0 or self.b_panel.data > 0
        require(self, not packed or self.kk.data > 0, "has a kk of at least 1 where an operand is packed")
        if packed:
            panels = (self.a_panel.data, self.b_panel.data)
            _require_padding(self, tuple(kk for kk, panel in zip(self.groups, panels, strict=True) if panel > 0))
        types = [a.type for a in self.body.block.args]
        require(
            self, len(types) == 3 and types[1:] == [INDEX, INDEX], "passes the sum and its row and column to its body"
        )
        require(self, isinstance(self.body.block.last_op, YieldOp), "ends its body with tile.yield")
        waits = (self.depth, self.keeps, self.resumes)
        require(self, self.partial is not None or not any(waits), "has a partial where its sums wait")
        require(self, self.partial is None or self.partial.type.dtype == types[0], "has a partial of its sums' type")
        depth = self.padding if self.depth is None else self.depth.data
        require(self, depth > 0 and depth % self.padding == 0, "has a depth of whole groups of k")
        require(self, self.order is None or self.order.data in ORDERS, f"has an order among {', '.join(ORDERS)}")


@irdl_op_definition
class KernelOp(IRDLOperation):
    """One kernel: block arguments are its buffers and then, as i64, its symbols in the order of `symbols`."""

    name = "tile.kernel"
    sym_name = prop_def(StringAttr)
    symbols = prop_def(ArrayAttr)
    body = region_def("single_block")
    traits = traits_def(NoTerminator())

    def verify_(self) -> None:
        types = [a.type for a in self.body.block.args]
        buffers = len(types) - len(self.symbols)
        require(self, all(isinstance(t, BufferType) for t in types[: max(buffers, 0)]), "takes its buffers first")
        require(
            self,
            buffers >= 0 and types[buffers:] == [INDEX] * len(self.symbols),
            "takes one i64 for each of its symbols last",
        )


def find_kernels(module: Operation) -> list[KernelOp]:
    """The kernels of a module, in order."""
    return [op for op in module.ops if isinstance(op, KernelOp)] if isinstance(module, ModuleOp) else []


TILE = Dialect(
    "tile",
    [YieldOp, DimOp, ForOp, LoadOp, StoreOp, AllocOp, PairsOp, CheckOp, RandomOp, PackOp, PatchesOp, DotOp, KernelOp],
    [BufferType],
)
