"""What a packing function is asked to be: a frozen description, checked once when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from luban.compiler.codegen.llvm.dots.pack_parts import PARTS
from luban.compiler.codegen.llvm.dots.spec import ELEMENT_BYTES
from luban.errors import ConfigError

CONTIGUOUS = ("k", "rows", "none")


@dataclass(frozen=True)
class PackSpec:
    """One packing function, `void name(ptr src, i64 src_rs, i64 src_ks, ptr dst, i64 rows, i64 K)`.

    Element (r, k) is read at `src[r * src_rs + k * src_ks]`; `ceil(rows / panel)` panels of `panel * Kp` elements are
    written one after the other, `Kp` being K rounded up to `k_multiple`; what lies beyond `rows` or K is zero.

    panel        rows of a panel: MR for A, NR for B
    group        values of K side by side: see `dots.PANELS`; 1, as many as a word of 4 bytes holds, or a vector
    contiguous   "k" (src_ks is 1), "rows" (src_rs is 1) or "none"
    src_type, dst_type   LLVM element types; float to bfloat rounds to nearest even, i8 may be widened to i16
    unsigned     integers are widened by zeros
    lanes        words in a vector register: 16 for AVX-512, 8 for AVX2, 4 for NEON
    masked       the target has masked loads of the source's elements
    native_bf16  the target converts float to bfloat itself (AVX512-BF16, FEAT_BF16)
    k_multiple   0 means `group`; see `dots.PANELS`
    parts        what a panel holds, one after the other, each with all of K: the values themselves, or parts of them
                 (see pack_parts)
    part         the one that code is being written for
    """

    panel: int
    group: int = 1
    contiguous: str = "k"
    src_type: str = "float"
    dst_type: str = "float"
    lanes: int = 16
    masked: bool = True
    native_bf16: bool = False
    k_multiple: int = 0
    parts: tuple[str, ...] = ("whole",)
    part: str = "whole"
    unsigned: bool = False

    def __post_init__(self) -> None:
        if self.contiguous not in CONTIGUOUS:
            raise ConfigError(f"packing: contiguous {self.contiguous!r} is unknown; use one of {CONTIGUOUS}")
        word = 4 // self.dst_bytes  # values in one; 0 for float64
        if self.group > 1 and (word < 2 or self.group % word):
            raise ConfigError(
                f"packing: groups of {self.group} need a 1- or 2-byte type and whole words of {word or 1}, "
                f"got {self.dst_type}; use group 1"
            )
        if self.group > max(word, 1) and self.group != word * self.lanes:
            raise ConfigError(
                f"packing: groups of {self.group} need vectors of {self.group // word} words, got {self.lanes}; "
                f"use group {word}"
            )
        if set(self.parts) - {"whole", *PARTS} or (self.parts != ("whole",) and self.dst_type != "bfloat"):
            raise ConfigError(f"packing: parts are {PARTS}, of bfloat, got {self.parts} of {self.dst_type}")
        if self.k_step % self.group:
            raise ConfigError(f"packing: K is padded to {self.k_step}, which is no multiple of the group {self.group}")

    @property
    def k_step(self) -> int:
        """K is padded to a multiple of this."""
        return self.k_multiple or self.group

    @property
    def pair(self) -> int:
        """Values of K in a word."""
        return min(self.group, max(1, 4 // self.dst_bytes))

    @property
    def word_bytes(self) -> int:
        return self.pair * self.dst_bytes

    @property
    def word(self) -> str:
        """LLVM type of a word."""
        return f"i{8 * self.word_bytes}"

    @property
    def line_bytes(self) -> int:
        """Bytes of a panel that hold one group of K of all rows."""
        return self.panel * self.group * self.dst_bytes

    @property
    def dst_bytes(self) -> int:
        return ELEMENT_BYTES[self.dst_type]

    @property
    def src_bytes(self) -> int:
        return ELEMENT_BYTES[self.src_type]


@dataclass(frozen=True)
class Panel:
    """A panel being written, as LLVM operands: source, target, valid rows (may exceed the panel's), source strides in
    bytes, padded K, bytes to the next panel.
    """

    source: str
    target: str
    valid: str
    row_bytes: str
    k_bytes: str
    padded: str
    size: str
