"""Loads relocatable ELF64 objects into this process, with ctypes and mmap only.

Three steps, each usable alone: `parse` reads the object, `link` lays it out and applies its relocations for a base
address (a pure function, so that objects for other chips can be checked anywhere), `load` maps the result. Text is
never writable and executable at once. What a relocation does is in one file an architecture (`elf_x86_64.py`,
`elf_aarch64.py`); chips without such a file go through llvmlite (`elf_llvm.py`).
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

from luban.errors import LubanError

Resolver = Callable[[str], int | None]

SHT_SYMTAB, SHT_RELA, SHT_NOBITS, SHT_REL = 2, 4, 8, 9
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR, SHF_TLS = 1, 2, 4, 0x400
SHN_UNDEF, SHN_ABS, SHN_COMMON = 0, 0xFFF1, 0xFFF2
STT_SECTION, STT_TLS, STB_WEAK = 3, 6, 2
PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
STUB_BYTES = 16

# ELF machine number -> module with the relocations of that architecture.
ARCHITECTURES = {62: "luban.runtime.elf_x86_64", 183: "luban.runtime.elf_aarch64"}
# ELF machine number -> module whose `load(data, resolve, what)` does all the work.
FOREIGN_LOADERS = {243: "luban.runtime.elf_llvm", 258: "luban.runtime.elf_llvm"}
MACHINE_NAMES = {62: "x86-64", 183: "aarch64", 243: "riscv64", 258: "loongarch64"}


@dataclass(frozen=True)
class Section:
    """One section header; offsets and sizes in bytes."""

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    align: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    """One symbol; `section` is an index or one of SHN_UNDEF, SHN_ABS, SHN_COMMON."""

    name: str
    section: int
    value: int
    size: int
    kind: int
    weak: bool


@dataclass(frozen=True)
class ObjectFile:
    """A parsed object: ELF machine number, bytes, sections and symbols."""

    machine: int
    data: bytes
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]


@dataclass(frozen=True)
class Segment:
    """A page-aligned part of the image with one protection (PROT_* bits)."""

    start: int
    size: int
    protection: int


@dataclass(frozen=True)
class Layout:
    """Where everything goes, as byte offsets from the image's start."""

    sections: dict[int, int]
    commons: dict[int, int]
    got: dict[int, int]
    stubs: dict[int, int]
    segments: tuple[Segment, ...]
    size: int


@dataclass(frozen=True)
class Image:
    """A loaded object: keeps the memory alive; `symbols` maps defined names to absolute addresses."""

    address: int
    symbols: dict[str, int]
    memory: object

    def lookup(self, name: str) -> int:
        """The address of a defined symbol. Raises LubanError when the object has none of that name."""
        if name not in self.symbols:
            raise LubanError(f"the compiled program has no symbol {name!r}; compile it again")
        return self.symbols[name]


def load(data: bytes, resolve: Resolver, what: str = "program") -> Image:
    """Maps an object of this machine's architecture; `resolve(name)` gives addresses of external symbols or None.

    Raises LubanError for a damaged object, an unknown relocation or a symbol that nobody defines.
    """
    obj = parse(data, what)
    if obj.machine in FOREIGN_LOADERS:
        return importlib.import_module(FOREIGN_LOADERS[obj.machine]).load(data, resolve, what)
    arch = _architecture(obj, what)
    layout = plan(obj, arch)
    memory = mmap.mmap(-1, max(layout.size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[: layout.size] = link(obj, base, resolve, layout, what)
    for segment in layout.segments:
        _protect(base + segment.start, segment.size, segment.protection)
        if segment.protection & PROT_EXEC:
            arch.flush(base + segment.start, segment.size)
    defined = (i for i, s in enumerate(obj.symbols) if _defined(obj, s))
    return Image(base, {obj.symbols[i].name: _address(obj, layout, base, i, resolve, what) for i in defined}, memory)


def parse(data: bytes, what: str = "program") -> ObjectFile:
    """Reads headers, sections and symbols. Raises LubanError when the bytes are not a whole ELF64 object."""
    try:
        return _parse(data)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise LubanError(f"the object code of {what} is damaged ({error}); compile it again") from None


def _parse(data: bytes) -> ObjectFile:
    if data[:4] != b"\x7fELF" or data[4] != 2 or data[5] != 1:
        raise ValueError("not a little-endian ELF64 file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 1:
        raise ValueError("not a relocatable object")
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)]
    for h in headers:
        if h[1] != SHT_NOBITS and h[4] + h[5] > len(data):
            raise ValueError("a section reaches past the end")
    names = headers[names_index][4]
    sections = tuple(
        Section(_string(data, names + h[0]), h[1], h[2], h[4], h[5], max(h[8], 1), h[6], h[7]) for h in headers
    )
    return ObjectFile(machine, data, sections, _symbols(data, sections))


def _symbols(data: bytes, sections: tuple[Section, ...]) -> tuple[Symbol, ...]:
    table = next((s for s in sections if s.kind == SHT_SYMTAB), None)
    if table is None:
        return ()
    strings = sections[table.link].offset
    found = []
    raw = data[table.offset : table.offset + table.size]
    for name, info, _other, section, value, size in struct.iter_unpack("<IBBHQQ", raw):
        if 0 < section < 0xFF00 and section >= len(sections):
            raise ValueError("a symbol names a section that is not there")
        found.append(Symbol(_string(data, strings + name), section, value, size, info & 15, info >> 4 == STB_WEAK))
    return tuple(found)


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def plan(obj: ObjectFile, arch) -> Layout:
    """Places sections in three page-aligned segments: text and stubs (R+X), constants and GOT (R), data (R+W)."""
    loaded = [i for i, s in enumerate(obj.sections) if _wanted(s)]
    got, stubs = _indirections(obj, arch)
    commons = [i for i, s in enumerate(obj.symbols) if s.section == SHN_COMMON]
    text = [i for i in loaded if obj.sections[i].flags & SHF_EXECINSTR]
    data = [i for i in loaded if obj.sections[i].flags & SHF_WRITE and i not in text]
    constants = [i for i in loaded if i not in text and i not in data]
    places: dict[int, int] = {}
    end = _place(obj, text, 0, places)
    stub_start = _up(end, STUB_BYTES)
    text_end = _up(stub_start + STUB_BYTES * len(stubs), mmap.PAGESIZE)
    got_start = _up(_place(obj, constants, text_end, places), 8)
    constants_end = _up(got_start + 8 * len(got), mmap.PAGESIZE)
    end = _place(obj, data, constants_end, places)
    common_places = {}
    for i in commons:  # the value of a common symbol is its alignment
        common_places[i] = _up(end, max(obj.symbols[i].value, 1))
        end = common_places[i] + obj.symbols[i].size
    size = _up(end, mmap.PAGESIZE)
    segments = (
        Segment(0, text_end, PROT_READ | PROT_EXEC),
        Segment(text_end, constants_end - text_end, PROT_READ),
        Segment(constants_end, size - constants_end, PROT_READ | PROT_WRITE),
    )
    return Layout(
        places,
        common_places,
        {s: got_start + 8 * i for i, s in enumerate(got)},
        {s: stub_start + STUB_BYTES * i for i, s in enumerate(stubs)},
        tuple(s for s in segments if s.size),
        size,
    )


def link(
    obj: ObjectFile, base: int, resolve: Resolver, layout: Layout | None = None, what: str = "program"
) -> bytearray:
    """The image's bytes as they must lie at address `base`, all relocations applied."""
    arch = _architecture(obj, what)
    layout = layout or plan(obj, arch)
    image = bytearray(layout.size)
    for index, start in layout.sections.items():
        section = obj.sections[index]
        if section.kind != SHT_NOBITS:
            image[start : start + section.size] = obj.data[section.offset : section.offset + section.size]
    addresses: dict[int, int] = {}

    def address(symbol: int) -> int:
        if symbol not in addresses:
            addresses[symbol] = _address(obj, layout, base, symbol, resolve, what)
        return addresses[symbol]

    for symbol, slot in layout.got.items():
        struct.pack_into("<Q", image, slot, address(symbol))
    for symbol, slot in layout.stubs.items():
        image[slot : slot + STUB_BYTES] = arch.stub(address(symbol))
    for section in obj.sections:
        if section.kind == SHT_REL and section.info in layout.sections:
            raise LubanError(f"the object code of {what} has relocations without addends; compile it with Luban")
        if section.kind == SHT_RELA and section.info in layout.sections:
            _relocate(obj, section, arch, layout, base, address, image, what)
    return image


def _relocate(obj, section: Section, arch, layout: Layout, base: int, address, image: bytearray, what: str) -> None:
    start = layout.sections[section.info]
    for offset, symbol, kind, addend in _relocations(obj, section):
        entry = arch.RELOCATIONS.get(kind)
        if entry is None:
            if kind == 0:
                continue
            raise LubanError(
                f"the loader does not know relocation {kind} of {arch.NAME}, which {what} uses against "
                f"{obj.symbols[symbol].name or 'a section'!r}; compile it as position-independent code"
            )
        name, apply = entry
        if kind in arch.GOT_TYPES:
            value = base + layout.got[symbol]
        elif kind in arch.CALL_TYPES and symbol in layout.stubs:
            value = base + layout.stubs[symbol]
        else:
            value = address(symbol)
        try:
            apply(image, start + offset, base + start + offset, value + addend)
        except (OverflowError, struct.error):
            target = obj.symbols[symbol].name or "a section"
            raise LubanError(
                f"{name} against {target!r} in {what} is out of range; compile it as position-independent code"
            ) from None


def _relocations(obj: ObjectFile, section: Section):
    for offset, info, addend in struct.iter_unpack("<QQq", obj.data[section.offset : section.offset + section.size]):
        yield offset, info >> 32, info & 0xFFFFFFFF, addend


def _indirections(obj: ObjectFile, arch) -> tuple[list[int], list[int]]:
    """Symbols that need a GOT slot, and undefined ones that are called and need a jump stub, each in order of use."""
    got: dict[int, None] = {}
    stubs: dict[int, None] = {}
    for section in obj.sections:
        if section.kind != SHT_RELA or section.info >= len(obj.sections) or not _wanted(obj.sections[section.info]):
            continue
        for _offset, symbol, kind, _addend in _relocations(obj, section):
            if symbol >= len(obj.symbols):
                raise LubanError("the object code is damaged (a relocation without a symbol); compile it again")
            if kind in arch.GOT_TYPES:
                got[symbol] = None
            elif kind in arch.CALL_TYPES and obj.symbols[symbol].section == SHN_UNDEF:
                stubs[symbol] = None
    return list(got), list(stubs)


def _address(obj: ObjectFile, layout: Layout, base: int, index: int, resolve: Resolver, what: str) -> int:
    symbol = obj.symbols[index]
    if symbol.kind == STT_TLS:
        raise LubanError(
            f"{what} has a thread-local variable {symbol.name!r}, which cannot be loaded; compile it without"
        )
    if symbol.section == SHN_ABS:
        return symbol.value
    if symbol.section == SHN_COMMON:
        return base + layout.commons[index]
    if symbol.section != SHN_UNDEF:
        if symbol.section not in layout.sections:
            raise LubanError(f"{what} refers to {symbol.name!r} in a section that is not loaded; compile it again")
        return base + layout.sections[symbol.section] + symbol.value
    found = resolve(symbol.name) if symbol.name else 0
    if found is None and not symbol.weak:
        raise LubanError(f"{what} calls {symbol.name!r}, which this process lacks; install the library that has it")
    return found or 0


def _architecture(obj: ObjectFile, what: str):
    module = ARCHITECTURES.get(obj.machine)
    if module is None:
        name = MACHINE_NAMES.get(obj.machine, f"ELF machine {obj.machine}")
        raise LubanError(f"{what} holds code for {name}, which cannot be loaded; compile it for this machine")
    return importlib.import_module(module)


def _wanted(section: Section) -> bool:
    # Unwind tables are left out: compiled kernels never throw, and nothing registers them.
    return bool(section.flags & SHF_ALLOC) and not section.flags & SHF_TLS and section.name != ".eh_frame"


def _defined(obj: ObjectFile, symbol: Symbol) -> bool:
    if not symbol.name or symbol.kind in (STT_SECTION, STT_TLS) or symbol.section in (SHN_UNDEF, SHN_ABS):
        return False
    return symbol.section == SHN_COMMON or symbol.section < len(obj.sections) and _wanted(obj.sections[symbol.section])


def _place(obj: ObjectFile, indices: list[int], start: int, places: dict[int, int]) -> int:
    for i in indices:
        places[i] = _up(start, obj.sections[i].align)
        start = places[i] + obj.sections[i].size
    return start


def _up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def _protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address, size, protection):
        raise LubanError(
            f"the system refused to make compiled code executable (errno {ctypes.get_errno()}); "
            "allow executable anonymous memory for this process"
        )
