"""A training that needs more memory than there is: one sentence, whoever runs out, and the run directory stays usable."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from luban.cli import main as cli
from luban.errors import OutOfMemoryError, memory_wanted
from luban.recipes import checkpoint
from luban.recipes.gpt import memory
from luban.recipes.gpt.model import GPT
from luban.recipes.gpt.options import of_size

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


def test_what_cannot_fit_is_refused_before_it_takes_memory(monkeypatch, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 1 << 30)
    command = ["train", "gpt", *SIZE, "--backend", "eager"]
    for size in (["--batch", "2000000"], ["--width", "4096", "--layers", "6"]):
        assert cli.main([*command, *size]) == 1
        said = capsys.readouterr().err
        assert "needs at least" in said and "MiB of memory, and there are 1024; choose a smaller" in said
        assert said.count("\n") == 1 and not (tmp_path / "run" / "config.json").exists()
    assert cli.main([*command, "--batch", "4"]) == 0


def test_the_lower_bound_is_one(monkeypatch):
    """The weights are exact up to embeddings and norms; of the activations a part is counted."""
    options = of_size(quick=True, backend="eager")
    blocks = sum(p.numel() for p in GPT(options, 256).blocks.parameters())
    alone = memory.least_bytes(dataclasses.replace(options, batch=1)) - memory.least_bytes(
        dataclasses.replace(options, batch=0)
    )
    weights = memory.least_bytes(dataclasses.replace(options, batch=0))
    assert 0.95 * 16 * blocks < weights <= 16 * blocks
    tokens = torch.zeros(1, options.context, dtype=torch.int64)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):
        GPT(options, 256)(tokens, tokens)
    assert alone < sum(held)


def test_a_control_group_bounds_the_machine(monkeypatch, tmp_path):
    whole = memory.machine_bytes()
    for text, expected in (("max\n", None), ("123456789\n", 123456789)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_CGROUP", tmp_path / "memory.max")
        found = memory.machine_bytes()
        assert found == expected if expected else found >= whole


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
        (RuntimeError("Storage size calculation overflowed with sizes=[3000000000, 9000000000]"), 0),
        (MemoryError(), 0),
        (OSError(12, "Cannot allocate memory"), 0),
    ],
)
def test_every_kind_of_running_out_is_known(error, wanted, monkeypatch, capsys):
    found = memory_wanted(error)
    assert found.startswith(f"no memory for {wanted} MiB" if wanted else "no memory ")

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
