"""The small commands: recipes, targets, cache, doctor."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass

import pytest

from luban.cli import doctor
from luban.cli.main import main


def answer(capsys, *argv):
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_recipes(capsys):
    code, result = answer(capsys, "recipes")
    assert code == 0 and [r["name"] for r in result["recipes"]] == ["gpt"]
    assert main(["recipes"]) == 0
    assert "luban train gpt" in capsys.readouterr().out


@dataclass(frozen=True)
class Unit:
    name: str
    input: str


@dataclass(frozen=True)
class Chip:
    name: str
    family: str = "x86-64"
    vector_bits: int = 512
    caches: tuple[int, ...] = (32768, 1 << 20)
    matrix_unit: str | None = None
    dot_units: tuple[Unit, ...] = (Unit("fma", "float32"),)
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    cores: int = 2
    verified: bool = True


@pytest.fixture
def chips(monkeypatch):
    module = types.ModuleType("luban.targets")
    known = {"native": Chip("native"), "x86-64-amx": Chip("x86-64-amx", matrix_unit="amx")}
    module.names, module.get = lambda: list(known), known.__getitem__
    import luban

    monkeypatch.setitem(sys.modules, "luban.targets", module)
    monkeypatch.setattr(luban, "targets", module, raising=False)


def test_targets(chips, capsys):
    code, result = answer(capsys, "targets")
    assert code == 0 and [t["name"] for t in result["targets"]] == ["native", "x86-64-amx"]
    assert result["targets"][1]["dot_units"] == [{"name": "fma", "input": "float32"}]
    assert result["targets"][0]["dtypes"] == ["bfloat16", "float32"]
    assert main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["x86-64-amx", "x86-64", "512", "amx", "yes"]
    assert main(["targets", "native"]) == 0
    assert "32768, 1048576" in capsys.readouterr().out
    assert main(["targets", "x86-64-amz"]) == 2, "a name that does not exist is wrong usage"
    assert "did you mean x86-64-amx?" in capsys.readouterr().err


@dataclass(frozen=True)
class Entry:
    key: str
    bytes: int
    modified: float
    target: str
    valid: bool


@pytest.fixture
def programs(monkeypatch, tmp_path):
    module = types.ModuleType("luban.runtime.cache")
    kept = [Entry("ab" * 32, 2048, 1.7e9, "native", True), Entry("cd" * 32, 10, 1.6e9, "native", False)]
    module.directory, module.entries, module.clear = lambda: tmp_path / "new" / "cache", lambda: kept, lambda: 2
    import luban.runtime

    monkeypatch.setitem(sys.modules, "luban.runtime.cache", module)
    monkeypatch.setattr(luban.runtime, "cache", module, raising=False)


def test_cache(programs, capsys):
    code, result = answer(capsys, "cache")
    assert code == 0 and result["bytes"] == 2058 and len(result["entries"]) == 2
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "2 programs" in shown and shown.index("damaged") < shown.index("abab"), "oldest first"
    code, result = answer(capsys, "cache", "--clear")
    assert code == 0 and result["removed"] == 2


def test_a_cache_that_is_a_file_is_wrong_input(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "file"))
    for argv in (["cache"], ["cache", "--clear"]):
        assert main(argv) == 2
        assert "file is a file, where the cache needs a folder; set LUBAN_CACHE_DIR" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_doctor_is_content_here(chips, programs, capsys):
    code, result = answer(capsys, "doctor")
    assert code == 0, [c for c in result["checks"] if c["state"] == "wrong"]
    names = {c["name"] for c in result["checks"]}
    assert {
        "python",
        "torch",
        "torch build",
        "llvmlite",
        "xdsl",
        "chip",
        "OpenMP pool",
        "huge pages",
        "cache",
        "disk",
    } <= names
    assert main(["doctor"]) == 0
    assert "everything that Luban needs is here" in capsys.readouterr().out


def test_doctor_names_the_fix_of_every_cross(chips, programs, capsys, monkeypatch):
    def missing(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    code, result = answer(capsys, "doctor")
    assert code == 1
    crosses = [c for c in result["checks"] if c["state"] != "ok"]
    assert len(crosses) >= 6 and all(c["fix"] for c in crosses)
