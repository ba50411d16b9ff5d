"""`luban doctor`: what is installed, what the chip can do, and the command that mends each cross."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from luban.cli import output

_FREE_BYTES = 2 << 30
# The tested versions, where Luban runs from its repository; an installed copy has no such file.
_PINS = Path(__file__).parents[3] / "constraints.txt"
_PIP = f"{sys.executable} -m pip install" + (f" -c {_PINS}" if _PINS.is_file() else "")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Check:
    """One finding. `state` is ok, wrong (Luban cannot work so) or absent (an optional part, or speed lost)."""

    name: str
    state: str
    found: str
    fix: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Takes no arguments of its own."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All checks; "ok" is False when one of them is wrong."""
    found = [check for examine in _EXAMINATIONS for check in examine()]
    return {"ok": all(c.state != "wrong" for c in found), "checks": [asdict(c) for c in found]}


def text(result: dict[str, Any]) -> str:
    """One check a line; below each cross the command that mends it."""
    marks = {"ok": output.paint("✓", "green"), "wrong": output.paint("✗", "red"), "absent": output.paint("✗", "yellow")}
    width = max(len(c["name"]) for c in result["checks"])
    lines = []
    for c in result["checks"]:
        optional = " (optional)" if c["state"] == "absent" else ""
        lines.append(f"{marks[c['state']]} {c['name'].ljust(width)}  {c['found']}{optional}")
        if c["fix"]:
            lines.append(f"  {' ' * width}  fix: {output.paint(c['fix'], 'bold')}")
    lines.append(
        "everything that Luban needs is here" if result["ok"] else "Luban cannot work until the red crosses are mended"
    )
    return "\n".join(lines)


def _python() -> Iterator[Check]:
    right = sys.version_info >= (3, 11)
    yield Check(
        "python", "ok" if right else "wrong", platform.python_version(), "" if right else "apt-get install python3.11"
    )


def _packages() -> Iterator[Check]:
    for name in ("torch", "numpy", "llvmlite", "xdsl", "safetensors"):
        try:
            yield Check(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, "wrong", "not installed", f"{_PIP} {name}")


def _torch() -> Iterator[Check]:
    """Imports torch: whether it loads, and whether it is the small CPU build."""
    try:
        import torch
    except Exception as e:
        fix = f"{_PIP} --force-reinstall torch"
        yield Check("torch loads", "wrong", " ".join(str(e).split())[:120], fix)
        return
    if torch.version.cuda or torch.version.hip:
        found = f"a GPU build (CUDA {torch.version.cuda or '-'}); the CPU build is enough for CPU targets"
        yield Check("torch build", "ok", found)
    else:
        yield Check("torch build", "ok", "CPU")


def _llvm() -> Iterator[Check]:
    try:
        import llvmlite.binding as llvm

        yield Check("LLVM", "ok", ".".join(map(str, llvm.llvm_version_info)))
    except Exception as e:
        fix = f"{_PIP} --force-reinstall llvmlite"
        yield Check("LLVM", "wrong", " ".join(str(e).split())[:120], fix)


def _chip() -> Iterator[Check]:
    try:
        from luban import targets

        chip = targets.get("native")
    except Exception as e:
        yield Check("chip", "wrong", str(e), "luban targets")
        return
    found = (
        f"{chip.family}, {chip.cores} cores, {chip.vector_bits}-bit vectors, matrix unit {chip.matrix_unit or 'none'}"
    )
    yield Check("chip", "ok", found)
    units = {f"{unit.name} ({unit.input})": None for unit in chip.dot_units}  # in order, each once
    yield Check("multiply-add", "ok", ", ".join(units) or "none listed")


def _threads() -> Iterator[Check]:
    """Kernels run on the OpenMP pool of the process, which is torch's own once torch is loaded."""
    pools = sorted({line.split()[-1] for line in _maps() if "libgomp" in line or "libiomp" in line})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if len(pools) > 1:
        fix = f"{_PIP} --force-reinstall torch"
        yield Check("OpenMP pool", "absent", f"{len(pools)} are loaded and may crowd each other", fix)
    elif pools:
        yield Check("OpenMP pool", "ok", f"{Path(pools[0]).name}, {os.environ.get('OMP_NUM_THREADS', cores)} threads")
    else:
        yield Check("OpenMP pool", "absent", "none is loaded, kernels run on one core", "apt-get install libgomp1")


def _maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []


def _huge_pages() -> Iterator[Check]:
    fix = f"echo madvise > {_HUGE_PAGES}"
    try:
        mode = _HUGE_PAGES.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        yield Check("huge pages", "absent", "this kernel has none", "use a kernel with transparent huge pages")
        return
    if mode == "never":
        yield Check("huge pages", "absent", "never: large steps take more page faults", fix)
    else:
        yield Check("huge pages", "ok", mode)


def _cache() -> Iterator[Check]:
    try:
        from luban.runtime import cache

        folder = Path(cache.directory())
    except Exception as e:
        yield Check("cache", "wrong", str(e), "export LUBAN_CACHE_DIR=/tmp/luban")
        return
    at = folder
    while not at.exists():
        at = at.parent
    try:
        with tempfile.TemporaryFile(dir=at):
            pass
    except OSError as e:
        yield Check(
            "cache",
            "absent",
            f"{folder}: {e.strerror}; programs are compiled anew each time",
            "export LUBAN_CACHE_DIR=/tmp/luban",
        )
        return
    yield Check("cache", "ok", f"{folder} can be written")
    free = shutil.disk_usage(at).free
    enough = free >= _FREE_BYTES
    yield Check(
        "disk", "ok" if enough else "absent", f"{output.size(free)} free", "" if enough else "luban cache --clear"
    )


def _optional() -> Iterator[Check]:
    """Parts that only some commands need."""
    parts: list[tuple[str, Callable[[], object], str, str]] = [
        (
            "qemu",
            lambda: shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64"),
            "runs foreign programs",
            "apt-get install qemu-user-static",
        ),
        ("ziglang", lambda: find_spec("ziglang"), "links exported programs", f"{_PIP} ziglang"),
        ("triton", lambda: find_spec("triton"), "checks GPU kernels", f"{_PIP} triton"),
        (
            "g++",
            lambda: shutil.which(os.environ.get("CXX", "g++")),
            "only the backend inductor needs it",
            "apt-get install g++",
        ),
        (
            "transformers",
            lambda: find_spec("transformers"),
            "models of `luban bench models`",
            f"{_PIP} transformers",
        ),
    ]
    for name, present, purpose, fix in parts:
        here = bool(present())
        yield Check(
            name, "ok" if here else "absent", purpose if here else f"not installed; {purpose}", "" if here else fix
        )


_EXAMINATIONS = (_python, _packages, _torch, _llvm, _chip, _threads, _huge_pages, _cache, _optional)
