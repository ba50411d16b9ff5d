"""Reference interpreter of the `graph` dialect in NumPy: slow on purpose only where speed would cost trust.

Bodies are evaluated once on whole arrays; sums and contractions accumulate in float64 and are rounded once, so that
the result is an oracle for generated code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from luban import symbolic
from luban.compiler.ir import graph
from luban.compiler.ir.attention_semantics import attention, attention_backward
from luban.compiler.ir.attributes import Access, Indirect, TensorType
from luban.compiler.ir.numeric_types import conform, from_array, is_float, numpy_dtype, unsigned_view, write_back
from luban.compiler.ir.scalar_semantics import evaluate, random
from luban.compiler.ir.window import inside, window_of
from luban.errors import ConfigError, LubanError, VerificationError

Shape = tuple[int, ...]


@dataclass
class Frame:
    """State of one run: symbols, values, how often each is still to be read, what is to be assigned."""

    symbols: Mapping[str, int]
    values: dict[SSAValue, Any] = field(default_factory=dict)
    reads: Counter[SSAValue] = field(default_factory=Counter)
    assigned: list[tuple[SSAValue, np.ndarray]] = field(default_factory=list)

    def take(self, value: SSAValue) -> Any:
        """Reads a value; forgets it after its last read, so that long programs do not hold every array."""
        found = self.values[value]
        self.reads[value] -= 1
        if self.reads[value] <= 0 and value in self.reads:
            del self.values[value], self.reads[value]
        return found

    def shape(self, dims: Sequence[symbolic.Dim]) -> Shape:
        return tuple(symbolic.evaluate(d, self.symbols) for d in dims)


def run_graph(module: Operation, inputs: Sequence[Any], symbols: Mapping[str, int] | None = None) -> list[np.ndarray]:
    """Runs the (first) graph.func of a module.

    inputs: NumPy arrays or torch tensors, one for each block argument, of its shape and element type (bf16 as float32
    or torch.bfloat16; see numeric_types). symbols: the value of each symbolic dim. Returns fresh arrays, one for each
    returned value, in the shape and order that graph.return gives them. graph.assign writes into the given inputs
    after everything has been read. Raises ConfigError for inputs that do not fit, VerificationError for a read outside
    a tensor, LubanError for a checked index out of range.
    """
    function = find_function(module)
    frame = Frame(dict(symbols or {}))
    _bind_inputs(function, inputs, frame)
    frame.reads = Counter(operand for op in function.walk() for operand in op.operands)
    outputs = run_block(function.body.block, frame)
    for target, value in frame.assigned:
        _assign(function, target, value, inputs)
    return outputs


def find_function(module: Operation) -> graph.FuncOp:
    """The first graph.func of a module (or the function itself). Raises ConfigError when there is none."""
    if isinstance(module, graph.FuncOp):
        return module
    for op in module.ops if isinstance(module, ModuleOp) else []:
        if isinstance(op, graph.FuncOp):
            return op
    raise ConfigError("the module holds no graph.func to interpret; give one that has not been lowered to kernels")


def _bind_inputs(function: graph.FuncOp, inputs: Sequence[Any], frame: Frame) -> None:
    arguments = function.body.block.args
    if len(inputs) != len(arguments):
        raise ConfigError(
            f"{function.sym_name.data} takes {len(arguments)} inputs, got {len(inputs)}; pass one an argument"
        )
    for i, (argument, given) in enumerate(zip(arguments, inputs, strict=False)):
        if not isinstance(argument.type, TensorType):
            frame.values[argument] = given
            continue
        array = from_array(given, argument.type.dtype, f"input {i} of {function.sym_name.data}")
        want = frame.shape(argument.type.shape)
        if array.shape != want:
            raise ConfigError(
                f"input {i} of {function.sym_name.data} has shape {array.shape}, the program wants {want}"
            )
        frame.values[argument] = array


def _assign(function: graph.FuncOp, target: SSAValue, value: np.ndarray, inputs: Sequence[Any]) -> None:
    arguments = list(function.body.block.args)
    if target not in arguments:
        raise VerificationError("graph.assign breaks its rule: it writes into an argument of its function")
    assert isinstance(target.type, TensorType)
    given = inputs[arguments.index(target)]
    write_back(
        given, value.reshape(tuple(given.shape)), target.type.dtype
    )  # the shapes may differ, the elements do not


def run_block(block: Block, frame: Frame) -> list[np.ndarray]:
    """Runs a function's or group's block; gives what it returned or yielded."""
    for op in block.ops:
        if isinstance(op, graph.YieldOp):
            return [frame.take(v) for v in op.values]
        if isinstance(op, graph.ReturnOp):
            return _returned(op, frame)
        if isinstance(op, graph.AssignOp):
            frame.assigned.append((op.target, np.array(frame.take(op.value))))
            continue
        rule = RULES.get(op.name)
        if rule is None:
            raise ConfigError(f"the graph interpreter cannot run {op.name}; give it a module before it is lowered")
        for result, value in zip(op.results, rule(op, frame), strict=False):
            if frame.reads[result]:
                frame.values[result] = value
    return []


def _returned(op: graph.ReturnOp, frame: Frame) -> list[np.ndarray]:
    outputs = []
    for value, dims, access in zip(op.values, op.shapes, op.accesses, strict=False):
        shape = frame.shape(dims.data)
        outputs.append(np.array(np.broadcast_to(view(op, frame.take(value), access, shape, frame), shape)))
    return outputs


def view(op: Operation, array: np.ndarray, access: Access, domain: Shape, frame: Frame) -> np.ndarray:
    """A dense array seen through an access over a domain; dims that the access does not move along have size 1.

    Raises VerificationError when a read would fall outside the array.
    """
    strides, offset = frame.shape(access.strides), symbolic.evaluate(access.offset, frame.symbols)
    shape = tuple(n if s else min(n, 1) for n, s in zip(domain, strides, strict=False))
    if 0 in domain:
        return np.empty(shape, array.dtype)
    ends = [s * (n - 1) for s, n in zip(strides, shape, strict=False)]
    low, high = offset + sum(e for e in ends if e < 0), offset + sum(e for e in ends if e > 0)
    if low < 0 or high >= array.size:
        raise VerificationError(
            f"{op.name} reads elements {low} to {high} of a tensor of {array.size} through {access}; keep it inside"
        )
    flat = np.ascontiguousarray(array).reshape(-1)[offset:]
    return as_strided(flat, shape, [s * array.itemsize for s in strides], writeable=False)


def operand_views(op: Operation, operands: Sequence[SSAValue], domain: Shape, frame: Frame) -> list[np.ndarray]:
    """What a body receives: a view for a linear operand, the whole tensor for an indirect one."""
    found = []
    for operand, access in zip(operands, op.properties["accesses"], strict=False):
        array = frame.take(operand)
        found.append(array if isinstance(access, Indirect) else view(op, array, access, domain, frame))
    return found


def run_body(op: Operation, arguments: Sequence[np.ndarray], domain: Shape, frame: Frame) -> list[np.ndarray]:
    """The yielded values of a scalar body for every point of the domain, as arrays that broadcast to it."""
    block = op.regions[0].block
    for argument, array in zip(block.args, arguments, strict=False):
        frame.values[argument] = array
    for inner in block.ops:
        if isinstance(inner, graph.YieldOp):
            return [frame.take(v) for v in inner.values]
        special = BODY_RULES.get(inner.name)
        operands = [frame.take(v) for v in inner.operands]
        results = special(inner, operands, domain, frame) if special else evaluate(inner, operands)
        for result, value in zip(inner.results, results, strict=False):
            frame.values[result] = value
    raise VerificationError(f"{op.name} breaks its rule: it ends its body with graph.yield")


def _index(op: graph.IndexOp, operands: list, domain: Shape, frame: Frame) -> list[np.ndarray]:
    d = op.dim.data
    if not 0 <= d < len(domain):
        raise VerificationError(f"graph.index breaks its rule: it names dim {d} of a domain of {len(domain)} dims")
    return [np.arange(domain[d], dtype=np.int64).reshape([-1 if i == d else 1 for i in range(len(domain))])]


def _dim(op: graph.DimOp, operands: list, domain: Shape, frame: Frame) -> list[np.ndarray]:
    return [np.asarray(frame.shape(op.value.data)[0], np.int64)]


def _load(op: graph.LoadOp, operands: list, domain: Shape, frame: Frame) -> list[np.ndarray]:
    table, index = operands[0].reshape(-1), np.asarray(operands[1])
    bad = (index < 0) | (index >= table.size)
    if bad.any():
        first = f"index {index[bad].flat[0]} of a tensor of {table.size} elements"
        if op.checked.value.data:
            raise LubanError(f"graph.load met {first}; the data that the indices come from is out of range")
        raise VerificationError(f"graph.load reads {first} and is not checked")
    return [table[index]]


def _random(op: graph.RandomOp, operands: list, domain: Shape, frame: Frame) -> list[np.ndarray]:
    return [conform(random(op.kind.data, operands[0], operands[1]), op.result.type)]


BODY_RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    "graph.index": _index,
    "graph.dim": _dim,
    "graph.load": _load,
    "graph.random": _random,
}


def _dense(array: np.ndarray, shape: Shape) -> np.ndarray:
    return np.ascontiguousarray(np.broadcast_to(array, shape)).reshape(shape)


def _map(op: graph.MapOp, frame: Frame) -> list[np.ndarray]:
    domain = frame.shape(op.domain.data)
    return [_dense(v, domain) for v in run_body(op, operand_views(op, op.ins, domain, frame), domain, frame)]


def _reduce(op: graph.ReduceOp, frame: Frame) -> list[np.ndarray]:
    domain = frame.shape(op.domain.data)
    kept = domain[: len(domain) - op.reduced.data]
    yielded = graph.yielded(op)
    values = run_body(op, operand_views(op, op.ins, domain, frame), domain, frame)
    flat = [np.broadcast_to(v, domain).reshape(*kept, int(np.prod(domain[len(kept) :]))) for v in values]
    return [reduce_last(v, k.data, y.type) for v, k, y in zip(flat, op.kinds, yielded, strict=False)]


def identity(kind: str, element: Attribute) -> Any:
    """The value that a reduction of nothing gives, e.g. -inf or the smallest integer for max; 0 for argmax."""
    dtype = numpy_dtype(element)
    if kind in ("max", "min"):
        if is_float(element):
            return -np.inf if kind == "max" else np.inf
        low, high = (False, True) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return low if kind == "max" else high
    if kind == "and":
        return True if dtype == np.bool_ else -1
    return 1 if kind == "mul" else 0


def reduce_last(array: np.ndarray, kind: str, element: Attribute) -> np.ndarray:
    """Reduces the last dim; floats accumulate in float64, integers wrap in their own type, NaN wins in max and min."""
    if kind in ("argmax", "argmin"):
        if array.shape[-1] == 0:
            return np.zeros(array.shape[:-1], np.int64)
        return np.asarray(getattr(np, kind)(array, axis=-1), np.int64)
    if array.shape[-1] == 0:
        return np.full(array.shape[:-1], identity(kind, element), numpy_dtype(element))
    wide = array.astype(np.float64) if is_float(element) else array
    with np.errstate(all="ignore"):
        return conform(REDUCERS[kind](wide), element)


def _wrapping(ufunc: Any, on_bool: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (on_bool if x.dtype == np.bool_ else ufunc).reduce(x, axis=-1, dtype=x.dtype)


REDUCERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "add": _wrapping(np.add, np.logical_xor),
    "mul": _wrapping(np.multiply, np.logical_and),
    "max": lambda x: np.maximum.reduce(x, axis=-1),
    "min": lambda x: np.minimum.reduce(x, axis=-1),
    "and": lambda x: np.bitwise_and.reduce(x, axis=-1),
    "or": lambda x: np.bitwise_or.reduce(x, axis=-1),
}


def _contract(op: graph.ContractOp, frame: Frame) -> list[np.ndarray]:
    domain = frame.shape(op.domain.data)
    nb, nm, nn, nk = (c.data for c in op.counts)
    batch, m, n, k = np.split(np.asarray(domain, np.int64), np.cumsum([nb, nm, nn]))
    sizes = [int(np.prod(part)) for part in (batch, m, n, k)]
    if 0 in domain[: nb + nm + nn]:
        return [np.zeros(frame.shape(op.out.type.shape), numpy_dtype(op.out.type.dtype))]
    left = view(op, frame.take(op.a), op.accesses.data[0], domain, frame)
    read = view if op.window is None else _windowed
    right = read(op, frame.take(op.b), op.accesses.data[1], domain, frame)
    left, right = unsigned_view(left, op.unsigned, "a"), unsigned_view(right, op.unsigned, "b")
    if op.element is not None:
        left, right = conform(left, op.element), conform(right, op.element)
    left = np.broadcast_to(left.reshape(_without(left.shape, nb + nm, nn)), (*batch, *m, *k))
    right = np.broadcast_to(right.reshape(_without(right.shape, nb, nm)), (*batch, *n, *k))
    wide = np.float64 if left.dtype.kind == "f" else numpy_dtype(op.out.type.dtype)
    a = left.reshape(sizes[0], sizes[1], sizes[3]).astype(wide)
    b = right.reshape(sizes[0], sizes[2], sizes[3]).astype(wide)
    with np.errstate(all="ignore"):
        product = np.matmul(a, b.transpose(0, 2, 1))
    return [conform(product.reshape(frame.shape(op.out.type.shape)), op.out.type.dtype)]


def _windowed(op: graph.ContractOp, array: np.ndarray, access: Access, domain: Shape, frame: Frame) -> np.ndarray:
    """The second operand of a convolution over (batch, 1, n, k), zeros outside its window."""
    nb, nm, nn, nk = (c.data for c in op.counts)
    at = np.full((), symbolic.evaluate(access.offset, frame.symbols), np.int64)
    sizes = [1 if nb <= d < nb + nm else n for d, n in enumerate(domain)]
    for d, stride in enumerate(frame.shape(access.strides)):
        at = at + (np.arange(sizes[d]) * stride).reshape([-1 if e == d else 1 for e in range(len(sizes))])
    held = inside(window_of(op.window), domain[nb + nm : nb + nm + nn], domain[nb + nm + nn :])
    at, held = np.broadcast_to(at, sizes), np.broadcast_to(held, sizes)
    if held.any() and (at[held].min() < 0 or at[held].max() >= array.size):
        raise VerificationError(f"{op.name} reads outside a tensor of {array.size} elements within its window")
    flat = np.ascontiguousarray(array).reshape(-1)
    return np.where(held, flat[np.where(held, at, 0)], flat.dtype.type(0)) if flat.size else np.zeros(sizes, flat.dtype)


def _without(shape: Shape, start: int, count: int) -> Shape:
    return shape[:start] + shape[start + count :]


def _scatter(op: graph.ScatterOp, frame: Frame) -> list[np.ndarray]:
    domain = frame.shape(op.domain.data)
    init = np.broadcast_to(frame.take(op.init), frame.shape(op.out.type.shape))
    position, value = run_body(op, operand_views(op, op.ins, domain, frame), domain, frame)
    positions = np.broadcast_to(position, domain).reshape(-1)
    values = np.broadcast_to(value, domain).reshape(-1)
    bad = (positions < 0) | (positions >= init.size)
    if bad.any():
        raise VerificationError(
            f"graph.scatter writes position {positions[bad][0]} of a tensor of {init.size} elements"
        )
    element = op.out.type.dtype
    wide = np.float64 if is_float(element) else init.dtype
    flat = init.reshape(-1).astype(wide)
    if op.kind.data == "set":
        flat[positions] = values
    else:
        with np.errstate(all="ignore"):
            SCATTERERS[op.kind.data].at(flat, positions, values.astype(wide))
    return [conform(flat, element).reshape(init.shape)]


SCATTERERS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _concat(op: graph.ConcatOp, frame: Frame) -> list[np.ndarray]:
    whole, axis = frame.shape(op.out.type.shape), op.axis.data
    pieces = []
    for operand, extent, access in zip(op.ins, frame.shape(op.extents.data), op.accesses, strict=False):
        shape = (*whole[:axis], extent, *whole[axis + 1 :])
        pieces.append(np.broadcast_to(view(op, frame.take(operand), access, shape, frame), shape))
    return [np.concatenate(pieces, axis=axis)]


def _attention_operands(op: Operation, domains: Sequence[Shape], frame: Frame) -> list[np.ndarray]:
    found = []
    for operand, access, shape in zip(op.operands, op.properties["accesses"], domains, strict=False):
        seen = view(op, frame.take(operand), access, shape, frame)
        found.append(np.broadcast_to(seen, shape).astype(np.float64))
    return found


def _attention(op: graph.AttentionOp, frame: Frame) -> list[np.ndarray]:
    b, h, q, k, d = frame.shape(op.domain.data)
    shared = graph.shared_heads(op)
    keys = (b, h // shared, k, d)
    arrays = _attention_operands(op, [(b, h, q, d), keys, keys, (b, h, q, k)], frame)
    arrays[1:3] = [np.repeat(x, shared, axis=1) for x in arrays[1:3]]
    results = attention(arrays, op.scale.value.data, bool(op.causal.value.data))
    return [conform(x, r.type.dtype) for x, r in zip(results, op.results, strict=False)]


def _attention_backward(op: graph.AttentionBackwardOp, frame: Frame) -> list[np.ndarray]:
    b, h, q, k, d = frame.shape(op.domain.data)
    shared = graph.shared_heads(op)
    rows, keys = (b, h, q, d), (b, h // shared, k, d)
    arrays = _attention_operands(op, [rows, rows, keys, keys, rows, (b, h, q), (b, h, q, k)], frame)
    arrays[2:4] = [np.repeat(x, shared, axis=1) for x in arrays[2:4]]
    grad_q, *others = attention_backward(arrays, op.scale.value.data, bool(op.causal.value.data))
    summed = [x.reshape(b, h // shared, shared, k, d).sum(axis=2) for x in others]
    return [conform(x, r.type.dtype) for x, r in zip((grad_q, *summed), op.results, strict=False)]


def _group(op: graph.GroupOp, frame: Frame) -> list[np.ndarray]:
    return run_block(op.body.block, frame)


RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    "graph.map": _map,
    "graph.reduce": _reduce,
    "graph.contract": _contract,
    "graph.scatter": _scatter,
    "graph.concat": _concat,
    "graph.attention": _attention,
    "graph.attention_backward": _attention_backward,
    "graph.group": _group,
}
