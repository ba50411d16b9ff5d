"""One training step of a measured model, as the models bench runs it: forward and backward compiled, in either dtype."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from luban.bench.workloads import TRANSFORMERS, make
from luban.errors import ConfigError


def step(name: str, dtype: str, quick: bool) -> Callable[[], Any]:
    """A function that makes a step's gradients through Luban. Raises ConfigError where a package is missing."""
    if name in TRANSFORMERS and find_spec("transformers") is None:
        raise ConfigError(
            f"{name} needs the package transformers, which is not installed; run `pip install transformers`"
        )
    import torch

    import luban

    torch.manual_seed(0)
    work = make(name, quick)
    model = luban.compile(work.model, fallback="error", dynamic=False)

    def run() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = work.loss_of(model, *work.batch)
        loss.backward()
        return loss.detach()

    return run
