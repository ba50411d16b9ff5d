"""The list of chips, and what each says of itself."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from luban import targets
from luban.errors import TargetError
from luban.targets import Cache, Target, x86_64

NAMES = """native x86-64-avx2 x86-64-avx512 x86-64-avx512-bf16 x86-64-amx aarch64-neon aarch64-sve kunpeng-920
riscv64-rvv loongarch64-lasx cuda-sm80 cuda-sm90 hip-gfx942 ascend-910b""".split()
CPUS = [n for n in NAMES if n != "native" and targets.get(n).is_cpu]


def test_the_names():
    assert set(NAMES) <= set(targets.names())
    assert len(set(targets.names())) == len(targets.names())


@pytest.mark.parametrize("name", NAMES)
def test_every_target_is_whole(name):
    t = targets.get(name)
    assert t.name == name and targets.get(t) is t
    assert t.family in {"x86-64", "aarch64", "riscv64", "loongarch64", "triton"}
    assert t.verified in {"native", "emulated", "compiled only", "generated"}
    assert t.vector_bits >= 64 and t.vector_registers >= 1 and t.cores >= 1
    assert [c.level for c in t.caches] == sorted(c.level for c in t.caches)
    assert t.l1_bytes >= 16 << 10 and t.l2_bytes > t.l1_bytes and t.line_bytes in (32, 64, 128)
    assert t.lanes("float32") == t.vector_bits // 32 and t.lanes("bfloat16") == 2 * t.lanes("float32")
    assert {"float32", "bfloat16", "int64", "bool"} <= set(t.dtypes)
    assert t.units("float32")[0].kind in {"fma", "tile"}
    for unit in t.dot_units:
        assert unit.kind in {"fma", "dot", "tile"} and unit.k >= 1 and unit.rate > 0
        assert (unit.kind == "tile") == (unit.rows * unit.cols > 1)


def test_the_best_unit_comes_first():
    amx = targets.get("x86-64-amx")
    assert amx.units("bfloat16")[0] == x86_64.AMX_BF16 and amx.units("int8")[0].k == 64
    assert targets.get("x86-64-avx2").units("bfloat16") == ()


def test_unknown_names_get_help():
    with pytest.raises(TargetError, match="kunpeng-920"):
        targets.get("kunpeng920")
    with pytest.raises(TargetError, match="known are native"):
        targets.get("???")


def chip(name):
    return Target(name, "x86-64", "t", "c", "+a", 128, 16, (Cache(1, 1),), (), None, (), 1, None, "generated")


def test_other_packages_add_chips(monkeypatch):
    points = [
        SimpleNamespace(name="one", load=lambda: chip("one")),
        SimpleNamespace(name="many", load=lambda: lambda: [chip("two"), chip("native-avx2"), chip("x86-64-avx2")]),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "luban.targets" else [])
    monkeypatch.setattr(targets, "_known", dict(targets._known))
    targets._load_plugins.cache_clear()
    assert targets.get("one").name == "one" and "two" in targets.names()
    assert targets.get("x86-64-avx2") is x86_64.REFERENCE  # Luban's own names cannot be taken
    targets._load_plugins.cache_clear()


def test_a_broken_package_is_named(monkeypatch):
    points = [SimpleNamespace(name="bad", load=lambda: [1, 2])]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    targets._load_plugins.cache_clear()
    with pytest.raises(TargetError, match="'bad'"):
        targets.names()
    targets._load_plugins.cache_clear()


VECTORS = {
    "x86-64-avx2": r"vmulps.*%ymm",
    "x86-64-avx512": r"vmulps.*%zmm",
    "x86-64-avx512-bf16": r"vmulps.*%zmm",
    "x86-64-amx": r"vmulps.*%zmm",
    "aarch64-neon": r"fmul\s+v\d+\.4s",
    "aarch64-sve": r"fmul\s+z\d+\.s",
    "kunpeng-920": r"fmul\s+v\d+\.4s",
    "riscv64-rvv": r"vfmul\.vv",
    "loongarch64-lasx": r"xvfmul\.s",
}


@pytest.mark.parametrize("name", CPUS)
def test_llvm_knows_each_chip_and_uses_its_vectors(name, capfd):
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    t = targets.get(name)
    v = f"<{t.lanes('float32')} x float>"
    text = f"""
    define void @f(ptr %p) {t.function_attributes} {{
      %a = load {v}, ptr %p
      %b = fmul {v} %a, %a
      store {v} %b, ptr %p
      ret void
    }}"""
    machine = llvm.Target.from_triple(t.triple).create_target_machine(cpu=t.llvm_cpu, features=t.llvm_features)
    assembly = machine.emit_assembly(llvm.parse_assembly(text))
    assert len(re.findall(VECTORS[name], assembly)) == 1
    assert "not a recognized" not in capfd.readouterr().err
