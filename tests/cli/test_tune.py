"""`luban tune`: what it asks for, what it answers, and that the answer is kept."""

from __future__ import annotations

import json

import pytest

from luban.cli.main import main
from luban.cli.tune import text


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_TUNING_DIR", str(tmp_path / "tuning"))
    return tmp_path / "tuning"


def answer(capsys, *argv):
    code = main(["tune", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_product_is_tuned_and_listed_and_cleared(capsys, folder):
    code, result = answer(capsys, "gemm", "24x32x40", "--layout", "nt", "--seconds", "2")
    assert code == 0 and set(result) == {"chip", "table", "rows", "summary"}
    (row,) = result["rows"]
    assert row["workload"].startswith("gemm 1x24x32x40 float32,float32,float32 n,t highest")
    assert {"before_us", "after_us", "gain", "schedule", "measured", "refused", "ended", "changed"} <= set(row)
    assert row["measured"] > 0 and "gemm 1x24x32x40" in text(result)
    code, listed = answer(capsys, "--list")
    assert code == 0 and len(listed["entries"]) >= result["summary"]["changed"]
    assert text(listed).startswith(str(folder))
    code, cleared = answer(capsys, "--clear")
    assert code == 0 and cleared["removed"] == result["summary"]["changed"]
    assert not (folder / "measured.jsonl").read_text()


def test_entries_of_another_chip_or_version_are_listed_as_such(capsys):
    from luban import targets
    from luban.kernels.tuning.family import spaces
    from luban.runtime import schedules
    from luban.runtime.schedules import Entry, Key

    here = schedules.chip_of(targets.get("native"))
    for chip, space in ((here, min(spaces())), ("another", min(spaces())), (here, "gemm 0")):
        schedules.store(Entry(Key(chip, space, "gemm 1x2x3x4 ..."), {}, {"gain": 1.5}))
    _, result = answer(capsys, "--list")
    own = [e for e in result["entries"] if e["table"] == "user"]
    assert [e["used"] for e in own] == [True, False, False]
    assert text(result).count("not used: another chip or version") >= 2


@pytest.mark.parametrize(
    "argv,said",
    [
        ([], "say one of: what to tune, --list, --clear"),
        (["gemm", "2x2x2", "--list"], "say one of"),
        (["conv", "2x2x2"], "there is nothing called 'conv' to tune; choose among gemm, attention, gpt"),
        (["gemm"], "say for which shapes, as in `luban tune gemm 1024x1024x1024`"),
        (["gemm", "2x2"], "has the sizes MxNxK"),
        (["gemm", "2x0x2"], "'2x0x2' is no shape"),
        (["gemm", "axb"], "'axb' is no shape"),
        (["attention", "2x2x2"], "BATCHxHEADSxLENGTHxSIZE"),
        (["mlp", "2x2x2"], "the model mlp has its own shapes; leave 2x2x2 out"),
        (["mlp", "--dtype", "float16"], "models train in float32 or bfloat16"),
        (["gemm", "2x2x2", "--seconds", "0"], "is not a number of seconds above 0"),
        (["gemm", "2x2x2", "--seconds", "nan"], "is not a number of seconds above 0"),
        (["gemm", "2x2x2", "--target", "kunpeng-920"], "this machine is no kunpeng-920"),
        (["gemm", "2x2x2", "--target", "cuda-sm90"], "this machine is no cuda-sm90"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence(capsys, argv, said):
    assert main(["tune", *argv]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_a_models_step(capsys):
    code, result = answer(capsys, "mlp", "--quick", "--seconds", "1")
    assert code == 0 and result["summary"]["workloads"] >= 3, result
    assert sum(row["calls"] for row in result["rows"]) >= 8, "products of four layers, forward and backward"


def test_the_recipes_step():
    from luban.kernels.tuning import collect
    from luban.recipes.gpt.one_step import step

    found = collect.used(step("float32", True))
    assert {w.op for w in found} == {"gemm", "attention", "attention_backward"}
    assert max(found.values()) >= 4, "one call a layer"
