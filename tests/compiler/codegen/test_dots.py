"""Micro-kernels against float64 NumPy: layouts, ragged extents, poison; other chips by their assembly."""

import ctypes
import itertools
import re

import llvmlite.binding as llvm
import numpy as np
import pytest

from luban.compiler.codegen.llvm.dots import PANELS, DotSpec, PackSpec, emit_pack, emitter_for
from luban.compiler.codegen.llvm.dots.amx import emit_configure
from luban.compiler.codegen.llvm.dots.flow import masked_store
from luban.compiler.codegen.llvm.dots.spec import PARAMETERS
from luban.compiler.codegen.llvm.emitter import Function, Module
from luban.errors import ConfigError

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
HOST_FEATURES = llvm.get_host_cpu_features()
POISON = 12345.0
DTYPES = {"float": np.float32, "double": np.float64, "half": np.float16, "bfloat": np.uint16}
PACK_PARAMETERS = [("ptr", "src"), ("i64", "rs"), ("i64", "ks"), ("ptr", "dst"), ("i64", "rows"), ("i64", "K")]
needs_bf16 = pytest.mark.skipif(not HOST_FEATURES.get("avx512bf16"), reason="the chip has no vdpbf16ps")
needs_masks = HOST_FEATURES.get("avx512f", False) or HOST_FEATURES.get("avx2", False)


def host_machine():
    features = HOST_FEATURES.flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def optimise(text, machine, triple=None):
    parsed = llvm.parse_assembly(text)
    parsed.triple = triple or llvm.get_default_triple()
    parsed.verify()
    options = llvm.PipelineTuningOptions(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def export(module, name, parameters):
    """An external function `run` that calls the internal one, which a JIT could not find."""
    fn = Function(module, "run", "void", list(parameters))
    fn.call("void", f"@{name}", [(ty, f"%{arg}") for ty, arg in parameters])
    fn.emit("ret void")
    module.add(fn)


def jit(module, name, parameters):
    export(module, name, parameters)
    machine = host_machine()
    engine = llvm.create_mcjit_compiler(optimise(module.text(), machine), machine)
    types = [ctypes.c_void_p if ty == "ptr" else ctypes.c_int64 for ty, _ in parameters]
    call = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("run"))
    call.engine = engine
    return call


def micro_kernel(spec):
    module = Module()
    emitter_for(spec.unit)(module, "tile", spec)
    return jit(module, "tile", [*PARAMETERS, *spec.extra_params])


def to_storage(values, ty):
    """float64 values rounded to `ty`: what memory holds, and the same numbers in float64."""
    if ty != "bfloat":
        held = values.astype(DTYPES[ty])
        return held, held.astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    held = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return held, (held.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def aligned(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def panel(matrix, rows, group, k_multiple):
    """`matrix` (rows, K) as one packed panel [K/group][rows][group]."""
    held = np.zeros((rows, -(-max(matrix.shape[1], 1) // k_multiple) * k_multiple), matrix.dtype)
    held[: matrix.shape[0], : matrix.shape[1]] = matrix
    order = held.reshape(rows, -1, group).transpose(1, 0, 2)
    result = aligned(order.shape, order.dtype)
    result[:] = order
    return result


def place_a(a, spec):
    """A in memory with guard elements around it: (array, pointer, row stride, K stride)."""
    m, k = a.shape
    if spec.a_layout == "packed":
        rules = PANELS[spec.unit]
        held = panel(a, spec.mr, rules.a_group, rules.k_multiple)
        return held, held.ctypes.data, 0, 0
    poison = np.array(0x7FC0, np.uint16) if a.dtype == np.uint16 else np.array(np.nan, a.dtype)
    if spec.a_layout == "row_major":
        held = np.full((m + 1, k + 3), poison, a.dtype)
        held[:m, :k] = a
        return held, held.ctypes.data, k + 3, 1
    if spec.a_layout == "col_major":
        held = np.full((k + 1, m + 3), poison, a.dtype)
        held[:k, :m] = a.T
        return held, held.ctypes.data, 1, m + 3
    held = np.full((m + 1, 2 * k + 5), poison, a.dtype)
    held[:m, : 2 * k : 2] = a
    return held, held.ctypes.data, 2 * k + 5, 2


def place_b(b, spec):
    k, n = b.shape
    if spec.b_layout == "packed":
        rules = PANELS[spec.unit]
        wide = rules.b_columns or spec.nr
        columns = np.zeros((spec.nr, k), b.dtype)
        columns[:n] = b.T
        parts = [panel(columns[q : q + wide], wide, rules.b_group, rules.k_multiple) for q in range(0, spec.nr, wide)]
        held = aligned((len(parts), *parts[0].shape), b.dtype)
        held[:] = np.stack(parts)
        return held, held.ctypes.data, parts[0].size
    poison = np.array(0x7FC0, np.uint16) if b.dtype == np.uint16 else np.array(np.nan, b.dtype)
    held = np.full((k + 1, n + 5), poison, b.dtype)
    held[:k, :n] = b
    return held, held.ctypes.data, n + 5


def check(call, spec, m, n, k, rng):
    a, a_exact = to_storage(rng.standard_normal((m, k)), spec.a_type)
    b, b_exact = to_storage(rng.standard_normal((k, n)), spec.b_type)
    a_held, a_pointer, a_rs, a_cs = place_a(a, spec)
    b_held, b_pointer, b_rs = place_b(b, spec)
    c = np.full((spec.mr + 2, spec.nr + 7), POISON, DTYPES[spec.acc_type])
    start = rng.standard_normal((m, n))
    c[:m, :n] = start
    before = c.copy()
    call(a_pointer, a_rs, a_cs, b_pointer, b_rs, k, c.ctypes.data, c.shape[1], m, n)
    expected = a_exact @ b_exact + (before[:m, :n].astype(np.float64) if spec.accumulate else 0)
    eps = np.finfo(DTYPES[spec.acc_type]).eps
    scale = np.abs(a_exact) @ np.abs(b_exact) + 4
    assert np.all(np.abs(c[:m, :n] - expected) <= (k + 2) * eps * scale), (spec, m, n, k)
    c[:m, :n] = before[:m, :n]
    assert np.array_equal(c, before), f"memory beyond the tile was written: {spec} {m} {n} {k}"
    del a_held, b_held


def extents(spec, rng, count=10):
    """Corner cases of (m, n, K), then random ones."""
    lanes, group = spec.lanes, spec.unroll * PANELS[spec.unit].b_group
    yield from [(0, spec.nr, 3), (spec.mr, 0, 3), (spec.mr, spec.nr, 0), (spec.mr, spec.nr, 1), (1, 1, 1), (1, 1, 0)]
    yield from [
        (spec.mr, spec.nr, 4 * group + 3),
        (spec.mr - 1, spec.nr, 37),
        (spec.mr, spec.nr - 1, 2 * group),
        (min(2, spec.mr), lanes, 5),
    ]
    for _ in range(count):
        yield int(rng.integers(1, spec.mr + 1)), int(rng.integers(1, spec.nr + 1)), int(rng.integers(0, 70))


LAYOUTS = list(itertools.product(("packed", "row_major", "col_major", "strided"), ("packed", "rows")))


@pytest.mark.parametrize(("a_layout", "b_layout"), LAYOUTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_fma_layouts(a_layout, b_layout, accumulate):
    rng = np.random.default_rng(1)
    spec = DotSpec(
        "fma", 6, 2, 8, a_layout=a_layout, b_layout=b_layout, accumulate=accumulate, masked=needs_masks, unroll=3
    )
    call = micro_kernel(spec)
    for m, n, k in extents(spec, rng):
        check(call, spec, m, n, k, rng)


@pytest.mark.parametrize(("a_layout", "b_layout"), [("packed", "packed"), ("row_major", "rows")])
@pytest.mark.parametrize("accumulate", [False, True])
def test_fma_without_masks(a_layout, b_layout, accumulate):
    rng = np.random.default_rng(2)
    spec = DotSpec("fma", 5, 2, 4, a_layout=a_layout, b_layout=b_layout, accumulate=accumulate, masked=False)
    call = micro_kernel(spec)
    for m, n, k in extents(spec, rng):
        check(call, spec, m, n, k, rng)


@pytest.mark.parametrize(
    ("mr", "nv", "lanes", "types"),
    [
        (8, 3, 16, ("float", "float", "float")),
        (14, 2, 16, ("float", "float", "float")),
        (6, 4, 16, ("float", "float", "float")),
        (1, 4, 16, ("float", "float", "float")),
        (4, 2, 8, ("double", "double", "double")),
        (4, 2, 8, ("float", "float", "double")),
        (4, 2, 8, ("half", "half", "float")),
        (4, 2, 8, ("bfloat", "bfloat", "float")),
        (4, 2, 8, ("bfloat", "float", "float")),
    ],
)
@pytest.mark.parametrize("layouts", [("packed", "packed"), ("row_major", "rows")])
def test_fma_shapes_and_types(mr, nv, lanes, types, layouts):
    rng = np.random.default_rng(3)
    spec = DotSpec("fma", mr, nv, lanes, *types, *layouts, masked=needs_masks)
    call = micro_kernel(spec)
    for m, n, k in extents(spec, rng, 5):
        check(call, spec, m, n, k, rng)


@needs_bf16
@pytest.mark.parametrize(("a_layout", "b_layout"), LAYOUTS)
@pytest.mark.parametrize(("masked", "lanes"), [(True, 16), (False, 8)])
def test_bf16_dot(a_layout, b_layout, masked, lanes):
    rng = np.random.default_rng(4)
    types = ("bfloat", "bfloat", "float")
    spec = DotSpec("bf16_dot", 6, 2, lanes, *types, a_layout, b_layout, accumulate=masked, masked=masked, unroll=2)
    call = micro_kernel(spec)
    for m, n, k in extents(spec, rng):
        check(call, spec, m, n, k, rng)


class SoftTiles:
    """The eight AMX tile registers and their instructions, played by NumPy, for chips that have none."""

    def __init__(self):
        self.tiles = np.zeros((8, 16, 64), np.uint8)
        byte, pointer, word = ctypes.c_int8, ctypes.c_void_p, ctypes.c_int64
        kinds = {
            "tilezero": (self.zero, byte),
            "tileloadd64": (self.load, byte, pointer, word),
            "tilestored64": (self.store, byte, pointer, word),
            "tdpbf16ps": (self.product, byte, byte, byte),
        }
        self.kept = {name: ctypes.CFUNCTYPE(None, *types)(method) for name, (method, *types) in kinds.items()}
        for name, function in self.kept.items():
            llvm.add_symbol(f"soft_{name}", ctypes.cast(function, ctypes.c_void_p).value)

    def zero(self, tile):
        self.tiles[tile] = 0

    def load(self, tile, pointer, stride):
        for row in range(16):
            self.tiles[tile, row] = np.frombuffer(ctypes.string_at(pointer + row * stride, 64), np.uint8)

    def store(self, tile, pointer, stride):
        for row in range(16):
            ctypes.memmove(pointer + row * stride, self.tiles[tile, row].ctypes.data, 64)

    def product(self, c, a, b):
        left, right = ((self.tiles[t].view(np.uint16).astype(np.uint32) << 16).view(np.float32) for t in (a, b))
        pairs = right.reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16)
        self.tiles[c].view(np.float32)[:] += left @ pairs


@pytest.mark.parametrize("a_layout", ["packed", "row_major"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("vectors", [1, 2])
def test_amx_addresses_with_soft_tiles(a_layout, accumulate, vectors):
    rng = np.random.default_rng(7)
    spec = DotSpec("amx", 32, vectors, 16, "bfloat", "bfloat", "float", a_layout, accumulate=accumulate)
    module = Module()
    emitter_for("amx")(module, "tile", spec)
    export(module, "tile", PARAMETERS)
    text = module.text().replace("@llvm.x86.", "@soft_").replace(" immarg", "")
    machine, soft = host_machine(), SoftTiles()
    engine = llvm.create_mcjit_compiler(optimise(text, machine), machine)
    types = [ctypes.c_void_p if ty == "ptr" else ctypes.c_int64 for ty, _ in PARAMETERS]
    call = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("run"))
    for m, n, k in [(32, 32, 64), (32, 32, 0), (32, 32, 33), (7, 32, 65), (32, 5, 32), (31, 17, 95), (1, 1, 1)]:
        check(call, spec, m, min(n, spec.nr), k, rng)
    del soft


@needs_bf16
@pytest.mark.parametrize("a_layout", ["packed", "row_major"])
def test_a_whole_product_from_panels_in_bfloat16(a_layout):
    """53 x 101 x 77 from two packing functions and 8 x 48 tiles."""
    rng = np.random.default_rng(8)
    m, n, k = 53, 101, 77
    a, a_exact = to_storage(rng.standard_normal((m, k)), "bfloat")
    b = rng.standard_normal((n, k)).astype(np.float32)
    b_exact = to_storage(b, "bfloat")[1]
    spec = DotSpec("bf16_dot", 8, 3, 16, "bfloat", "bfloat", "float", a_layout)
    call, panels = micro_kernel(spec), []
    for held, rows, ty in ((a, spec.mr, "bfloat"), (b, spec.nr, "float")):
        module = Module()
        emit_pack(module, "pack", PackSpec(rows, 2, "k", ty, "bfloat", native_bf16=True))
        out = aligned((-(-held.shape[0] // rows), rows * (k + 1)), np.uint16)
        jit(module, "pack", PACK_PARAMETERS)(held.ctypes.data, k, 1, out.ctypes.data, held.shape[0], k)
        panels.append(out)
    c = np.full((m, n), np.nan, np.float32)
    for i, j in itertools.product(range(len(panels[0])), range(len(panels[1]))):
        row, column = i * spec.mr, j * spec.nr
        start = panels[0][i].ctypes.data if a_layout == "packed" else a[row:].ctypes.data
        extent = (min(spec.mr, m - row), min(spec.nr, n - column))
        call(start, k, 1, panels[1][j].ctypes.data, 0, k, c[row:, column:].ctypes.data, n, *extent)
    np.testing.assert_allclose(c, a_exact @ b_exact.T, atol=2e-5 * k)


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("masked", [needs_masks, False])
def test_epilogue_takes_the_place_of_the_store(unrolled, masked):
    """out[row, col] = max(C + A @ B + bias[col], 0) written through a pointer of the epilogue's own."""

    def epilogue(fn, value, row, col, mask, lanes):
        vector = "float" if lanes == 1 else f"<{lanes} x float>"
        place = fn.op(f"add i64 {fn.op(f'mul i64 {row}, %out_rs')}, {col}")
        bias = fn.op(f"load {vector}, ptr {fn.op(f'getelementptr float, ptr %bias, i64 {col}')}, align 4")
        total = fn.op(f"fadd {vector} {value}, {bias}")
        zero = "0.0" if lanes == 1 else "zeroinitializer"
        positive = fn.op(f"fcmp ogt {vector} {total}, {zero}")
        chosen = fn.op(
            f"select {'i1' if lanes == 1 else f'<{lanes} x i1>'} {positive}, {vector} {total}, {vector} {zero}"
        )
        at = fn.op(f"getelementptr float, ptr %out, i64 {place}")
        if mask:
            masked_store(fn, lanes, "float", chosen, at, mask, 4)
        else:
            fn.emit(f"store {vector} {chosen}, ptr {at}, align 4")

    extra = (("ptr", "bias"), ("ptr", "out"), ("i64", "out_rs"))
    spec = DotSpec(
        "fma", 4, 2, 8, accumulate=True, masked=masked, epilogue=epilogue, unroll_epilogue=unrolled, extra_params=extra
    )
    call = micro_kernel(spec)
    rng = np.random.default_rng(5)
    for m, n, k in extents(spec, rng, 6):
        a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal((m, n))
        a, b, c = (v.astype(np.float32) for v in (a, b, c))
        bias = rng.standard_normal(spec.nr).astype(np.float32)
        out = np.full((spec.mr + 1, spec.nr + 3), POISON, np.float32)
        kept = c.copy()
        pa, pb = panel(a, spec.mr, 1, 1), panel(b.T, spec.nr, 1, 1)
        call(
            pa.ctypes.data,
            0,
            0,
            pb.ctypes.data,
            0,
            k,
            c.ctypes.data,
            n,
            m,
            n,
            bias.ctypes.data,
            out.ctypes.data,
            spec.nr + 3,
        )
        expected = np.maximum(a.astype(float) @ b.astype(float) + c + bias[:n], 0)
        np.testing.assert_allclose(out[:m, :n], expected, atol=1e-4)
        out[:m, :n] = POISON
        assert np.all(out == POISON) and np.array_equal(c, kept)


def assembly(spec, triple, cpu, features="", abi=""):
    module = Module()
    emitter_for(spec.unit)(module, "tile", spec)
    if spec.unit == "amx":
        emit_configure(module, "configure")
        fn = Function(module, "start", "void", [])
        fn.call("void", "@configure", [])
        fn.emit("ret void")
        module.add(fn)
    export(module, "tile", [*PARAMETERS, *spec.extra_params])
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", abiname=abi
    )
    return machine.emit_assembly(optimise(module.text(), machine, triple))


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "abi", "lanes", "instruction"),
    [
        ("aarch64-linux-gnu", "neoverse-n1", "", "", 4, r"fmla\s+v\d+\.4s"),
        ("riscv64-linux-gnu", "generic-rv64", "+m,+a,+f,+d,+c,+v,+zvl256b", "lp64d", 8, r"vfm(acc|add)\.v[vf]"),
        ("loongarch64-linux-gnu", "la464", "+f,+d,+lsx,+lasx", "lp64d", 8, r"xvfmadd\.s"),
        ("x86_64-linux-gnu", "haswell", "", "", 8, r"vfmadd231ps\s.*%ymm"),
    ],
)
@pytest.mark.parametrize("layouts", [("packed", "packed"), ("row_major", "rows")])
def test_fma_on_other_chips(triple, cpu, features, abi, lanes, instruction, layouts):
    masked = triple.startswith(("riscv", "x86"))
    spec = DotSpec("fma", 4, 2, lanes, a_layout=layouts[0], b_layout=layouts[1], masked=masked, unroll=2)
    text = assembly(spec, triple, cpu, features, abi)
    assert len(re.findall(instruction, text)) >= 4 * 2 * 3, text


def test_bfdot_on_aarch64():
    spec = DotSpec("bfdot", 4, 2, 4, "bfloat", "bfloat", masked=False)
    assert re.search(r"bfdot\s+v\d+\.4s", assembly(spec, "aarch64-linux-gnu", "neoverse-v1"))


@pytest.mark.parametrize("a_layout", ["packed", "row_major"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_amx_compiles(a_layout, accumulate):
    spec = DotSpec("amx", 32, 2, 16, "bfloat", "bfloat", "float", a_layout, accumulate=accumulate)
    text = assembly(spec, "x86_64-linux-gnu", "sapphirerapids")
    assert "tdpbf16ps" in text and "ldtilecfg" in text and "tileloadd" in text and "tilestored" in text


def test_wrong_specs_are_refused():
    with pytest.raises(ConfigError, match="unknown"):
        emitter_for("abacus")
    with pytest.raises(ConfigError, match="layouts"):
        DotSpec("fma", 4, 2, 8, a_layout="sideways")
    with pytest.raises(ConfigError, match="accumulated"):
        emitter_for("fma")(Module(), "t", DotSpec("fma", 4, 2, 8, "double", "double", "float"))
    with pytest.raises(ConfigError, match="bf16_dot"):
        emitter_for("bf16_dot")(Module(), "t", DotSpec("bf16_dot", 4, 2, 8))
    with pytest.raises(ConfigError, match="AMX"):
        emitter_for("amx")(Module(), "t", DotSpec("amx", 16, 2, 16, "bfloat", "bfloat"))
    with pytest.raises(ConfigError, match="AMX"):
        emitter_for("amx")(Module(), "t", DotSpec("amx", 32, 3, 16, "bfloat", "bfloat"))
