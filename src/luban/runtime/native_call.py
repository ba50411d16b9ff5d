"""The call of a program from Python through machine code of its own, without ctypes.

Every object has a function `luban_call` that CPython calls as it calls a built-in one (METH_FASTCALL): it looks at each
input tensor, takes the addresses and runs the kernels with the GIL released. It asks torch through its stable C
interface (`aoti_torch_...`). An input costs some 25 ns that way and 0.4 us when Python looks at it. Where a torch or a
Python is laid out in another way, `function` gives None and calls go by ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence

import torch

from luban.runtime import elf
from luban.runtime.program import Plan, Tensor

CALL, TABLE = "luban_call", "luban_python"
_METH_FASTCALL = 0x80
_PYTHON = ("PyLong_AsVoidPtr", "PyLong_FromLong", "PyEval_SaveThread", "PyEval_RestoreThread")
_TORCH = ("layout", "device_type", "dtype", "dim", "sizes", "strides", "data_ptr")
_IS_NEGATED = "_ZN2at6native6is_negERKNS_6TensorE"  # at::native::is_neg(at::Tensor const&)


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def function(image: elf.Image, name: str) -> Callable[..., int] | None:
    """A loaded object's `luban_call` as a Python function; None where the object or this process has no such call.

    It takes addresses of a description and of the arena, the number of threads, an object for each input, and a tensor
    or an address for each output; it returns the status word, or -1 - i when input i is not as described. The plan's
    description, and the memory that the addresses mean, must be alive while it runs. It keeps the object's memory alive.
    """
    table = _table()
    if table is None or CALL not in image.symbols or TABLE not in image.symbols:
        return None
    ctypes.memmove(image.symbols[TABLE], table, len(table))
    method = _Method(name.encode(), image.symbols[CALL], _METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    return make(ctypes.addressof(method), (method, image), None)


class Description:
    """What `luban_call` must know of a plan, as a struct in memory; `address` is valid while this object lives."""

    __slots__ = ("address", "_memory", "_plan")

    def __init__(self, plan: Plan, kinds: Sequence[str], outputs: int):
        wanted = iter(plan.inputs)
        parts = [_described(next(wanted)) if kind == "tensor" else b"" for kind in kinds]
        head = struct.pack("4q", _address_of(plan.symbols), _address_of(plan.offsets), len(parts), outputs)
        body = b"".join(struct.pack("q", len(part)) + part for part in parts)
        self._plan = plan  # the head holds addresses inside its bytes
        self._memory = ctypes.create_string_buffer(head + body)
        self.address = ctypes.addressof(self._memory)


def _described(tensor: Tensor) -> bytes:
    pairs = [n for pair in zip(tensor.shape, tensor.strides, strict=True) for n in pair]
    strided, cpu, dtypes = _codes()
    return struct.pack(f"{4 + len(pairs)}q", strided, cpu, dtypes(tensor.dtype), len(tensor.shape), *pairs)


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


@functools.cache
def _table() -> bytes | None:
    """The words of `luban_python`, in the order of `codegen/llvm/python_call.py`."""
    places = _places()
    if places is None:
        return None
    try:
        python = [_pointer(ctypes.pythonapi, name) for name in _PYTHON]
        asked = [_pointer(_library(), f"aoti_torch_get_{name}") for name in _TORCH]
        asked.append(_pointer(_library(), _IS_NEGATED))
        _codes()
    except (AttributeError, OSError):
        return None
    types = [id(torch.Tensor), id(torch.nn.Parameter)]
    return struct.pack(f"{len(python) + 4 + len(asked)}q", *python, *types, *places, *asked)


def _places() -> tuple[int, int] | None:
    """Bytes from a tensor object to its type and to the C++ tensor, if they lie where CPython and torch put them."""
    head = object.__basicsize__
    type_at, tensor_at = head - ctypes.sizeof(ctypes.c_void_p), head
    probe = torch.empty(0)
    if _word(id(probe) + type_at) != id(torch.Tensor) or _word(id(probe) + tensor_at) != probe._cdata:
        return None
    return type_at, tensor_at


def _word(address: int) -> int | None:
    return ctypes.c_void_p.from_address(address).value


def _pointer(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    """torch's libraries: the handle of its extension module finds the symbols of all that it is linked with."""
    return ctypes.CDLL(torch._C.__file__)


@functools.cache
def _codes() -> tuple[int, int, Callable[[str], int]]:
    """torch's numbers for the strided layout, for the CPU and for a dtype."""
    library = _library()

    @functools.cache
    def dtype(name: str) -> int:
        return getattr(library, f"aoti_torch_dtype_{name}")()

    return library.aoti_torch_layout_strided(), library.aoti_torch_device_type_cpu(), dtype
