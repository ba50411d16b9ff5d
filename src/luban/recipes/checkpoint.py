"""Checkpoints: a folder a step, complete or absent.

checkpoints/step-00000300/ holds one safetensors file a group of tensors and `state.json`. It is written under another
name and renamed when everything is on the disk, so that a crash or a full disk leaves the one before intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from luban.errors import ConfigError, LubanError

_KEEP = 2
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `step` steps: groups of named tensors, and JSON state."""

    step: int
    groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint below `folder`, keeps the last two and returns its path.

    Raises LubanError when the disk refuses; the checkpoints that were there stay.
    """
    final = folder / f"step-{checkpoint.step:08}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in checkpoint.groups.items():
            _write(temporary / f"{name}.safetensors", safetensors.torch.save(_contiguous(tensors)))
        state = {"step": checkpoint.step, **checkpoint.state}
        _write(temporary / "state.json", (json.dumps(state, indent=2) + "\n").encode())
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _sync(folder)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise LubanError(_refused(folder, checkpoint.step, e)) from e
    for old in steps(folder)[:-_KEEP]:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder / f"step-{old:08}")
    return final


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def load_last(folder: Path, needed: Sequence[str] = ()) -> Checkpoint:
    """The newest checkpoint. Raises ConfigError when there is none and LubanError when it cannot be read.

    It cannot be read either when one of the groups that are `needed` is missing.
    """
    found = steps(folder)
    if not found:
        raise ConfigError(f"{folder} holds no checkpoint to resume from; start the run anew with another --out")
    path = folder / f"step-{found[-1]:08}"
    try:
        state = json.loads((path / "state.json").read_text())
        groups = {p.stem: safetensors.torch.load_file(p) for p in sorted(path.glob("*.safetensors"))}
        missing = [f"{name}.safetensors" for name in needed if name not in groups]
        if missing:
            raise FileNotFoundError(f"it lacks {' and '.join(missing)}")
    except (OSError, ValueError, safetensors.SafetensorError) as e:
        raise LubanError(
            f"cannot read the checkpoint {path}: {e}; remove that folder to go on from the one before"
        ) from e
    return Checkpoint(found[-1], groups, state)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: '3.exp_avg' is exp_avg of its fourth parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": torch.as_tensor(value) for i, slot in state.items() for key, value in slot.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave; groups and their settings stay the optimizer's own."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous() for name, value in tensors.items()}


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(folder: Path, step: int, error: OSError) -> str:
    found = steps(folder)
    kept = f"the checkpoint of step {found[-1]} is intact" if found else "none was saved before"
    reason = error.strerror or str(error)
    return (
        f"cannot write the checkpoint of step {step} into {folder}: {reason}; {kept}, "
        "free some space and continue with --resume"
    )
