"""Reference interpreter of `tile` kernels in NumPy.

Loops run one iteration after another; a vector or parallel loop whose body is scalar work only runs all its iterations
at once as lanes: every scalar becomes an array with one leading axis a loop. Every access is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from xdsl.ir import Attribute, Block, Operation, SSAValue

from luban import symbolic
from luban.compiler.ir import tile
from luban.compiler.ir.attributes import BufferType, Dims
from luban.compiler.ir.interpret_graph import identity
from luban.compiler.ir.numeric_types import conform, from_array, is_float, numpy_dtype, poisoned, unsigned_view
from luban.compiler.ir.scalar_semantics import evaluate, random
from luban.compiler.ir.tile_memory import Memory, Pairs, pack, part_of, unpacked
from luban.compiler.ir.window import window_of
from luban.errors import ConfigError, LubanError, VerificationError

MOST_LANES = 1 << 20  # a loop with more lanes runs in pieces, so that memory stays bounded


def run_kernel(kernel: tile.KernelOp, buffers: Sequence[np.ndarray], symbols: Mapping[str, int] | None = None) -> None:
    """Runs one kernel on flat arrays, in place.

    buffers: one contiguous one-dimensional array for each buffer argument, of its element type (bf16 as float32 arrays
    of bf16 values, uint8 for i8 is accepted). Raises ConfigError for buffers that do not fit, VerificationError naming
    operation and index for an access outside a buffer, LubanError where tile.check fails.
    """
    machine = Machine(kernel, symbols or {})
    arguments = [a for a in kernel.body.block.args if isinstance(a.type, BufferType)]
    if len(arguments) != len(buffers):
        raise ConfigError(
            f"{kernel.sym_name.data} takes {len(arguments)} buffers, got {len(buffers)}; pass one an argument"
        )
    for i, (argument, given) in enumerate(zip(arguments, buffers, strict=False)):
        if given.ndim != 1 or not given.flags.c_contiguous:
            raise ConfigError(
                f"buffer {i} of {kernel.sym_name.data} is not a flat contiguous array; pass array.reshape(-1)"
            )
        array = from_array(given, argument.type.dtype, f"buffer {i} of {kernel.sym_name.data}")
        machine.values[argument] = Memory(array, argument.type.dtype, f"buffer {i} of {kernel.sym_name.data}")
    for argument, name in zip(kernel.body.block.args[len(arguments) :], kernel.symbols, strict=False):
        machine.values[argument] = np.int64(symbolic.evaluate(symbolic.symbol(name.data), machine.symbols))
    machine.block(kernel.body.block)
    for argument, given in zip(arguments, buffers, strict=False):
        array = machine.values[argument].array
        if not np.shares_memory(array, given):  # bf16 buffers are rounded into a copy
            given[...] = array


class Machine:
    """State of one run. `lanes` is the shape of the axes over which scalars are arrays now; () in plain execution."""

    def __init__(self, kernel: tile.KernelOp, symbols: Mapping[str, int]):
        self.kernel = kernel
        self.symbols = dict(symbols)
        self.values: dict[SSAValue, Any] = {}
        self.lanes: tuple[int, ...] = ()
        self._dims: dict[int, tuple[int, ...]] = {}
        self._simple: dict[Block, bool] = {}

    def dims(self, attribute: Dims) -> tuple[int, ...]:
        """The numbers of a list of dims under this run's symbols."""
        found = self._dims.get(id(attribute))
        if found is None:
            found = self._dims[id(attribute)] = tuple(symbolic.evaluate(d, self.symbols) for d in attribute.data)
        return found

    def block(self, block: Block) -> list[Any]:
        """Runs a block and gives what its tile.yield yields."""
        for op in block.ops:
            if isinstance(op, tile.YieldOp):
                return [self.values[v] for v in op.values]
            rule = RULES.get(op.name)
            operands = [self.values[v] for v in op.operands]
            results = evaluate(op, operands) if rule is None else rule(self, op, operands)
            for result, value in zip(op.results, results, strict=False):
                self.values[result] = value
        return []

    def position(self, op: tile.LoadOp | tile.StoreOp) -> np.ndarray:
        """The flat index that a load or store computes."""
        total: Any = np.int64(self.dims(op.offset)[0])
        for index, stride in zip(op.indices, self.dims(op.strides), strict=False):
            total = total + np.multiply(self.values[index], np.int64(stride))
        return np.asarray(total)

    def is_simple(self, root: Block) -> bool:
        """Whether a loop body may run as lanes: scalar work, loads, stores, loops whose bounds all lanes share."""
        found = self._simple.get(root)
        if found is None:
            found = self._simple[root] = self._is_simple(root, root)
        return found

    def _is_simple(self, block: Block, root: Block) -> bool:
        for op in block.ops:
            if isinstance(op, tile.ForOp):
                if None in (self.shared(op.lower, root), self.shared(op.upper, root)) or not self._is_simple(
                    op.body.block, root
                ):
                    return False
            elif op.name not in _LANE_OPS and op.name.split(".")[0] not in ("arith", "math"):
                return False
        return True

    def shared(self, value: SSAValue, root: Block) -> int | None:
        """The number that a loop bound has in every lane of the loop with body `root`; None where lanes differ."""
        if not _inside(value, root):
            return int(self.values[value])
        op = value.owner
        if isinstance(op, tile.DimOp):
            return self.dims(op.value)[0]
        if not isinstance(op, Operation) or not op.name.startswith("arith."):
            return None
        operands = [self.shared(v, root) for v in op.operands]
        if None in operands:
            return None
        return int(evaluate(op, [conform(x, v.type) for x, v in zip(operands, op.operands, strict=False)])[0])


_LANE_OPS = {"tile.yield", "tile.dim", "tile.load", "tile.store", "tile.check", "tile.random"}


def _inside(value: SSAValue, root: Block) -> bool:
    """Whether a value is defined in a block or anywhere below it."""
    block = value.owner if isinstance(value.owner, Block) else value.owner.parent_block()
    while block is not None and block is not root:
        parent = block.parent_op()
        block = parent.parent_block() if parent is not None else None
    return block is root


def _for(machine: Machine, op: tile.ForOp, operands: list[Any]) -> list[Any]:
    lower, upper, init = int(operands[0]), int(operands[1]), operands[2:]
    if upper <= lower:
        return init
    body = op.body.block
    if op.role.data in ("vector", "parallel") and (machine.lanes or machine.is_simple(body)):
        step = upper - lower if machine.lanes else max(1, MOST_LANES // _inner_lanes(machine, body, body))
        for begin in range(lower, upper, step):
            init = _lanes(machine, op, begin, min(upper, begin + step), init)
        return init
    for i in range(lower, upper):
        for argument, value in zip(body.args, [np.int64(i), *init], strict=False):
            machine.values[argument] = value
        init = machine.block(body)
    return init


def _inner_lanes(machine: Machine, block: Block, root: Block) -> int:
    """The largest number of lanes that one iteration of a simple block spreads over."""
    most = 1
    for op in block.ops:
        if isinstance(op, tile.ForOp):
            extent = (machine.shared(op.upper, root) or 0) - (machine.shared(op.lower, root) or 0)
            inner = _inner_lanes(machine, op.body.block, root)
            most = max(most, inner * (max(extent, 1) if op.role.data == "vector" else 1))
    return most


def _lanes(machine: Machine, op: tile.ForOp, begin: int, end: int, init: list[Any]) -> list[Any]:
    """Runs [begin, end) at once; what is carried starts from the identity in every lane and is combined at the end."""
    outer, arguments = machine.lanes, op.body.block.args
    kinds = [c.data for c in op.combines]
    machine.lanes = (end - begin, *outer)
    machine.values[arguments[0]] = np.arange(begin, end, dtype=np.int64).reshape(-1, *[1] * len(outer))
    unsigned = [getattr(v.owner, "name", "") in _UNSIGNED for v in op.body.block.last_op.operands]  # type: ignore[union-attr]
    for argument, kind, plain in zip(arguments[1:], kinds, unsigned, strict=True):
        start = {"max": 0, "min": -1}[kind] if plain else identity(kind, argument.type)
        machine.values[argument] = conform(start, argument.type)
    partial = [np.broadcast_to(v, machine.lanes) for v in machine.block(op.body.block)]
    machine.lanes = outer
    found = zip(kinds, init, partial, op.outs, unsigned, strict=True)
    return [combine_lanes(k, i, p, r.type, u) for k, i, p, r, u in found]


_UNSIGNED = ("arith.maxui", "arith.minui")  # a body that ends with one of them compares without sign


def combine_lanes(kind: str, init: Any, partial: np.ndarray, element: Attribute, unsigned: bool = False) -> np.ndarray:
    """init and the first axis of partial results combined; floats in float64, rounded once."""
    wide = np.float64 if is_float(element) else numpy_dtype(element)
    if unsigned:
        bits = np.dtype(f"u{np.dtype(wide).itemsize}")
        reduced = COMBINE[kind].reduce(partial.astype(wide).view(bits), axis=0)
        return COMBINE[kind](np.asarray(init).astype(wide).view(bits), reduced).view(wide)
    with np.errstate(all="ignore"):
        ufunc = COMBINE[kind] if numpy_dtype(element) != np.bool_ else _COMBINE_BOOL[kind]
        reduced = ufunc.reduce(partial.astype(wide), axis=0, dtype=wide)
        return conform(ufunc(np.asarray(init).astype(wide), reduced), element)


COMBINE: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_COMBINE_BOOL = COMBINE | {"add": np.logical_xor, "mul": np.logical_and}


def _dim(machine: Machine, op: tile.DimOp, operands: list[Any]) -> list[Any]:
    return [np.int64(machine.dims(op.value)[0])]


def _load(machine: Machine, op: tile.LoadOp, operands: list[Any]) -> list[Any]:
    memory: Memory = machine.values[op.buffer]
    position = machine.position(op)
    mask = None if op.mask is None else machine.values[op.mask]
    return [memory.load(position, mask, _where(machine, op))]


def _store(machine: Machine, op: tile.StoreOp, operands: list[Any]) -> list[Any]:
    memory: Memory = machine.values[op.buffer]
    position, value = machine.position(op), machine.values[op.value]
    mask = np.True_ if op.mask is None else machine.values[op.mask]
    kind = op.combine.data
    # A combining store counts once a lane, even where neither place nor value depends on the lane.
    shape = np.broadcast_shapes(
        position.shape, np.shape(value), np.shape(mask), machine.lanes if kind != "none" else ()
    )
    position, value, mask = (np.broadcast_to(x, shape).reshape(-1) for x in (position, value, mask))
    ufunc = None if kind == "none" else (_COMBINE_BOOL if memory.array.dtype == np.bool_ else COMBINE)[kind]
    memory.store(position[mask], value[mask], ufunc, _where(machine, op))
    return []


def _where(machine: Machine, op: Operation) -> Callable[[], str]:
    """Names an operation for a message; the text is made only when it is needed."""
    return lambda: f"{op.name} in kernel {machine.kernel.sym_name.data} ({str(op).splitlines()[0].strip()})"


def _alloc(machine: Machine, op: tile.AllocOp, operands: list[Any]) -> list[Any]:
    element, count = op.buffer.type.dtype, machine.dims(op.elements)[0]
    return [Memory(poisoned(count, element), element, f"a scratch buffer of {machine.kernel.sym_name.data}")]


def _check(machine: Machine, op: tile.CheckOp, operands: list[Any]) -> list[Any]:
    index, bound = np.asarray(operands[0]), machine.dims(op.bound)[0]
    bad = (index < 0) | (index >= bound)
    if bad.any():
        raise LubanError(
            f"{_where(machine, op)()} met index {index[bad].flat[0]} outside [0, {bound}); "
            "the data that indices come from is out of range"
        )
    return [index]


def _random(machine: Machine, op: tile.RandomOp, operands: list[Any]) -> list[Any]:
    return [conform(random(op.kind.data, operands[0], operands[1]), op.result.type)]


def _pack(machine: Machine, op: tile.PackOp, operands: list[Any]) -> list[Any]:
    source, base, outer, k, target, *at = operands
    where = _where(machine, op)
    s0, s1 = machine.dims(op.strides)
    positions = base + np.arange(outer)[:, None] * s0 + np.arange(k)[None, :] * s1
    loaded = source.load(positions, None, where)
    if op.unsigned is not None and loaded.dtype == np.int8:
        loaded = loaded.view(np.uint8)
    values = [conform(part_of(loaded, part), target.element) for part in op.parts_of]
    packed = pack(values, op.panel.data, op.kk.data, op.padding)
    target.store(np.arange(packed.size) + (at[0] if at else 0), packed, None, where)
    return []


def _patches(machine: Machine, op: tile.PatchesOp, operands: list[Any]) -> list[Any]:
    source, base, first, count, target = operands
    points, taps = machine.dims(op.points), machine.dims(op.taps)
    window, panel = window_of(op.window), op.panel.data
    flat = np.arange(count) + first
    where_n = np.unravel_index(flat, (max(int(points[0]), int(first + count)), *points[1:]))
    where_k = np.indices(taps).reshape(len(taps), -1)
    rows = np.tensordot(machine.dims(op.point_strides), where_n, 1)
    at = base + rows[:, None] + np.tensordot(machine.dims(op.tap_strides), where_k, 1)[None, :]
    held = np.ones(at.shape, bool)
    for n, k, *numbers in zip(
        where_n[len(points) - window.rank :], where_k[len(taps) - window.rank :], *vars(window).values(), strict=True
    ):
        extent, n_step, k_step, pad = numbers
        position = n[:, None] * n_step + k[None, :] * k_step - pad
        held &= (position >= 0) & (position < extent)
    values = conform(source.load(at, held, _where(machine, op)), target.element)
    packed = pack([values], panel, 1)
    target.store(np.arange(packed.size), packed, None, _where(machine, op))
    return []


def _dot(machine: Machine, op: tile.DotOp, operands: list[Any]) -> list[Any]:
    a, a_base, b, b_base = operands[:4]
    m, n, k = (int(x) for x in operands[4:7])
    left = _dot_operand(machine, op, a, int(a_base), (m, k), op.a_strides, op.a_panel.data, op.groups[0], k)
    room = k if op.b_depth is None else op.b_depth.data
    right = _dot_operand(machine, op, b, int(b_base), (n, k), op.b_strides, op.b_panel.data, op.groups[1], room)
    left, right = unsigned_view(left, op.unsigned, "a"), unsigned_view(right, op.unsigned, "b")
    acc_argument, i_argument, j_argument = op.body.block.args
    wide = np.float64 if is_float(acc_argument.type) else numpy_dtype(acc_argument.type)
    with np.errstate(all="ignore"):
        product = left.astype(wide) @ right.astype(wide).T
        if op.resumes is not None:
            product += operands[7].load(np.arange(m * n).reshape(m, n), None, _where(machine, op))
        product = conform(product, acc_argument.type)
    if op.keeps is not None:
        operands[7].store(np.arange(m * n), product.reshape(-1), None, _where(machine, op))
    if m == 0 or n == 0 or op.keeps is not None:
        return []
    if machine.is_simple(op.body.block):
        pieces: Any = [(product, np.arange(m).reshape(-1, 1), np.arange(n))]
        machine.lanes = (m, n)
    else:
        pieces = ((product[i, j], np.int64(i), np.int64(j)) for i in range(m) for j in range(n))
    for acc, i, j in pieces:
        machine.values[acc_argument], machine.values[i_argument], machine.values[j_argument] = acc, i, j
        machine.block(op.body.block)
    machine.lanes = ()
    return []


def _dot_operand(
    machine: Machine,
    op: tile.DotOp,
    memory: Memory,
    base: int,
    shape: tuple[int, int],
    strides: Dims,
    panel: int,
    kk: int,
    room: int,
) -> np.ndarray:
    """One operand of a dot as an (outer, k) array; its panels have room for so many values of k."""
    outer, k = shape
    if panel:
        positions = unpacked(outer, room, panel, kk, op.padding)[:, :k]
    else:
        s0, s1 = machine.dims(strides)
        positions = np.arange(outer)[:, None] * s0 + np.arange(k)[None, :] * s1
    return memory.load(base + positions, None, _where(machine, op))


def _nested_kernel(machine: Machine, op: Operation, operands: list[Any]) -> list[Any]:
    raise VerificationError(f"{op.name} breaks its rule: it stands at the top of a module")


RULES: dict[str, Callable[..., list[Any]]] = {
    "tile.for": _for,
    "tile.dim": _dim,
    "tile.load": _load,
    "tile.store": _store,
    "tile.alloc": _alloc,
    "tile.pairs": lambda _machine, _op, operands: [Pairs.of(operands[0])],
    "tile.check": _check,
    "tile.random": _random,
    "tile.pack": _pack,
    "tile.patches": _patches,
    "tile.dot": _dot,
    "tile.kernel": _nested_kernel,
}
