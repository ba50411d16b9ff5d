"""`luban bench models` and `luban bench compile` on tiny models, and what they say about what cannot be measured."""

from __future__ import annotations

import json
import math

import pytest

from luban.bench import BENCHES, common, compile_time, models
from luban.bench.peers import peer
from luban.cli.main import main
from luban.errors import LubanError


def answer(capsys, *argv):
    code = main(["bench", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_models(capsys):
    code, result = answer(capsys, "models", "--quick", "--models", "mlp")
    assert code == 0 and set(result) >= {"bench", "machine", "rows", "summary"}
    (row,) = result["rows"]
    assert (row["model"], row["dtype"]) == ("mlp", "float32") and row["luban"]["fallbacks"] == []
    assert row["loss_difference"] < 1e-5  # both peers train the same model
    assert row["over_eager"] == pytest.approx(row["eager"]["step_ms"] / row["luban"]["step_ms"])
    assert result["summary"]["geomean_over_eager_float32"] == pytest.approx(row["over_eager"])
    assert "mlp" in models.table(result)[1][0] and "inductor" not in row


def test_compile(capsys):
    code, result = answer(capsys, "compile", "--quick", "--models", "mlp", "--peers", "luban", "--whole-step")
    (row,) = result["rows"]
    cold, warm = row["luban"]["cold"], row["luban"]["warm"]
    assert code == 0 and cold["cache_hits"] == 0 and warm["cache_hits"] == warm["graphs"] == 1
    assert 0 < warm["backend_seconds"]["total"] < cold["backend_seconds"]["total"] <= cold["first_seconds"]
    assert result["summary"]["max_warm_backend_seconds"] == warm["backend_seconds"]["total"]
    assert [line[2] for line in compile_time.table(result)[1:]] == ["cold", "warm"]


def test_a_peer_that_dies_is_reported_with_its_last_words():
    asked = {"model": "mlp", "dtype": "float32", "quick": True, "whole_step": False, "peer": "no such backend"}
    with (
        peer(asked) as worker,
        pytest.raises(LubanError, match="no such backend on mlp ended early: .*no such backend"),
    ):
        worker.wait_for_first()


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--models", "gtp2"], "there is no model 'gtp2' to measure; choose among gpt2, bert"),
        (["--dtypes", "int4"], "there is no dtype 'int4'"),
        (["--quick", "--peers", "tvm"], "there is no peer 'tvm'"),
        (["--models", ","], "argument --models: ',' names nothing"),
        (["--peers", " , "], "argument --peers: ' , ' names nothing"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_what_is_not_known(argv, message, capsys):
    assert main(["bench", "models", *argv]) == 2
    assert message in capsys.readouterr().err


def test_every_model_is_measured_once():
    assert common.comma_list("gpt2, bert,llama,vit,gpt2") == ["gpt2", "bert", "llama", "vit"]


def test_a_peer_that_cannot_run_leaves_a_gap_and_says_why(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    code, result = answer(capsys, "models", "--quick", "--models", "mlp", "--peers", "luban,inductor")
    (row,) = result["rows"]
    assert code == 0 and result["ok"] and row["luban"]["step_ms"] > 0
    assert "inductor on mlp ended early: " in row["inductor"]["error"] and "/no/compiler" in row["inductor"]["error"]


def test_a_failure_of_lubans_own_is_one(capsys, monkeypatch):
    failed = {"model": "m", "dtype": "float32", "luban": {"error": "it broke"}}
    result = {"bench": "models", "machine": {}, "rows": [failed], "summary": {}}
    monkeypatch.setattr(models, "run", lambda args, progress: result)
    code, found = answer(capsys, "models", "--quick")
    assert code == 1 and found["ok"] is False
    assert main(["bench", "models", "--quick"]) == 1
    assert "m float32, luban: it broke" in capsys.readouterr().out


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    assert main(["bench", "models"]) == 2
    assert "gpt2, bert, llama, vit need the package transformers" in capsys.readouterr().err


def test_wrong_usage(capsys):
    assert main(["bench", "speed"]) == 2 and main(["bench", "models", "--rounds", "0"]) == 2
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in BENCHES)


def test_means():
    assert common.geomean([2.0, 8.0, None]) == pytest.approx(4.0) and common.geomean([]) is None
    assert common.least([3.0, None, 2.0]) == 2.0 and common.least([None]) is None
    assert math.isclose(common.geomean([1.0]), 1.0)


def row(**first_seconds):
    return {"model": "m", "dtype": "float32"}, {
        name: {state: [{"first_seconds": s, **extra}] for state in ("cold", "warm")}
        for name, (s, extra) in first_seconds.items()
    }


def test_the_share_of_a_backend_is_what_it_adds_to_tracing():
    ours = (3.0, {"backend_seconds": {"total": 0.5}})
    got = compile_time._compared(*row(luban=ours, inductor=(22.0, {}), aot_eager=(2.0, {})))
    assert got["luban"]["cold"]["added_seconds"] == 1.0 and got["inductor"]["cold"]["added_seconds"] == 20.0
    assert got["cold_over_inductor"] == pytest.approx(22 / 3)
    assert got["backend_over_inductor"] == 20.0  # the 1 s that the clock saw, not the 0.5 s that Luban counted
