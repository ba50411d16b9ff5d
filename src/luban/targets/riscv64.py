"""RISC-V with the vector extension 1.0."""

from __future__ import annotations

from luban.targets.target import ALL_DTYPES, Cache, DotUnit, Target

FMA = DotUnit("fma", "float32", "float32", 1, "fma")

# Code for 128-bit registers in groups of two: 256-bit values, of which 16 fit, on every chip that has V.
REFERENCE = Target(
    name="riscv64-rvv",
    family="riscv64",
    triple="riscv64-unknown-linux-gnu",
    llvm_cpu="generic-rv64",
    llvm_features="+m,+a,+f,+d,+c,+v",
    vector_bits=256,
    vector_registers=16,
    caches=(Cache(1, 32 << 10), Cache(2, 512 << 10), Cache(3, 4 << 20)),
    dot_units=(FMA,),
    matrix_unit=None,
    dtypes=ALL_DTYPES,
    cores=8,
    clock_ghz=None,
    verified="emulated",
    description="64-bit RISC-V with the vector extension 1.0 (RVA22 with V, RVA23)",
)

TARGETS = (REFERENCE,)
