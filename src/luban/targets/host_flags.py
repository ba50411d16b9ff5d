"""What the flags in /proc/cpuinfo mean, one reader an architecture: fields of a processor -> Target."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

from luban.errors import TargetError
from luban.targets import aarch64, loongarch64, riscv64, x86_64
from luban.targets.target import Target

# Linux's name -> LLVM's name. Only what code generation can use.
X86_FEATURES = {
    "pni": "sse3", "ssse3": "ssse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "popcnt": "popcnt", "cx16": "cx16",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2", "abm": "lzcnt",
    "movbe": "movbe", "aes": "aes", "pclmulqdq": "pclmul", "adx": "adx", "gfni": "gfni", "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd",
    "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni", "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx512_bf16": "avx512bf16", "avx512_fp16": "avx512fp16",
    "avx512_vp2intersect": "avx512vp2intersect", "avx_vnni": "avxvnni", "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16", "amx_int8": "amx-int8", "amx_fp16": "amx-fp16",
}  # fmt: skip
_V3 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# (vendor, family, first model, last model) -> LLVM's name. It sets instruction costs; features are listed one by one,
# on and off, so that a hypervisor that hides some is respected.
X86_MODELS = (
    ("AuthenticAMD", 23, 0x30, 0xFF, "znver2"),
    ("AuthenticAMD", 25, 0x10, 0x1F, "znver4"),
    ("AuthenticAMD", 25, 0x60, 0x7F, "znver4"),
    ("AuthenticAMD", 25, 0xA0, 0xAF, "znver4"),
    ("AuthenticAMD", 25, 0x00, 0x5F, "znver3"),
    ("AuthenticAMD", 26, 0x00, 0xFF, "znver5"),
    ("GenuineIntel", 6, 0x55, 0x55, "skylake-avx512"),
    ("GenuineIntel", 6, 0x6A, 0x6A, "icelake-server"),
    ("GenuineIntel", 6, 0x6C, 0x6C, "icelake-server"),
    ("GenuineIntel", 6, 0x8F, 0x8F, "sapphirerapids"),
    ("GenuineIntel", 6, 0xCF, 0xCF, "emeraldrapids"),
    ("GenuineIntel", 6, 0xAD, 0xAE, "graniterapids"),
)
ARM_FEATURES = {
    "asimd": "neon", "fp": "fp-armv8", "asimdhp": "fullfp16", "asimddp": "dotprod", "asimdfhm": "fp16fml",
    "atomics": "lse", "asimdrdm": "rdm", "fcma": "complxnum", "bf16": "bf16", "i8mm": "i8mm", "sve": "sve",
    "sve2": "sve2",
}  # fmt: skip
ARM_MODELS = {
    ("0x41", "0xd0c"): "neoverse-n1", ("0x41", "0xd40"): "neoverse-v1", ("0x41", "0xd49"): "neoverse-n2",
    ("0x41", "0xd4f"): "neoverse-v2", ("0x41", "0xd08"): "cortex-a72", ("0x41", "0xd0b"): "cortex-a76",
    ("0x48", "0xd01"): "tsv110",
}  # fmt: skip


def x86(cpuinfo: dict[str, str], _vector_bytes: int) -> Target:
    """AVX2 with FMA is the least that Luban compiles for."""
    flags = set(cpuinfo.get("flags", "").split())
    missing = [f for f in _V3 if f not in flags]
    if missing:
        chip = cpuinfo.get("model name", "this x86-64 chip")
        raise TargetError(
            f"{chip} lacks {', '.join(missing)}, and Luban needs a chip with AVX2 and FMA (x86-64-v3, 2013 and later); "
            "run on such a machine, or ask the hypervisor to pass these flags on"
        )
    wide = all(f in flags for f in _V4)
    base = x86_64.AVX512 if wide else x86_64.REFERENCE
    features = [("+" if linux in flags else "-") + llvm for linux, llvm in X86_FEATURES.items()]
    if wide:
        features.append("-prefer-256-bit")
    intel = cpuinfo.get("vendor_id") == "GenuineIntel"
    return replace(
        base,
        llvm_cpu=_x86_model(cpuinfo) or base.llvm_cpu,
        llvm_features=",".join(features),
        dot_units=_x86_units(flags, wide, intel),
        matrix_unit="amx" if "amx_bf16" in flags and wide else None,
        description=cpuinfo.get("model name", "x86-64"),
    )


def _x86_model(cpuinfo: dict[str, str]) -> str | None:
    try:
        family, model = int(cpuinfo["cpu family"]), int(cpuinfo["model"])
    except (KeyError, ValueError):
        return None
    vendor = cpuinfo.get("vendor_id")
    return next((n for v, f, low, high, n in X86_MODELS if (v, f) == (vendor, family) and low <= model <= high), None)


def _x86_units(flags: set[str], wide: bool, intel: bool):
    if not wide:
        narrow = (x86_64.AVX_INT16_DOT, x86_64.AVX_INT8_DOT) if "avx_vnni" in flags else ()
        return (x86_64.FMA, x86_64.INT16_MADD, *narrow)
    bf16 = replace(x86_64.BF16_DOT, rate=0.5) if intel else x86_64.BF16_DOT
    offered = (
        ("avx512_bf16", bf16),
        ("avx512_fp16", x86_64.FP16_FMA),
        ("avx512_vnni", x86_64.INT16_DOT),
        ("avx512_vnni", x86_64.INT8_DOT),
        ("amx_bf16", x86_64.AMX_BF16),
        ("amx_int8", x86_64.AMX_INT8),
    )
    return (x86_64.FMA, x86_64.INT16_MADD, *(unit for flag, unit in offered if flag in flags))


def arm(cpuinfo: dict[str, str], vector_bytes: int) -> Target:
    """NEON everywhere; SVE where it is wider than NEON, since fixed-length code gains nothing from it at 128 bits."""
    flags = set(cpuinfo.get("features", "").split())
    features = [f"+{llvm}" for linux, llvm in ARM_FEATURES.items() if linux in flags]
    wide = "sve" in flags and vector_bytes > 16
    offered = (
        ("asimdhp", aarch64.FP16_FMA),
        ("bf16", aarch64.BF16_DOT),
        ("bf16", aarch64.BF16_TILE),
        ("asimddp", aarch64.INT8_DOT),
        ("i8mm", aarch64.MIXED_DOT),
        ("i8mm", aarch64.INT8_TILE),
    )
    return replace(
        aarch64.REFERENCE,
        llvm_cpu=ARM_MODELS.get((cpuinfo.get("cpu implementer", ""), cpuinfo.get("cpu part", "")), "generic"),
        llvm_features=",".join(features) or aarch64.REFERENCE.llvm_features,
        vector_bits=vector_bytes * 8 if wide else 128,
        function_attributes=f"vscale_range({vector_bytes // 16},{vector_bytes // 16})" if wide else "",
        dot_units=(aarch64.FMA, *(unit for flag, unit in offered if flag in flags)),
        description=cpuinfo.get("model name", "64-bit Arm"),
    )


def riscv(cpuinfo: dict[str, str], _vector_bytes: int) -> Target:
    """Without V the code is scalar: right, and slow."""
    single, *extended = cpuinfo.get("isa", "rv64imafdc").lower().split("_")
    letters = [c for c in "imafdcv" if c in single.removeprefix("rv64")]
    known = [e for e in extended if re.fullmatch(r"zfhmin|zfh|zvfh|zvfhmin|zba|zbb|zbs|zicond", e)]
    features = [f"+{f}" for f in (*letters, *known)]
    vectors = "v" in letters
    return replace(
        riscv64.REFERENCE,
        llvm_features=",".join(features),
        vector_bits=256 if vectors else 64,
        vector_registers=16 if vectors else 32,
        description=cpuinfo.get("uarch", cpuinfo.get("model name", "64-bit RISC-V")),
    )


def loongarch(cpuinfo: dict[str, str], _vector_bytes: int) -> Target:
    """LASX where it is, else LSX, else scalar code."""
    flags = set(cpuinfo.get("features", "").split())
    bits = 256 if "lasx" in flags else 128 if "lsx" in flags else 64
    names = (("fpu", "f"), ("fpu", "d"), ("lsx", "lsx"), ("lasx", "lasx"), ("ual", "ual"))
    features = ["+64bit", *(("+" if linux in flags else "-") + llvm for linux, llvm in names)]
    return replace(
        loongarch64.REFERENCE,
        llvm_cpu="la464" if bits == 256 else "loongarch64",
        llvm_features=",".join(features),
        vector_bits=bits,
        description=cpuinfo.get("model name", "LoongArch"),
    )


READERS = {"x86_64": x86, "aarch64": arm, "riscv64": riscv, "loongarch64": loongarch}


def sve_bytes(machine: str) -> int:
    """The width of this process's SVE registers in bytes, 0 where there are none."""
    if machine != "aarch64":
        return 0
    width = ctypes.CDLL(None).prctl(51, 0, 0, 0, 0)  # PR_SVE_GET_VL
    return width & 0xFFFF if width > 0 else 0


def allow_amx() -> bool:
    """Asks Linux for the AMX tile registers, once a process is enough; False when it refuses."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0  # arch_prctl(ARCH_REQ_XCOMP_PERM, tile data)
