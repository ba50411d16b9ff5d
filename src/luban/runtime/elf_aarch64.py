"""Relocations of AArch64 objects: for each number its name and how it is applied.

The apply functions have the form that `elf_x86_64.py` describes; out of range raises OverflowError.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import struct

NAME = "aarch64"
_WORD = struct.Struct("<I")


def _data(bits: int, relative: bool):
    """A plain data field of 16, 32 or 64 bits."""
    code = {16: "<H", 32: "<I", 64: "<Q"}[bits]
    mask = (1 << bits) - 1

    def apply(image, offset, place, value):
        value = value - place if relative else value
        if bits < 64 and not -(1 << (bits - 1)) <= value <= mask:
            raise OverflowError
        struct.pack_into(code, image, offset, value & mask)

    return apply


def _patch(image, offset: int, clear: int, bits: int) -> None:
    (word,) = _WORD.unpack_from(image, offset)
    _WORD.pack_into(image, offset, (word & ~clear) | bits)


def _branch(width: int, shift: int):
    """A PC-relative word offset of `width` bits at bit `shift` (b, bl, b.cond, tbz, ldr literal)."""
    mask = (1 << width) - 1
    limit = 1 << (width + 1)

    def apply(image, offset, place, value):
        delta = value - place
        if not -limit <= delta < limit or delta & 3:
            raise OverflowError
        _patch(image, offset, mask << shift, ((delta >> 2) & mask) << shift)

    return apply


def _adr(image, offset, delta: int) -> None:
    if not -(1 << 20) <= delta < 1 << 20:
        raise OverflowError
    _patch(image, offset, 3 << 29 | 0x7FFFF << 5, (delta & 3) << 29 | ((delta >> 2) & 0x7FFFF) << 5)


def _adr_page(image, offset, place, value):
    _adr(image, offset, (value >> 12) - (place >> 12))


def _adr_byte(image, offset, place, value):
    _adr(image, offset, value - place)


def _low12(scale: int):
    """The low 12 bits of an address in an immediate that counts units of 2**scale bytes."""

    def apply(image, offset, place, value):
        low = value & 0xFFF
        if low & ((1 << scale) - 1):
            raise OverflowError
        _patch(image, offset, 0xFFF << 10, (low >> scale) << 10)

    return apply


def _move(group: int, check: bool):
    """16 bits of an absolute address in movz/movk; `check` asks that no higher bits are set."""

    def apply(image, offset, place, value):
        if check and value >> (16 * (group + 1)):
            raise OverflowError
        _patch(image, offset, 0xFFFF << 5, ((value >> (16 * group)) & 0xFFFF) << 5)

    return apply


RELOCATIONS = {
    257: ("R_AARCH64_ABS64", _data(64, False)),
    258: ("R_AARCH64_ABS32", _data(32, False)),
    259: ("R_AARCH64_ABS16", _data(16, False)),
    260: ("R_AARCH64_PREL64", _data(64, True)),
    261: ("R_AARCH64_PREL32", _data(32, True)),
    262: ("R_AARCH64_PREL16", _data(16, True)),
    263: ("R_AARCH64_MOVW_UABS_G0", _move(0, True)),
    264: ("R_AARCH64_MOVW_UABS_G0_NC", _move(0, False)),
    265: ("R_AARCH64_MOVW_UABS_G1", _move(1, True)),
    266: ("R_AARCH64_MOVW_UABS_G1_NC", _move(1, False)),
    267: ("R_AARCH64_MOVW_UABS_G2", _move(2, True)),
    268: ("R_AARCH64_MOVW_UABS_G2_NC", _move(2, False)),
    269: ("R_AARCH64_MOVW_UABS_G3", _move(3, False)),
    273: ("R_AARCH64_LD_PREL_LO19", _branch(19, 5)),
    274: ("R_AARCH64_ADR_PREL_LO21", _adr_byte),
    275: ("R_AARCH64_ADR_PREL_PG_HI21", _adr_page),
    276: ("R_AARCH64_ADR_PREL_PG_HI21_NC", _adr_page),
    277: ("R_AARCH64_ADD_ABS_LO12_NC", _low12(0)),
    278: ("R_AARCH64_LDST8_ABS_LO12_NC", _low12(0)),
    279: ("R_AARCH64_TSTBR14", _branch(14, 5)),
    280: ("R_AARCH64_CONDBR19", _branch(19, 5)),
    282: ("R_AARCH64_JUMP26", _branch(26, 0)),
    283: ("R_AARCH64_CALL26", _branch(26, 0)),
    284: ("R_AARCH64_LDST16_ABS_LO12_NC", _low12(1)),
    285: ("R_AARCH64_LDST32_ABS_LO12_NC", _low12(2)),
    286: ("R_AARCH64_LDST64_ABS_LO12_NC", _low12(3)),
    299: ("R_AARCH64_LDST128_ABS_LO12_NC", _low12(4)),
    311: ("R_AARCH64_ADR_GOT_PAGE", _adr_page),
    312: ("R_AARCH64_LD64_GOT_LO12_NC", _low12(3)),
    314: ("R_AARCH64_PLT32", _data(32, True)),
}
GOT_TYPES = frozenset({311, 312})
CALL_TYPES = frozenset({282, 283, 314})


def stub(address: int) -> bytes:
    """16 bytes that jump to an absolute address: `ldr x16, 8; br x16` and the address (x16 is free at calls)."""
    return struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)


def flush(address: int, size: int) -> None:
    """Makes new instructions visible. Linux does it too when pages become executable, so a missing helper is fine."""
    try:
        clear = ctypes.CDLL("libgcc_s.so.1").__clear_cache
    except (OSError, AttributeError):
        return
    clear.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    clear(address, address + size)
