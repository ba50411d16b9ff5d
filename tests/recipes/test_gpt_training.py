"""Whole trainings of a tiny GPT in eager: resumption, interruption, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from luban import events
from luban.cli.main import main
from luban.errors import ConfigError, LubanError
from luban.recipes import checkpoint
from luban.recipes.gpt.options import Options
from luban.recipes.gpt.train import train

TEXT = "".join(f"def function_{i}(x):\n    return x + {i} * {i % 7}\n\n" for i in range(400))


class Silent:
    """A progress display that shows nothing."""

    def __init__(self, total, done):
        self.total = total

    def update(self, done, *facts):
        pass

    note = close = lambda self, *a: None


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return Options(
        run_dir=str(tmp_path / "run"), backend="eager", layers=2, heads=2, width=16, context=16, batch=4, steps=8,
        lr=1e-2, warmup=2, eval_every=4, checkpoint_every=4, text=str(tmp_path / "text.txt"),
    )  # fmt: skip


def losses(run_dir):
    return {m["step"]: m["loss"] for m in map(json.loads, open(f"{run_dir}/metrics.jsonl"))}


def changed(options, **values):
    return dataclasses.replace(options, **values)


def test_a_run_leaves_everything_behind(tiny, tmp_path):
    report = train(changed(tiny, steps=40, tokenizer="bpe", vocab=280), Silent)
    run = tmp_path / "run"
    assert report["steps"] == 40 and report["loss_last"] < report["loss_first"] - 1
    assert report["metric"] < report["loss_first"] and report["tokens_per_s"] > 0 and report["sample"]
    assert json.loads((run / "report.json").read_text()) == report
    assert sorted(losses(run)) == list(range(1, 41))
    assert [e["args"]["step"] for e in events.read(run / "events.jsonl") if e["name"] == "step"] == list(range(1, 41))
    assert checkpoint.steps(run / "checkpoints") == [36, 40], "the last two"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_gives_bitwise_the_same_losses(tiny, tmp_path, dtype):
    tiny = changed(tiny, dtype=dtype)
    train(tiny, Silent)
    whole = losses(tiny.run_dir)
    model = checkpoint.load_last(tmp_path / "run" / "checkpoints").groups["model"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    report = train(changed(tiny, resume=True), Silent)
    assert losses(tiny.run_dir) == whole and len(whole) == 8
    again = checkpoint.load_last(tmp_path / "run" / "checkpoints").groups["model"]
    assert all(torch.equal(model[name], again[name]) for name in model) and report["steps"] == 8
    assert report["loss_first"] == whole[5]


def test_a_finished_run_resumes_to_nothing_or_to_more_steps(tiny):
    train(tiny, Silent)
    report = train(changed(tiny, resume=True), Silent)
    assert report["steps"] == 8 and report["loss_first"] is None and report["metric"] is not None
    kept = json.loads(open(f"{tiny.run_dir}/report.json").read())
    assert kept["loss_first"] is not None, "what the run knew of its steps is not lost"
    assert train(changed(tiny, resume=True, steps=10), Silent)["steps"] == 10
    with pytest.raises(ConfigError, match="has made 10 steps already, more than --steps 7; give at least 10"):
        train(changed(tiny, resume=True, steps=7), Silent)
    assert json.loads(open(f"{tiny.run_dir}/config.json").read())["steps"] == 10


def test_ctrl_c_saves_and_resumes(tiny, tmp_path, monkeypatch):
    command = [
        sys.executable,
        "-m",
        "luban.cli.main",
        "train",
        "gpt",
        "--backend",
        "eager",
        "--steps",
        "100000",
        "--out",
        tiny.run_dir,
    ]
    for name in ("layers", "heads", "width", "context", "batch"):
        command += [f"--{name}", str(getattr(tiny, name))]
    command += ["--text", tiny.text, "--eval-every", "1000", "--checkpoint-every", "100000", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"ended before its first step with {child.wait(timeout=0.05)}: {child.stderr.read()}")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130 and "Traceback" not in err, err
    report = json.loads(out)
    assert report["interrupted"] and 0 < report["steps"] < 100000
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [report["steps"]]
    assert max(losses(tiny.run_dir)) == report["steps"]
    more = [*command[:5], "--resume", "--out", tiny.run_dir, "--steps", str(report["steps"] + 2)]
    done = subprocess.run([*more, "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == report["steps"] + 2, done.stderr


def test_a_second_training_in_a_run_directory_is_refused(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "lock", "w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another training \(process 4711\)"):
            train(tiny, Silent)
    assert os.listdir(tmp_path / "run") == ["lock"]
    train(tiny, Silent)


def test_a_run_is_not_overwritten(tiny):
    train(tiny, Silent)
    before = losses(tiny.run_dir)
    with pytest.raises(ConfigError, match="already holds a run"):
        train(changed(tiny, seed=1), Silent)
    assert losses(tiny.run_dir) == before


def test_a_full_disk_leaves_the_last_checkpoint_intact(tiny, tmp_path, monkeypatch):
    write = checkpoint._write

    def refuse_later(path, data):
        if "00000008" in str(path) and path.name.startswith("optimizer"):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write", refuse_later)
    with pytest.raises(LubanError, match="No space left on device; the checkpoint of step 4 is intact"):
        train(tiny, Silent)
    folder = tmp_path / "run" / "checkpoints"
    assert os.listdir(folder) == ["step-00000004"], "no half-written rest"
    whole = losses(tiny.run_dir)
    monkeypatch.undo()
    train(changed(tiny, resume=True), Silent)
    assert losses(tiny.run_dir) == whole


def test_a_damaged_checkpoint_is_named(tiny, tmp_path):
    train(tiny, Silent)
    (tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(LubanError, match="step-00000008.*remove that folder"):
        train(changed(tiny, resume=True), Silent)


def test_a_checkpoint_without_one_of_its_files_is_named(tiny, tmp_path):
    train(tiny, Silent)
    (tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors").unlink()
    with pytest.raises(LubanError, match="step-00000008: it lacks model.safetensors; remove that folder"):
        train(changed(tiny, resume=True), Silent)


def test_lines_of_metrics_that_a_crash_left_unreadable_do_not_stop_a_resumption(tiny, tmp_path):
    train(tiny, Silent)
    whole = losses(tiny.run_dir)
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'\0\0\xff\n"text"\n{"loss": 1}\n{"step": 9, "lo')
    train(changed(tiny, resume=True), Silent)
    assert losses(tiny.run_dir) == whole


def test_a_run_that_never_saved_is_not_sent_back_and_forth(tiny, tmp_path):
    train(changed(tiny, steps=4), Silent)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="another --out"):
            train(changed(tiny, resume=resume), Silent)


def test_another_text_is_refused_when_resuming(tiny, tmp_path):
    train(tiny, Silent)
    (tmp_path / "text.txt").write_text(TEXT + "more")
    with pytest.raises(ConfigError, match="not the one"):
        train(changed(tiny, resume=True, steps=10), Silent)


@pytest.mark.parametrize(
    "detect, said", [(False, "--detect-nan to see"), (True, "first module|gradient of|update of the parameters")]
)
def test_a_loss_that_is_not_finite_ends_the_run_with_the_checkpoint_kept(tiny, tmp_path, detect, said):
    train(changed(tiny, steps=4), Silent)
    with pytest.raises(LubanError, match=said) as caught:
        train(changed(tiny, steps=8, lr=1e30, resume=True, detect_nan=detect), Silent)
    assert "the checkpoint of step 4 is intact" in str(caught.value) or detect
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [4]


def test_wrong_inputs_are_one_sentence_each(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    for argv, said in (
        (["--text", "picture"], "is not text"),
        (["--text", "absent"], "No such file"),
        (["--text", "text.txt", "--out", "text.txt/run"], "cannot write into"),
        (["--workers", "4"], "data-parallel training is not part of this version"),
        (["--resume"], "no gpt run"),
    ):
        assert main(["train", "gpt", "--quick", "--backend", "eager", *argv]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err


def test_a_start_that_made_no_step_does_not_block_its_directory(tiny, monkeypatch):
    monkeypatch.setattr("luban.recipes.gpt.steps.make", lambda *_: None)
    with pytest.raises(TypeError):
        train(tiny, Silent)
    monkeypatch.undo()
    assert train(tiny, Silent)["steps"] == 8


def test_a_lock_on_a_full_disk_holds_all_the_same(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to("/dev/full")
    assert train(tiny, Silent)["steps"] == 8


def test_events_on_a_full_disk_cost_one_warning(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="recording of events into .* ended: No space left") as said:
        assert train(tiny, Silent)["steps"] == 8
    assert len(said) == 1


def test_the_report_for_people(tiny, capsys):
    size = [
        part
        for name in ("layers", "heads", "width", "context", "batch")
        for part in (f"--{name}", str(getattr(tiny, name)))
    ]
    argv = ["train", "gpt", "--backend", "eager", "--steps", "3", "--text", tiny.text, "--out", tiny.run_dir, *size]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "tokens/s" in out and "sample:" in out and tiny.run_dir in out and "3/3" in err
    assert main(["train", "gpt", "--resume", "--out", tiny.run_dir]) == 0
    shown = capsys.readouterr().out.replace("\n", "").replace("\t", "")
    assert shown.isprintable(), "a sample of bytes sends a terminal no commands"


def test_luban_follows_eager_step_by_step_and_resumes(tiny, tmp_path):
    eager = changed(tiny, steps=50, width=32, dtype="float32", checkpoint_every=25, run_dir=str(tmp_path / "eager"))
    ours = changed(eager, backend="luban", run_dir=str(tmp_path / "luban"))
    train(eager, Silent)
    report = train(ours, Silent)
    want, got = losses(eager.run_dir), losses(ours.run_dir)
    assert want.keys() == got.keys() and max(want) == 50
    assert all(abs(want[s] - got[s]) < 1e-3 for s in want), "equal to 1e-3 up to step 50"
    assert report["loss_last"] < report["loss_first"] - 1
    shutil.rmtree(tmp_path / "luban" / "checkpoints" / "step-00000050")
    train(changed(ours, resume=True), Silent)
    assert losses(ours.run_dir) == got, "a resumed run repeats the losses exactly"
