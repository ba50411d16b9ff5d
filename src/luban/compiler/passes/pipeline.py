"""Runs passes over a module: text pipelines, numbered dumps, verification after each pass, and bisection.

A pipeline is a plain list, `simplify,cse,fuse{max_ops=64 siblings=false},dce`; options of a pass stand in braces.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from luban.compiler.ir.text import to_text, verify
from luban.compiler.ir.tile import find_kernels
from luban.compiler.passes.registry import Pass, create
from luban.errors import ConfigError, LubanError, VerificationError


def parse_pipeline(text: str) -> list[Pass]:
    """The passes of a text pipeline. Raises ConfigError naming the item that cannot be read."""
    return [_parse_item(item) for item in _split(text)]


def _split(text: str) -> list[str]:
    """The items of a pipeline; a comma within braces separates options, not passes."""
    items, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch == "{") - (ch == "}")
        if depth not in (0, 1):
            raise ConfigError(
                f"cannot read the pipeline {text!r}: braces do not match at position {i}; write pass{{option=value}}"
            )
        if ch == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    if depth:
        raise ConfigError(f"cannot read the pipeline {text!r}: a brace is left open; write pass{{option=value}}")
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def _parse_item(item: str) -> Pass:
    name, brace, rest = item.partition("{")
    if brace and not rest.endswith("}"):
        raise ConfigError(f"cannot read the pass {item!r}: text follows its options; write pass{{option=value}}")
    options = {}
    for option in rest.rstrip("}").replace(",", " ").split():
        key, equals, value = option.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"cannot read the option {option!r} of the pass {name.strip()!r}; write option=value")
        options[key] = value
    return create(name.strip(), options)


class Dump:
    """A folder that receives a module after every pass: 00-input.mlir, 01-simplify.mlir, ..."""

    _opened: dict[Path, int] = {}

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._numbers = itertools.count()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write IR dumps into {self.folder}: {error.strerror}; set LUBAN_DUMP to a writable folder"
            ) from error

    @classmethod
    def from_environment(cls) -> Dump | None:
        """The dump that LUBAN_DUMP asks for, or None.

        A process's first module goes into the folder itself, later ones into its subfolders 2, 3, ..., so that the
        forward and backward modules of a program do not overwrite each other.
        """
        name = os.environ.get("LUBAN_DUMP")
        if not name:
            return None
        folder = Path(name)
        count = cls._opened[folder] = cls._opened.get(folder, 0) + 1
        return cls(folder if count == 1 else folder / str(count))

    def write(self, label: str, module: ModuleOp) -> Path:
        """Writes the module as the next numbered file and gives its path."""
        path = self.folder / f"{next(self._numbers):02d}-{label}.mlir"
        try:
            path.write_text(to_text(module))
        except OSError as error:
            raise ConfigError(
                f"cannot write the IR dump {path}: {error.strerror}; set LUBAN_DUMP to a writable folder"
            ) from error
        return path


def run(
    module: ModuleOp,
    passes: str | Iterable[Pass],
    *,
    dump: Dump | str | Path | None = None,
    verify_each: bool = False,
) -> ModuleOp:
    """Runs passes (a list or a text pipeline) over the module in place and gives it back.

    dump: a folder or Dump for the module after every pass; without it LUBAN_DUMP decides. A Dump given to several runs
    keeps counting. verify_each: check every rule after every pass; a VerificationError then names the pass.
    """
    listed = parse_pipeline(passes) if isinstance(passes, str) else list(passes)
    if dump is None:
        dump = Dump.from_environment()
    elif not isinstance(dump, Dump):
        dump = Dump(dump)
    if dump is not None:
        dump.write("input", module)
    for p in listed:
        p.apply(module)
        if dump is not None:
            dump.write(p.name, module)
        if verify_each:
            _verify_after(module, p.name)
    return module


def _verify_after(module: ModuleOp, name: str) -> None:
    try:
        verify(module)
    except VerificationError as error:
        raise VerificationError(f"after the pass {name}: {error}") from error


@dataclass(frozen=True)
class Culprit:
    """The first pass that changes a result: its position in the pipeline (from 0), its name and what it changed."""

    position: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"pass {self.position + 1} ({self.name}) changes the program: {self.reason}"


def bisect(
    module: ModuleOp,
    passes: str | Iterable[Pass],
    inputs: Sequence[Any],
    symbols: Mapping[str, int] | None = None,
    tolerance: float = 1e-5,
) -> Culprit | None:
    """Interprets the module after each pass and names the first pass that changes a result, breaks a rule or fails.

    Works on a copy; neither the module nor the inputs change. `inputs` and `symbols` are those of `run_graph`, or of
    `run_kernel` for a module that holds one kernel. Results and inputs that the program assigns are compared with the
    unchanged module's, errors relative to the largest finite magnitude of the array. Gives None when every pass keeps
    every result within `tolerance`. Raises ConfigError for a pass that turns the graph into kernels.
    """
    listed = parse_pipeline(passes) if isinstance(passes, str) else list(passes)
    copy = module.clone()
    want = _interpret(copy, inputs, symbols)
    holds_kernels = bool(find_kernels(copy))
    for position, p in enumerate(listed):
        reason = _after(p, copy, want, holds_kernels, inputs, symbols, tolerance)
        if reason:
            return Culprit(position, p.name, reason)
    return None


def _after(
    p: Pass,
    module: ModuleOp,
    want: dict[str, np.ndarray],
    holds_kernels: bool,
    inputs: Sequence[Any],
    symbols: Mapping[str, int] | None,
    tolerance: float,
) -> str:
    """Applies a pass and says what is wrong with the module after it, or ''."""
    try:
        p.apply(module)
        verify(module)
        lowered = find_kernels(module) and not holds_kernels
        got = want if lowered else _interpret(module, inputs, symbols)
    except LubanError as error:
        return str(error)
    except Exception as error:  # a pass with a defect may fail in any way, and this is what the caller looks for
        return f"it fails with {type(error).__name__}: {error}"
    if lowered:
        raise ConfigError(
            f"the pass {p.name} turns the graph into kernels, which take other inputs; bisect the passes before it"
        )
    return _difference(want, got, tolerance)


def _interpret(module: ModuleOp, inputs: Sequence[Any], symbols: Mapping[str, int] | None) -> dict[str, np.ndarray]:
    """Runs the module's graph.func, or its only kernel; gives the results and what the inputs are afterwards."""
    from luban.compiler.ir.interpret_graph import run_graph
    from luban.compiler.ir.interpret_tile import run_kernel

    fresh = [x.clone() if hasattr(x, "clone") else np.array(x) for x in inputs]
    kernels = find_kernels(module)
    if len(kernels) == 1:
        run_kernel(kernels[0], fresh, symbols)
        return {f"buffer {i}": x for i, x in enumerate(fresh)}
    outputs = run_graph(module, fresh, symbols)
    found = {f"output {i}": x for i, x in enumerate(outputs)}
    for i, x in enumerate(fresh):
        found[f"input {i} after the run"] = x.detach().double().numpy() if hasattr(x, "detach") else x
    return found


def _difference(want: dict[str, np.ndarray], got: dict[str, np.ndarray], tolerance: float) -> str:
    """What differs, or ''."""
    if want.keys() != got.keys():
        return f"it gives {len(got)} arrays where {len(want)} are wanted"
    for name, a in want.items():
        b = got[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
        error = relative_error(a, b)
        if error > tolerance:
            return f"{name} differs by {error:.3g} relative to its largest value (allowed {tolerance:.3g})"
    return ""


def relative_error(want: np.ndarray, got: np.ndarray) -> float:
    """Largest difference over the largest finite magnitude of `want`; infinite where only one is NaN or inf."""
    if want.size == 0:
        return 0.0
    a, b = want.astype(np.float64), got.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not (np.isfinite(a) | same).all() or not (np.isfinite(b) | same).all():
        return float("inf")
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max()) if finite.size else 0.0
    worst = float(np.abs(np.subtract(a, b, out=np.zeros_like(a), where=~same)).max())
    return worst / scale if scale else worst
