"""How IR element types look in NumPy, and conversions from and to torch tensors.

NumPy has no bfloat16: such arrays are float32 arrays that hold only bfloat16 values; the IR type tells them apart.
An unsigned 8-bit tensor is i8 in the IR, so its bits are viewed as int8 here. Torch is imported only when it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, Float64Type, IndexType, IntegerType
from xdsl.ir import Attribute

from luban.errors import ConfigError

_FLOATS: dict[type, np.dtype] = {
    Float64Type: np.dtype(np.float64),
    Float32Type: np.dtype(np.float32),
    Float16Type: np.dtype(np.float16),
    BFloat16Type: np.dtype(np.float32),
    IndexType: np.dtype(np.int64),
}
_INTEGERS = {
    1: np.dtype(bool),
    8: np.dtype(np.int8),
    16: np.dtype(np.int16),
    32: np.dtype(np.int32),
    64: np.dtype(np.int64),
}


def numpy_dtype(element: Attribute) -> np.dtype:
    """The NumPy dtype that holds an IR element type. Raises ConfigError for a type without one."""
    found = _INTEGERS.get(element.width.data) if isinstance(element, IntegerType) else _FLOATS.get(type(element))
    if found is None:
        raise ConfigError(
            f"the element type {element} has no NumPy form; interpret programs of floats, integers and i1 only"
        )
    return found


def is_float(element: Attribute) -> bool:
    """Whether an IR element type is a floating-point one."""
    return isinstance(element, (Float64Type, Float32Type, Float16Type, BFloat16Type))


def round_to_bf16(values: Any) -> np.ndarray:
    """float32 values rounded to the nearest bfloat16 (ties to even), as float32; NaN stays, overflow is infinite."""
    wide = np.asarray(values, dtype=np.float32)
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(wide), np.float32(np.nan), rounded)


def conform(values: Any, element: Attribute) -> np.ndarray:
    """Values as an array of an IR element type: floats rounded, integers wrapped, i1 the lowest bit of an integer."""
    array = np.asarray(values)
    if isinstance(element, BFloat16Type):
        return round_to_bf16(array)
    dtype = numpy_dtype(element)
    if array.dtype == dtype:
        return array
    if dtype == np.bool_:
        return (array & 1) != 0
    return array.astype(dtype)


def poisoned(count: int, element: Attribute) -> np.ndarray:
    """Undefined contents: values that show in a result where they are read before the first write."""
    dtype = numpy_dtype(element)
    poison: Any = np.nan if is_float(element) else (True if dtype == np.bool_ else np.iinfo(dtype).max - 21)
    return np.full(count, poison, dtype)


def unsigned_view(values: np.ndarray, unsigned: Any, name: str) -> np.ndarray:
    """8-bit integers read without a sign where `unsigned` (a StringAttr or None) lists the operand `name`."""
    listed = unsigned is not None and name in unsigned.data
    return values.view(np.uint8) if listed and values.dtype == np.int8 else values


def from_array(value: Any, element: Attribute, what: str = "the array") -> np.ndarray:
    """A NumPy array or torch tensor as a contiguous array of an IR element type, without changing its values.

    A float32 array is accepted for bf16 (and rounded), uint8 for i8. Shares memory where it can. Raises ConfigError
    naming `what` when the dtype does not match.
    """
    array = _torch_to_numpy(value) if _is_torch(value) else np.asarray(value)
    want = numpy_dtype(element)
    if array.dtype == np.uint8 and want == np.int8:
        array = array.view(np.int8)
    if array.dtype != want:
        raise ConfigError(
            f"{what} has dtype {array.dtype} where the program wants {element}; convert it to {want} first"
        )
    if isinstance(element, BFloat16Type):
        array = round_to_bf16(array)
    return np.ascontiguousarray(array).reshape(array.shape)


def write_back(target: Any, array: np.ndarray, element: Attribute) -> None:
    """Copies an array of an IR element type into the caller's NumPy array or torch tensor of the same shape."""
    if _is_torch(target):
        target.copy_(to_torch(array, element, target.dtype))
    else:
        np.copyto(target, array.view(target.dtype) if target.dtype == np.uint8 else array)


def to_torch(array: np.ndarray, element: Attribute, dtype: Any = None) -> Any:
    """A torch tensor with the values of an array of an IR element type; `dtype` torch.uint8 reads i8 as unsigned."""
    import torch

    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if dtype is torch.uint8 and contiguous.dtype == np.int8:
        contiguous = contiguous.view(np.uint8)
    tensor = torch.from_numpy(contiguous.copy())
    return tensor.to(torch.bfloat16) if isinstance(element, BFloat16Type) else tensor


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" or hasattr(value, "detach")


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    import torch

    host = tensor.detach().cpu()
    return (host.float() if host.dtype is torch.bfloat16 else host).numpy()
