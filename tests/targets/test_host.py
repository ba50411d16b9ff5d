"""This machine's chip from texts: every architecture, chips that lack what Luban needs, sysfs."""

from __future__ import annotations

import os
import platform

import pytest

from luban import targets
from luban.errors import TargetError
from luban.targets import Cache, host

V3 = "fpu pni ssse3 sse4_1 sse4_2 popcnt cx16 avx avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


def x86(flags, vendor="GenuineIntel", family=6, model=143, name="A Chip"):
    fields = {"vendor_id": vendor, "cpu family": family, "model": model, "model name": name, "flags": flags}
    text = "\n".join(f"{k}\t: {v}" for k, v in fields.items())
    return host.describe("x86_64", host.first_processor(text + "\n\nprocessor\t: 1\nflags\t: none\n\n"))


def features(target):
    return set(target.llvm_features.split(","))


def test_avx2_chip():
    t = x86(V3, model=60)
    assert (t.name, t.vector_bits, t.llvm_cpu, t.matrix_unit) == ("native", 256, "x86-64-v3", None)
    assert {"+avx2", "+fma", "-avx512f", "-amx-tile"} <= features(t)


def test_avx512_needs_all_five_parts():
    assert x86(V4, model=85).vector_bits == 512
    assert x86(V4.replace(" avx512vl", "")).vector_bits == 256


def test_zen4_and_sapphire_rapids():
    zen = x86(V4 + " avx512_bf16 avx512_vnni", "AuthenticAMD", 25, 17)
    assert zen.llvm_cpu == "znver4" and zen.units("bfloat16")[0].rate == 2.0 and zen.vector_registers == 32
    spr = x86(V4 + " avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8")
    assert spr.llvm_cpu == "sapphirerapids" and spr.matrix_unit == "amx"
    assert spr.units("bfloat16")[0].kind == "tile" and spr.units("float16")[0].k == 1
    assert {"+amx-bf16", "+avx512fp16", "-prefer-256-bit"} <= features(spr)


def test_what_a_hypervisor_hides_stays_off():
    t = x86(V4, model=143)
    assert t.llvm_cpu == "sapphirerapids" and t.matrix_unit is None and t.units("bfloat16") == ()
    assert {"-amx-tile", "-avx512bf16", "-avx512fp16"} <= features(t)


def test_a_chip_without_avx2_gets_one_sentence():
    with pytest.raises(TargetError, match="Old Chip lacks avx2, fma.*x86-64-v3") as error:
        x86(V3.replace(" avx2 fma", ""), name="Old Chip")
    assert "\n" not in str(error.value)
    with pytest.raises(TargetError, match="cannot compile for a mips64 chip"):
        host.describe("mips64", {})


def arm(flags, implementer="0x41", part="0xd40", width=0):
    text = f"processor : 0\nBogoMIPS : 1\nFeatures : {flags}\nCPU implementer : {implementer}\nCPU part : {part}\n\n"
    return host.describe("aarch64", host.first_processor(text), width)


def test_arm_chips():
    v1 = arm("fp asimd asimdhp asimddp sve bf16 i8mm", width=32)
    assert (v1.llvm_cpu, v1.vector_bits, v1.function_attributes) == ("neoverse-v1", 256, "vscale_range(2,2)")
    assert [u.name for u in v1.units("bfloat16")] == ["bf16.bfmmla", "bf16.bfdot"]
    assert "sve=256" in v1.required_features
    kunpeng = arm("fp asimd asimdhp asimddp", "0x48", "0xd01")
    assert (kunpeng.llvm_cpu, kunpeng.vector_bits, kunpeng.units("bfloat16")) == ("tsv110", 128, ())
    narrow = arm("fp asimd sve sve2", part="0xd4f", width=16)
    assert (narrow.vector_bits, narrow.function_attributes) == (128, "")
    assert arm("fp asimd", "0x99", "0x1").llvm_cpu == "generic"


def test_riscv_chips():
    def chip(isa):
        return host.describe("riscv64", host.first_processor(f"processor : 0\nhart : 0\nisa : {isa}\nmmu : sv39\n\n"))

    wide = chip("rv64imafdcv_zicbom_zicntr_zba_zbb_zvfh")
    assert wide.vector_bits == 256 and {"+v", "+zbb", "+zvfh"} <= features(wide) and "+zicbom" not in features(wide)
    plain = chip("rv64imafdc_zvx")
    assert plain.vector_bits == 64 and "+v" not in features(plain)


def test_loongarch_chips():
    def chip(flags):
        text = f"system type : generic\n\nprocessor : 0\nModel Name : Loongson-3A5000\nFeatures : {flags}\n\n"
        return host.describe("loongarch64", host.first_processor(text))

    lasx = chip("cpucfg lam ual fpu lsx lasx crc32")
    assert lasx.vector_bits == 256 and {"+lasx", "+lsx", "+ual"} <= features(lasx)
    assert lasx.description == "Loongson-3A5000"
    assert chip("cpucfg ual fpu lsx").vector_bits == 128


@pytest.mark.parametrize(
    ("machine", "triple", "text"),
    [
        ("aarch64", "aarch64-unknown-linux-gnu", "Features : fp asimd asimdhp asimddp asimdfhm atomics sve bf16 i8mm"),
        ("riscv64", "riscv64-unknown-linux-gnu", "isa : rv64imafdcv_zfh_zvfh_zba_zbb_zbs_zicond"),
        ("loongarch64", "loongarch64-unknown-linux-gnu", "Features : ual fpu lsx lasx"),
        ("loongarch64", "loongarch64-unknown-linux-gnu", "Features : ual fpu lsx"),
        (
            "x86_64",
            "x86_64-unknown-linux-gnu",
            "flags : " + V4 + " amx_tile amx_bf16 amx_int8 avx512_fp16 avx_vnni gfni",
        ),
    ],
)
def test_llvm_knows_all_features(machine, triple, text, capfd):
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    t = host.describe(machine, host.first_processor(text + "\n\n"), 32)
    m = llvm.Target.from_triple(triple).create_target_machine(cpu=t.llvm_cpu, features=t.llvm_features)
    m.emit_object(llvm.parse_assembly("define void @f() {\n ret void\n}"))
    assert "not a recognized" not in capfd.readouterr().err


def test_caches_from_sysfs(tmp_path):
    levels = [
        ("index0", 1, "Data", "48K", 64),
        ("index1", 1, "Instruction", "32K", 64),
        ("index3", 3, "Unified", "4M", 128),
    ]
    for name, level, kind, size, line in levels:
        at = tmp_path / name
        at.mkdir()
        for file, value in (("level", level), ("type", kind), ("size", size), ("coherency_line_size", line)):
            (at / file).write_text(f"{value}\n")
    (tmp_path / "index4").mkdir()  # a cache that the system does not describe
    assert host.caches_of(tmp_path) == (Cache(1, 48 << 10, 64), Cache(3, 4 << 20, 128))
    assert host.caches_of(tmp_path / "nothing") == ()


def test_hyper_threads_count_once(tmp_path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        at = tmp_path / f"cpu{cpu}" / "topology"
        at.mkdir(parents=True)
        (at / "thread_siblings_list").write_text(siblings + "\n")
    assert host.physical_cores(tmp_path, {0, 1, 2, 3}) == 2
    assert host.physical_cores(tmp_path, {0}) == 1
    assert host.physical_cores(tmp_path / "nothing", {4, 5}) == 2


def test_the_real_chip():
    t = targets.get("native")
    assert t.name == "native" and t.verified == "native" and t is targets.get("native")
    assert 1 <= t.cores <= len(os.sched_getaffinity(0))
    host.require(t.required_features, "p")
    with pytest.raises(TargetError, match="p needs nothing-has-this"):
        host.require(["nothing-has-this"], "p")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM's host detection is compared on x86-64")
def test_llvm_sees_the_same_features():
    llvm = pytest.importorskip("llvmlite.binding")
    seen = llvm.get_host_cpu_features()
    ours = {f[1:]: f[0] == "+" for f in targets.get("native").llvm_features.split(",")}
    differ = {f for f, on in ours.items() if f in seen and seen[f] != on}
    assert not {f for f in differ if not f.startswith("amx")}
