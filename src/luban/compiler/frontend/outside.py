"""What Dynamo leaves to eager: whole frames that it gives up, and calls at graph breaks that do a tensor's work.

A graph break by itself is fine: both sides are compiled. What stands here runs without Luban: it is an error with
fallback="error", and otherwise warned of and counted in the report when the frame around it is compiled.
"""

from __future__ import annotations

import re
import sysconfig
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from torch._dynamo import config
from torch._dynamo.convert_frame import has_tensor_in_frame
from torch._dynamo.exc import remove_resume_prefix

from luban.errors import LubanError, UnsupportedOperatorError
from luban.runtime import report

_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_LIMIT = "Dynamo recompile limit exceeded"
_OPERATOR = re.compile(r"\b((?:aten|prims|prim|quantized|torchvision|mkldnn)\.\w+(?:\.\w+)?)")
# Graph breaks at which an operator runs in eager, by the titles that Dynamo gives them; reading a number is not one.
_OPERATOR_BREAKS = (
    "Dynamic shape operator",
    "Data dependent operator",
    "Operator does not support running with fake tensors",
    "NotImplementedError/UnsupportedFakeTensorException when running FX node",
    "Encountered non-PT2-compliant op",
)
_DISABLED = ("Skip calling `torch.compiler.disable()`d function", "Skip inlining `torch.compiler.disable()`d function")
_RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"
_READS = ("aten._local_scalar_dense",)


@dataclass(frozen=True)
class Outside:
    """Something that runs in eager: an operator or a function with its place, why, and what to do about it."""

    name: str
    why: str
    advice: str
    operator: bool = False


def note(found: Iterable[Outside], strict: bool) -> None:
    """Raises an error that lists what was found if `strict`, else warns of it and counts it as fallbacks."""
    each = list(dict.fromkeys(found))
    if not each:
        return
    if strict and all(o.operator for o in each):
        raise UnsupportedOperatorError([f"{o.name}, since {o.why}" for o in each])
    if strict:
        text = "; ".join(f"{o.name} would run in eager: {o.why}; {o.advice}" for o in each)
        raise LubanError(f'{text}, or pass fallback="allow"')
    for o in each:
        report.add_fallback(o.name)
    listed = "; ".join(f"{o.name} ({o.why})" for o in each)
    warnings.warn(f"Luban leaves to eager: {listed}", stacklevel=2)


def given_up(frame: Any, error: Any) -> list[Outside]:
    """A frame that Dynamo does not convert, if it has tensors and is not about to raise the user's own exception."""
    kind, code = error.gb_type or "", frame.f_code
    if kind.startswith("Observed exception") or not _matters(frame):
        return []
    if kind == _LIMIT:
        name = "accumulated_recompile_limit" if "accumulated" in error.msg else "recompile_limit"
        limit = getattr(config, name)
        why = f"it was compiled {limit} times, which is torch._dynamo.config.{name}, and needs another program"
        advice = "mark the sizes that change with torch._dynamo.mark_dynamic, pass dynamic=True, raise the limit"
        return [Outside(place_of(code), why, advice)]
    where = next((f" at {s.filename}:{s.lineno}" for s in reversed(list(error.real_stack or ()))), "")
    return [
        Outside(place_of(code), f"Dynamo gives the function up ({_shortened(error.msg)}{where})", "rewrite that part")
    ]


def left_out(frame: Any, result: Any) -> list[Outside]:
    """A frame that Dynamo was told to skip by torch.compiler.disable(recursive=False)."""
    if result.guarded_code is not None or "non-recursively disabled" not in (result.skip_reason or ""):
        return []
    return [Outside(place_of(frame.f_code), "torch.compiler.disable is on it", "remove it")]


def broken_off(reason: Any) -> Outside | None:
    """What runs in eager at a graph break, from Dynamo's description of it; None where nothing but Python does."""
    text = reason.reason
    where = next((f" ({s.filename}:{s.lineno})" for s in reversed(list(reason.user_stack))), "")
    if text.startswith(_DISABLED):
        called = re.search(r"<(?:bound method|function) ([\w.<>]+)", text)
        name = called.group(1) if called else "a function"
        return Outside(name + where, "torch.compiler.disable is on it", "remove it")
    if text.startswith(_RECURRENT):
        return Outside("a recurrent layer" + where, "Dynamo skips it", "set torch._dynamo.config.allow_rnn")
    if text.startswith(_OPERATOR_BREAKS):
        operator = _OPERATOR.search(text)
        if operator and not operator.group(1).startswith(_READS):
            return Outside(operator.group(1), f"{_shortened(text)}{where}", "avoid it", operator=True)
    return None


def place_of(code: CodeType) -> str:
    """The function of a frame with its file and line."""
    return f"{remove_resume_prefix(code.co_name) or code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _shortened(text: str) -> str:
    """The explanation's first sentence in one of Dynamo's descriptions, or its title."""
    first, _, rest = text.partition("\n")
    explanation = re.search(r"Explanation: ([^\n]*?)(?:\.\s|\.?\n|$)", rest)
    return explanation.group(1).strip() if explanation else first.strip()


def _matters(frame: Any) -> bool:
    """Whether a frame can do a tensor's work (generators of the standard library are given up without a look)."""
    inside = _STANDARD_LIBRARY in Path(frame.f_code.co_filename).parents
    return has_tensor_in_frame(frame) and (not inside or "site-packages" in frame.f_code.co_filename)
