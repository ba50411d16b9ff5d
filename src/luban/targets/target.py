"""What a chip is, as data. Nothing outside `luban.targets` asks for a chip's name: it asks for these fields."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BITS = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int64": 64, "int32": 32, "int16": 16, "int8": 8,
    "uint8": 8, "bool": 8, "complex64": 64,
}  # fmt: skip
ALL_DTYPES = tuple(ITEM_BITS)


@dataclass(frozen=True)
class Cache:
    """One data or unified cache as one core sees it: level (1 is nearest), bytes it may use, line size in bytes."""

    level: int
    bytes: int
    line: int = 64


@dataclass(frozen=True)
class DotUnit:
    """An instruction that multiplies and adds.

    `k` is the number of products summed into one accumulator an instruction. `kind` is "fma" (lane by lane), "dot"
    (lane groups) or "tile" (a `rows` x `cols` block of accumulators). `rate` is products a cycle relative to the
    chip's float32 fma, as measured or documented: what pays is decided by this, not by the name.
    """

    name: str
    input: str
    accumulator: str
    k: int
    kind: str
    rows: int = 1
    cols: int = 1
    rate: float = 1.0


@dataclass(frozen=True)
class Target:
    """A chip: what to tell LLVM or Triton, and what schedules need to know.

    `vector_bits` is the width of generated vector code, `vector_registers` how many such values the registers hold.
    `verified` tells how code for it was checked: "native", "emulated", "compiled only" or "generated".
    """

    name: str
    family: str
    triple: str
    llvm_cpu: str
    llvm_features: str
    vector_bits: int
    vector_registers: int
    caches: tuple[Cache, ...]
    dot_units: tuple[DotUnit, ...]
    matrix_unit: str | None
    dtypes: tuple[str, ...]
    cores: int
    clock_ghz: float | None
    verified: str
    function_attributes: str = ""
    description: str = ""

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector register as code uses it."""
        return self.vector_bits // 8

    @property
    def l1_bytes(self) -> int:
        """Bytes of the first-level data cache."""
        return self.cache_bytes(1)

    @property
    def l2_bytes(self) -> int:
        """Bytes of the second-level cache that one core sees."""
        return self.cache_bytes(2)

    @property
    def l3_bytes(self) -> int:
        """Bytes of the third-level cache, shared by cores; 0 when there is none."""
        return self.cache_bytes(3)

    @property
    def line_bytes(self) -> int:
        """Bytes of a cache line."""
        return self.caches[0].line if self.caches else 64

    @property
    def is_cpu(self) -> bool:
        """True where code goes through LLVM to a CPU, False where it is Triton source."""
        return self.family != "triton"

    @property
    def required_features(self) -> tuple[str, ...]:
        """What a chip must have to run this target's code: LLVM feature names, and "sve=BITS" for a fixed SVE width."""
        listed = tuple(f[1:] for f in self.llvm_features.split(",") if f.startswith("+"))
        fixed = (f"sve={self.vector_bits}",) if self.function_attributes.startswith("vscale_range") else ()
        return listed + fixed

    def cache_bytes(self, level: int) -> int:
        """Bytes of the cache of a level, 0 when the chip has none."""
        return next((c.bytes for c in self.caches if c.level == level), 0)

    def lanes(self, dtype: str) -> int:
        """Elements of a dtype in one vector."""
        return max(self.vector_bits // ITEM_BITS[dtype], 1)

    def units(self, dtype: str) -> tuple[DotUnit, ...]:
        """The dot units that take inputs of a dtype, fastest first."""
        return tuple(sorted((u for u in self.dot_units if u.input == dtype), key=lambda u: -u.rate))

    def has(self, feature: str) -> bool:
        """True when an LLVM feature is switched on by name (those that `llvm_cpu` implies are not listed)."""
        return f"+{feature}" in self.llvm_features.split(",")
