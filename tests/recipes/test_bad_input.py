"""What can go wrong around a training, on the real thing: each gets one sentence and loses nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from luban.cli.main import main
from luban.recipes import checkpoint

TEXT = "".join(f"def function_{i}(x):\n    return x + {i} * {i % 7}\n\n" for i in range(400))
SIZE = "--layers 2 --heads 2 --width 16 --context 16 --batch 4 --eval-every 1000".split()


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The arguments of a tiny training in an empty folder, up to its run directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return ["train", "gpt", *SIZE, "--text", "text.txt", "--out", "run"]


def said(capfd):
    """What was printed on stderr, without the progress bar."""
    lines = capfd.readouterr().err.replace("\r", "\n").splitlines()
    return [line for line in lines if line.startswith("luban:") or "Error" in line or "Warning" in line]


def test_detect_nan_names_the_first_kernel_and_module(job, tmp_path, capfd):
    assert main([*job, "--steps", "2", "--checkpoint-every", "2"]) == 0
    capfd.readouterr()
    resume = ["train", "gpt", "--resume", "--out", "run", "--steps", "9", "--detect-nan"]
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lr": 1e30}))
    assert main(resume) == 1
    (line,) = said(capfd)
    assert "the first to make a NaN, and blocks.0" in line and "the kernel k" in line
    assert "the checkpoint of step 2 is intact" in line
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [2]


def test_a_full_disk_keeps_the_last_checkpoint(job, tmp_path):
    assert main([*job, "--backend", "eager", "--steps", "2", "--checkpoint-every", "2"]) == 0
    largest = max(p.stat().st_size for p in (tmp_path / "run" / "checkpoints").rglob("*.safetensors"))
    script = f"""
import resource, signal, sys
from luban.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({largest - 1}, {largest - 1}))
sys.exit(main(["train", "gpt", "--resume", "--out", "run", "--steps", "9"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("luban: cannot write the checkpoint of step 4"), done.stderr
    assert "the checkpoint of step 2 is intact, free some space and continue with --resume" in last
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step-00000002"], "no half-written rest"
    assert main(["train", "gpt", "--resume", "--out", "run", "--steps", "4"]) == 0


def test_a_cache_folder_that_cannot_be_written_costs_one_line(job, monkeypatch):
    monkeypatch.setenv("LUBAN_CACHE_DIR", "text.txt/cache")
    command = [sys.executable, "-m", "luban.cli.main", *job, "--steps", "2", "--eval-every", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    shown = [line for line in done.stderr.replace("\r", "\n").splitlines() if "cache" in line]
    assert done.returncode == 0 and len(shown) == 1
    assert shown[0].startswith("luban: Luban goes on without its program cache: text.txt/cache cannot be used")


def test_two_trainings_in_one_run_directory(job, tmp_path, capfd):
    command = [sys.executable, "-m", "luban.cli.main", *job, "--backend", "eager", "--steps", "1000000"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"ended before its first step with {child.wait(timeout=0.05)}: {child.stderr.read()}")
        for argv in (job, ["train", "gpt", "--resume", "--out", "run"]):
            assert main(argv) == 2
            (line,) = said(capfd)
            assert f"another training (process {child.pid}) is at work in run; wait for it or choose" in line
    finally:
        child.send_signal(signal.SIGINT)
    assert child.wait(timeout=120) == 130, "the first one goes on undisturbed and saves when it is stopped"
    assert len(checkpoint.steps(tmp_path / "run" / "checkpoints")) == 1


def test_an_unreadable_text(job, tmp_path, capfd):
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("picture", "is not text: byte 0"),
        ("absent", "No such file"),
        ("empty", "holds no UTF-8 text"),
    ):
        assert main(["train", "gpt", "--text", name, "--out", "run"]) == 2
        (line,) = said(capfd)
        assert reason in line and not (tmp_path / "run" / "config.json").exists()
