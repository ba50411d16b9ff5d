"""Programs that search for NaNs: the first kernel is named, nothing is lost, and other programs hold no checks."""

from __future__ import annotations

import pytest
import torch

import luban
from luban import events
from luban.compiler.frontend import compile_fx
from luban.errors import NanError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()


def a_step(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, luban.train_step(model, torch.nn.functional.mse_loss, optimizer, **options)


def test_a_step_stops_at_the_first_nan_and_loses_nothing():
    model, step = a_step(detect_nan=True)
    twin, plain = a_step()
    x, y = torch.randn(5, 8), torch.randn(5, 4)
    for a, b in ((step(x, y), plain(x, y)), (step(x, y), plain(x, y))):
        assert torch.equal(a, b)
    bad = x.clone()
    bad[4, 7] = float("nan")
    with pytest.raises(
        NanError, match=r"input \d+ \(f32\[5, 8\]\) of train_step holds a NaN before the first kernel"
    ) as e:
        step(bad, y)
    assert e.value.kernel is None
    with pytest.raises(NanError, match="is the first to make a NaN, in its output 0") as e:
        step(x * 3e38, y)  # inf - inf inside the first product
    assert e.value.kernel.startswith("k0_contract")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(step(x, y), plain(x, y)), "the failed steps did not count"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 17, 3299])
def test_every_place_of_every_dtype_is_searched(dtype, place, monkeypatch):
    monkeypatch.setenv("LUBAN_DETECT_NAN", "1")
    log = luban.compile(lambda x: torch.log(x) * 2, dynamic=False)
    x = torch.ones(33, 100, dtype=dtype)
    log(x)
    x.view(-1)[place] = -1
    with pytest.raises(NanError, match="is the first to make a NaN") as e:
        log(x)
    assert "log" in e.value.kernel


def test_the_kernel_that_made_it_is_named_not_those_that_pass_it_on(monkeypatch):
    monkeypatch.setenv("LUBAN_DETECT_NAN", "1")
    f = luban.compile(lambda a, b, c: ((a @ b).log() @ c).exp(), dynamic=False)
    a, b, c = (torch.ones(8, 8) for _ in range(3))
    f(a, b, c)
    with pytest.raises(NanError, match="contract_log") as e:
        f(-a, b, c)
    assert "exp" not in e.value.kernel


def test_infinities_are_no_finding(monkeypatch):
    monkeypatch.setenv("LUBAN_DETECT_NAN", "1")
    x = torch.zeros(4, 5)
    assert torch.isinf(luban.compile(lambda x: 1 / x)(x)).all()
    masked = luban.compile(lambda x, m: torch.softmax(x.masked_fill(m, float("-inf")), -1))
    assert torch.isfinite(masked(x, torch.arange(5) > 2)).all()


def test_a_symbolic_size_is_searched_to_its_end(monkeypatch):
    monkeypatch.setenv("LUBAN_DETECT_NAN", "1")
    f = luban.compile(lambda x: torch.sqrt(x) + 1, dynamic=True)
    for n in (5, 40, 7):
        x = torch.ones(n, 3)
        f(x)
        x[-1, -1] = -1
        with pytest.raises(NanError, match="sqrt"):
            f(x)


def test_a_stopped_program_records_only_the_kernels_that_ran(tmp_path):
    _, step = a_step(detect_nan=True)
    x, y = torch.randn(5, 8), torch.randn(5, 4)
    step(x, y)
    with events.record(tmp_path / "events.jsonl"), pytest.raises(NanError):
        step(x * 3e38, y)
    kernels = [e for e in events.read(tmp_path / "events.jsonl") if e["cat"] == "kernel"]
    assert len(kernels) == 1 and kernels[0]["name"].startswith("k0_contract")


def test_programs_hold_no_checks_unless_asked(monkeypatch):
    seen = []
    real = compile_fx.CompiledGraph
    monkeypatch.setattr(
        compile_fx, "CompiledGraph", lambda program, constants: seen.append(program) or real(program, constants)
    )
    for options in ({}, {"detect_nan": True}):
        _, step = a_step(**options)
        step(torch.randn(5, 8), torch.randn(5, 4))
    plain, checked = seen
    assert "nan_checks" not in plain.metadata and checked.metadata["nan_checks"], "and the two have keys of their own"
    assert len(plain.object) < len(checked.object)
