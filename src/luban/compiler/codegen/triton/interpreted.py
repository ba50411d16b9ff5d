"""Runs kernels in Triton's interpreter, on a CPU.

Triton decides when it is imported whether it interprets, and a process that interprets cannot compile: the interpreter
therefore has a process of its own, which starts with the first kernel and ends with this one.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from luban.compiler.codegen.triton.kernel import TritonKernel
from luban.errors import ConfigError, LubanError

_NUMPY = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.float32, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "int8": np.int8, "int1": np.bool_,
}  # fmt: skip


def launch_interpreted(
    kernel: TritonKernel, buffers: Sequence[np.ndarray], symbols: Mapping[str, int] | None = None
) -> None:
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
            raise ConfigError(
                f"{argument.name} of {kernel.name} has to be a flat contiguous array of {want}, "
                f"got {array.dtype} of shape {array.shape}; convert it first"
            )
        given.append(values)
    missing = [a.name for a in kernel.of_kind("symbol") if a.name not in (symbols or {})]
    if missing:
        raise ConfigError(
            f"{kernel.name} needs a value for the symbol {missing[0]}; pass symbols={{{missing[0]!r}: ...}}"
        )
    sizes = [dict(symbols or {})[a.name] for a in kernel.of_kind("symbol")]
    results, good = _ask(kernel, given, sizes)
    for array, result in zip(buffers, results, strict=True):
        array[...] = result.view(array.dtype) if result.dtype != array.dtype else result
    if not good:
        raise LubanError(f"{kernel.name} met an index out of range; the data that indices come from is out of range")


@functools.cache
def _process() -> subprocess.Popen:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # arrays here are a block long
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    atexit.register(process.kill)
    return process


def _ask(kernel: TritonKernel, arrays: list[np.ndarray], sizes: list[int]) -> tuple[list[np.ndarray], bool]:
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump((kernel, arrays, sizes), process.stdin)
        process.stdin.flush()
        answer: Any = pickle.load(process.stdout)
    except (BrokenPipeError, EOFError) as error:
        process.wait()
        _process.cache_clear()
        raise LubanError(
            f"Triton's interpreter ended while it ran {kernel.name}; run its source alone to see why"
        ) from error
    if isinstance(answer, LubanError):
        raise answer
    return answer


def _serve() -> None:
    """Answers one request after another; what kernels print goes to stderr."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = _run(*request)
        except LubanError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _run(kernel: TritonKernel, arrays: list[np.ndarray], sizes: list[int]) -> tuple[list[np.ndarray], bool]:
    import torch

    from luban.compiler.codegen.triton.faithful import faithful
    from luban.compiler.codegen.triton.load import imported

    tensors = []
    for argument, array in zip(kernel.of_kind("buffer"), arrays, strict=True):
        tensor = torch.from_numpy(array)
        tensors.append(tensor.to(torch.bfloat16) if argument.dtype == "tl.bfloat16" else tensor)
    with imported(replace(kernel, source=faithful(kernel.source))) as module:
        try:
            good = module.launch(*tensors, *sizes)
        except Exception as error:
            cause = error.__cause__ or error
            raise LubanError(f"Triton's interpreter failed on {kernel.name}: {type(cause).__name__}: {cause}") from None
    return [(t.float() if t.dtype is torch.bfloat16 else t).numpy() for t in tensors], good is not False


if __name__ == "__main__":
    _serve()
