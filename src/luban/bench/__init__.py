"""Measurements of Luban beside its peers: `luban bench NAME`.

Every peer runs in a process of its own and they take turns, so that neither memory nor caches nor a drifting clock favour
one of them. A result is {"bench", "machine", "rows", "summary"}; every ratio above 1 means that Luban is better.
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
        Bench("models", "training steps of real models, beside eager and Inductor", "luban.bench.models"),
        Bench("compile", "how long the first step takes, cold and warm, beside Inductor", "luban.bench.compile_time"),
    )
}
