"""The line of the user's source that each operator of a trace comes from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.fx import traceback
from torch.overrides import TorchFunctionMode

import luban

# Where no user's source is: the two packages, and code that torch makes from texts.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(luban.__file__).parent), "<string>", "<eval_with_key>")


@contextlib.contextmanager
def source_places(wanted: bool = True) -> Iterator[None]:
    """Nodes that are traced in the block get a `stack_trace` of one line: the innermost outside torch and Luban.

    It costs a few microseconds an operator. make_fx's own record keeps only frames that are called "forward".
    """
    if not wanted:
        yield
        return
    with traceback.preserve_node_meta(), _Places():
        yield


class _Places(TorchFunctionMode):
    """Sees each call of torch's that the user's code makes, before torch takes it apart."""

    def __torch_function__(self, func: Callable, types: Any, args: Sequence = (), kwargs: Any = None) -> Any:
        traceback.set_stack_trace([_place()])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            traceback.set_stack_trace([])


def user_frame() -> FrameType:
    """The innermost running function outside torch and Luban."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame


def _place() -> str:
    frame = user_frame()
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
