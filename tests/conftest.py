"""What tests of every layer share: a cache of their own, and a way from a torch function to machine code."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Compiled programs of a test run stay out of the user's cache, and the user's out of the tests."""
    before = os.environ.get("LUBAN_CACHE_DIR")
    os.environ["LUBAN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["LUBAN_CACHE_DIR"]
    else:
        os.environ["LUBAN_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def seeded_torch():
    """The same random numbers for a test whichever tests ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


class MachineCode:
    """A torch function compiled with a pipeline of graph passes; callable on tensors like the ones it was traced with."""

    def __init__(self, function: Callable, args: Sequence[Any], pipeline: str | None = None):
        from luban import targets
        from luban.compiler.driver import GRAPH_PIPELINE, compile_graph
        from luban.compiler.frontend.torch.importer import import_graph
        from luban.runtime.loaded import load

        imported = import_graph(traced(function, args), "main")
        metadata = imported.metadata
        seed = {"kind": "tensor", "dtype": "int64", "shape": [1], "strides": [1]}
        self.seeded = any(entry["kind"] == "seed" for entry in metadata["inputs"])
        metadata["inputs"] = [seed if entry["kind"] == "seed" else entry for entry in metadata["inputs"]]
        self.program = compile_graph(
            imported.module, metadata, targets.get("native"), "main", pipeline=pipeline or GRAPH_PIPELINE
        )
        self.constants = imported.constants
        self._run = load(self.program)

    @property
    def kernels(self) -> list[str]:
        return [k["name"] for k in self.program.kernels]

    def __call__(self, *args):
        import torch

        from luban.runtime import arena, pools

        place = arena.address

        def poisoned_arena(size):
            ctypes.memset(place(size), 0xFF, size)  # NaN in every float type
            return place(size)

        with mock.patch.object(pools, "empty", _poisoned), mock.patch.object(arena, "address", poisoned_arena):
            return self._run([*args, *self.constants, *([torch.tensor([123])] if self.seeded else [])])


def _poisoned(shape, strides, dtype):
    """An output that shows when a kernel leaves a part of it unwritten."""
    import torch

    return torch.empty_strided(shape, strides, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 77)


def traced(function: Callable, args: Sequence[Any]):
    """A function of tensors (gradients inside are fine) as a functional ATen graph."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    from luban.compiler.frontend.torch.decompositions import table

    def trace(f):
        return make_fx(f, decomposition_table=table(), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)

    graph = trace(lambda *a: list(outputs_of(function(*a))))
    if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes):
        graph = trace(torch.func.functionalize(graph, remove="mutations_and_views"))
    graph.graph.eliminate_dead_code()
    return graph


def outputs_of(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def relative_error(got, want) -> float:
    """Largest difference over the largest finite magnitude of `want`; infinite where only one is NaN or infinite."""
    import torch

    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    ok = want.isfinite() & got.isfinite()
    if not bool((ok | same).all()):
        return float("inf")
    if bool(same.all()):
        return 0.0
    scale = want[ok].abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((got - want)[ok].abs().max() / scale)


def check(function: Callable, *args, tolerance: float = 1e-5, pipeline: str | None = None) -> MachineCode:
    """Compiles and runs a function; its results have the shapes and dtypes of eager's and are near to float64's."""
    import torch

    compiled = MachineCode(function, args, pipeline)
    got = compiled(*args)
    eager = outputs_of(function(*args))
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    want = outputs_of(function(*wide))
    assert len(got) == len(eager)
    for i, (g, e, w) in enumerate(zip(got, eager, want, strict=True)):
        assert g.dtype is e.dtype and g.shape == e.shape, f"output {i} is {g.dtype}{list(g.shape)}"
        error, own = relative_error(g, w), relative_error(e, w)
        assert error <= max(tolerance, 2 * own), f"output {i} is off by {error:.3g}, eager by {own:.3g}"
    return compiled


@pytest.fixture(scope="session")
def machine() -> SimpleNamespace:
    """compile(f, args, pipeline), check(f, *args, tolerance, pipeline), error(got, want)."""
    return SimpleNamespace(compile=MachineCode, check=check, error=relative_error, outputs=outputs_of, traced=traced)
