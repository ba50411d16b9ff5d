"""`luban ir`."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from luban.cli.main import main
from luban.compiler.ir.text import parse, to_text

GRAPH = """"graph.func"() <{sym_name="f", symbols=["s0"]}> ({
^bb0(%x: !graph.tensor<[s0, 3], f32>, %i: !graph.tensor<[3], i64>, %w: !graph.tensor<[3], bf16>):
  %m = "graph.map"(%x, %w) <{domain=#graph.dims<[s0, 3]>, accesses=[#graph.access<[3, 1] + 0>, #graph.access<[0, 1] + 0>]}> ({
  ^bb1(%a: f32, %b: bf16):
    %c = arith.constant 1.0 : f32
    %d = arith.mulf %a, %c : f32
    %e = arith.extf %b : bf16 to f32
    %r = arith.addf %d, %e : f32
    "graph.yield"(%r) : (f32) -> ()
  }) : (!graph.tensor<[s0, 3], f32>, !graph.tensor<[3], bf16>) -> !graph.tensor<[s0, 3], f32>
  "graph.return"(%m, %i) <{shapes=[#graph.dims<[3, s0]>, #graph.dims<[3]>], accesses=[#graph.access<[1, 3] + 0>, #graph.access<[1] + 0>]}>
    : (!graph.tensor<[s0, 3], f32>, !graph.tensor<[3], i64>) -> ()
}) : () -> ()
"""
KERNEL = """"tile.kernel"() <{sym_name="double", symbols=["s0"]}> ({
^bb0(%x: !tile.buf<f32>, %s: i64):
  %z = arith.constant 0 : i64
  "tile.for"(%z, %s) <{role="vector", combines=[]}> ({
  ^bb1(%i: i64):
    %v = "tile.load"(%x, %i) <{strides=#graph.dims<[1]>, offset=#graph.dims<[0]>, operandSegmentSizes=array<i32: 1, 1, 0>}>
      : (!tile.buf<f32>, i64) -> f32
    %w = arith.addf %v, %v : f32
    "tile.store"(%w, %x, %i) <{strides=#graph.dims<[1]>, offset=#graph.dims<[0]>, combine="none", operandSegmentSizes=array<i32: 1, 1, 1, 0>}>
      : (f32, !tile.buf<f32>, i64) -> ()
    "tile.yield"() : () -> ()
  }) : (i64, i64) -> ()
}) : () -> ()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.mlir"
    path.write_text(GRAPH)
    return str(path)


def answer(capsys, *argv):
    code = main(["ir", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_prints_the_transformed_module(file, capsys):
    assert main(["ir", file]) == 0
    assert capsys.readouterr().out == to_text(parse(GRAPH))
    code, result = answer(capsys, file, "--passes", "simplify,dce", "--verify-each")
    assert code == 0 and result["passes"] == ["simplify", "dce"]
    assert "arith.mulf" not in result["module"]
    parse(result["module"])


def test_runs_with_seeded_inputs(file, capsys):
    code, first = answer(capsys, file, "--run", "--symbols", "s0=2")
    _, second = answer(capsys, file, "--run", "--symbols", "s0=2", "--passes", "simplify,cse,dce")
    assert code == 0 and first["results"] == second["results"]
    result = first["results"][0]
    assert result["shape"] == [3, 2] and result["dtype"] == "float32" and len(result["first"]) == 6
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    w = np.random.default_rng(2).standard_normal(3)
    np.testing.assert_allclose(np.reshape(result["first"], (3, 2)), x.T + w[:, None], atol=0.02)  # w is rounded to bf16
    assert result["sum"] == pytest.approx(sum(result["first"]))


def test_runs_with_given_inputs_and_stays_ir_text(file, tmp_path, capsys):
    np.savez(tmp_path / "in.npz", np.ones((1, 3), np.float32), np.arange(3), np.zeros(3, np.float32))
    assert main(["ir", file, "--run", "--symbols", "s0=1", "--inputs", str(tmp_path / "in.npz")]) == 0
    out = capsys.readouterr().out
    assert "// result 0: float32[3, 1] sum 3 " in out and "first [0, 1, 2]" in out
    parse(out)


def test_bisect(file, capsys):
    code, result = answer(capsys, file, "--bisect", "--passes", "simplify,cse,dce", "--symbols", "s0=2")
    assert code == 0 and result["culprit"] is None
    assert main(["ir", file, "--bisect", "--passes", "cse", "--symbols", "s0=2"]) == 0
    assert "// every pass keeps every result" in capsys.readouterr().out


def test_bisect_fails_when_a_pass_is_at_fault(file, capsys, monkeypatch):
    from luban.compiler.passes.graph import simplify

    monkeypatch.setattr(simplify.Simplify, "apply", lambda self, module: [op.detach() for op in module.body.block.ops])
    code, result = answer(capsys, file, "--bisect", "--passes", "cse,simplify", "--symbols", "s0=2")
    assert code == 1 and result["culprit"]["pass"] == "simplify" and result["culprit"]["position"] == 1
    assert main(["ir", file, "--bisect", "--passes", "simplify", "--symbols", "s0=2"]) == 1
    assert "// pass 1 (simplify) changes the program" in capsys.readouterr().out


def test_runs_a_kernel(tmp_path, capsys):
    path = tmp_path / "k.mlir"
    path.write_text(KERNEL)
    np.savez(tmp_path / "in.npz", np.arange(4, dtype=np.float32))
    code, result = answer(capsys, str(path), "--run", "--symbols", "s0=4", "--inputs", str(tmp_path / "in.npz"))
    assert code == 0 and result["results"][0]["first"] == [0, 2, 4, 6]
    given = ["--symbols", "s0=4", "--inputs", str(tmp_path / "in.npz")]
    code, result = answer(capsys, str(path), "--bisect", "--passes", "simplify,cse", *given)
    assert code == 0 and result["culprit"] is None


def test_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(GRAPH))
    assert main(["ir", "-"]) == 0
    assert "graph.map" in capsys.readouterr().out


def test_bad_input_is_one_sentence(file, tmp_path, capsys):
    kernel, broken, binary = tmp_path / "k.mlir", tmp_path / "b.mlir", tmp_path / "c.mlir"
    kernel.write_text(KERNEL)
    broken.write_text(GRAPH.replace("[3, 1] + 0", "[3] + 0"))
    binary.write_bytes(b"\xff\xfe\x00")
    for code, message, argv in (
        (2, "cannot read /nowhere: No such file", ["/nowhere"]),
        (2, "it is not text", [str(binary)]),
        (1, "graph.map breaks its rule: it has one stride for each dim", [str(broken)]),
        (2, "there is no pass 'nope'", [file, "--passes", "nope"]),
        (2, "the symbol s0 has no value; give it one, e.g. --symbols s0=8", [file, "--run"]),
        (2, "the symbol s0 has no value", [file, "--bisect"]),
        (2, "the symbol s0 has no value", [str(kernel), "--run", "--inputs", "x.npz"]),
        (2, "the symbol 's0=-3' is a size and cannot be negative", [file, "--run", "--symbols", "s0=-3"]),
        (2, "--tolerance must be a number of at least 0, not nan", [file, "--bisect", "--tolerance", "nan"]),
        (2, "cannot read the symbol 's0=x'", [file, "--symbols", "s0=x"]),
        (2, "cannot read arrays from", [file, "--run", "--symbols", "s0=1", "--inputs", file]),
        (2, "a kernel's buffers have no size", [str(kernel), "--run", "--symbols", "s0=1"]),
        (2, "a kernel's buffers have no size", [str(kernel), "--bisect", "--symbols", "s0=1"]),
        (
            2,
            "choose one of the module's kernels with --kernel NAME; it holds double",
            [str(kernel), "--run", "--kernel", "x"],
        ),
    ):
        assert main(["ir", *argv]) == code
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error and error.count("\n") == 1
