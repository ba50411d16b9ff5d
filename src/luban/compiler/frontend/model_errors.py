"""What torch finds wrong with a model while it is traced (shapes, dtypes, indices), as one sentence with its place."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from luban.compiler.frontend.source_places import LIBRARIES, user_frame
from luban.errors import ConfigError

_KINDS = (IndexError, TypeError, ValueError, RuntimeError)
_NODE = re.compile(r"FX node with fake tensors: call_\w+ (?:<[\w-]+ [\w-]+ )?(?P<name>[\w.]+)")
_SIZE = re.compile(r"FakeTensor\(\.\.\.[^)]*?size=\((?P<size>[^)]*)\)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


class ModelError(ConfigError):
    """A model that cannot be run on what it was given. `original` is what torch raised.

    Those that reach the user are of the original's type as well, so that code that waits for a RuntimeError gets one.
    """

    original: Exception


def as_model_error(error: Exception) -> ModelError | None:
    """The sentence for an error that Dynamo raises over the user's code; None for errors of another kind."""
    text = str(error)
    if not isinstance(error, TorchRuntimeError) and "\n\nfrom user code:\n" not in text:
        return None
    original = _original(error)
    kind = next((k for k in _KINDS if isinstance(original, k)), None)
    if kind is None or isinstance(original, TorchDynamoException):
        return None
    reason = str(original).split("\n\nfrom user code:")[0].split("\n")[0].strip().rstrip(".") or type(original).__name__
    operation = _operation(text)
    failed = f"cannot run {operation}" if operation else "fails"
    shown = _both(kind)(f"the model {failed} {_where(error)}: {reason}; check shapes and dtypes")
    shown.original = original.with_traceback(None)
    return shown


@functools.cache
def _both(kind: type[Exception]) -> type[ModelError]:
    return type("ModelError", (ModelError, kind), {"__module__": __name__})


def _original(error: BaseException) -> Exception:
    """The error of torch's that Dynamo wrapped: the innermost one that is not Dynamo's own."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        at = at.__cause__ or at.__context__
    foreign = [e for e in seen if isinstance(e, Exception) and not isinstance(e, TorchDynamoException)]
    return foreign[0] if foreign else error  # type: ignore[return-value]


def _operation(text: str) -> str:
    """`linear on [2, 5], [3, 6]` from Dynamo's description of the call that failed."""
    node = _NODE.search(text)
    if node is None:
        return ""
    call = text[node.start() :].split("**{")[0]
    sizes = [f"[{m['size'].rstrip(',')}]" for m in _SIZE.finditer(call)]
    return node["name"] + (f" on {', '.join(sizes)}" if sizes else "")


def _where(error: Any) -> str:
    """The innermost line of the user's own source, or the one that called the compiled model."""
    stack = [(s.filename, s.lineno) for s in getattr(error, "real_stack", None) or ()]
    stack = stack or [(file, int(line)) for file, line in _PLACE.findall(str(error))]
    own = [(file, line) for file, line in stack if not file.startswith(LIBRARIES)]
    if own:
        return f"at {own[-1][0]}:{own[-1][1]}"
    frame = user_frame()
    return f"in the call at {frame.f_code.co_filename}:{frame.f_lineno}"
