"""The on-disk cache believes only whole entries of its own, survives other processes, and never fails a compilation."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings

import pytest

from luban.errors import ConfigError
from luban.runtime import cache
from luban.runtime.program import Program

PROGRAM = Program({"version": 1, "target": "native", "kernels": [], "name": "p"}, bytes(range(256)) * 8)
KEY = cache.key("a graph", b"\0\1")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LUBAN_CACHE_MAX_BYTES", raising=False)
    monkeypatch.setattr(cache, "_state", cache._State())
    return tmp_path / "cache"


@pytest.fixture
def entry(folder):
    assert cache.put(KEY, PROGRAM)
    return folder / f"{KEY}.prog"


def test_round_trip(entry):
    assert cache.get(KEY) == PROGRAM
    assert cache.get(cache.key("another")) is None
    (found,) = cache.entries()
    assert (found.key, found.bytes, found.target, found.valid) == (KEY, entry.stat().st_size, "native", True)
    assert cache.clear() == 1 and cache.entries() == [] and cache.get(KEY) is None


def test_keys_keep_parts_apart():
    assert (
        len({cache.key("ab", "c"), cache.key("a", "bc"), cache.key("abc"), cache.key(b"abc"), cache.key("abc", "")})
        == 5
    )
    assert cache.key("x", b"y") == cache.key("x", b"y")


def test_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("LUBAN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "luban"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.directory() == tmp_path / "home" / ".cache" / "luban"


def test_truncated_entries_are_missing(entry):
    whole = entry.read_bytes()
    for size in [*range(0, 130, 7), len(whole) // 2, len(whole) - 1]:
        entry.write_bytes(whole[:size])
        assert cache.get(KEY) is None
        assert not entry.exists()


def test_any_flipped_bit_is_noticed(entry):
    whole = entry.read_bytes()
    rng = random.Random(0)
    places = [*range(cache._HEADER.size), *rng.sample(range(cache._HEADER.size, len(whole)), 100)]
    for at in places:
        bad = bytearray(whole)
        bad[at] ^= 1 << rng.randrange(8)
        entry.write_bytes(bad)
        assert cache.get(KEY) is None, f"byte {at}"


def test_longer_other_and_foreign_files_are_missing(entry, folder):
    whole = entry.read_bytes()
    other = cache.key("other")
    (folder / f"{other}.prog").write_bytes(whole)  # a file under another's name
    assert cache.get(other) is None
    for content in (whole + b"x", b"", b"\x7fELF" + bytes(500), b"LUBANPRG" + b"\xff" * 300):
        entry.write_bytes(content)
        assert not cache.entries()[0].valid
        assert cache.get(KEY) is None


def test_entries_of_another_format_are_missing(entry, monkeypatch):
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert cache.get(KEY) is None
    assert cache.put(KEY, PROGRAM) and cache.get(KEY) == PROGRAM


def test_a_damaged_entry_is_replaced(entry):
    entry.write_bytes(b"rubbish")
    assert cache.get(KEY) is None
    assert cache.put(KEY, PROGRAM) and cache.get(KEY) == PROGRAM


def test_the_folder_stays_below_its_bound(folder, monkeypatch):
    size = len(cache.encode(KEY, PROGRAM))
    monkeypatch.setenv("LUBAN_CACHE_MAX_BYTES", str(5 * size))
    keys = [cache.key(str(i)) for i in range(8)]
    for i, key in enumerate(keys):
        assert cache.put(key, PROGRAM)
        os.utime(folder / f"{key}.prog", (1000 + i, 1000 + i))
        if i == 4:
            assert cache.get(keys[0])  # used just now: the others go first
    kept = {e.key for e in cache.entries()}
    assert len(kept) <= 5 and keys[0] in kept and keys[-1] in kept and keys[1] not in kept


def test_a_bad_bound_is_a_sentence(monkeypatch):
    monkeypatch.setenv("LUBAN_CACHE_MAX_BYTES", "2G")
    with pytest.raises(ConfigError, match="LUBAN_CACHE_MAX_BYTES"):
        cache.put(KEY, PROGRAM)


def test_left_over_temporaries_go(folder, entry):
    old, new = folder / f"{KEY}.prog.1.aa.tmp", folder / f"{KEY}.prog.2.bb.tmp"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    cache._state.counted = None
    cache.put(KEY, PROGRAM)
    assert not old.exists() and new.exists()
    cache.clear()
    assert not new.exists()


def test_an_unusable_folder_costs_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="without its program cache.*LUBAN_CACHE_DIR"):
        assert not cache.put(KEY, PROGRAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.put(KEY, PROGRAM) and cache.get(KEY) is None and cache.entries() == [] and cache.clear() == 0


def test_a_full_disk_costs_one_warning_and_leaves_nothing(folder, monkeypatch):
    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not cache.put(KEY, PROGRAM)
    assert list(folder.iterdir()) == []


WRITER = """
import sys
from luban.runtime import cache
from luban.runtime.program import Program
key = cache.key("shared")
for i in range(150):
    p = Program({"target": "native", "writer": sys.argv[1]}, sys.argv[1].encode() * 20000)
    assert cache.put(key, p)
    got = cache.get(key)
    assert got is not None and got.object == got.metadata["writer"].encode() * 20000, "a torn entry"
"""


def test_processes_that_write_one_entry_at_once(folder):
    running = [subprocess.Popen([sys.executable, "-c", WRITER, name], stderr=subprocess.PIPE) for name in "ab"]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert len(list(folder.iterdir())) == 1


HIT = """
import sys
from luban.runtime import cache, loaded
program = cache.get(cache.key("hit"))
assert program is not None
ready = loaded.load(program)
heavy = sorted(m for m in ("llvmlite", "xdsl", "numpy", "torch") if m in sys.modules)
assert not heavy, heavy
"""


def test_a_hit_loads_without_llvm_xdsl_numpy_or_torch(scale):
    meta = {**scale.metadata, "requires": []}
    cache.put(cache.key("hit"), Program(meta, scale.object))
    done = subprocess.run([sys.executable, "-c", HIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
