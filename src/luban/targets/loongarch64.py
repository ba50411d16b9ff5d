"""LoongArch with the 256-bit LASX vectors."""

from __future__ import annotations

from luban.targets.target import ALL_DTYPES, Cache, DotUnit, Target

FMA = DotUnit("fma", "float32", "float32", 1, "fma")

REFERENCE = Target(
    name="loongarch64-lasx",
    family="loongarch64",
    triple="loongarch64-unknown-linux-gnu",
    llvm_cpu="la464",
    llvm_features="+64bit,+f,+d,+lsx,+lasx,+ual",
    vector_bits=256,
    vector_registers=32,
    caches=(Cache(1, 64 << 10), Cache(2, 256 << 10), Cache(3, 16 << 20)),
    dot_units=(FMA,),
    matrix_unit=None,
    dtypes=ALL_DTYPES,
    cores=4,
    clock_ghz=2.5,
    verified="emulated",
    description="Loongson 3A5000 and later: LASX, 256 bits",
)

TARGETS = (REFERENCE,)
