"""Tuning on this machine's chip, with small sizes: right results, entries, and what the next compilation does with them."""

from __future__ import annotations

import pytest
import torch

import luban
from luban import targets
from luban.errors import ConfigError, LubanError, TargetError
from luban.kernels.tuning import codec, collect, measured, programs, search, trial, tune
from luban.kernels.tuning.family import family
from luban.kernels.tuning.workload import Workload, read
from luban.runtime import cache, json_lines, schedules
from luban.runtime.schedules import Entry

NATIVE = targets.get("native")
CORES = NATIVE.cores


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setenv("LUBAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "MOST_SETS", 2)


WORKLOADS = [
    Workload("gemm", ("float32",) * 3, (1, 70, 100, 130), ("n", "t"), "highest", CORES),
    Workload("gemm", ("float32",) * 3, (3, 5, 200, 64), ("t", "n"), "highest", CORES),
    Workload("gemm", ("float32",) * 3, (1, 3, 600, 1100), ("n", "n"), "highest", CORES),
    Workload("gemm", ("float32",) * 3, (1, 70, 90, 110), ("n", "n"), "high", CORES),
    Workload("gemm", ("float32",) * 3, (1, 70, 90, 110), ("n", "n"), "medium", CORES),
    Workload("gemm", ("float64",) * 3, (1, 33, 65, 40), ("t", "t"), "highest", CORES),
    Workload("gemm", ("float16",) * 3, (2, 40, 70, 90), ("96:1", "2:150"), "highest", CORES),
    Workload("gemm", ("bfloat16", "float32", "bfloat16"), (1, 65, 97, 70), ("t", "n"), "highest", CORES),
    Workload("gemm", ("bfloat16",) * 3, (1, 130, 70, 192), ("n", "t"), "highest", CORES),
    Workload("attention", ("float32",), (1, 2, 100, 70, 32), ("full", "shared:1", "rows:64:32:32"), "highest", CORES),
    Workload("attention", ("bfloat16",), (2, 4, 90, 90, 40), ("causal", "shared:2", "rows:480:240:240"), "highest", CORES),
    Workload(
        "attention_backward", ("float32",), (1, 4, 80, 80, 24), ("causal", "shared:2", "rows:96:24:24:24:96"), "highest", CORES
    ),
    Workload(
        "attention_backward", ("bfloat16",), (1, 2, 130, 60, 64), ("full", "shared:1", "rows:64:64:64:64:64"), "highest", CORES
    ),
]  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_neighbours_give_the_right_results(workload):
    """A sample over the whole list, the expected slowest too: a schedule that the rules allow is right."""
    own = family(workload, NATIVE)
    machine = programs.bench(workload, NATIVE)
    near = own.near(codec.encode(own.derived))
    assert near, "there is something to look at"
    for schedule in [None, *near[:: max(1, len(near) // 6)]]:
        assert machine.right(machine.compiled(own.key, schedule)), schedule


def test_a_wrong_kernel_is_found_out():
    workload = WORKLOADS[0]
    machine = programs.bench(workload, NATIVE)
    good = machine.compiled(family(workload, NATIVE).key, None)
    assert machine.right(good)

    def wrong(turn):
        (result,) = good(turn)
        result[3, 5] += 0.01
        return [result]

    def partly(turn):
        (result,) = good(turn)
        result[-1] = float("nan")
        return [result]

    assert not machine.right(wrong) and not machine.right(partly)


def test_a_kept_schedule_changes_the_next_compilation_and_no_other(machine):
    x, w, other = torch.randn(64, 96), torch.randn(80, 96), torch.randn(64, 50)

    def compiled():
        torch._dynamo.reset()
        f = luban.compile(lambda x, w: x @ w.t(), fallback="error")
        g = luban.compile(lambda x, y: x.t() @ y, fallback="error")
        with luban.report() as first:
            result = f(x, w)
        with luban.report() as second:
            g(x, other)
        assert machine.error(result, x.double() @ w.double().t()) < 1e-5
        ((key, tuned),) = first.kernels[0].schedules
        return first.cache_hits, second.cache_hits, tuned, schedules.key_from(key)

    hit, _, tuned, key = compiled()
    assert (hit, tuned) == (0, False)
    assert compiled()[:3] == (1, 1, False)
    own = family(read(key.workload), NATIVE)
    assert own.key == key
    better = own.near(codec.encode(own.derived))[0]
    schedules.store(Entry(key, better))
    assert compiled()[:3] == (0, 1, True), "only the product that was tuned is compiled again"
    assert compiled()[:3] == (1, 1, True)
    schedules.clear()
    assert compiled()[:3] == (0, 1, False)
    assert not cache.entries() == []


def test_the_machine_code_is_that_of_the_schedule():
    workload = WORKLOADS[0]
    own = family(workload, NATIVE)
    problem = programs.bench(workload, NATIVE).problem
    objects = set()
    for schedule in [None, *own.near(codec.encode(own.derived))[:3]]:
        with schedules.forced({} if schedule is None else {own.key: schedule}):
            objects.add(programs.program(problem, NATIVE).program.object)
    assert len(objects) == 4


@pytest.fixture
def quick(monkeypatch):
    """Few turns and short moments: what is found does not matter here."""
    monkeypatch.setattr(search, "TURNS", (1, 1))
    monkeypatch.setattr(search, "LAST_TURNS", (3, 3))
    monkeypatch.setattr(trial, "MOMENT", 1e-5)


def test_tuning_keeps_an_entry_and_goes_on(quick, monkeypatch):
    monkeypatch.setattr(search, "WORTH", 1e9)  # whatever was measured as faster once is kept
    monkeypatch.setattr(search, "DOUBT", 9.0)
    told = []
    result = tune.tune({WORKLOADS[0]: 2}, 4.0, show=lambda gone, what: told.append(what))
    (row,) = result["rows"]
    assert row["workload"] == str(WORKLOADS[0]) and row["calls"] == 2 and row["share"] == 1.0 and row["reached"]
    assert row["measured"] > 0 and row["refused"] == 0 and row["before_us"] > 0 and told
    own = family(WORKLOADS[0], NATIVE)
    if row["changed"]:
        (entry,) = schedules.entries()
        assert entry.key == own.key and entry.facts["gain"] == row["gain"] and own.in_use == row["schedule"]
    else:
        assert row["schedule"] == own.in_use and schedules.entries() == []
    again = tune.tune({WORKLOADS[0]: 2}, 0.01)["rows"][0]
    lines = [(line["base"], schedules.digest(line["schedule"])) for line in json_lines.read(measured.path())]
    assert len(set(lines)) == row["measured"] + again["measured"], "what the log knows is not measured again"


def test_the_heaviest_comes_first_and_what_was_not_reached_is_said(quick):
    small = Workload("gemm", ("float32",) * 3, (1, 8, 8, 8), ("n", "n"), "highest", CORES)
    large = Workload("gemm", ("float32",) * 3, (1, 256, 256, 256), ("n", "n"), "highest", CORES)
    result = tune.tune({small: 1, large: 1}, 0.5)
    assert [row["workload"] for row in result["rows"]] == [str(large), str(small)]
    assert [row["reached"] for row in result["rows"]] == [True, False]
    assert sum(row["share"] for row in result["rows"]) == pytest.approx(1)
    assert result["summary"]["workloads"] == 2 and result["summary"]["reached"] == 1


def test_what_was_tried_much_waits_for_the_others():
    heavy, light = (tune.Item(WORKLOADS[0], 1, seconds, tried) for seconds, tried in ((3.0, 160), (1.0, 0)))
    assert heavy.weight > light.weight and heavy.promise < light.promise


def test_an_interruption_keeps_what_is_done(quick, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "search", interrupted)
    result = tune.tune({WORKLOADS[0]: 1}, 1.0)
    assert result["interrupted"] and result["rows"] == [] and result["summary"]["gain"] is None


def test_a_stopped_search_is_the_last(quick):
    result = tune.tune({WORKLOADS[0]: 1, WORKLOADS[1]: 1}, 5.0, stopped=lambda: True)
    (row,) = result["rows"]
    assert result["interrupted"] and row["ended"] == "stopped" and row["measured"] == 0


def test_only_this_machines_chip_can_be_measured():
    with pytest.raises(TargetError, match="this machine is no kunpeng-920; run `luban tune` there"):
        tune.this_machine("kunpeng-920")
    assert tune.this_machine("native") == NATIVE


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tune, "family", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(LubanError, match="cannot be written .*LUBAN_TUNING_DIR"):
        tune.tune({WORKLOADS[0]: 1}, 1.0)


def test_the_workloads_of_a_function_with_their_calls():
    x, w = torch.randn(64, 96), torch.randn(96, 96)
    f = luban.compile(lambda x, w: ((x @ w) @ w) @ w.t(), fallback="error")
    found = collect.used(lambda: f(x, w))
    assert found == {
        collect.gemm((64, 96, 96), "float32", "nn", "highest", CORES): 2,
        collect.gemm((64, 96, 96), "float32", "nt", "highest", CORES): 1,
    }
    assert collect.used(lambda: f(x, w)) == {}, "nothing is compiled the second time"


@pytest.mark.parametrize("layout", collect.LAYOUTS)
@pytest.mark.parametrize("sizes", [(64, 80, 96), (1, 80, 96), (64, 1, 96), (64, 80, 1), (1, 1, 1)], ids=str)
def test_the_command_lines_workload_is_that_of_the_compiler(layout, sizes):
    m, n, k = sizes
    a = torch.randn(m, k) if layout[0] == "n" else torch.randn(k, m).t()
    b = torch.randn(k, n) if layout[1] == "n" else torch.randn(n, k).t()
    f = luban.compile(torch.mm, fallback="error", dynamic=False)
    torch._dynamo.reset()
    assert list(collect.used(lambda: f(a, b))) == [collect.gemm(sizes, "float32", layout, "highest", CORES)]


def test_attention_has_two_workloads():
    found = collect.attention((2, 4, 64, 32), "bfloat16", True, 2)
    assert {w.op for w in found} == {"attention", "attention_backward"}
    assert all(w.shape == (2, 4, 64, 64, 32) and w.layout[:2] == ("causal", "shared:2") for w in found)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: collect.gemm((3, 4), "float32", "nn", "highest", 1), "has the sizes MxNxK"),
        (lambda: collect.gemm((3, 4, 5), "float16", "nn", "high", 1), "--precision high is for float32"),
        (lambda: collect.gemm((10**7, 10**7, 5), "float32", "nn", "highest", 1), "choose smaller sizes"),
        (lambda: collect.attention((1, 4, 64), "float32", True, 1), "BATCHxHEADSxLENGTHxSIZE"),
        (lambda: collect.attention((1, 4, 64, 32), "float32", True, 3), "does not divide the 4 heads"),
    ],
)
def test_sizes_that_cannot_be_are_one_sentence(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
