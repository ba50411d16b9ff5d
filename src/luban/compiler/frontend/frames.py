"""Luban's watch on Dynamo: what it hands back to eager is said, and what it raises over a user's model is one sentence.

Dynamo gives no hook for frames that it skips, so the one method that converts a frame is wrapped; frames of other
backends pass through untouched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import graph_break_reasons

from luban.compiler.frontend import outside
from luban.compiler.frontend.model_errors import as_model_error
from luban.compiler.frontend.step_errors import quiet
from luban.errors import LubanError

Convert = Callable[..., Any]


def watch(backend: Callable) -> None:
    """From now on frames compiled with `backend` are watched. Again for the same backend does nothing."""
    convert = ConvertFrameAssert.__call__
    if getattr(convert, "watches", None) is not backend:
        watched = _watched(convert, backend)
        watched.watches = backend  # type: ignore[attr-defined]
        ConvertFrameAssert.__call__ = watched  # type: ignore[method-assign,assignment]


def _watched(convert: Convert, backend: Callable) -> Convert:
    @functools.wraps(convert)
    def convert_frame(self: ConvertFrameAssert, frame: Any, *args: Any, skip: int = 0, **more: Any) -> Any:
        options = _options(self._torchdynamo_orig_backend, backend)
        if options is None:
            return convert(self, frame, *args, skip=skip + 1, **more)
        strict, debug = options.get("fallback") == "error", os.environ.get("LUBAN_DEBUG") == "1"
        breaks = len(graph_break_reasons)
        try:
            with nullcontext() if debug else quiet():
                result = convert(self, frame, *args, skip=skip + 1, **more)
        except LubanError:
            raise
        except Unsupported as error:
            if not self._one_graph:  # else Dynamo raises it
                outside.note(outside.given_up(frame, error), strict)
            raise
        except Exception as error:
            shown = as_model_error(error)
            if shown is None:
                raise
            raise shown from (error if debug else shown.original)
        found = [each for reason in graph_break_reasons[breaks:] if (each := outside.broken_off(reason))]
        outside.note([*found, *outside.left_out(frame, result)], strict)
        return result

    return convert_frame


def _options(compiler: Any, backend: Callable) -> dict[str, Any] | None:
    """The options of torch.compile if the compiler of a frame is our backend, else None."""
    compiler = getattr(getattr(compiler, "__self__", None), "backend_compile_fn", compiler)  # DistributedDataParallel's
    inner: Any = innermost_backend(compiler)
    if inner is backend:
        return {}
    named = getattr(inner, "compiler_fn", getattr(inner, "func", None))  # torch.compile's wrapper, or a partial
    if named is not backend:
        return None
    return (getattr(inner, "kwargs", None) or getattr(inner, "keywords", {})).get("options") or {}
