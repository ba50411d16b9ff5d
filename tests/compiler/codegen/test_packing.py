"""Packing against NumPy and torch: layouts, types, ragged extents, with unmapped pages around source and target."""

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

from luban import targets
from luban.compiler.codegen.llvm.compile import compile_module
from luban.compiler.codegen.llvm.dots import PackSpec, emit_pack
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.compiler.codegen.llvm.lanes import function_attributes, loads_masked
from luban.errors import ConfigError
from luban.runtime import elf, externals

PARAMETERS = [("ptr", "src"), ("i64", "rs"), ("i64", "ks"), ("ptr", "dst"), ("i64", "rows"), ("i64", "K")]
STORAGE = {"float": np.float32, "double": np.float64, "half": np.float16, "bfloat": np.uint16}
NATIVE = targets.get("native")
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
UNTOUCHED = 0x4D  # a byte that no test value is made of alone


class Guarded:
    """Memory between two unmapped pages: reading or writing one byte beyond it ends the process."""

    def __init__(self, size):
        pages = -(-size // PAGE) + 2
        self.map = mmap.mmap(-1, pages * PAGE)
        self.whole = np.frombuffer(self.map, np.uint8)
        self.start, self.size = self.whole.ctypes.data, (pages - 2) * PAGE
        for place in (self.start, self.start + (pages - 1) * PAGE):
            assert LIBC.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(PAGE), 0) == 0

    def bytes(self, size, at_end):
        """`size` bytes that touch the unmapped page after (or before) them."""
        first = PAGE + (self.size - size if at_end else 0)
        return self.whole[first : first + size]

    def inside(self):
        return self.whole[PAGE : PAGE + self.size]


def llvm_text(spec, target):
    module = Module()
    emit_pack(module, "pack", spec, function_attributes(target))
    fn = Function(module, "run", "void", list(PARAMETERS), attributes=function_attributes(target))
    fn.call("void", "@pack", [(ty, f"%{arg}") for ty, arg in PARAMETERS])
    fn.emit("ret void")
    module.add(fn)
    return module.text()


def load(spec, target=NATIVE):
    image = elf.load(compile_module(llvm_text(spec, target), target).object, externals.resolve)
    types = [ctypes.c_void_p if ty == "ptr" else ctypes.c_int64 for ty, _ in PARAMETERS]
    call = ctypes.CFUNCTYPE(None, *types)(image.lookup("run"))
    call.image = image
    return call


def to_type(values, ty):
    """float32 or float64 values as they are stored in `ty`, rounded to nearest even by torch."""
    if ty == "bfloat":
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return values.astype(STORAGE[ty])


def to_float64(held, ty):
    wide = (held.astype(np.uint32) << 16).view(np.float32) if ty == "bfloat" else held
    return wide.astype(np.float64)


def values_of(rng, rows, k):
    """Random values of many sizes with infinities and NaN among them; exact in float32."""
    values = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-14, 15, (rows, k))
    values[rng.random((rows, k)) < 0.02] = np.inf
    values[rng.random((rows, k)) < 0.02] = -np.inf
    values[rng.random((rows, k)) < 0.02] = np.nan
    return values.astype(np.float32)


def place(guarded, held, contiguous, at_end):
    """`held` (rows, K) in guarded memory: (pointer, row stride, K stride). What lies between its elements is NaN."""
    rows, k = held.shape
    rs, ks = {"k": (k + 3, 1), "rows": (1, rows + 3), "none": (2 * k + 3, 2)}[contiguous]
    if rows == 0 or k == 0:
        return guarded.bytes(0, at_end).ctypes.data, rs, ks
    size = held.itemsize
    memory = guarded.bytes(((rows - 1) * rs + (k - 1) * ks + 1) * size, at_end).view(held.dtype)
    memory[:] = 0x7FC0 if held.dtype == np.uint16 else np.nan
    np.lib.stride_tricks.as_strided(memory, (rows, k), (rs * size, ks * size))[:] = held
    return memory.ctypes.data, rs, ks


def packed(held, spec):
    """What packing writes: panels [K/group][panel][group], zeros beyond rows and K."""
    rows, k = held.shape
    panels, padded = -(-rows // spec.panel), -(-k // spec.k_step) * spec.k_step
    full = np.zeros((panels * spec.panel, padded), held.dtype)
    full[:rows, :k] = held
    return full.reshape(panels, spec.panel, padded // spec.group, spec.group).transpose(0, 2, 1, 3).ravel()


def extents(spec, rng):
    """Corner cases of (rows, K), then random ones."""
    rows, block = spec.panel, 2 * spec.lanes
    yield from [(rows, block), (1, 1), (0, 5), (5, 0), (2 * rows + 3, 2 * block + 5), (rows + 1, 3), (9 * rows + 3, 7)]
    yield from [(rows - 1, block - 1), (rows, block + 1), (2 * rows, 2 * block), (3 * rows, 1), (10 * rows, 3 * block)]
    for _ in range(8):
        yield int(rng.integers(1, 3 * rows + 2)), int(rng.integers(1, 4 * block))


def check(call, spec, seed=0):
    rng = np.random.default_rng(seed)
    sizes = list(extents(spec, rng))
    memory = [Guarded(max((r + 4) * (2 * k + 4) for r, k in sizes) * 8 + PAGE) for _ in range(2)]
    memory[1] = Guarded(max((r + spec.panel) * (k + spec.k_step) for r, k in sizes) * 8 + PAGE)
    for number, (rows, k) in enumerate(sizes):
        held = to_type(values_of(rng, rows, k), spec.src_type)
        exact = to_float64(held, spec.src_type)
        result = held if spec.src_type == spec.dst_type else to_type(exact.astype(np.float32), spec.dst_type)
        expected = packed(result, spec)
        source, rs, ks = place(memory[0], held, spec.contiguous, number % 2 == 0)
        for at_end in (True, False):
            memory[1].inside()[:] = UNTOUCHED
            target = memory[1].bytes(expected.nbytes, at_end)
            call(source, rs, ks, target.ctypes.data, rows, k)
            got = target.view(expected.dtype)
            same = (got == expected) if spec.src_type == spec.dst_type == "bfloat" else None
            if same is None:
                same = np.equal(to_float64(got, spec.dst_type), to_float64(expected, spec.dst_type))
                same |= np.isnan(to_float64(got, spec.dst_type)) & np.isnan(to_float64(expected, spec.dst_type))
            assert same.all(), f"{spec} {rows} x {k}: {np.flatnonzero(~same)[:8]} of {len(same)} differ"
            target[:] = UNTOUCHED
            assert np.all(memory[1].inside() == UNTOUCHED), f"packing wrote beyond its panels: {spec} {rows} x {k}"


CASES = [  # panel, group, source, panel's type, k_multiple
    (48, 1, "float", "float", 0),
    (16, 1, "float", "float", 0),
    (14, 1, "float", "float", 0),
    (8, 1, "float", "float", 0),
    (6, 1, "float", "float", 0),
    (1, 1, "float", "float", 0),
    (20, 1, "float", "float", 0),
    (16, 1, "float", "float", 4),
    (8, 1, "double", "double", 0),
    (12, 1, "double", "double", 0),
    (48, 1, "bfloat", "float", 0),
    (12, 1, "bfloat", "float", 0),
    (48, 1, "half", "float", 0),
    (14, 1, "half", "float", 0),
    (8, 1, "bfloat", "bfloat", 0),
    (14, 1, "half", "half", 0),
    (16, 1, "float", "bfloat", 0),
    (14, 1, "float", "bfloat", 3),
    (48, 2, "bfloat", "bfloat", 0),
    (32, 2, "bfloat", "bfloat", 32),
    (8, 2, "bfloat", "bfloat", 0),
    (14, 2, "bfloat", "bfloat", 0),
    (6, 2, "half", "half", 0),
    (32, 2, "float", "bfloat", 32),
    (14, 2, "float", "bfloat", 0),
    (8, 2, "float", "bfloat", 0),
]
GROUPS = [(32, "bfloat", "bfloat", 0), (32, "float", "bfloat", 0), (14, "float", "bfloat", 0), (8, "half", "half", 2)]


def spec_of(case, contiguous, lanes, masked, native=False):
    panel, group, src, dst, k_multiple = case
    lanes = max(1, lanes // 2) if dst == "double" else lanes
    return PackSpec(panel, group, contiguous, src, dst, lanes, masked, native, k_multiple)


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packing(case, contiguous):
    """As the chip itself would have it, with and without masks."""
    lanes, native = NATIVE.vector_bits // 32, NATIVE.has("avx512bf16") or NATIVE.has("bf16")
    for masked in {loads_masked(NATIVE, case[2]), False}:
        spec = spec_of(case, contiguous, lanes, masked, native and masked)
        check(load(spec), spec)


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("lanes", [8, 4, 1])
def test_packing_with_shorter_vectors(case, contiguous, lanes):
    for masked in {lanes == 8 and loads_masked(NATIVE, case[2]), False}:
        spec = spec_of(case, contiguous, lanes, masked)
        check(load(spec), spec)


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("lanes", [16, 8, 4])
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_groups_as_wide_as_a_vector(case, lanes, contiguous):
    """AMX's panels of A and their like for shorter vectors."""
    panel, src, dst, more = case
    native = NATIVE.has("avx512bf16") and lanes == 16
    for masked in {loads_masked(NATIVE, src), False}:
        spec = PackSpec(panel, 2 * lanes, contiguous, src, dst, lanes, masked, native and masked, more * 2 * lanes)
        check(load(spec), spec)


@pytest.mark.skipif(not NATIVE.has("avx2"), reason="the chip has no AVX2")
@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("case", [c for c in CASES if c[0] in (6, 14, 16, 32)], ids=str)
def test_packing_for_avx2(case, contiguous):
    target = targets.get("x86-64-avx2")
    spec = spec_of(case, contiguous, 8, loads_masked(target, case[2]))
    check(load(spec, target), spec)


@pytest.mark.parametrize("contiguous", ["k", "rows"])
def test_strides_of_a_page(contiguous):
    """Rows that share one set of the cache, and strides of zero: one row for all."""
    spec = PackSpec(16, 1, contiguous)
    call, rng = load(spec), np.random.default_rng(0)
    source = rng.standard_normal((40, 1024)).astype(np.float32)
    for step in (1024, 0):
        rows, k = (37, 40) if contiguous == "k" else (1000, 37)
        shape, outer = ((rows, k), True) if contiguous == "k" else ((k, rows), False)
        seen = np.lib.stride_tricks.as_strided(source, shape, (4 * step, 4))
        seen = seen if outer else seen.T
        out = np.full(-(-rows // 16) * 16 * k, 77, np.float32)
        call(source.ctypes.data, *((step, 1) if outer else (1, step)), out.ctypes.data, rows, k)
        np.testing.assert_array_equal(out, packed(np.ascontiguousarray(seen), spec))


@pytest.mark.parametrize("native", [False, NATIVE.has("avx512bf16")])
@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("group", [1, 2, 32])
def test_rounding_to_bfloat_keeps_nan_and_ties(contiguous, group, native):
    values = np.array([np.nan, np.inf, -np.inf, 1.00390625, 1.01171875, -0.0, 3.4e38, 1e-3], np.float32)
    values.view(np.uint32)[0] = 0x7FFFFFFF  # a NaN whose rounded payload would carry into the sign
    spec = PackSpec(8, group, contiguous, "float", "bfloat", 16, loads_masked(NATIVE, "float"), native)
    call = load(spec)
    rs, ks = (1, 8) if contiguous == "rows" else (1, 1) if contiguous == "k" else (2, 2)
    spread = np.repeat(values, 2) if contiguous == "none" else values
    rows, k = (1, 8) if contiguous == "k" else (8, 1)
    out = np.zeros(8 * max(8, group), np.uint16)
    call(spread.ctypes.data, rs, ks, out.ctypes.data, rows, k)
    padded = -(-k // group) * group
    order = out[: 8 * padded].reshape(padded // group, 8, group).transpose(1, 0, 2).reshape(8, padded)
    wide = to_float64(order[0, :8] if contiguous == "k" else order[:, 0], "bfloat")
    assert np.isnan(wide[0])
    assert np.array_equal(wide[1:6], np.array([np.inf, -np.inf, 1.0, 1.015625, -0.0])) and np.signbit(wide[5])
    assert wide[6] == np.inf and abs(wide[7] - 1e-3) < 4e-6


FOREIGN = [
    "aarch64-neon",
    "aarch64-sve",
    "kunpeng-920",
    "riscv64-rvv",
    "loongarch64-lasx",
    "x86-64-avx512",
    "x86-64-amx",
]


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("name", FOREIGN)
def test_packing_compiles_for_other_chips(name, contiguous):
    target = targets.get(name)
    lanes = max(1, target.vector_bits // 32)
    native = target.has("avx512bf16") or target.has("bf16")
    cases = [CASES[i] for i in (0, 2, 3, 8, 10, 12, 14, 19, 23)] + [(32, 2 * lanes, "float", "bfloat", 0)]
    for case in cases:
        spec = spec_of(case, contiguous, lanes, loads_masked(target, case[2]), native)
        compiled = compile_module(llvm_text(spec, target), target)
        assert len(compiled.object) > 500


def test_wrong_specs_are_refused():
    with pytest.raises(ConfigError, match="contiguous"):
        PackSpec(8, contiguous="sideways")
    with pytest.raises(ConfigError, match="2-byte"):
        PackSpec(8, 2)
    with pytest.raises(ConfigError, match="vectors of 16 words"):
        PackSpec(8, 32, dst_type="bfloat", lanes=8)
    with pytest.raises(ConfigError, match="no multiple"):
        PackSpec(8, 2, dst_type="bfloat", k_multiple=3)
    with pytest.raises(ConfigError, match="not known"):
        emit_pack(Module(), "pack", replace(PackSpec(8), dst_type="double"))


# ---- 8-bit integers: into groups of four or of a vector, pairs of 16 bits, single values

INT_LANES = NATIVE.vector_bits // 32
INT_MASKED = loads_masked(NATIVE, "i8")
# panel, group, k_multiple, dst_type: AMX's two sides, dot units, pairs of 16 bits, single values
INT_FORMS = [
    (32, 4 * INT_LANES, 4 * INT_LANES, "i8"),
    (16, 4, 4 * INT_LANES, "i8"),
    (8, 4, 4, "i8"),
    (48, 4, 4, "i8"),
    (7, 4, 4, "i8"),
    (8, 2, 2, "i16"),
    (48, 2, 2, "i16"),
    (3, 2, 2, "i16"),
    (6, 1, 1, "i8"),
    (48, 1, 1, "i8"),
]
INT_STORAGE = {"i8": np.int8, "i16": np.int16}


def place_integers(guarded, held, contiguous, at_end):
    """Values in guarded memory with others between them: (pointer, row stride, K stride)."""
    rows, k = held.shape
    rs, ks = {"k": (k + 3, 1), "rows": (1, rows + 3), "none": (2 * k + 3, 2)}[contiguous]
    if rows == 0 or k == 0:
        return guarded.bytes(0, at_end).ctypes.data, rs, ks
    memory = guarded.bytes((rows - 1) * rs + (k - 1) * ks + 1, at_end).view(np.int8)
    memory[:] = 0x55
    np.lib.stride_tricks.as_strided(memory, (rows, k), (rs, ks))[:] = held
    return memory.ctypes.data, rs, ks


def check_integers(call, spec):
    rng = np.random.default_rng(spec.panel + spec.group)
    sizes = list(extents(spec, rng))
    source = Guarded(max((r + 4) * (2 * k + 4) for r, k in sizes) + PAGE)
    target = Guarded(max((r + spec.panel) * (k + spec.k_step) for r, k in sizes) * 2 + PAGE)
    for number, (rows, k) in enumerate(sizes):
        held = rng.integers(-128, 128, (rows, k)).astype(np.int8)
        wide = held.view(np.uint8) if spec.unsigned else held
        expected = packed(wide.astype(INT_STORAGE[spec.dst_type]), spec)
        pointer, rs, ks = place_integers(source, held, spec.contiguous, number % 2 == 0)
        for at_end in (True, False):
            target.inside()[:] = UNTOUCHED
            place = target.bytes(expected.nbytes, at_end)
            call(pointer, rs, ks, place.ctypes.data, rows, k)
            assert np.array_equal(place.view(expected.dtype), expected), f"{spec} {rows} x {k}"
            place[:] = UNTOUCHED
            assert np.all(target.inside() == UNTOUCHED), f"packing wrote beyond its panels: {spec} {rows} x {k}"


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
@pytest.mark.parametrize("form", INT_FORMS, ids=str)
def test_integers(form, contiguous):
    panel, group, multiple, dst = form
    spec = PackSpec(panel, group, contiguous, "i8", dst, INT_LANES, INT_MASKED, k_multiple=multiple)
    for unsigned in (False, True) if dst == "i16" else (False,):
        check_integers(load(replace(spec, unsigned=unsigned)), replace(spec, unsigned=unsigned))


@pytest.mark.parametrize("contiguous", ["k", "rows", "none"])
def test_integers_without_masks(contiguous):
    for group, multiple, dst in ((4, 4, "i8"), (2, 2, "i16"), (1, 1, "i8")):
        spec = PackSpec(12, group, contiguous, "i8", dst, 4, False, k_multiple=multiple)
        check_integers(load(spec), spec)


@pytest.mark.parametrize("name", ["aarch64-neon", "kunpeng-920", "aarch64-sve", "riscv64-rvv", "loongarch64-lasx"])
def test_other_chips_pack_integers(name):
    target = targets.get(name)
    for contiguous in ("k", "rows", "none"):
        for group, multiple, dst in ((4, 4, "i8"), (2, 2, "i16"), (1, 1, "i8")):
            spec = PackSpec(24, group, contiguous, "i8", dst, target.vector_bits // 32, False, k_multiple=multiple)
            assert compile_module(llvm_text(spec, target), target).object[:4] == b"\x7fELF"


def test_wrong_integer_specs_are_refused():
    with pytest.raises(ConfigError, match="whole words of 4"):
        PackSpec(8, 2, src_type="i8", dst_type="i8")
    with pytest.raises(ConfigError, match="need vectors of 4 words, got 16; use group 4"):
        PackSpec(8, 16, src_type="i8", dst_type="i8")
