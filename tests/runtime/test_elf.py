"""The object loader: code runs with constants, data, calls far and near; damaged and foreign objects are refused."""

from __future__ import annotations

import ctypes
import math
import struct

import pytest

from luban.errors import LubanError
from luban.runtime import elf, elf_aarch64, elf_x86_64, externals

TEXT = """
@table = private unnamed_addr constant [4 x float] [float 1.5, float 2.5, float 3.5, float 4.5]
@counter = internal global i64 7
@scratch = internal global [1000 x i64] zeroinitializer, align 64
@pointer = global ptr @helper
@shared = global i64 40
declare float @expf(float)
declare double @sin(double)

define internal i64 @helper(i64 %x) noinline {
  %y = mul i64 %x, 3
  ret i64 %y
}
define float @pick(i64 %i) {
  %p = getelementptr [4 x float], ptr @table, i64 0, i64 %i
  %x = load float, ptr %p
  ret float %x
}
define i64 @count() {
  %old = load i64, ptr @counter
  %new = add i64 %old, 1
  store i64 %new, ptr @counter
  %p = getelementptr [1000 x i64], ptr @scratch, i64 0, i64 %old
  store i64 %new, ptr %p
  %q = getelementptr [1000 x i64], ptr @scratch, i64 0, i64 999
  %zero = load i64, ptr %q
  %r = add i64 %new, %zero
  ret i64 %r
}
define i64 @through(i64 %x) {
  %f = load volatile ptr, ptr @pointer
  %a = call i64 %f(i64 %x)
  %b = load i64, ptr @shared
  %c = add i64 %a, %b
  ret i64 %c
}
define float @exponential(float %x) {
  %y = tail call float @expf(float %x)
  ret float %y
}
define ptr @address() {
  ret ptr @expf
}
define double @tail(double %x) {
  %y = tail call double @sin(double %x)
  ret double %y
}
"""


def function(image, name, result, *arguments):
    made = ctypes.CFUNCTYPE(result, *arguments)(image.lookup(name))
    made.image = image  # the code lives as long as its image
    return made


def check_all(image):
    pick = function(image, "pick", ctypes.c_float, ctypes.c_int64)
    assert [pick(i) for i in range(4)] == [1.5, 2.5, 3.5, 4.5]
    count = function(image, "count", ctypes.c_int64)
    assert [count(), count()] == [8, 9]
    assert function(image, "through", ctypes.c_int64, ctypes.c_int64)(5) == 55
    assert function(image, "exponential", ctypes.c_float, ctypes.c_float)(1.0) == pytest.approx(math.e, rel=1e-6)
    assert function(image, "tail", ctypes.c_double, ctypes.c_double)(0.5) == math.sin(0.5)
    assert function(image, "address", ctypes.c_void_p)() == externals.resolve("expf")


def test_loads_and_runs(build):
    check_all(elf.load(build.emit(TEXT), externals.resolve))


def test_two_loads_do_not_share_data(build):
    data = build.emit(TEXT)
    first, second = elf.load(data, externals.resolve), elf.load(data, externals.resolve)
    assert function(first, "count", ctypes.c_int64)() == 8
    assert function(second, "count", ctypes.c_int64)() == 8


def test_the_llvm_loader_runs_the_same_object(build):
    from luban.runtime import elf_llvm

    check_all(elf_llvm.load(build.emit(TEXT), externals.resolve))


def test_text_is_never_writable_and_executable(build):
    image = elf.load(build.emit(TEXT), externals.resolve)
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[:2] for line in maps]
    at = image.lookup("pick")
    mine = [mode for span, mode in ranges if int(span.split("-")[0], 16) <= at < int(span.split("-")[1], 16)]
    assert mine and all("x" in mode and "w" not in mode for mode in mine)


def test_vector_constants_keep_their_alignment(build):
    text = """
    define void @f(ptr %p) {
      store <16 x float> <float 0.0, float 1.0, float 2.0, float 3.0, float 4.0, float 5.0, float 6.0, float 7.0,
        float 8.0, float 9.0, float 10.0, float 11.0, float 12.0, float 13.0, float 14.0, float 15.0>, ptr %p, align 4
      ret void
    }"""
    out = (ctypes.c_float * 16)()
    function(elf.load(build.emit(text), externals.resolve), "f", None, ctypes.c_void_p)(ctypes.addressof(out))
    assert list(out) == [float(i) for i in range(16)]


def test_missing_symbols_are_named(build):
    text = (
        "declare i32 @not_anywhere_at_all()\ndefine i32 @f() {\n %x = call i32 @not_anywhere_at_all()\n ret i32 %x\n}"
    )
    with pytest.raises(LubanError, match="thing calls 'not_anywhere_at_all'"):
        elf.load(build.emit(text), externals.resolve, "thing")


def test_weak_symbols_may_be_missing(build):
    text = "@w = extern_weak global i32\ndefine i1 @f() {\n %x = icmp eq ptr @w, null\n ret i1 %x\n}"
    assert function(elf.load(build.emit(text), externals.resolve), "f", ctypes.c_bool)() is True


def test_lookup_of_an_unknown_name(build):
    with pytest.raises(LubanError, match="no symbol 'nothing'"):
        elf.load(build.emit(TEXT), externals.resolve).lookup("nothing")


def test_foreign_objects_are_refused(build):
    data = bytearray(build.emit(TEXT))
    data[18:20] = struct.pack("<H", 8)  # MIPS
    with pytest.raises(LubanError, match="ELF machine 8"):
        elf.load(bytes(data), externals.resolve)


def test_truncated_objects_are_refused(build):
    data = build.emit(TEXT)
    for size in (0, 3, 20, 63, 64, len(data) // 2, len(data) - 1):
        with pytest.raises(LubanError, match="damaged"):
            elf.load(data[:size], externals.resolve)


def test_unknown_relocations_are_named(build):
    data = build.emit("@t = thread_local global i32 0\ndefine ptr @f() {\n ret ptr @t\n}", "x86-64")
    with pytest.raises(LubanError, match=r"relocation \d+ of x86-64|thread-local"):
        elf.link(elf.parse(data), 0x10000, lambda name: 0x1000)


# x86-64 fields by hand -------------------------------------------------------------------------------------------


def applied(table, kind, place, value, size, start=b""):
    image = bytearray(start or bytes(size))
    table[kind][1](image, 0, place, value)
    return bytes(image)


def test_x86_64_fields():
    table = elf_x86_64.RELOCATIONS
    assert applied(table, 2, 0x1000, 0x2000 - 4, 4) == struct.pack("<i", 0xFFC)
    assert applied(table, 4, 0x3000, 0x1000 - 4, 4) == struct.pack("<i", -0x2004)
    assert applied(table, 1, 0, 0x123456789ABCDEF0, 8) == struct.pack("<Q", 0x123456789ABCDEF0)
    assert applied(table, 10, 0, 0xFFFFFFFF, 4) == b"\xff\xff\xff\xff"
    assert applied(table, 11, 0, -1, 4) == b"\xff\xff\xff\xff"
    assert applied(table, 24, 0x10, 0x8, 8) == struct.pack("<q", -8)
    for kind, value in ((2, 1 << 40), (10, 1 << 32), (10, -1), (11, 1 << 31)):
        with pytest.raises(struct.error):
            applied(table, kind, 0, value, 4)


def test_a_call_out_of_reach_goes_through_a_stub(build):
    text = "declare void @far()\ndefine void @f() {\n call void @far()\n ret void\n}"
    obj = elf.parse(build.emit(text, "x86-64"))
    base, target = 0x7F0000000000, 0x1234
    image = elf.link(obj, base, lambda name: target)
    layout = elf.plan(obj, elf_x86_64)
    (stub,) = layout.stubs.values()
    assert image[stub : stub + 14] == b"\xff\x25\0\0\0\0" + struct.pack("<Q", target)
    call = image.index(0xE8)
    (delta,) = struct.unpack_from("<i", image, call + 1)
    assert call + 5 + delta == stub


def test_absolute_code_at_a_high_address_is_refused(build):
    body = "define ptr @f(i64 %i) {\n %p = getelementptr i32, ptr @x, i64 %i\n ret ptr %p\n}"
    data = build.emit(f"@x = external dso_local global [9 x i32]\n{body}", "x86-64", relocation="static")
    with pytest.raises(LubanError, match="position-independent"):
        elf.link(elf.parse(data), 0x7F0000000000, lambda name: 0x7F0000000000)


# AArch64 words by hand: instruction words as the Arm manual encodes them ---------------------------------------------


def word(kind, instruction, place, value):
    return struct.unpack("<I", applied(elf_aarch64.RELOCATIONS, kind, place, value, 4, struct.pack("<I", instruction)))[
        0
    ]


@pytest.mark.parametrize(
    ("kind", "instruction", "place", "value", "expected"),
    [
        (283, 0x94000000, 0x1000, 0x2000, 0x94000400),  # bl +0x1000
        (283, 0x94000000, 0x2000, 0x1000, 0x97FFFC00),  # bl -0x1000
        (282, 0x14000000, 0, 0x7FFFFFC, 0x15FFFFFF),  # b, the farthest
        (280, 0x54000000, 0x100, 0x80, 0x54FFFC00),  # b.eq -0x80
        (275, 0x90000000, 0x400123, 0x405678, 0xB0000020),  # adrp x0, +5 pages
        (275, 0x90000001, 0x405678, 0x400123, 0xF0FFFFC1),  # adrp x1, -5 pages
        (274, 0x10000000, 0x1000, 0x1005, 0x30000020),  # adr x0, +5
        (277, 0x91000000, 0, 0x12345678, 0x9119E000),  # add x0, x0, #0x678
        (278, 0x39400000, 0, 0x1235, 0x3948D400),  # ldrb w0, [x0, #0x235]
        (284, 0x79400000, 0, 0x1234, 0x79446800),  # ldrh w0, [x0, #0x234]
        (285, 0xB9400000, 0, 0x1238, 0xB9423800),  # ldr w0, [x0, #0x238]
        (286, 0xF9400000, 0, 0x1238, 0xF9411C00),  # ldr x0, [x0, #0x238]
        (299, 0x3DC00000, 0, 0x1240, 0x3DC09000),  # ldr q0, [x0, #0x240]
        (312, 0xF9400000, 0, 0x1238, 0xF9411C00),  # ldr x0, [x0, #got]
        (264, 0xD2800000, 0, 0x123456789ABCDEF0, 0xD29BDE00),  # movz x0, #0xdef0
        (266, 0xF2A00000, 0, 0x123456789ABCDEF0, 0xF2B35780),  # movk x0, #0x9abc, lsl 16
        (268, 0xF2C00000, 0, 0x123456789ABCDEF0, 0xF2CACF00),  # movk x0, #0x5678, lsl 32
        (269, 0xF2E00000, 0, 0x123456789ABCDEF0, 0xF2E24680),  # movk x0, #0x1234, lsl 48
    ],
)
def test_aarch64_words(kind, instruction, place, value, expected):
    assert word(kind, instruction, place, value) == expected


def test_aarch64_out_of_range():
    for kind, value in ((283, 1 << 27), (283, 2), (275, 1 << 33), (286, 0x1234), (263, 1 << 16), (279, 1 << 15)):
        with pytest.raises(OverflowError):
            word(kind, 0, 0, value)


def test_aarch64_data_fields():
    table = elf_aarch64.RELOCATIONS
    assert applied(table, 257, 0, 0x123456789ABCDEF0, 8) == struct.pack("<Q", 0x123456789ABCDEF0)
    assert applied(table, 261, 0x1000, 0x800, 4) == struct.pack("<i", -0x800)
    assert applied(table, 260, 0x1000, 0x800, 8) == struct.pack("<q", -0x800)
    with pytest.raises(OverflowError):
        applied(table, 261, 0, 1 << 33, 4)


def test_aarch64_objects_link(build):
    """Every relocation of a real object applies, and adrp + load pairs and calls reach what they name."""
    obj = elf.parse(build.emit(TEXT, "aarch64"))
    base, outside = 0x7F0000000000, {"expf": 0x400000, "sin": 0x500000}
    image = elf.link(obj, base, outside.__getitem__)
    layout = elf.plan(obj, elf_aarch64)
    assert len(image) == layout.size
    starts = {obj.symbols[s].name: at for s, at in layout.stubs.items()}
    assert set(starts) == {"expf", "sin"}
    for name, at in starts.items():
        assert struct.unpack_from("<IIQ", image, at) == (0x58000050, 0xD61F0200, outside[name])
    got = {obj.symbols[s].name: struct.unpack_from("<Q", image, at)[0] for s, at in layout.got.items()}
    assert got["expf"] == 0x400000
    text = next(s for i, s in enumerate(obj.sections) if s.name == ".text")
    start = layout.sections[obj.sections.index(text)]
    words = struct.unpack_from(f"<{text.size // 4}I", image, start)
    exponential = next(s for s in obj.symbols if s.name == "exponential").value // 4
    branch = words[exponential]  # a tail call: b
    assert branch >> 26 == 0b000101
    delta = ((branch & 0x3FFFFFF) ^ 0x2000000) - 0x2000000
    assert start + 4 * (exponential + delta) == starts["expf"]
    pick = next(s for s in obj.symbols if s.name == "pick").value // 4
    adrp, low = words[pick], words[pick + 1]
    pages = (adrp >> 29 & 3) | (adrp >> 5 & 0x7FFFF) << 2
    address = ((base + start + 4 * pick) >> 12) + pages << 12 | (low >> 10 & 0xFFF)
    assert struct.unpack_from("<4f", image, address - base) == (1.5, 2.5, 3.5, 4.5)


@pytest.mark.parametrize("family", ["riscv64", "loongarch64"])
def test_other_architectures_go_through_llvm(build, family):
    obj = elf.parse(build.emit("define void @f() {\n ret void\n}", family))
    assert elf.FOREIGN_LOADERS[obj.machine] == "luban.runtime.elf_llvm"
    assert elf.MACHINE_NAMES[obj.machine] == family
