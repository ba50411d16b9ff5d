"""What was compiled inside a block: `with luban.report() as r: ...`.

The compiler calls the module functions; they add to every report that is open in the caller's context, so nested
blocks all see what happens inside them and concurrent threads do not see each other's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass

from luban.runtime.program import Program, work

STAGES = ("frontend", "passes", "codegen", "load", "total")

_open: ContextVar[tuple[Report, ...]] = ContextVar("luban_reports", default=())
_running: ContextVar[tuple[_Stage, ...]] = ContextVar("luban_stages", default=())


@dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled graph; `kind` is "generated" or "library", flops and bytes are of one call.

    Where sizes are open, of a call with the sizes that the graph was traced with; 0 where they depend on data.
    `schedules` are the keys under which its schedule could be tuned, and whether it is (see `runtime/schedules.py`).
    """

    name: str
    kind: str
    target: str
    flops: int
    bytes: int
    schedules: tuple[tuple[str, bool], ...] = ()


class Report:
    """Counts of what was compiled while the block was open.

    `graphs` and `cache_hits` are ints, `fallbacks` the distinct ATen overloads that run outside Luban, `kernels` a list
    of `Kernel`, `seconds` a dict with the keys "frontend", "passes", "codegen", "load" and "total".
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.cache_hits = 0
        self.fallbacks: list[str] = []
        self.kernels: list[Kernel] = []
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._token: Token | None = None

    def __enter__(self) -> Report:
        self._token = _open.set((*_open.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _open.reset(self._token)
            self._token = None

    def __repr__(self) -> str:
        return (
            f"Report(graphs={self.graphs}, kernels={len(self.kernels)}, fallbacks={self.fallbacks}, "
            f"seconds={self.seconds['total']:.3f}, cache_hits={self.cache_hits})"
        )


class _Stage:
    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = 0.0  # seconds that nested stages took


def report() -> Report:
    """A new report, to be used as `with luban.report() as r:`."""
    return Report()


def add_graph(kernels: Iterable[Kernel]) -> None:
    """Counts one compiled graph and its kernels."""
    kernels = list(kernels)
    for r in _open.get():
        r.graphs += 1
        r.kernels += kernels


def add_fallback(name: str) -> None:
    """Notes an ATen overload that runs outside Luban; each is listed once."""
    for r in _open.get():
        if name not in r.fallbacks:
            r.fallbacks.append(name)


def add_seconds(stage: str, seconds: float) -> None:
    """Adds time to a stage; stages outside a running `stage` block also count in the total."""
    for r in _open.get():
        r.seconds[stage] = r.seconds.get(stage, 0.0) + seconds
        if stage != "total" and not _running.get():
            r.seconds["total"] += seconds


def add_cache_hit() -> None:
    """Counts one program that came from the cache."""
    for r in _open.get():
        r.cache_hits += 1


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Times a block as a stage. Time inside a nested stage counts there only; the outermost block is the total."""
    outer = _running.get()
    mine = _Stage()
    token = _running.set((*outer, mine))
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        _running.reset(token)
        for r in _open.get():
            if name != "total":
                r.seconds[name] = r.seconds.get(name, 0.0) + spent - mine.inner
            if not outer:
                r.seconds["total"] += spent
        if outer:
            outer[-1].inner += spent


def kernels_of(program: Program, sizes: Mapping[str, int]) -> list[Kernel]:
    """The kernels of a program, as reports list them, for values of its symbols."""
    return [
        Kernel(
            k["name"],
            k.get("kind", "generated"),
            program.target,
            **{"flops": 0, "bytes": 0, **work(k, sizes)},
            schedules=tuple((key, answer is not None) for key, answer in k.get("schedules", {}).items()),
        )
        for k in program.kernels
    ]
