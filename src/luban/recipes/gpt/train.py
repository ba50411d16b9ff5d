"""The training itself: set up, loop, checkpoints, report."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luban import __version__, events
from luban.errors import ConfigError, LubanError, NanError
from luban.recipes import checkpoint, rundir
from luban.recipes.gpt import data, nan, steps
from luban.recipes.gpt.memory import within_memory
from luban.recipes.gpt.model import GPT, make_optimizer
from luban.recipes.gpt.options import Options, check
from luban.recipes.gpt.sample import generate
from luban.recipes.interrupt import Interrupt

_SAMPLE_TOKENS = 300


@dataclass
class Job:
    """A training under way. `done` counts finished steps; losses and times are those of this process."""

    options: Options
    folder: Path
    corpus: data.Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    held_out_batches: list[tuple[Tensor, Tensor]]
    done: int = 0
    held_out: float | None = None
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"


def train(options: Options, progress: Callable[[int, int], Any]) -> dict[str, Any]:
    """Trains a GPT in `options.run_dir` and returns the report, which is also written there.

    `progress(total, done)` makes a display with update, note and close. The report holds `steps`, `loss_first` and
    `loss_last` (nats a token, of this process's steps), `tokens_per_s` (median, without the first step), `seconds` (of
    the loop, with compilation and held-out losses), `metric` (held-out loss), `run_dir`, `sample`. Raises LubanErrors.
    """
    check(options)
    folder = Path(options.run_dir)
    with rundir.locked(folder), Interrupt() as interrupt, within_memory(options):
        if not options.resume and _holds_run(folder):
            raise ConfigError(f"{folder} already holds a run; continue it with --resume or choose another --out")
        job = _set_up(options, folder)
        rundir.write_json(folder / "config.json", dataclasses.asdict(options))
        began = time.perf_counter()
        compiled = _run(job, interrupt, progress(options.steps, job.done))
        return _finish(job, time.perf_counter() - began, interrupt.asked, compiled)


def _holds_run(folder: Path) -> bool:
    """Whether there is something to lose: a checkpoint or a step that was made. A start that failed at once is not."""
    metrics = folder / "metrics.jsonl"
    return bool(checkpoint.steps(folder / "checkpoints")) or (metrics.exists() and metrics.stat().st_size > 0)


def _set_up(options: Options, folder: Path) -> Job:
    corpus = data.load(options)
    torch.manual_seed(options.seed)
    model = GPT(options, corpus.tokenizer.size)
    job = Job(options, folder, corpus, model, make_optimizer(model, options), data.held_out_batches(corpus, options))
    if options.resume:
        _restore(job)
    return job


def _run(job: Job, interrupt: Interrupt, display: Any) -> dict[str, Any]:
    """Trains up to the last step or an interruption; returns what Luban compiled, empty for the other backends."""
    metrics = rundir.Metrics(job.folder / "metrics.jsonl", job.done)
    try:
        with events.record(job.folder / "events.jsonl"), _report(job.options) as report:
            _loop(job, interrupt, display, metrics)
    finally:
        metrics.close()
        display.close()
    return _compiled(report)


def _loop(job: Job, interrupt: Interrupt, display: Any, metrics: rundir.Metrics) -> None:
    options = job.options
    step_function = steps.make(job.model, job.optimizer, options)
    saved = job.done if options.resume else -1
    while job.done < options.steps and not interrupt.asked:
        facts = _one_step(job, step_function)
        if job.done % options.eval_every == 0 or job.done == options.steps:
            job.held_out = facts["held_out_loss"] = _held_out_loss(job)
        metrics.write(**facts)
        if job.done % options.checkpoint_every == 0:
            _save(job)
            saved = job.done
        display.update(job.done, *_shown(job))
    if saved != job.done:
        _save(job)


def _one_step(job: Job, step_function: steps.Step) -> dict[str, Any]:
    options, number = job.options, job.done + 1
    tokens, targets = data.batch(job.corpus, options, number)
    rate = steps.learning_rate(options, number)
    steps.set_learning_rate(job.optimizer, rate)
    before = nan.snapshot(job.model) if options.detect_nan else None
    begin = time.perf_counter_ns()
    try:
        loss = float(step_function(tokens, targets))
    except NanError as error:
        raise LubanError(_not_finite(job, number, error, before, tokens, targets)) from error
    end = time.perf_counter_ns()
    if not abs(loss) < float("inf") or (before is not None and not nan.finite(job.model)):
        raise LubanError(_not_finite(job, number, loss, before, tokens, targets))
    events.span("step", "train", begin, end, step=number, loss=loss)
    job.done = number
    job.losses.append(loss)
    job.times.append((end - begin) / 1e9)
    return {
        "step": number,
        "loss": loss,
        "lr": rate,
        "seconds": job.times[-1],
        "tokens_per_s": tokens.numel() / job.times[-1],
    }


def _not_finite(
    job: Job, number: int, loss: float | NanError, before: list[Tensor] | None, tokens: Tensor, targets: Tensor
) -> str:
    """What is said of a step that gave a loss or parameters that are not finite, or stopped at a NaN."""
    kept = checkpoint.steps(job.checkpoints)
    where = f"; the checkpoint of step {kept[-1]} is intact" if kept else ""
    if before is None:
        return f"the loss of step {number} is {loss}: try a smaller --lr, or --detect-nan to see where it began{where}"
    cause = nan.locate(job.model, before, tokens, targets)
    if isinstance(loss, NanError):
        first = (
            "its inputs hold a NaN" if loss.kernel is None else f"the kernel {loss.kernel} is the first to make a NaN"
        )
        return f"step {number} stopped: {first}, and {cause}; try a smaller --lr{where}"
    return f"step {number} is not finite (loss {loss}): {cause}; try a smaller --lr{where}"


@torch.no_grad()
def _held_out_loss(job: Job) -> float:
    """Mean loss over the held-out windows, in eager whatever the backend, so that backends can be compared."""
    with events.timed("held-out loss", "train", step=job.done):
        sums = [float(job.model(x, y)) * len(x) for x, y in job.held_out_batches]
    return sum(sums) / sum(len(x) for x, _ in job.held_out_batches)


def _save(job: Job) -> None:
    if not nan.finite(job.model):
        raise LubanError(_not_finite(job, job.done, float("nan"), None, torch.empty(0), torch.empty(0)))
    state = {
        "held_out_loss": job.held_out,
        "text_digest": job.corpus.digest,
        "data": {"seed": job.options.seed, "next_step": job.done + 1},
        "luban": __version__,
    }
    groups = {
        "model": job.model.state_dict(),
        "optimizer": checkpoint.optimizer_tensors(job.optimizer),
        "random": {"torch": torch.get_rng_state()},
    }
    with events.timed("checkpoint", "train", step=job.done):
        checkpoint.save(job.checkpoints, checkpoint.Checkpoint(job.done, groups, state))


def _restore(job: Job) -> None:
    last = checkpoint.load_last(job.checkpoints, ("model", "optimizer", "random"))
    if last.state.get("text_digest") != job.corpus.digest:
        raise ConfigError(
            f"the text is not the one that the run in {job.folder} was started with; "
            "give the same --text or start a new run"
        )
    if last.step > job.options.steps:
        raise ConfigError(
            f"the run in {job.folder} has made {last.step} steps already, more than --steps {job.options.steps}; "
            f"give at least {last.step}"
        )
    job.model.load_state_dict(last.groups["model"])
    checkpoint.restore_optimizer(job.optimizer, last.groups["optimizer"])
    torch.set_rng_state(last.groups["random"]["torch"])
    job.done, job.held_out = last.step, last.state["held_out_loss"]


def _report(options: Options) -> contextlib.AbstractContextManager[Any]:
    if options.backend != "luban":
        return contextlib.nullcontext()
    import luban

    return luban.report()


def _compiled(report: Any) -> dict[str, Any]:
    if report is None:
        return {}
    kernels: dict[str, int] = {}
    for kernel in report.kernels:
        kernels[kernel.kind] = kernels.get(kernel.kind, 0) + 1
    return {
        "graphs": report.graphs,
        "fallbacks": list(report.fallbacks),
        "kernels": kernels,
        "seconds": dict(report.seconds),
        "cache_hits": report.cache_hits,
    }


def _shown(job: Job) -> list[str]:
    held_out = [] if job.held_out is None else [f"held out {job.held_out:.3f}"]
    return [f"loss {job.losses[-1]:.3f}", *held_out, f"{_speed(job):,.0f} tokens/s"]


def _speed(job: Job) -> float:
    """Tokens a second by the median step, leaving out the first, which compiles."""
    timed = job.times[1:] or job.times
    return job.options.batch * job.options.context / statistics.median(timed) if timed else 0.0


def _finish(job: Job, seconds: float, interrupted: bool, compiled: dict[str, Any]) -> dict[str, Any]:
    report = {
        "recipe": "gpt",
        "steps": job.done,
        "loss_first": job.losses[0] if job.losses else None,
        "loss_last": job.losses[-1] if job.losses else None,
        "tokens_per_s": _speed(job),
        "seconds": seconds,
        "metric": job.held_out,
        "metric_name": "held-out loss, nats a token",
        "bits_per_byte": _bits_per_byte(job),
        "run_dir": str(job.folder),
        "backend": job.options.backend,
        "dtype": job.options.dtype,
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "interrupted": interrupted,
        "sample": None if interrupted else _sample(job),
        "compiled": compiled,
    }
    path = job.folder / "report.json"
    if job.losses or not path.exists():  # a finished run that is resumed to nothing keeps what it knew of its steps
        rundir.write_json(path, report)
    return report


def _bits_per_byte(job: Job) -> float | None:
    if job.held_out is None:
        return None
    return job.held_out / 0.6931471805599453 * len(job.corpus.held_out) / job.corpus.held_out_bytes


def _sample(job: Job) -> str:
    prompt = job.corpus.held_out[: min(32, job.options.context)].tolist()
    return generate(job.model, job.corpus.tokenizer, prompt, _SAMPLE_TOKENS, job.options.seed)
