"""The loops of the peaks: that they do what they count, here and in the code for other chips."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest

from luban import targets
from luban.bench import peak_kernels, peaks
from luban.bench.peak_kernels import compute_loops, memory_loops, module_text, step_bytes
from luban.compiler.codegen.llvm.compile import compile_module

INSTRUCTIONS = {
    "x86-64-avx2": ["vfmadd.*%ymm", "vpaddd.*%ymm"],
    "x86-64-avx512": ["vfmadd.*%zmm", "vmovntps.*%zmm"],
    "x86-64-avx512-bf16": ["vdpbf16ps.*%zmm", "vpdpbusd.*%zmm"],
    "x86-64-amx": ["tdpbf16ps", "tdpbssd", "vfmadd.*ph.*%zmm"],
    "aarch64-neon": [r"fmla\s+v\d+\.4s", r"fmla\s+v\d+\.2d"],
    "aarch64-sve": [
        r"fm(la|ad)\s+z\d+\.s",
        r"bfdot\s+v",
        r"bfmmla\s+v",
        r"sdot\s+v",
        r"smmla\s+v",
        r"fm(la|ad)\s+z\d+\.h",
    ],
    "kunpeng-920": [r"fmla\s+v\d+\.8h", r"sdot\s+v"],
    "riscv64-rvv": [r"vfm(acc|add)\.v", r"vle32\.v"],
    "loongarch64-lasx": [r"xvfmadd\.s", r"xvfmadd\.d"],
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_same_loops_are_vector_code_on_every_chip(name):
    target = targets.get(name)
    assembly = compile_module(module_text(target), target).assembly
    for wanted in INSTRUCTIONS[name]:
        assert re.search(wanted, assembly), wanted


def test_a_chip_without_vectors_has_loops_too():
    plain = replace(targets.get("riscv64-rvv"), llvm_features="+m,+a,+f,+d,+c", vector_bits=64, vector_registers=32)
    assembly = compile_module(module_text(plain), plain).assembly
    assert "fmadd.s" in assembly and "fmadd.d" in assembly


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_sums_stay_in_registers(name):
    target = targets.get(name)
    assembly = compile_module(module_text(target), target).assembly
    body = assembly.split("peak.fma.float32.body:")[1].split(".body:")[0]
    used = {
        "x86-64": r"vfmadd\S+",
        "aarch64": r"fm(?:la|ad)\s",
        "riscv64": r"vfm(?:acc|add)",
        "loongarch64": r"xvfmadd",
    }
    assert len(re.findall(used[target.family], body)) == peak_kernels.sums_of(target)
    assert not re.search(r"Spill|Reload", body)


@pytest.fixture(scope="module")
def loops():
    return peaks.Loops(count=2)


@pytest.mark.parametrize("loop", compute_loops(targets.get("native")), ids=lambda c: c.symbol)
def test_a_compute_loop_does_the_arithmetic_that_it_counts(loops, loop):
    """With ones in both operands each sum ends at turns times products; the sums are what the loop leaves in memory."""
    one = {"float64": b"\0\0\0\0\0\0\xf0?", "float32": b"\0\0\x80?", "float16": b"\0<", "bfloat16": b"\x80?"}.get(
        loop.dtype, b"\1"
    )
    size = peaks.TASK_BYTES
    memory = ctypes.create_string_buffer(2 * size + 64)
    start = -(-ctypes.addressof(memory) // 64) * 64
    ctypes.memmove(start, one * (2 * size // len(one)), 2 * size)
    turns = 3
    loops.native(loop.symbol, start, size, 0, memory)(turns)
    total = {"float64": ctypes.c_double, "float32": ctypes.c_float, "bfloat16": ctypes.c_float}.get(
        loop.dtype, ctypes.c_int32
    )
    if loop.dtype == "float16":
        return _check_half(start, turns)
    products = loop.operations // 2
    for task in range(2):
        first = total.from_address(start + task * size).value
        assert first == turns * _products_of_a_sum(loop)
    assert products % _products_of_a_sum(loop) == 0
    return None


def _check_half(start, turns):
    assert ctypes.string_at(start, 2) == {3: b"\0B"}[turns]  # 3.0


def _products_of_a_sum(loop):
    unit = next((u for u in targets.get("native").dot_units if u.name == loop.unit), None)
    return unit.k if unit else 1


@pytest.mark.parametrize("loop", memory_loops(targets.get("native")), ids=lambda m: m.symbol)
@pytest.mark.parametrize("turns", [2, 6])
def test_a_memory_loop_touches_its_region_and_nothing_else(loops, loop, turns):
    size = step_bytes(loops.target) * turns  # of each of two tasks
    memory = ctypes.create_string_buffer(2 * size + 128)
    start = -(-ctypes.addressof(memory) // 64) * 64
    first, second = bytes(range(1, 129)) * (size // 256), bytes(range(64, 192)) * (size // 256)
    ctypes.memmove(start, (first + second) * 2, 2 * size)
    loops.native(loop.symbol, start, size, size, memory)(1)
    for task in range(2):
        got = ctypes.string_at(start + task * size, size)
        if loop.does == "copy":
            assert got == first * 2
        elif loop.does == "write":
            assert got == bytes(size)
        else:
            assert _words(got[: step_bytes(loops.target)]) == _lane_sums(first + second, step_bytes(loops.target))
    assert ctypes.string_at(start + 2 * size, 32) == bytes(32)


def _words(data):
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


def _lane_sums(data, step):
    rows = [_words(data[i : i + step]) for i in range(0, len(data), step)]
    return [sum(lane) % 2**32 for lane in zip(*rows)]


def test_levels_lie_within_their_caches():
    target = targets.get("x86-64-amx")
    found = peaks.levels(target, 2, 1 << 30)
    assert list(found) == ["L1", "L2", "L3", "memory"]
    assert found["L1"] == target.l1_bytes and found["L2"] == target.l2_bytes  # half of each thread's own, two threads
    assert 2 * target.l2_bytes < found["L3"] <= target.l3_bytes // 2
    alone = peaks.levels(targets.get("riscv64-rvv"), 1, 1 << 30)
    assert alone["L3"] == 2 << 20


def test_the_table_has_every_unit_and_level(loops):
    table = peaks.measure(loops, rounds=1, large=1 << 20)
    assert [(u["unit"], u["dtype"]) for u in table["compute"]] == list(loops.compute_loops)
    assert all(u["gflops"] >= u["median_gflops"] > 0 for u in table["compute"])
    assert {(m["level"], m["does"]) for m in table["memory"]} >= {("L1", "read"), ("memory", "copy"), ("L2", "write")}


@pytest.mark.parametrize("reads,writes", [(4096, 0), (0, 4096), (1 << 20, 1 << 18), (1000, 3000), (1, 1)])
def test_traffic_moves_at_least_what_it_is_asked_for(loops, reads, writes):
    got = loops.traffic(reads, writes, seconds=0.0)
    got.run()
    slack = 4 * 2 * step_bytes(loops.target)  # two parts, each up to a whole turn of both threads
    assert reads + writes <= got.amount <= reads + writes + slack


def test_a_walk_comes_through_the_whole_region(loops, monkeypatch):
    monkeypatch.setattr(peaks, "PIECE", 64 << 10)
    fresh = peaks.Loops(count=2)
    walk = fresh.walk("write", 1 << 20)
    assert walk.amount == 128 << 10
    ctypes.memset(fresh._base, 1, fresh._room)
    for _ in range((1 << 20) // (128 << 10)):
        walk.run()
    assert ctypes.string_at(fresh._base, 1 << 20) == bytes(1 << 20)
