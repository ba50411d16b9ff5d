"""Torch dtypes, their IR element types, and the types in which scalars are computed.

bfloat16 and float16 compute in float32 and are rounded when stored; uint8 computes in int32, so that signed integer
operations serve every dtype and wrapping happens when stored; all others compute in themselves.
"""

from __future__ import annotations

import torch
from xdsl.dialects.builtin import bf16, f16, f32, f64, i1, i8, i16, i32, i64
from xdsl.ir import Attribute

ELEMENT: dict[torch.dtype, Attribute] = {
    torch.float32: f32,
    torch.float64: f64,
    torch.bfloat16: bf16,
    torch.float16: f16,
    torch.int64: i64,
    torch.int32: i32,
    torch.int16: i16,
    torch.int8: i8,
    torch.uint8: i8,
    torch.bool: i1,
}
"""The IR element type of each dtype that Luban stores; a dtype that is missing is unsupported."""

COMPUTE: dict[torch.dtype, torch.dtype] = {d: d for d in ELEMENT}
COMPUTE.update({torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.uint8: torch.int32})

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32: the name that program metadata uses."""
    return str(dtype)[6:]


def scalar_dtype(value: object) -> torch.dtype:
    """The dtype that promotion gives a Python number (symbolic ints count as ints)."""
    if isinstance(value, bool):
        return torch.bool
    return torch.get_default_dtype() if isinstance(value, float) else torch.int64


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype in FLOATS else 1


def result_type(tensors: list[tuple[torch.dtype, int]], scalars: list[object]) -> torch.dtype:
    """Torch's type promotion over (dtype, rank) of tensors and Python scalars.

    Dimensioned tensors win over zero-dim ones, which win over scalars, unless the lower class has a higher category
    (bool < integer < float).
    """
    result: torch.dtype | None = None
    groups = (
        [d for d, rank in tensors if rank],
        [d for d, rank in tensors if not rank],
        [scalar_dtype(s) for s in scalars],
    )
    for group in groups:
        if not group:
            continue
        merged = group[0]
        for other in group[1:]:
            merged = torch.promote_types(merged, other)
        if result is None or _category(merged) > _category(result):
            result = merged
    assert result is not None
    return result
