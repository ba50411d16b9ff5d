"""AArch64: NEON is the least; SVE code is generated for a fixed width."""

from __future__ import annotations

from dataclasses import replace

from luban.targets.target import ALL_DTYPES, Cache, DotUnit, Target

FMA = DotUnit("fma", "float32", "float32", 1, "fma")
FP16_FMA = DotUnit("fullfp16.fmla", "float16", "float16", 1, "fma", rate=2.0)
BF16_DOT = DotUnit("bf16.bfdot", "bfloat16", "float32", 2, "dot", rate=2.0)
BF16_TILE = DotUnit("bf16.bfmmla", "bfloat16", "float32", 4, "tile", rows=2, cols=2, rate=4.0)
INT8_DOT = DotUnit("dotprod.sdot", "int8", "int32", 4, "dot", rate=4.0)
MIXED_DOT = DotUnit("i8mm.usdot", "uint8", "int32", 4, "dot", rate=4.0)  # unsigned by signed
INT8_TILE = DotUnit("i8mm.smmla", "int8", "int32", 8, "tile", rows=2, cols=2, rate=8.0)

REFERENCE = Target(
    name="aarch64-neon",
    family="aarch64",
    triple="aarch64-unknown-linux-gnu",
    llvm_cpu="generic",
    llvm_features="+neon,+fp-armv8",
    vector_bits=128,
    vector_registers=32,
    caches=(Cache(1, 64 << 10), Cache(2, 512 << 10), Cache(3, 16 << 20)),
    dot_units=(FMA,),
    matrix_unit=None,
    dtypes=ALL_DTYPES,
    cores=8,
    clock_ghz=None,
    verified="emulated",
    description="any 64-bit Arm chip: NEON, 128 bits",
)

# Fixed-length vectors become SVE instructions only when the width is known; vscale counts units of 128 bits.
SVE = replace(
    REFERENCE,
    name="aarch64-sve",
    llvm_cpu="neoverse-v1",
    llvm_features="+neon,+fp-armv8,+fullfp16,+dotprod,+sve,+bf16,+i8mm",
    vector_bits=256,
    caches=(Cache(1, 64 << 10), Cache(2, 1 << 20), Cache(3, 32 << 20)),
    dot_units=(FMA, FP16_FMA, BF16_DOT, BF16_TILE, INT8_DOT, MIXED_DOT, INT8_TILE),
    cores=64,
    clock_ghz=2.6,
    function_attributes="vscale_range(2,2)",
    description="64-bit Arm with SVE of 256 bits: Neoverse V1 (Graviton3)",
)

KUNPENG_920 = replace(
    REFERENCE,
    name="kunpeng-920",
    llvm_cpu="tsv110",
    llvm_features="+neon,+fp-armv8,+fullfp16,+dotprod",
    caches=(Cache(1, 64 << 10), Cache(2, 512 << 10), Cache(3, 64 << 20, 128)),
    dot_units=(FMA, FP16_FMA, INT8_DOT),
    cores=64,
    clock_ghz=2.6,
    description="Huawei Kunpeng 920 (TaiShan v110)",
)

TARGETS = (REFERENCE, SVE, KUNPENG_920)
