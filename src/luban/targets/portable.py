"""A chip with nothing but scalars: IR written for it shows a kernel's blocking and no chip's choices."""

from __future__ import annotations

from luban.targets.target import ALL_DTYPES, Target

# Three registers hold one sum and its two factors: a register tile of one element. No code is generated for it.
PORTABLE = Target(
    name="portable",
    family="portable",
    triple="",
    llvm_cpu="",
    llvm_features="",
    vector_bits=32,
    vector_registers=3,
    caches=(),
    dot_units=(),
    matrix_unit=None,
    dtypes=ALL_DTYPES,
    cores=1,
    clock_ghz=None,
    verified="interpreted",
    description="no chip: for the reference interpreter",
)
