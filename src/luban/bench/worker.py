"""One peer training one model: `python -m luban.bench.worker JSON`.

Answers lines of JSON on stdout: one after the first step, then one for each number of steps that it reads from stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from luban.bench.workloads import Workload, make


def main(text: str) -> None:
    """Runs the peer that `text` describes until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    warnings.filterwarnings("ignore")
    asked = json.loads(text)
    try:
        step = _first_step(asked, answers)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": _sentence(error)}), file=answers, flush=True)
        return
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            last = step()
            times.append(time.perf_counter() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"times": times, "loss_last": float(last), "peak_mib": round(peak)}), file=answers, flush=True)


def _first_step(asked: dict[str, Any], answers: TextIO) -> Callable:
    """Makes the model and its first step, answers with how that went, and gives the function for the others."""
    import torch

    torch.manual_seed(0)
    work = make(asked["model"], asked["quick"])
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=3e-4, fused=asked["peer"] == "eager")
    began = time.perf_counter()
    step, facts = _prepare(asked, work, optimizer)
    with facts as found:
        loss = float(step())
        seconds = time.perf_counter() - began
    first = {"first_seconds": seconds, "loss_first": loss, "threads": torch.get_num_threads(), **_reported(found)}
    print(json.dumps(first), file=answers, flush=True)
    return step


def _sentence(error: Exception) -> str:
    """An error's type and the first line of what it says; what follows is advice to people who debug torch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}"[:300] if lines else type(error).__name__


def _prepare(asked: dict[str, Any], work: Workload, optimizer: Any) -> tuple[Callable, Any]:
    """A function that makes one step, and what to hold open while the first one runs."""
    import torch

    peer = asked["peer"]
    if peer == "luban":
        import luban

        facts: Any = luban.report()
    else:
        facts = contextlib.nullcontext()

    def mixed() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=asked["dtype"] == "bfloat16")

    if peer == "luban" and asked["whole_step"]:
        return _whole_step(work, optimizer, mixed), facts
    model = _compiled(peer, work.model)

    def step() -> Any:
        with mixed():
            loss = work.loss_of(model, *work.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, facts


def _compiled(peer: str, model: Any) -> Any:
    import torch

    if peer == "luban":
        import luban

        return luban.compile(model, fallback="error")
    return model if peer == "eager" else torch.compile(model, backend=peer)


def _whole_step(work: Workload, optimizer: Any, mixed: Callable) -> Callable:
    import torch

    import luban

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def forward(self, *batch: Any) -> Any:
            with mixed():
                return work.loss_of(self.model, *batch)

    step = luban.train_step(Loss(), None, optimizer)
    return lambda: step(*work.batch)


def _reported(report: Any) -> dict[str, Any]:
    if report is None:
        return {}
    facts = {"backend_seconds": report.seconds, "cache_hits": report.cache_hits, "graphs": report.graphs}
    return {**facts, "kernels": len(report.kernels), "fallbacks": list(report.fallbacks)}


if __name__ == "__main__":
    main(sys.argv[1])
