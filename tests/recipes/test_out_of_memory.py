"""A training that needs more memory than there is: one sentence, whoever runs out, and the run directory stays usable."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from luban.cli import main as cli
from luban.errors import OutOfMemoryError, memory_wanted
from luban.recipes import checkpoint

TEXT = "".join(f"def function_{i}(x):\n    return x + {i} * {i % 7}\n\n" for i in range(400))
SIZE = "--layers 1 --heads 1 --width 16 --context 16 --eval-every 1000 --steps 1 --text text.txt --out run".split()
# Leaves room for two GiB more than a process takes that has loaded everything.
LIMITED = """
import resource, sys, torch
from luban.cli.main import main
import luban.recipes.gpt.train, luban.compiler.driver
torch.set_num_threads(1)
size = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30),) * 2)
sys.exit(main(sys.argv[1:]))
"""


def limited(tmp_path, *argv):
    environment = {**os.environ, "LUBAN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LIMITED, *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="the limit is set from what Linux says of a process"
)
@pytest.mark.parametrize("backend, batch", [("luban", 150_000), ("eager", 150_000), ("luban", 10_000_000)])
def test_a_batch_that_is_far_too_large(tmp_path, backend, batch):
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["train", "gpt", *SIZE, "--backend", backend]
    done = limited(tmp_path, *command, "--batch", str(batch), "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert answer["error"].startswith("the training of 1 layers of width 16 on batches of"), done.stderr
    assert (
        "ran out of memory (no memory" in answer["error"] and "choose a smaller --batch or --context" in answer["error"]
    )
    assert done.stderr.splitlines()[-1] == f"luban: {answer['error']}" and "Traceback" not in done.stderr
    again = limited(tmp_path, *command, "--batch", "4")
    assert again.returncode == 0, again.stderr
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.parametrize(
    "error, wanted",
    [
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145729 bytes."
            ),
            4,
        ),
        (OutOfMemoryError("no memory for 7 MiB of temporaries; use a smaller batch"), 7),
        (MemoryError(), 0),
        (OSError(12, "Cannot allocate memory"), 0),
    ],
)
def test_every_kind_of_running_out_is_known(error, wanted, monkeypatch, capsys):
    found = memory_wanted(error)
    assert found.startswith(f"no memory for {wanted} MiB" if wanted else "no memory left")

    def fail(*_):
        raise error

    monkeypatch.delenv("LUBAN_DEBUG", raising=False)
    monkeypatch.setattr("luban.cli.recipes.run", fail)
    assert cli.main(["recipes"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no memory" in said and "smaller batch" in said


def test_other_errors_are_not_taken_for_it():
    assert memory_wanted(RuntimeError("shape mismatch")) is None
    assert memory_wanted(OSError(28, "No space left on device")) is None
    assert memory_wanted(ValueError("can't allocate memory: you tried to allocate 3 bytes")) is None
