"""What a register-level matrix kernel is asked to be: a frozen description, checked once when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from luban.errors import ConfigError

A_LAYOUTS = ("packed", "row_major", "col_major", "strided")
B_LAYOUTS = ("packed", "rows")
ELEMENT_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat": 2, "i8": 1, "i16": 2, "i32": 4}

PARAMETERS = (
    ("ptr", "A"), ("i64", "a_rs"), ("i64", "a_cs"),
    ("ptr", "B"), ("i64", "b_rs"), ("i64", "K"),
    ("ptr", "C"), ("i64", "c_rs"), ("i64", "m"), ("i64", "n"),
)  # fmt: skip

# epilogue(fn, value, row, col, mask, lanes): see DotSpec.epilogue
Epilogue = Callable[..., None]


@dataclass(frozen=True)
class DotSpec:
    """One micro-kernel: `C[m x n] (+)= A[m x K] @ B[K x n]` for `m <= mr` and `n <= nr`.

    The emitted function is `void name(ptr A, i64 a_rs, i64 a_cs, ptr B, i64 b_rs, i64 K, ptr C, i64 c_rs, i64 m, i64 n,
    *extra_params)`; strides are in elements, `m`, `n` and `K` may be 0, `C` is row-major of `acc_type`.

    unit          the arithmetic, a name that `emitter_for` knows: "fma", "bf16_dot", "bfdot", "amx", "imul", ...
    mr            rows of the register tile
    nr_vectors    vectors a row; `nr = nr_vectors * lanes`
    lanes         accumulators in one vector register
    a_type, b_type, acc_type   LLVM element types; the dot units need "bfloat" inputs and "float" accumulators, or "i8"
                  inputs (some "i16") and "i32" accumulators
    unsigned      the operands whose "i8" values have no sign: "", "a", "b" or "ab"
    a_layout      "packed": a panel `[ceil(K/kk)][mr][kk]`, zero padded, strides unused (kk: `a_group` of
                  `dots.PANELS[unit]`); "row_major" (a_cs is 1), "col_major" (a_rs is 1) or "strided": read in place,
                  never beyond row m
    b_layout      "packed": a panel `[ceil(K/kk)][nr][kk]` aligned to a vector, zero padded (`b_group`), b_rs unused;
                  where the unit's panels have fewer columns (`b_columns`), several of them, b_rs elements apart;
                  "rows": row-major with row stride b_rs, read in place, never beyond column n
    accumulate    add to C instead of overwriting it
    whole_tile    C is memory for a whole tile, rows `nr` apart and aligned to a vector, whose ragged part may hold
                  anything: all of it is read and written, whatever `m` and `n`; `c_rs` is not used
    unroll        steps of K in one turn of the main loop
    masked        the target loads and stores under a mask natively (AVX-512, AVX2, RVV, SVE; not NEON, LSX, LASX)
    prefetch_b    bytes ahead of the packed B panel to prefetch, 0 for none
    epilogue      replaces the store: called as `epilogue(fn, value, row, col, mask, lanes)` wherever one vector of
                  results is ready (C already added when `accumulate`). `value` is `<lanes x acc_type>`, or a scalar
                  when `lanes` is 1, which is how the last columns come where the target has no masks; `row` and `col`
                  are i64 operands inside the tile; `mask` is None (all lanes valid) or an `<lanes x i1>`. It writes
                  instructions with `fn`, may read every parameter (`%C`, `%c_rs`, ...) and must store the result
                  itself. It is called two times, whatever the tile's size, unless `unroll_epilogue`
    unroll_epilogue   write the epilogue out for every accumulator of a full tile, in registers: for short ones
    extra_params  (LLVM type, name) pairs appended to the function's parameters, for the epilogue to read as `%name`
    """

    unit: str
    mr: int
    nr_vectors: int
    lanes: int
    a_type: str = "float"
    b_type: str = "float"
    acc_type: str = "float"
    a_layout: str = "packed"
    b_layout: str = "packed"
    accumulate: bool = False
    whole_tile: bool = False
    unroll: int = 4
    masked: bool = True
    prefetch_b: int = 0
    epilogue: Epilogue | None = None
    unroll_epilogue: bool = False
    extra_params: tuple[tuple[str, str], ...] = ()
    unsigned: str = ""

    def __post_init__(self) -> None:
        if self.a_layout not in A_LAYOUTS or self.b_layout not in B_LAYOUTS:
            raise ConfigError(
                f"micro-kernel layouts {self.a_layout!r}, {self.b_layout!r} are unknown; "
                f"use one of {A_LAYOUTS} for A and {B_LAYOUTS} for B"
            )
        if self.whole_tile and self.epilogue:
            raise ConfigError("a micro-kernel that stores whole tiles has no epilogue; run it over the tile afterwards")
        sizes = (self.mr, self.nr_vectors, self.lanes, self.unroll)
        if min(sizes) < 1:
            raise ConfigError(f"micro-kernel mr, nr_vectors, lanes and unroll must be positive, got {sizes}")
        for ty in (self.a_type, self.b_type, self.acc_type):
            if ty not in ELEMENT_BYTES:
                raise ConfigError(f"micro-kernel element type {ty!r} is unknown; use one of {tuple(ELEMENT_BYTES)}")

    @property
    def nr(self) -> int:
        """Columns of the register tile."""
        return self.nr_vectors * self.lanes

    @property
    def vector(self) -> str:
        """LLVM type of one accumulator vector."""
        return f"<{self.lanes} x {self.acc_type}>"

    @property
    def in_place(self) -> bool:
        """True where an operand is read where it lies, so that partial tiles need their own loop."""
        return self.a_layout != "packed" or self.b_layout != "packed"
