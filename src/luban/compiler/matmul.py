"""The product of two matrices as a `graph` module: what the step-by-step pipeline compiles. Knows no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ArrayAttr, IntAttr, ModuleOp, StringAttr
from xdsl.ir import Block, Region

from luban.compiler.ir import dtypes, graph
from luban.compiler.ir.attributes import Access, Dims, TensorType, contiguous
from luban.errors import ConfigError

INTEGERS = ("int8", "uint8")
DTYPES = ("float32", "float64", "bfloat16", "float16", *INTEGERS)


@dataclass(frozen=True)
class Matmul:
    """C (m, n) = A (m, k) @ B (k, n), all of one dtype (a name); sums in float32, in float64 for float64.

    8-bit integers, each operand with a sign or without, give int32.

    `precision` is torch's for float32 products. C is row-major, and so are A and B unless `a_turned` or `b_turned`: then
    their columns lie one after the other.
    """

    m: int
    n: int
    k: int
    dtype: str
    a_turned: bool = False
    b_turned: bool = False
    precision: str = "highest"
    b_dtype: str = ""  # that of A where it is not given

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Of A, B and C."""
        return self.dtype, self.b_dtype or self.dtype, "int32" if self.dtype in INTEGERS else self.dtype

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of A, B and C."""
        return (self.m, self.k), (self.k, self.n), (self.m, self.n)

    @property
    def strides(self) -> tuple[tuple[int, int], ...]:
        """Of A, B and C, in elements."""
        turned = (self.a_turned, self.b_turned, False)
        return tuple((1, s[0]) if t else (s[1], 1) for s, t in zip(self.shapes, turned, strict=True))

    def fits(self, other: Matmul) -> bool:
        """Whether both multiply the same shapes and dtypes, wherever their elements lie."""
        return (self.shapes, self.dtypes) == (other.shapes, other.dtypes)


def matmul_of(a: Any, b: Any) -> Matmul:
    """The problem of two torch tensors, NumPy arrays or (shape, dtype) pairs. Raises ConfigError for what has no kernel."""
    (left, dtype), (right, other) = _described(a, "A"), _described(b, "B")
    if dtype != other and not {dtype, other} <= set(INTEGERS):
        raise ConfigError(f"A is {dtype} and B is {other}; convert one of them to the other's dtype")
    if dtype not in DTYPES:
        known = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        raise ConfigError(f"a product of {dtype} matrices has no kernel; convert A and B to {known}")
    if left[1] != right[0]:
        raise ConfigError(
            f"A has {left[1]} columns and B has {right[0]} rows, which must be equal for A @ B; "
            f"check the shapes {left} and {right}"
        )
    return Matmul(left[0], right[1], left[1], dtype, _is_turned(a, left), _is_turned(b, right), _precision(), other)


def _precision() -> str:
    """What torch lets float32 products cost in precision, where torch is in use."""
    torch = sys.modules.get("torch")
    return "highest" if torch is None else torch.get_float32_matmul_precision()


def _is_turned(value: Any, shape: tuple[int, int]) -> bool:
    """Whether an operand is dense with its columns one after the other, as the transpose of a matrix is."""
    rows, columns = shape
    if rows == 1 or columns == 1 or not hasattr(value, "dtype"):
        return False
    if callable(getattr(value, "stride", None)):
        return tuple(value.stride()) == (1, rows)
    return getattr(value, "strides", None) == (value.itemsize, rows * value.itemsize)


def _described(value: Any, name: str) -> tuple[tuple[int, int], str]:
    """Shape and dtype name of an operand."""
    layout = str(getattr(value, "layout", "torch.strided")).removeprefix("torch.")
    if layout != "strided":
        raise ConfigError(f"{name} is a {layout} tensor; make it dense with .to_dense()")
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = value.shape, value.dtype
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        shape, dtype = value
    else:
        raise ConfigError(
            f"{name} is a {type(value).__name__}; pass a torch tensor, a NumPy array or a (shape, dtype) pair"
        )
    try:
        sizes = tuple(int(n) for n in shape)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} has the shape {shape!r}, which is not a list of numbers; pass (rows, columns)"
        ) from error
    if len(sizes) != 2 or min(sizes) < 1:
        raise ConfigError(f"{name} has the shape {sizes}; pass a matrix of at least one row and one column")
    return (sizes[0], sizes[1]), _dtype_name(dtype, name)


def _dtype_name(dtype: Any, name: str) -> str:
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError as error:
        raise ConfigError(f"{name} has the dtype {dtype!r}, which is unknown; use {', '.join(DTYPES)}") from error


def graph_module(problem: Matmul) -> ModuleOp:
    """The module: one function with one `graph.contract`."""
    elements = [dtypes.from_name(name) for name in problem.dtypes]
    a, b, c = (TensorType.of(shape, element) for shape, element in zip(problem.shapes, elements, strict=True))
    block = Block(arg_types=[a, b])
    for argument, hint in zip(block.args, "ab", strict=True):
        argument.name_hint = hint
    (a_m, a_k), (b_k, b_n), _ = problem.strides
    product = graph.ContractOp.create(
        operands=list(block.args),
        result_types=[c],
        properties={
            "domain": Dims((problem.m, problem.n, problem.k)),
            "counts": ArrayAttr([IntAttr(0), IntAttr(1), IntAttr(1), IntAttr(1)]),
            "accesses": ArrayAttr([Access.of((a_m, 0, a_k)), Access.of((0, b_n, b_k))]),
        },
    )
    product.out.name_hint = "c"
    if problem.dtype == "float32" and problem.precision != "highest":
        product.properties["precision"] = StringAttr(problem.precision)
    unsigned = "".join(name for name, dtype in zip("ab", problem.dtypes) if dtype == "uint8")
    if unsigned:
        product.properties["unsigned"] = StringAttr(unsigned)
    shown = {"shapes": ArrayAttr([c.dims]), "accesses": ArrayAttr([Access.of(contiguous(c.shape))])}
    block.add_ops([product, graph.ReturnOp.create(operands=[product.out], properties=shown)])
    properties = {"sym_name": StringAttr("matmul"), "symbols": ArrayAttr([])}
    return ModuleOp([graph.FuncOp.create(properties=properties, regions=[Region(block)])])


def metadata(problem: Matmul) -> dict[str, Any]:
    """How the program is called, in the form of `luban.runtime.program`."""
    a, b, c = (
        {"dtype": dtype, "shape": list(shape), "strides": list(strides)}
        for dtype, shape, strides in zip(problem.dtypes, problem.shapes, problem.strides, strict=True)
    )
    return {
        "symbols": [],
        "symbol_sources": {},
        "inputs": [{"kind": "tensor", **a}, {"kind": "tensor", **b}],
        "outputs": [{"kind": "buffer", **c, "offset": 0, "size": problem.m * problem.n, "pool": "own"}],
    }
