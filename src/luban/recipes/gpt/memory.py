"""Whether a training fits the machine's memory, as far as that can be known before, and one sentence where it does not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from luban.errors import OutOfMemoryError, memory_wanted
from luban.recipes import checkpoint
from luban.recipes.gpt.options import Options

_CGROUP = Path("/sys/fs/cgroup/memory.max")


@contextlib.contextmanager
def within_memory(options: Options) -> Iterator[None]:
    """Says in one sentence that memory ran out, whoever found out: torch, Python or a program's arena.

    What cannot fit is refused before it begins: Linux would grant the memory and end the process when it is used.
    """
    need, there = least_bytes(options), machine_bytes()
    if there is not None and need > there:
        raise OutOfMemoryError(
            _sentence(options, f"needs at least {need >> 20} MiB of memory, and there are {there >> 20}")
        )
    try:
        yield
    except Exception as error:
        wanted = memory_wanted(error)
        if wanted is None:
            raise
        raise OutOfMemoryError(_sentence(options, f"ran out of memory ({wanted})")) from error


def least_bytes(options: Options) -> int:
    """A lower bound: weights with gradients and Adam's two moments; the tokens, and what each block keeps for the backward."""
    weights = 12 * options.layers * options.width**2 * 16
    return weights + options.batch * options.context * (16 + 2 * options.width * options.layers)


def machine_bytes() -> int | None:
    """The machine's memory, or what the control group of this process may take; None where neither is known."""
    known = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        known.append(int(_CGROUP.read_text()))
    return min(known, default=None)


def _sentence(options: Options, failed: str) -> str:
    kept = checkpoint.steps(Path(options.run_dir) / "checkpoints")
    where = f"; the checkpoint of step {kept[-1]} is intact" if kept else ""
    return (
        f"the training of {options.layers} layers of width {options.width} on batches of {options.batch} sequences of "
        f"{options.context} tokens {failed}; "
        f"choose a smaller --batch or --context, or a smaller model{where}"
    )
