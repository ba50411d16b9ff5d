"""Runs kernels in Triton's interpreter, on a CPU.

Triton decides when it is imported whether it interprets, and a process that interprets cannot compile: the interpreter
therefore has a process of its own, which starts with the first kernel and ends with this one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np

from luban.compiler.codegen.triton.kernel import TritonKernel
from luban.errors import ConfigError, LubanError

_NUMPY = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.float32, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "int8": np.int8, "int1": np.bool_,
}  # fmt: skip


def launch_interpreted(kernel: TritonKernel, buffers: Sequence[np.ndarray], symbols: Mapping[str, int] | None = None) -> None:
    """Runs a kernel's `launch` on flat arrays, in place.

    buffers: one contiguous one-dimensional array for each buffer argument, of its element type (bf16 as float32 arrays,
    uint8 for int8 is accepted). Raises ConfigError for buffers that do not fit, LubanError when an index was out of
    range and when Triton itself fails, with its message.
    """
    arguments = kernel.of_kind("buffer")
    if len(arguments) != len(buffers):
        raise ConfigError(f"{kernel.name} takes {len(arguments)} buffers, got {len(buffers)}; pass one an argument")
    given = []
    for argument, array in zip(arguments, buffers, strict=True):
        want = np.dtype(_NUMPY[argument.dtype.removeprefix("tl.")])
        values = array.view(np.int8) if array.dtype == np.uint8 else array
        if values.dtype != want or values.ndim != 1 or not values.flags.c_contiguous:
            raise ConfigError(f"{argument.name} of {kernel.name} has to be a flat contiguous array of {want}, got {array.dtype} {array.shape}")
        given.append(values)
    missing = [a.name for a in kernel.of_kind("symbol") if a.name not in (symbols or {})]
    if missing:
        raise ConfigError(f"{kernel.name} needs a value for the symbol {missing[0]}; pass symbols={{{missing[0]!r}: ...}}")
    sizes = [dict(symbols or {})[a.name] for a in kernel.of_kind("symbol")]
    try:
        results, good = _process().submit(_run, kernel, given, sizes).result()
    except BrokenProcessPool as error:
        _process.cache_clear()
        raise LubanError(f"Triton's interpreter ended while it ran {kernel.name}; run its source alone to see why") from error
    for array, result in zip(buffers, results, strict=True):
        array[...] = result.view(array.dtype) if result.dtype != array.dtype else result
    if not good:
        raise LubanError(f"{kernel.name} met an index out of range; the data that indices come from is out of range")


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # arrays here are a block long


def _run(kernel: TritonKernel, arrays: list[np.ndarray], sizes: list[int]) -> tuple[list[np.ndarray], bool]:
    import torch

    from luban.compiler.codegen.triton.load import imported

    tensors = []
    for argument, array in zip(kernel.of_kind("buffer"), arrays, strict=True):
        tensor = torch.from_numpy(array)
        tensors.append(tensor.to(torch.bfloat16) if argument.dtype == "tl.bfloat16" else tensor)
    with imported(kernel) as module:
        try:
            good = module.launch(*tensors, *sizes)
        except Exception as error:
            cause = error.__cause__ or error
            raise LubanError(f"Triton's interpreter failed on {kernel.name}: {type(cause).__name__}: {cause}") from None
    return [(t.float() if t.dtype is torch.bfloat16 else t).numpy() for t in tensors], good is not False
