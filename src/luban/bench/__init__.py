"""Measurements of Luban beside its peers: `luban bench NAME`.

Peers take turns, so that a drifting clock favours none of them; whole models run in a process each, so that neither memory
nor caches do. A result is {"bench", "machine", "rows", "summary"}; every ratio above 1 means that Luban is better.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bench:
    """One measurement; `module` offers configure(parser), run(args, progress) -> dict and table(result) -> rows of cells."""

    name: str
    measures: str
    module: str


BENCHES = {
    b.name: b
    for b in (
        Bench("gemm", "matrix products, beside torch and the chip's peaks", "luban.bench.gemm"),
        Bench("attention", "attention, beside torch and the chip's peaks", "luban.bench.attention"),
        Bench("ops", "memory-bound operators, beside eager, Inductor and the bandwidth", "luban.bench.ops"),
        Bench(
            "roofline", "the chip's peaks, and where the kernels stand below them, as a picture", "luban.bench.roofline"
        ),
        Bench("models", "training steps of real models, beside eager and Inductor", "luban.bench.models"),
        Bench("compile", "how long the first step takes, cold and warm, beside Inductor", "luban.bench.compile_time"),
    )
}
