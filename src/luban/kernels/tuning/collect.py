"""Which workloads a function compiles, and how often it runs each."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from luban.errors import ConfigError
from luban.kernels.tuning.workload import GEMM, Workload, layout_of, read
from luban.runtime import report, schedules

LAYOUTS = ("nn", "nt", "tn", "tt")
PRECISIONS = ("highest", "high", "medium")


def used(run: Callable[[], Any]) -> dict[Workload, int]:
    """The workloads of what is compiled while a function runs, cached programs included, and the calls of each."""
    with report.report() as found:
        run()
    keys = [schedules.key_from(key) for kernel in found.kernels for key, _ in kernel.schedules]
    return dict(Counter(read(key.workload) for key in keys))


def gemm(sizes: tuple[int, ...], dtype: str, layout: str, precision: str, cores: int) -> Workload:
    """The workload of (m, n, k) or (batch, m, n, k): A (m, k) and B (k, n), by rows for "n" and by columns for "t"."""
    if len(sizes) not in (3, 4):
        raise ConfigError(f"a GEMM has the sizes MxNxK, or BxMxNxK for a batch, not {'x'.join(map(str, sizes))}")
    if precision != "highest" and dtype != "float32":
        raise ConfigError(f"--precision {precision} is for float32 products; leave it out for {dtype}")
    batch, m, n, k = sizes if len(sizes) == 4 else (1, *sizes)
    _check_memory(batch * (m * k + n * k + 3 * m * n))
    strides = (*((k, 1) if layout[0] == "n" else (1, m)), *((1, n) if layout[1] == "n" else (k, 1)))
    return Workload(GEMM, (dtype, dtype, dtype), (batch, m, n, k), layout_of((m, n, k), strides), precision, cores)


def attention(sizes: tuple[int, ...], dtype: str, causal: bool, shared: int) -> dict[Workload, int]:
    """The workloads of torch's attention and its gradients for (batch, heads, length, head size) in dense tensors.

    With `shared` heads of queries sharing each head of keys and values.
    """
    import torch

    import luban

    if len(sizes) != 4 or dtype == "float64":
        raise ConfigError(
            "attention has the sizes BATCHxHEADSxLENGTHxSIZE and a dtype among float32, bfloat16 and float16"
        )
    batch, heads, length, size = sizes
    if shared < 1 or heads % shared:
        raise ConfigError(f"--shared {shared} does not divide the {heads} heads")
    _check_memory(batch * heads * length * (3 * length + 8 * size))
    few = (batch, heads // shared, length, size)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=True) for shape in (sizes, few, few))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared > 1)

    compiled: Any = luban.compile(attend, fallback="error", dynamic=False)
    return used(lambda: compiled(q, k, v).sum().backward())


def _check_memory(elements: int) -> None:
    """Raises ConfigError for sizes whose float64 reference does not fit this machine."""
    wanted, there = 8 * elements, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ConfigError(
            f"checking results takes about {math.ceil(wanted / 2**30)} GiB and this machine has {there >> 30} GiB; "
            "choose smaller sizes"
        )
