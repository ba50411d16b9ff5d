"""x86-64: AVX2 is the least, AVX-512 and AMX on top."""

from __future__ import annotations

from dataclasses import replace

from luban.targets.target import ALL_DTYPES, Cache, DotUnit, Target

FMA = DotUnit("fma", "float32", "float32", 1, "fma")
BF16_DOT = DotUnit("avx512bf16.vdpbf16ps", "bfloat16", "float32", 2, "dot", rate=2.0)
FP16_FMA = DotUnit("avx512fp16.vfmaddph", "float16", "float16", 1, "fma", rate=2.0)
INT16_MADD = DotUnit("avx2.vpmaddwd", "int16", "int32", 2, "dot", rate=1.0)  # and an addition
INT16_DOT = DotUnit("avx512vnni.vpdpwssd", "int16", "int32", 2, "dot", rate=2.0)
INT8_DOT = DotUnit("avx512vnni.vpdpbusd", "uint8", "int32", 4, "dot", rate=4.0)  # unsigned by signed
AVX_INT8_DOT = DotUnit("avxvnni.vpdpbusd", "uint8", "int32", 4, "dot", rate=4.0)
AVX_INT16_DOT = DotUnit("avxvnni.vpdpwssd", "int16", "int32", 2, "dot", rate=2.0)
AMX_BF16 = DotUnit("amx.tdpbf16ps", "bfloat16", "float32", 32, "tile", rows=16, cols=16, rate=16.0)
AMX_INT8 = DotUnit("amx.tdpbssd", "int8", "int32", 64, "tile", rows=16, cols=16, rate=32.0)

LEVEL3 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
# LLVM prefers 256-bit code on most AVX-512 chips; our kernels say how wide they are.
LEVEL4 = LEVEL3 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,-prefer-256-bit"

REFERENCE = Target(
    name="x86-64-avx2",
    family="x86-64",
    triple="x86_64-unknown-linux-gnu",
    llvm_cpu="x86-64-v3",
    llvm_features=LEVEL3,
    vector_bits=256,
    vector_registers=16,
    caches=(Cache(1, 32 << 10), Cache(2, 512 << 10), Cache(3, 16 << 20)),
    dot_units=(FMA, INT16_MADD),
    matrix_unit=None,
    dtypes=ALL_DTYPES,
    cores=8,
    clock_ghz=None,
    verified="native",
    description="x86-64 with AVX2 and FMA: Haswell, Zen and later, Hygon",
)

AVX512 = replace(
    REFERENCE,
    name="x86-64-avx512",
    llvm_cpu="x86-64-v4",
    llvm_features=LEVEL4,
    vector_bits=512,
    vector_registers=32,
    caches=(Cache(1, 32 << 10), Cache(2, 1 << 20), Cache(3, 32 << 20)),
    description="x86-64 with AVX-512: Skylake server, Ice Lake, Zen 4 and later",
)

AVX512_BF16 = replace(
    AVX512,
    name="x86-64-avx512-bf16",
    llvm_features=LEVEL4 + ",+avx512bf16,+avx512vnni",
    dot_units=(FMA, BF16_DOT, INT16_MADD, INT16_DOT, INT8_DOT),
    description="x86-64 with AVX-512 and bfloat16 dot products: Zen 4 and Zen 5",
)

AMX = replace(
    AVX512,
    name="x86-64-amx",
    llvm_cpu="sapphirerapids",
    llvm_features=LEVEL4 + ",+avx512bf16,+avx512vnni,+avx512fp16,+amx-tile,+amx-bf16,+amx-int8",
    caches=(Cache(1, 48 << 10), Cache(2, 2 << 20), Cache(3, 32 << 20)),
    # Measured on this chip: its vdpbf16ps does half the products of the float32 fma.
    dot_units=(
        FMA,
        replace(BF16_DOT, rate=0.5),
        FP16_FMA,
        INT16_MADD,
        INT16_DOT,
        INT8_DOT,
        AMX_BF16,
        AMX_INT8,
    ),  # fmt: skip
    matrix_unit="amx",
    verified="native",
    description="x86-64 with AMX tiles: Sapphire Rapids and later",
)

TARGETS = (REFERENCE, AVX512, AVX512_BF16, AMX)
