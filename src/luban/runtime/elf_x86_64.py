"""Relocations of x86-64 objects: for each number its name and how it is applied.

An apply function gets the image, the offset of the field in it, the field's run-time address and symbol + addend
(already redirected to a GOT slot or a jump stub where the type asks for one). Out of range raises struct.error.
"""

from __future__ import annotations

import struct

NAME = "x86-64"
_PACK_I32, _PACK_U32 = struct.Struct("<i").pack_into, struct.Struct("<I").pack_into
_PACK_U64 = struct.Struct("<Q").pack_into


def _relative32(image, offset, place, value):
    _PACK_I32(image, offset, value - place)


def _relative64(image, offset, place, value):
    _PACK_U64(image, offset, (value - place) & 0xFFFFFFFFFFFFFFFF)


def _absolute64(image, offset, place, value):
    _PACK_U64(image, offset, value & 0xFFFFFFFFFFFFFFFF)


def _absolute32(image, offset, place, value):
    _PACK_U32(image, offset, value)


def _absolute32_signed(image, offset, place, value):
    _PACK_I32(image, offset, value)


RELOCATIONS = {
    1: ("R_X86_64_64", _absolute64),
    2: ("R_X86_64_PC32", _relative32),
    4: ("R_X86_64_PLT32", _relative32),
    9: ("R_X86_64_GOTPCREL", _relative32),
    10: ("R_X86_64_32", _absolute32),
    11: ("R_X86_64_32S", _absolute32_signed),
    24: ("R_X86_64_PC64", _relative64),
    41: ("R_X86_64_GOTPCRELX", _relative32),
    42: ("R_X86_64_REX_GOTPCRELX", _relative32),
}
GOT_TYPES = frozenset({9, 41, 42})
CALL_TYPES = frozenset({4})


def stub(address: int) -> bytes:
    """16 bytes that jump to an absolute address: `jmp *0(%rip)` and the address."""
    return b"\xff\x25\0\0\0\0" + struct.pack("<Q", address) + b"\xcc\xcc"


def flush(address: int, size: int) -> None:
    """Nothing to do: x86-64 keeps its instruction cache coherent."""
