"""A kernel's source as an imported module: Triton reads functions from their file, so it needs one."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from luban.compiler.codegen.triton.kernel import TritonKernel


@contextmanager
def imported(kernel: TritonKernel) -> Iterator[ModuleType]:
    """The module of a kernel's source; its file lives as long as the `with`."""
    with tempfile.TemporaryDirectory(prefix="luban-triton-") as folder:
        path = Path(folder) / f"{kernel.name}.py"
        path.write_text(kernel.source)
        spec = importlib.util.spec_from_file_location(f"luban_triton_{kernel.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
