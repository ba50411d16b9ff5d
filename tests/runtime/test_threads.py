"""The OpenMP pool: torch's own where torch is loaded, and a serial one where there is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from luban.errors import ConfigError
from luban.runtime import elf, externals, threads

PARALLEL = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()

define internal void @body(ptr %p) {
  %t = call i32 @omp_get_thread_num()
  %n = call i32 @omp_get_num_threads()
  %i = sext i32 %t to i64
  %q = getelementptr i32, ptr %p, i64 %i
  store i32 %n, ptr %q
  ret void
}
define void @run(ptr %p, i32 %n) {
  call void @GOMP_parallel(ptr @body, ptr %p, i32 %n, i32 0)
  ret void
}
"""


@pytest.fixture(autouse=True)
def _default_threads():
    yield
    threads.set_num_threads(None)


def run(image, count):
    out = (ctypes.c_int32 * 4)()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(image.lookup("run"))(ctypes.addressof(out), count)
    return list(out)


def test_parallel_regions_run_on_torchs_pool(build):
    assert "torch" in threads.pool().library
    image = elf.load(build.emit(PARALLEL), externals.resolve)
    assert run(image, 2) == [2, 2, 0, 0]
    assert run(image, 1) == [1, 0, 0, 0]


def test_the_serial_pool_runs_the_same_code_on_one_thread(build):
    serial = threads._serial()
    image = elf.load(build.emit(PARALLEL), serial.symbols.get)
    assert run(image, 3) == [1, 0, 0, 0]


def test_thread_count_follows_torch_and_can_be_fixed(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert threads.num_threads() == 1
    finally:
        torch.set_num_threads(before)
    threads.set_num_threads(3)
    assert threads.num_threads() == 3
    with pytest.raises(ConfigError, match="at least 1"):
        threads.set_num_threads(0)


def in_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_torch_the_count_is_the_cores_we_may_run_on():
    code = "import sys; from luban.runtime import threads; print(threads.num_threads(), 'torch' in sys.modules)"
    assert in_new_process(code, LUBAN_NUM_THREADS="") == f"{len(os.sched_getaffinity(0))} False"


def test_the_environment_fixes_the_count():
    code = "from luban.runtime import threads; print(threads.num_threads())"
    assert in_new_process(code, LUBAN_NUM_THREADS="5") == "5"
    code = """
from luban.runtime import threads
from luban.errors import ConfigError
try:
    threads.num_threads()
except ConfigError as e:
    print(e)
"""
    assert "LUBAN_NUM_THREADS" in in_new_process(code, LUBAN_NUM_THREADS="many")
