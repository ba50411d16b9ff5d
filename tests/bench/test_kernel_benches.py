"""`luban bench gemm`, `attention`, `ops` and `roofline` on tiny sizes, and what they make of what they measure."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch

from luban import targets
from luban.bench import attention, beside, gemm, op_cases, ops, roofline
from luban.bench.beside import Work, alternate, relative_error, unit_for
from luban.bench.op_cases import CASES, make
from luban.bench.roofline_svg import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Frame, Point, Roof, draw, frame_of
from luban.cli.main import main


def answer(capsys, *argv):
    code = main(["bench", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def holds(row, peers=("torch",)):
    """What every row of a measured kernel says."""
    assert row["ms"]["luban"] > 0 and row["share"] > 0 and row["bound"] in ("compute", "memory")
    for peer in peers:
        assert row[f"over_{peer}"] > 0 and row["ms"][peer] > 0
    assert row["peak_gbs"] > 0 and row["gbs"] > 0


# ---- gemm


def test_gemm(capsys):
    code, result = answer(capsys, "gemm", "--shapes", "17x33x65", "--layouts", "nn,tn", "--rounds", "1")
    assert code == 0 and result["bench"] == "gemm" and {"cpu", "cores"} <= set(result["machine"])
    assert [(r["dtype"], r["layout"]) for r in result["rows"]] == [(d, w) for d in gemm.DTYPES for w in ("nn", "tn")]
    for row in result["rows"]:
        holds(row)
        assert row["peak_gflops"] > 0 and row["case"] == f"17x33x65 {row['layout']}"
        assert row["error"] <= 2 * row["torch_error"] + 1e-6
        assert row["gflops"] == pytest.approx(2 * 17 * 33 * 65 / row["ms"]["luban"] / 1e6)
    ratios = [r["over_torch"] for r in result["rows"] if r["dtype"] == "float16"]
    assert result["summary"]["min_over_torch_float16"] == min(ratios)
    assert len(gemm.table(result)) == 1 + len(result["rows"])


def test_gemm_sets_the_precision_for_its_own_products_only(capsys):
    before = torch.get_float32_matmul_precision()
    argv = ["--shapes", "64x64x64", "--dtypes", "float32", "--rounds", "1", "--precision", "high"]
    code, result = answer(capsys, "gemm", *argv)
    assert code == 0 and result["precision"] == "high" and torch.get_float32_matmul_precision() == before
    assert result["rows"][0]["error"] <= 2**-16 * 4


def test_the_default_shapes_are_those_of_the_groups(capsys):
    from luban.cli.bench import configure

    parser = __import__("argparse").ArgumentParser()
    configure(parser)
    problems = list(gemm.chosen(parser.parse_args(["gemm", "--dtypes", "float32"])))
    assert len(problems) == sum(len(s) * (3 if g == "transformer" else 1) for g, s in gemm.SHAPES.items())


def test_the_work_of_a_product():
    target = targets.get("x86-64-amx")
    work = gemm.work_of(target, gemm.Problem("odd", 2, 3, 5, "bfloat16", "nn"), "highest")
    assert (work.flops, work.reads, work.writes) == (60, (10 + 15) * 2, 6 * 2)
    assert work.unit == ("amx.tdpbf16ps", "bfloat16") and work.intensity == pytest.approx(60 / 62)
    assert gemm.work_of(target, gemm.Problem("odd", 2, 3, 5, "int8", "nn"), "highest").writes == 24


@pytest.mark.parametrize(
    "target,dtype,precision,unit,terms",
    [
        ("x86-64-amx", "float32", "highest", ("fma", "float32"), 1),
        ("x86-64-amx", "float32", "high", ("amx.tdpbf16ps", "bfloat16"), 3),
        ("x86-64-amx", "float32", "medium", ("amx.tdpbf16ps", "bfloat16"), 1),
        ("x86-64-amx", "float16", "highest", ("amx.tdpbf16ps", "bfloat16"), 3),
        ("x86-64-amx", "int8", "highest", ("amx.tdpbssd", "int8"), 1),
        ("x86-64-avx2", "bfloat16", "highest", ("fma", "float32"), 1),
        ("x86-64-avx2", "float64", "highest", ("fma", "float64"), 1),
        ("x86-64-avx512-bf16", "float32", "high", ("fma", "float32"), 1),
        ("kunpeng-920", "float16", "highest", ("fullfp16.fmla", "float16"), 1),
        ("riscv64-rvv", "float16", "medium", ("fma", "float32"), 1),
    ],
)
def test_a_dtype_is_held_to_the_fastest_unit_that_can_multiply_it(target, dtype, precision, unit, terms):
    assert unit_for(targets.get(target), dtype, precision) == (unit, terms)


def test_a_dtype_without_a_unit():
    assert unit_for(targets.get("x86-64-avx2"), "int8") is None


# ---- attention


def test_attention(capsys):
    argv = ["--lengths", "16", "--heads", "2", "--head-size", "8", "--masks", "causal,full,mask", "--rounds", "1"]
    code, result = answer(capsys, "attention", *argv, "--dtypes", "float32")
    assert code == 0
    assert [(r["mask"], r["pass"]) for r in result["rows"]] == [
        (m, p) for m in attention.MASKS for p in attention.PASSES
    ]
    for row in result["rows"]:
        holds(row)
        assert row["error"] <= 2 * row["torch_error"] + 1e-6
    assert result["summary"]["min_over_torch_backward_float32"] == min(
        r["over_torch"] for r in result["rows"] if r["pass"] == "backward"
    )
    assert len(attention.table(result)) == 7


def test_attention_with_shared_heads_in_bfloat16(capsys):
    argv = [
        "--lengths",
        "16",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-size",
        "16",
        "--rounds",
        "1",
        "--dtypes",
        "bfloat16",
    ]
    code, result = answer(capsys, "attention", *argv)
    assert code == 0 and "2x4/2 T=16" in result["rows"][0]["case"]
    assert all(r["error"] <= 2 * r["torch_error"] + 1e-6 for r in result["rows"])


def test_the_work_of_attention():
    target = targets.get("x86-64-avx2")
    p = attention.Problem(1, 2, 1, 4, 8, "float32", "causal")
    q, kv = 2 * 4 * 8 * 4, 4 * 8 * 4
    forward = attention.work_of(target, p, "forward")
    assert forward.flops == 2 * 2 * 2 * 10 * 8 and (forward.reads, forward.writes) == (q + 2 * kv, q)
    backward = attention.work_of(target, p, "backward")
    assert backward.flops == forward.flops * 7 / 2
    assert (backward.reads, backward.writes) == (2 * (q + 2 * kv) + 2 * q, 2 * q + 2 * kv)


# ---- operators


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ops(dtype, capsys):
    code, result = answer(capsys, "ops", "--quick", "--rounds", "1", "--dtypes", dtype)
    assert code == 0 and {r["case"] for r in result["rows"]} == set(CASES)
    for row in result["rows"]:
        holds(row)
        assert row["bound"] == "memory"
        if row["case"] != "dropout":
            assert row["error"] <= 4 * row["torch_error"] + (1e-6 if dtype == "float32" else 1e-3), row["case"]
    assert ("adamw", "backward") not in {(r["case"], r["pass"]) for r in result["rows"]}
    assert result["summary"][f"geomean_share_forward_{dtype}"] > 0
    assert len(ops.table(result)) == 1 + len(result["rows"])


def test_the_bytes_that_operators_must_move():
    def traffic(name, backward):
        case = make(name, "float32", True)
        with torch.no_grad():
            out = case.function(*case.inputs)
        return case, case.traffic(out if isinstance(out, tuple) else (out,), backward)

    case, got = traffic("softmax", False)
    size = case.inputs[0].nbytes
    assert got == (size, size)
    assert traffic("softmax", True)[1] == (3 * size, 2 * size)
    assert traffic("transpose", True)[1] == (2 * size, 2 * size)  # the gradient does not need the input
    assert traffic("swiglu", True)[1] == (5 * size, 3 * size)
    case, got = traffic("embedding", False)
    rows = case.inputs[1].numel() * case.inputs[0].shape[1] * 4
    assert got == (rows + case.inputs[1].nbytes, rows)
    assert traffic("embedding", True)[1] == (2 * rows + 2 * case.inputs[1].nbytes, rows + case.inputs[0].nbytes)
    assert traffic("adamw", False)[1] == (4 * size, 3 * size)


def test_the_update_is_that_of_torch():
    case = make("adamw", "float32", True)
    p, m, v, g = (t.double() for t in case.inputs)
    ours = op_cases.adamw(p.clone(), m.clone(), v.clone(), g)
    weight = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([weight], lr=op_cases.RATE, betas=op_cases.BETAS, weight_decay=op_cases.DECAY)
    state = {"step": torch.tensor(op_cases.STEP - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.state[weight] = state
    weight.grad = g
    optimizer.step()
    for mine, theirs in zip(ours, (weight.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_second_compiler_gets_code_of_its_own():
    scale = 3
    copied = ops._copy(lambda x, more=1: x * scale + more)
    assert copied(2) == 7 and copied.__code__ != test_a_second_compiler_gets_code_of_its_own.__code__
    assert ops._copy(op_cases.adamw).__code__ is not op_cases.adamw.__code__


def test_inductor_without_a_compiler_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(ops.shutil, "which", lambda _name: None)
    assert main(["bench", "ops", "--inductor"]) == 2
    assert "Inductor needs g++" in capsys.readouterr().err


# ---- turns and shares


def test_everyone_has_a_turn_in_each_round_and_who_begins_moves_on(monkeypatch):
    seen = []
    monkeypatch.setattr(beside, "_warm", lambda _run: 1.0)
    monkeypatch.setattr(beside, "ROW_SECONDS", 1e9)
    got = alternate({name: lambda name=name: seen.append(name) for name in "abc"}, 4)
    assert "".join(seen) == "abcbcacababc" and all(len(times) == 4 for times in got.values())


def test_short_calls_share_a_turn_and_long_ones_have_fewer(monkeypatch):
    seen = []
    monkeypatch.setattr(beside, "_warm", lambda _run: beside.TURN_SECONDS / 5)
    alternate({"a": lambda: seen.append(1)}, 2)
    assert len(seen) == 10
    monkeypatch.setattr(beside, "_warm", lambda _run: beside.ROW_SECONDS)
    assert len(alternate({"a": lambda: None}, 12)["a"]) == beside.LEAST_ROUNDS


def test_of_several_turns_a_round_the_best_counts(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0])
    monkeypatch.setattr(beside, "_warm", lambda _run: 1.0)
    monkeypatch.setattr(beside.time, "perf_counter", lambda: next(clock))
    assert alternate({"loop": lambda: None}, 1, {"loop": 3}) == {"loop": [1.0]}


def test_a_share_is_taken_within_a_round():
    """A chip that halves its rate for some rounds does so for the loop beside as well."""
    row = beside._shares([1.0, 2.0, 2.0], {"compute": [0.5, 1.0, 1.0], "memory": [0.1, 0.1, 0.1]}, Work(4e9, 10, 10))
    assert row["share"] == 0.5 and row["bound"] == "compute" and row["gflops"] == 2.0
    assert row["peak_gflops"] == 4.0 and row["intensity"] == 2e8
    assert beside._shares([1.0], {"memory": [0.25]}, Work(0, 1, 1)).keys() == {
        "gbs",
        "intensity",
        "share",
        "bound",
        "peak_gbs",
    }


def test_speeds_are_medians_of_a_rounds_ratios():
    row = beside._speeds({"luban": [1.0, 2.0, 4.0], "torch": [2.0, 2.0, 16.0]}, "luban", ["luban", "torch"])
    assert row == {"ms": {"luban": 2000.0, "torch": 2000.0}, "over_torch": 2.0}


def test_errors_count_what_is_not_a_number():
    ones, other = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert relative_error(ones, ones.double()) == 0.0 and relative_error(ones * 1.5, ones) == 0.5
    assert relative_error(other, ones) == relative_error(ones, other) == float("inf")
    assert relative_error(ones[:2], ones) == float("inf") and relative_error(other, other) == 0.0
    assert relative_error(torch.tensor([float("inf")]), torch.tensor([-float("inf")])) == float("inf")


# ---- the picture


def test_a_roofline_of_kept_results(tmp_path, capsys):
    code, result = answer(capsys, "gemm", "--shapes", "32x32x32", "--dtypes", "float32", "--rounds", "1")
    kept, picture = tmp_path / "gemm.json", tmp_path / "roofline.svg"
    kept.write_text(json.dumps(result))
    code, drawn = answer(capsys, "roofline", "--quick", "--from", str(kept), "--svg", str(picture))
    assert code == 0 and drawn["svg"] == str(picture) and drawn["rows"] == [{"bench": "gemm", **result["rows"][0]}]
    assert len(drawn["peaks"]["compute"]) >= 2 and drawn["summary"]["gflops_fma_float32"] > 0
    assert len(roofline.table(drawn)) == 2
    said = "".join(ET.parse(picture).getroot().itertext())
    assert "gemm float32 32x32x32 nn" in said and "fma float32" in said and "L1" in said and "memory" in said


def test_every_bench_draws_itself(tmp_path, capsys):
    picture = tmp_path / "ops.svg"
    code, result = answer(
        capsys, "ops", "--quick", "--ops", "gelu", "--dtypes", "float32", "--rounds", "1", "--svg", str(picture)
    )
    assert code == 0 and result["svg"] == str(picture) and "gelu with backward" in picture.read_text()
    assert main(["bench", "roofline", "--quick", "--from", str(picture)]) == 2
    assert "cannot be read as a result of a bench" in capsys.readouterr().err


UNITS, LEVELS = (
    [Roof("fma float32", 400.0), Roof("amx & co", 6000.0)],
    [Roof("L1", 500.0), Roof("memory", 40.0), Roof("L3", 50.0)],
)
POINTS = [Point("gemm", "float32", "a<b", 100.0, 300.0, ", 75%"), Point("ops", "bfloat16", "softmax", 0.1, 2.0)]


def test_the_picture_holds_every_point_and_is_xml():
    root = ET.fromstring(draw("a chip", UNITS, LEVELS, POINTS))
    space = "{http://www.w3.org/2000/svg}"
    for circle in root.iter(f"{space}circle"):
        assert LEFT <= float(circle.get("cx")) <= WIDTH and TOP <= float(circle.get("cy")) <= HEIGHT
    lines = [line for line in root.iter(f"{space}line") if line.get("class") == "roof"]
    assert len(lines) == len(UNITS) + len(LEVELS)
    for line in lines:
        assert all(LEFT - 1 <= float(line.get(x)) <= WIDTH - RIGHT + 1 for x in ("x1", "x2"))
    said = list(root.itertext())
    assert "gemm float32 a<b: 300 GFLOP/s, 75%" in said and "memory 40 GB/s" in said and "amx & co 6,000" in said


def test_a_memory_roof_meets_a_unit_where_it_feeds_it():
    frame = frame_of(UNITS, LEVELS, POINTS)
    assert 2.0 ** frame.x[0] <= 0.1 and 2.0 ** frame.x[1] >= 2 * 6000 / 40 and 10 ** frame.y[1] >= 6000
    text = draw("a chip", UNITS, LEVELS, [])
    assert f'x2="{frame.across(6000 / 40):.1f}" y2="{frame.down(6000):.1f}"' in draw("a chip", UNITS, LEVELS, POINTS)
    assert text.count("<circle") == 0
    square = Frame((0, 2), (0, 1))
    assert square.across(2) - square.across(1) == pytest.approx(square.across(4) - square.across(2))


@pytest.mark.parametrize(
    "argv,message",
    [
        (["gemm", "--shapes", "huge"], "there are no shapes 'huge' to measure; choose among squares"),
        (["gemm", "--shapes", "0x4x4"], "there are no shapes '0x4x4'"),
        (["gemm", "--dtypes", "int4"], "there is no dtype 'int4'"),
        (["gemm", "--layouts", "tt"], "there is no layout 'tt'"),
        (["attention", "--masks", "window"], "there is no mask 'window'"),
        (["attention", "--heads", "6", "--kv-heads", "4"], "6 query heads cannot share 4"),
        (["attention", "--lengths", "1,x"], "'x' is not a whole number"),
        (["attention", "--passes", "sideways"], "there is no pass 'sideways'"),
        (["ops", "--ops", "fft"], "there is no operator 'fft'"),
        (["ops", "--svg", "no/such/folder/a.svg"], "the picture cannot be written to no/such/folder/a.svg"),
        (["gemm", "--svg", "."], "the picture cannot be written to ."),
        (["roofline", "--from", "none.json"], "none.json cannot be read as a result of a bench"),
    ],
    ids=lambda v: " ".join(v)[:30] if isinstance(v, list) else "",
)
def test_wrong_usage(argv, message, capsys):
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_product_without_a_kernel_is_told(monkeypatch, capsys):
    from luban.errors import LubanError

    def none(_a, _b):
        raise LubanError("there is no such kernel; choose another")

    monkeypatch.setattr(gemm, "product", none)
    assert main(["bench", "gemm", "--shapes", "4x4x4", "--dtypes", "float32", "--rounds", "1"]) == 1
    assert "4x4x4 nn float32: there is no such kernel; choose another" in capsys.readouterr().out
