"""GPUs and NPUs, reached through Triton source. `cores` are multiprocessors, the first cache their scratch memory."""

from __future__ import annotations

from dataclasses import replace

from luban.targets.target import ALL_DTYPES, Cache, DotUnit, Target


def _tensor_cores(name: str, rows: int, cols: int, rate: float) -> tuple[DotUnit, ...]:
    """The plain fma, and the matrix unit for the two 16-bit types and int8 (twice their rate)."""
    return (
        DotUnit("fma", "float32", "float32", 1, "fma"),
        DotUnit(name, "bfloat16", "float32", 16, "tile", rows, cols, rate),
        DotUnit(name, "float16", "float32", 16, "tile", rows, cols, rate),
        DotUnit(name, "int8", "int32", 32, "tile", rows, cols, 2 * rate),
    )


REFERENCE = Target(
    name="cuda-sm80",
    family="triton",
    triple="nvptx64-nvidia-cuda",
    llvm_cpu="sm_80",
    llvm_features="",
    vector_bits=128,
    vector_registers=255,
    caches=(Cache(1, 164 << 10, 128), Cache(2, 40 << 20, 128)),
    dot_units=_tensor_cores("mma.sync", 16, 8, 16.0),
    matrix_unit="mma",
    dtypes=ALL_DTYPES,
    cores=108,
    clock_ghz=1.41,
    verified="compiled only",
    description="NVIDIA A100",
)

CUDA_SM90 = replace(
    REFERENCE,
    name="cuda-sm90",
    llvm_cpu="sm_90a",
    caches=(Cache(1, 228 << 10, 128), Cache(2, 50 << 20, 128)),
    dot_units=_tensor_cores("wgmma", 64, 256, 15.0),
    matrix_unit="wgmma",
    cores=132,
    clock_ghz=1.98,
    description="NVIDIA H100, H200",
)

HIP_GFX942 = replace(
    REFERENCE,
    name="hip-gfx942",
    triple="amdgcn-amd-amdhsa",
    llvm_cpu="gfx942",
    vector_registers=256,
    caches=(Cache(1, 64 << 10, 128), Cache(2, 4 << 20, 128), Cache(3, 256 << 20, 128)),
    dot_units=_tensor_cores("mfma", 32, 32, 8.0),
    matrix_unit="mfma",
    cores=304,
    clock_ghz=2.1,
    description="AMD Instinct MI300",
)

ASCEND_910B = replace(
    REFERENCE,
    name="ascend-910b",
    triple="",
    llvm_cpu="",
    vector_bits=2048,
    vector_registers=1,
    caches=(Cache(1, 192 << 10, 32), Cache(2, 192 << 20, 128)),
    dot_units=_tensor_cores("cube", 16, 16, 32.0),
    matrix_unit="cube",
    cores=24,
    clock_ghz=1.8,
    verified="generated",
    description="Huawei Ascend 910B, through triton-ascend",
)

TARGETS = (REFERENCE, CUDA_SM90, HIP_GFX942, ASCEND_910B)
