"""One call on NumPy arrays, for exported programs on machines without torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from luban.errors import ConfigError
from luban.runtime.program import ITEM_BYTES, Tensor

if TYPE_CHECKING:
    from luban.runtime.loaded import LoadedProgram


def call(loaded: LoadedProgram, inputs: Sequence) -> list:
    """Runs a loaded program on arrays and ints; returns arrays, ints, None. ConfigError where an input does not fit."""
    entries = loaded.signature.inputs
    name = loaded.program.name
    if len(inputs) != len(entries):
        raise ConfigError(f"{name} takes {len(entries)} inputs, not {len(inputs)}; pass those it was compiled for")
    plan = loaded.plan(loaded.symbol_values(inputs))
    wanted = iter(plan.inputs)
    pointers = [
        _pointer(given, next(wanted), i, name) if entry["kind"] == "tensor" else 0
        for i, (given, entry) in enumerate(zip(inputs, entries, strict=True))
    ]
    for position, value in plan.symbol_inputs:
        if inputs[position] != value:
            raise ConfigError(
                f"input {position} of {name} is {inputs[position]!r}, but the other inputs ask for {value}"
            )
    results: list[Any] = list(plan.template)
    addresses = [0] * len(results)
    for i, tensor in [*plan.own, *((i, t) for i, t, _ in plan.saved)]:
        results[i], addresses[i] = _empty(tensor)
    for i, j, tensor, offset in plan.aliases:
        results[i] = _alias(inputs[j] if j >= 0 else results[~j], tensor, offset)
    loaded.run(struct.pack(f"{len(pointers) + len(addresses)}Q", *pointers, *addresses), plan)
    return results


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype for a dtype name; bfloat16 is ml_dtypes' where that is installed, else raw uint16."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return np.dtype(np.uint16)
    return np.dtype(bfloat16)


def _pointer(given: Any, want: Tensor, position: int, program: str) -> int:
    problem = ""
    if not isinstance(given, np.ndarray):
        problem = f"is a {type(given).__name__}, not an array"
    elif given.dtype != dtype_of(want.dtype) and not (want.dtype == "bfloat16" and given.dtype == np.uint16):
        problem = f"has dtype {given.dtype}, not {want.dtype}"
    elif given.shape != want.shape:
        problem = f"has shape {given.shape}, not {want.shape}"
    else:
        strides = tuple(s * ITEM_BYTES[want.dtype] for s in want.strides)
        differ = any(d > 1 and a != b for d, a, b in zip(want.shape, given.strides, strides, strict=True))
        if differ and 0 not in want.shape:
            problem = f"has strides {given.strides} in bytes, not {strides}"
    if problem:
        raise ConfigError(f"input {position} of {program} {problem}; pass inputs like those it was compiled for")
    return _address(given)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _empty(tensor: Tensor) -> tuple[np.ndarray, int]:
    """A new array and the address of its memory, which may begin before the array's first element."""
    item = ITEM_BYTES[tensor.dtype]
    flat = np.empty(tensor.bytes // item, dtype_of(tensor.dtype))
    view = np.ndarray(tensor.shape, flat.dtype, flat, tensor.offset * item, tuple(s * item for s in tensor.strides))
    return view, _address(flat)


class _View:
    """Carries an array interface and keeps the array alive that the memory belongs to."""

    def __init__(self, interface: dict, owner: np.ndarray):
        self.__array_interface__ = interface
        self.owner = owner


def _alias(source: np.ndarray, tensor: Tensor, offset: int) -> np.ndarray:
    item = source.dtype.itemsize
    raw = {
        "version": 3,
        "shape": tensor.shape,
        "typestr": f"|V{item}",
        "data": (_address(source) + offset * item, not source.flags.writeable),
        "strides": tuple(s * item for s in tensor.strides),
    }
    return np.asarray(_View(raw, source)).view(source.dtype)
