"""The measured peaks of this machine: operations a second of every unit, bytes a second of every level of memory.

The loops of `peak_kernels` run on all threads, as kernels do. `measure` gives the table for people; `Loops` gives single
loops to run beside a kernel, since a chip's rate moves while one measures (the AMX unit here has two states, 2.5 apart).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from luban import targets
from luban.bench import peak_kernels
from luban.bench.common import TURN_SECONDS
from luban.bench.peak_kernels import ComputeLoop
from luban.runtime import elf, externals, memory, threads
from luban.targets.target import Target

SHORT_SECONDS = 2e-4  # enough to choose among loops
TRIES = 3  # a loop that was kept from running once seems long
TASK_BYTES = 8 << 10  # of a compute loop: its operands and results
ALIGN = 64
PIECE = 16 << 20  # bytes a thread of a region that is walked through
LARGE = 512 << 20  # bytes of "memory": from 128 MiB on the rates of this machine stay, whatever its cache is said to be
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class Counted(Protocol):
    """A loop that makes `count` turns or passes of each task, of one a thread where their number is not given."""

    def __call__(self, count: int, tasks: int | None = None) -> None: ...


@dataclass(frozen=True)
class Ready:
    """A loop that can be called: each call does `amount` operations, or moves so many bytes."""

    run: Callable[[], None]
    amount: float


class Loops:
    """The loops of this machine's target, compiled and loaded, with the memory that they run on."""

    def __init__(self, target: Target | None = None, count: int | None = None):
        self.target = target or targets.get("native")
        self.threads = count or threads.num_threads()
        self._image = _image(self.target)
        self._memory: Any = None
        self._room = self._base = 0

    @functools.cached_property
    def compute_loops(self) -> dict[tuple[str, str], ComputeLoop]:
        """By unit and dtype."""
        return {(c.unit, c.dtype): c for c in peak_kernels.compute_loops(self.target)}

    def compute(self, unit: str, dtype: str, seconds: float = TURN_SECONDS) -> Ready:
        """A compute loop of at least so many seconds a call."""
        chosen = self.compute_loops[unit, dtype]
        held = ctypes.create_string_buffer(TASK_BYTES * self.threads + ALIGN)  # zeros; random numbers run alike
        start = -(-ctypes.addressof(held) // ALIGN) * ALIGN
        run = self.native(chosen.symbol, start, TASK_BYTES, 0, held)
        return _long_enough(run, chosen.operations * self.threads, seconds)

    def memory(self, does: str, size: int, seconds: float = TURN_SECONDS) -> Ready:
        """The fastest loop that reads, writes or copies a region of about `size` bytes in all."""
        run, amount = self._fastest(does, size, 0)
        return _long_enough(run, amount, seconds)

    def walk(self, does: str, size: int) -> Ready:
        """The fastest loop that does it on pieces of a region of `size` bytes, each call on the next one.

        A piece takes a millisecond, so that most calls run through even where a core is shared; the region is what must be
        larger than the caches.
        """
        share = self._share(min(size, PIECE * self.threads))
        amount = share * self.threads
        self._reserve(-(-size // amount) * amount)

        def of(symbol: str) -> Ready:
            starts = range(self._base, self._base + self._room - amount + 1, amount)
            pieces = itertools.cycle([self.native(symbol, start, share, share, self._memory) for start in starts])
            return Ready(lambda: next(pieces)(1), amount)

        ready = [of(loop.symbol) for loop in peak_kernels.memory_loops(self.target) if loop.does == does]
        return min(ready, key=lambda r: min(_seconds(r) for _ in range(TRIES)) / r.amount)

    def traffic(self, reads: int, writes: int, seconds: float = TURN_SECONDS) -> Ready:
        """Reads and writes so many bytes, in one copy and what is left over of either."""
        both, rest = 2 * min(reads, writes), abs(reads - writes)
        parts = [("copy", both, 0), ("read" if reads > writes else "write", rest, self._share(both) * self.threads)]
        made = [self._fastest(does, size, at) for does, size, at in parts if size]

        def run(count: int, tasks: int | None = None) -> None:
            for one, _amount in made:
                one(count, tasks)

        return _long_enough(run, sum(amount for _, amount in made), seconds)

    def _fastest(self, does: str, size: int, at: int) -> tuple[Counted, int]:
        """Of the loops that do it, on a region that begins `at` bytes into the memory: the loop, and bytes a pass."""
        share = self._share(size)
        amount = share * self.threads
        self._reserve(at + amount)
        runs = [
            self.native(loop.symbol, self._base + at, share, share, self._memory)
            for loop in peak_kernels.memory_loops(self.target)
            if loop.does == does
        ]
        ready = [_long_enough(run, amount, SHORT_SECONDS) for run in runs]
        rates = [r.amount / min(_seconds(r) for _ in range(TRIES)) for r in ready]
        return runs[rates.index(max(rates))], amount

    def native(self, symbol: str, base: int, stride: int, size: int, held: Any) -> Counted:
        """A loop as a function of its count; `held` is the memory that it runs on, kept as long as the function is."""
        context = (ctypes.c_int64 * len(peak_kernels.CONTEXT))(0, base, stride, size)
        runtime = (ctypes.c_int64 * 3)(self.threads, 0, 0)
        entry, everyone = _ENTRY(self._image.lookup(symbol)), self.threads
        at, rt = ctypes.addressof(context), ctypes.addressof(runtime)

        def run(count: int, tasks: int | None = None, _held: Any = (held, runtime, self._image)) -> None:
            context[0] = count
            entry(at, tasks or everyone, rt)

        return run

    def _share(self, size: int) -> int:
        """Bytes a thread of a region, up to whole turns of a loop for both halves of a copy."""
        step = 2 * peak_kernels.step_bytes(self.target)
        return max(1, -(-size // (step * self.threads))) * step

    def _reserve(self, size: int) -> None:
        """Memory for so many bytes; loops made before keep theirs."""
        if size <= self._room:
            return
        self._memory, start = memory.reserve(size)
        self._room, self._base = size, memory.address_of(self._memory) + start
        ctypes.memset(self._base, 0, size)


@functools.cache
def _image(target: Target) -> elf.Image:
    from luban.compiler.codegen.llvm.compile import compile_module

    compiled = compile_module(peak_kernels.module_text(target), target)
    return elf.load(compiled.object, externals.resolve, "the peak loops")


def _long_enough(run: Counted, amount: float, seconds: float) -> Ready:
    """`run` with the smallest power of two as its count that takes so long, however often it is tried.

    It is tried with one task, which no other thread can hold up: where cores are shared, waiting for one takes milliseconds.
    """
    count = 1
    while any(_seconds(Ready(functools.partial(run, count, 1), 0)) < seconds for _ in range(TRIES)):
        count *= 2
    return Ready(lambda: run(count), amount * count)


def _seconds(ready: Ready) -> float:
    began = time.perf_counter()
    ready.run()
    return time.perf_counter() - began


# ---- the table


def levels(target: Target, count: int, large: int = LARGE) -> dict[str, int]:
    """Bytes, of all threads together, that lie in each level of memory: half of a thread's own caches, and so on outwards.

    A third-level cache is shared, and of a virtual machine's only part is its own: a small region of it is looked at.
    """
    found = {f"L{c.level}": c.bytes // 2 * count for c in target.caches if c.level in (1, 2)}
    outer = min(4 * target.l2_bytes * count, target.l3_bytes // 2)
    if target.l2_bytes and outer > target.l2_bytes * count:
        found["L3"] = outer
    return {**found, "memory": large}


def measure(loops: Loops, rounds: int = 9, large: int = LARGE) -> dict[str, Any]:
    """Every unit and level of this machine: the best of some rounds, and their median.

    {"threads", "compute": [{"unit", "dtype", "gflops", "median_gflops"}],
    "memory": [{"level", "bytes", "does", "gbs", "median_gbs"}]}
    """
    compute, moved = [], []
    for unit, dtype in loops.compute_loops:
        best, middle = _rates(loops.compute(unit, dtype), rounds)
        compute.append({"unit": unit, "dtype": dtype, "gflops": best, "median_gflops": middle})
    for level, size in levels(loops.target, loops.threads, large).items():
        for does in ("read", "write", "copy"):
            ready = loops.walk(does, size) if level == "memory" else loops.memory(does, size)
            best, middle = _rates(ready, rounds)
            moved.append({"level": level, "bytes": size, "does": does, "gbs": best, "median_gbs": middle})
    return {"threads": loops.threads, "compute": compute, "memory": moved}


def _rates(ready: Ready, rounds: int) -> tuple[float, float]:
    """The best and the median, in units of 1e9 a second."""
    times = [_seconds(ready) for _ in range(rounds)]
    return ready.amount / min(times) / 1e9, ready.amount / statistics.median(times) / 1e9
