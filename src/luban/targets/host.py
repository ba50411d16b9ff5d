"""What this machine's chip is, from /proc/cpuinfo and sysfs: no LLVM, no torch, under a millisecond.

`describe` is a pure function of the texts, so that every kind of chip can be tested anywhere. What an architecture's
flags mean is in `host_flags.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from luban.errors import TargetError
from luban.targets import host_flags
from luban.targets.target import Cache, Target

_CPUS = Path("/sys/devices/system/cpu")


@functools.cache
def native() -> Target:
    """The target "native". Raises TargetError on a chip or system that Luban cannot compile for."""
    machine = os.uname().machine
    fields = first_processor()
    target = describe(machine, fields, vector_bytes=host_flags.sve_bytes(machine))
    if target.matrix_unit == "amx" and not host_flags.allow_amx():  # the chip has it, the system keeps it back
        kept = [f for f in fields["flags"].split() if not f.startswith("amx")]
        target = describe(machine, {**fields, "flags": " ".join(kept)})
    cpu = min(os.sched_getaffinity(0), default=0)
    caches = caches_of(_CPUS / f"cpu{cpu}" / "cache") or target.caches
    return replace(target, caches=caches, cores=physical_cores(_CPUS, os.sched_getaffinity(0)), clock_ghz=_clock(cpu))


def describe(machine: str, cpuinfo: dict[str, str], vector_bytes: int = 0) -> Target:
    """The target for a `uname -m` name, the fields of one processor in /proc/cpuinfo, and SVE's width in bytes."""
    reader = host_flags.READERS.get(machine)
    if reader is None:
        raise TargetError(
            f"Luban cannot compile for a {machine or 'nameless'} chip; "
            f"use one of {', '.join(sorted(host_flags.READERS))}, or name another machine's target"
        )
    return replace(reader(cpuinfo, vector_bytes), name="native", verified="native")


def require(features: Iterable[str], program: str) -> None:
    """Raises TargetError when this chip lacks one of the LLVM features that a program was compiled with."""
    missing = [f for f in features if f not in enabled()]
    if missing:
        raise TargetError(f"{program} needs {', '.join(missing)}, which this chip lacks; compile it for 'native' here")


@functools.cache
def enabled() -> frozenset[str]:
    """The LLVM features of this chip that Luban knows of, in the form of `Target.required_features`."""
    return frozenset(native().required_features)


def first_processor(text: str | None = None) -> dict[str, str]:
    """The fields of the first processor of /proc/cpuinfo, by lower-case name; the other processors are not read."""
    if text is None:
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
            text = _first_block(file)
    fields: dict[str, str] = {}
    for line in _first_block((text or "").splitlines(keepends=True)).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip().lower(), value.strip())
    return fields


def _first_block(lines: Iterable[str]) -> str:
    """Lines up to the first blank one after a processor's flags (LoongArch begins with a block about the system)."""
    kept: list[str] = []
    for line in lines:
        kept.append(line)
        if not line.strip() and any(k.lower().startswith(("flags", "features", "isa")) for k in kept):
            break
    return "".join(kept)


def caches_of(folder: Path) -> tuple[Cache, ...]:
    """Data and unified caches from a sysfs `cache` folder, nearest first; empty when the system does not tell."""
    found = []
    for index in sorted(folder.glob("index*")):
        with contextlib.suppress(OSError, ValueError):
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            line = int((index / "coherency_line_size").read_text())
            found.append(Cache(level, _bytes((index / "size").read_text().strip()), line))
    return tuple(sorted(found, key=lambda c: c.level))


def physical_cores(cpus: Path, allowed: Iterable[int]) -> int:
    """Cores among the processors we may run on; hyper-threads of one core count once."""
    cores = set()
    for cpu in allowed:
        try:
            cores.add((cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(len(cores), 1)


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _clock(cpu: int) -> float | None:
    try:
        return int((_CPUS / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq").read_text()) / 1e6
    except (OSError, ValueError):
        return None
