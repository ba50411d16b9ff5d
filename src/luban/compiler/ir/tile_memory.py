"""Memory of the tile interpreter: checked loads and stores, and the layout that tile.pack writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import BFloat16Type, bf16, i32
from xdsl.ir import Attribute

from luban.compiler.ir.numeric_types import conform
from luban.errors import VerificationError


@dataclass(frozen=True)
class Memory:
    """A flat array with its IR element type and the name that messages give it."""

    array: np.ndarray
    element: Attribute
    name: str

    def load(self, position: np.ndarray, mask: Any, where: Callable[[], str]) -> np.ndarray:
        """The elements at positions, 0 where the mask is false. Raises VerificationError outside the memory."""
        if mask is None:
            self._check(position, where)
            return self.array[position]
        shape = np.broadcast_shapes(np.shape(position), np.shape(mask))
        position, mask = np.broadcast_to(position, shape), np.broadcast_to(mask, shape)
        self._check(position[mask], where)
        if not mask.any():
            return np.zeros(shape, self.array.dtype)
        return np.where(mask, self.array[np.where(mask, position, 0)], self.array.dtype.type(0))

    def store(
        self, position: np.ndarray, value: np.ndarray, combine: np.ufunc | None, where: Callable[[], str]
    ) -> None:
        """Writes values (flat arrays of one length) in order, or combines each with what is there."""
        self._check(position, where)
        if combine is None:
            self.array[position] = value
        elif isinstance(self.element, BFloat16Type):
            for p, v in zip(position, value, strict=False):  # every step is rounded
                self.array[p] = conform(combine(self.array[p], v), self.element)
        else:
            with np.errstate(all="ignore"):
                combine.at(self.array, position, value)

    def _check(self, position: np.ndarray, where: Callable[[], str]) -> None:
        bad = (position < 0) | (position >= self.array.size)
        if np.any(bad):
            index = np.asarray(position)[bad].flat[0]
            raise VerificationError(
                f"{where()} reaches element {index} of {self.name}, which has {self.array.size} elements"
            )


@dataclass(frozen=True)
class Pairs(Memory):
    """The memory of bfloat16 elements, which `array` holds as float32, as i32: see tile.PairsOp."""

    source: Memory

    @classmethod
    def of(cls, source: Memory) -> Pairs:
        return cls(source.array, i32, source.name, source)

    def load(self, position: np.ndarray, mask: Any, where: Callable[[], str]) -> np.ndarray:
        low, high = (self.source.load(2 * position + half, mask, where).view(np.uint32) for half in (0, 1))
        return ((low >> np.uint32(16)) | (high & np.uint32(0xFFFF0000))).view(np.int32)

    def store(
        self, position: np.ndarray, value: np.ndarray, combine: np.ufunc | None, where: Callable[[], str]
    ) -> None:
        assert combine is None
        bits = np.ascontiguousarray(value, np.int32).view(np.uint32)
        for half, held in enumerate((bits << np.uint32(16), bits & np.uint32(0xFFFF0000))):
            self.source.store(2 * position + half, held.view(np.float32), None, where)


def pack(parts: list[np.ndarray], panel: int, kk: int, multiple: int = 0) -> np.ndarray:
    """(outer, k) arrays as flat panels [outer // panel][part][k // kk][outer % panel][k % kk], zero padded.

    k is padded to a multiple of `multiple`, of kk where that is 0.
    """
    outer, k = parts[0].shape
    rows, steps = -(-outer // panel), _steps(k, kk, multiple)
    padded = np.zeros((len(parts), rows * panel, steps * kk), parts[0].dtype)
    for part, values in zip(padded, parts, strict=True):
        part[:outer, :k] = values
    return padded.reshape(len(parts), rows, panel, steps, kk).transpose(1, 0, 3, 2, 4).reshape(-1)


def part_of(values: np.ndarray, part: str) -> np.ndarray:
    """One of the bfloat16 parts of float32 or float16 values: see tile.PackOp."""
    if part == "whole":
        return values
    exact, finite = values.astype(np.float32), np.isfinite(values)
    largest = np.float32(3.3895313892515355e38)
    held = np.where(finite, np.clip(exact, -largest, largest), exact).astype(np.float32)
    high = conform(held, bf16)
    if part == "high":
        return high
    with np.errstate(invalid="ignore"):
        return np.where(finite, high if part == "finite" else held - high, np.float32(0))


def unpacked(outer: int, k: int, panel: int, kk: int, multiple: int = 0) -> np.ndarray:
    """Where `pack` puts each element of an (outer, k) array."""
    i, p = np.arange(outer)[:, None], np.arange(k)[None, :]
    return ((i // panel) * _steps(k, kk, multiple) + p // kk) * panel * kk + (i % panel) * kk + p % kk


def _steps(k: int, kk: int, multiple: int) -> int:
    """Groups of kk values in a padded panel."""
    return -(-k // (multiple or kk)) * (multiple or kk) // kk
