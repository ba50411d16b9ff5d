"""Luban's errors as Dynamo lets them through: the sentence alone, without a wrapper and Dynamo's frames."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import BackendCompilerFailed

from luban.errors import LubanError


def call_showing_errors(function: Callable, *args: Any) -> Any:
    """function(*args); a LubanError that it raises reaches the caller of a compiled function as itself.

    Dynamo wraps what a backend raises, and lets only its own BackendCompilerFailed pass: the error becomes both.
    """
    try:
        return function(*args)
    except LubanError as error:
        kind = _both(type(error))  # type: ignore[arg-type]
        shown = kind.__new__(kind, *error.args)
        shown.__dict__.update(error.__dict__)
        shown.__dict__.update(backend_name="luban", inner_exception=error, first_useful_frame=inspect.currentframe())
        raise shown from None


@functools.cache
def _both(kind: type[LubanError]) -> type[LubanError]:
    # __str__: Dynamo appends advice on debugging itself to the message, and the message is one sentence.
    members = {"__module__": kind.__module__, "__str__": lambda self: str(self.inner_exception)}
    return type(kind.__name__, (kind, BackendCompilerFailed), members)
