"""simplify: every fold keeps every bit, and what would not stay."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

import numpy as np
import pytest

from luban.compiler.ir.interpret_graph import run_graph
from luban.compiler.ir.text import verify
from luban.compiler.passes import pipeline

VALUES = {
    "f32": np.array([-0.0, np.nan, np.inf, 1.5], np.float32),
    "i32": np.array([0, -7, 2**31 - 1, -(2**31)], np.int32),
    "i1": np.array([True, False, True, False]),
}
OTHER = {
    "f32": np.array([2.0, -0.0, -1.0, np.nan], np.float32),
    "i32": np.array([3, -2, 7, 1], np.int32),
    "i1": np.array([True, True, False, False]),
}

# (element type, body on %a and %b, result type, operations that stay)
FOLDS = [
    ("f32", "%c = arith.constant 1.0 : f32\n%r = arith.mulf %a, %c : f32", "f32", []),
    ("f32", "%c = arith.constant 1.0 : f32\n%r = arith.mulf %c, %a : f32", "f32", []),
    ("f32", "%c = arith.constant 1.0 : f32\n%r = arith.divf %a, %c : f32", "f32", []),
    ("f32", "%c = arith.constant -0.0 : f32\n%r = arith.addf %a, %c : f32", "f32", []),
    ("f32", "%c = arith.constant 0.0 : f32\n%r = arith.subf %a, %c : f32", "f32", []),
    ("f32", "%c = arith.constant 0.0 : f32\n%r = arith.addf %a, %c : f32", "f32", ["arith.constant", "arith.addf"]),
    ("f32", "%c = arith.constant -0.0 : f32\n%r = arith.subf %a, %c : f32", "f32", ["arith.constant", "arith.subf"]),
    ("f32", "%c = arith.constant 0.0 : f32\n%r = arith.mulf %a, %c : f32", "f32", ["arith.constant", "arith.mulf"]),
    ("f32", "%c = arith.constant 1.0 : f32\n%r = arith.divf %c, %a : f32", "f32", ["arith.constant", "arith.divf"]),
    ("f32", "%r = arith.subf %a, %a : f32", "f32", ["arith.subf"]),
    ("f32", "%n = arith.negf %a : f32\n%r = arith.negf %n : f32", "f32", []),
    ("f32", "%n = arith.negf %a : f32\n%r = math.absf %n : f32", "f32", ["math.absf"]),
    ("f32", "%n = math.absf %a : f32\n%r = math.absf %n : f32", "f32", ["math.absf"]),
    ("f32", "%r = arith.maximumf %a, %a : f32", "f32", []),
    ("f32", "%c = arith.constant 2.0 : f32\n%r = math.powf %a, %c : f32", "f32", ["arith.mulf"]),
    ("f32", "%c = arith.constant 1.0 : f32\n%r = math.powf %a, %c : f32", "f32", []),
    ("f32", "%c = arith.constant 0.0 : f32\n%r = math.powf %a, %c : f32", "f32", ["arith.constant"]),
    ("f32", "%c = arith.constant 0.5 : f32\n%r = math.powf %a, %c : f32", "f32", ["arith.constant", "math.powf"]),
    ("f32", "%w = arith.extf %a : f32 to f64\n%r = arith.truncf %w : f64 to f32", "f32", []),
    ("f32", "%n = arith.truncf %a : f32 to f16\n%r = arith.extf %n : f16 to f32", "f32", ["arith.truncf", "arith.extf"]),
    ("f32", "%n = arith.truncf %a : f32 to f16\n%w = arith.extf %n : f16 to f32\n%r = arith.extf %w : f32 to f64", "f64",
     ["arith.truncf", "arith.extf"]),
    ("f32", "%c = arith.cmpf olt, %a, %b : f32\n%r = arith.select %c, %a, %a : f32", "f32", []),
    ("f32", "%c = arith.constant true\n%r = arith.select %c, %b, %a : f32", "f32", []),
    ("f32", "%c = arith.cmpf olt, %a, %b : f32\n%t = arith.constant true\n%f = arith.constant false\n%r = arith.select %c, %t, %f : i1",
     "i1", ["arith.cmpf"]),
    ("f32", "%p = arith.constant 2.0 : f32\n%q = arith.constant 3.0 : f32\n%s = arith.mulf %p, %q : f32\n%e = math.exp %s : f32\n"
     "%r = arith.addf %a, %e : f32", "f32", ["arith.constant", "arith.addf"]),
    ("f32", "%p = arith.constant 0.0 : f32\n%q = arith.constant 1.0 : f32\n%s = arith.divf %q, %p : f32\n%r = arith.addf %a, %s : f32",
     "f32", ["arith.constant", "arith.constant", "arith.divf", "arith.addf"]),
    ("i32", "%c = arith.constant 0 : i32\n%r = arith.addi %a, %c : i32", "i32", []),
    ("i32", "%c = arith.constant 1 : i32\n%r = arith.muli %c, %a : i32", "i32", []),
    ("i32", "%c = arith.constant 0 : i32\n%r = arith.muli %a, %c : i32", "i32", ["arith.constant"]),
    ("i32", "%r = arith.subi %a, %a : i32", "i32", ["arith.constant"]),
    ("i32", "%c = arith.constant -1 : i32\n%r = arith.andi %a, %c : i32", "i32", []),
    ("i32", "%r = arith.cmpi sle, %a, %a : i32", "i1", ["arith.constant"]),
    ("i32", "%r = arith.cmpi ult, %a, %a : i32", "i1", ["arith.constant"]),
    ("i32", "%c = arith.constant 1 : i32\n%r = arith.divsi %a, %c : i32", "i32", []),
    ("i32", "%w = arith.extsi %a : i32 to i64\n%r = arith.trunci %w : i64 to i32", "i32", []),
    ("i32", "%n = arith.trunci %a : i32 to i8\n%r = arith.extsi %n : i8 to i32", "i32", ["arith.trunci", "arith.extsi"]),
    ("i1", "%t = arith.constant true\n%n = arith.xori %a, %t : i1\n%r = arith.xori %n, %t : i1", "i1", []),
    ("i1", "%t = arith.constant true\n%r = arith.andi %a, %t : i1", "i1", []),
    ("i1", "%r = arith.ori %a, %a : i1", "i1", []),
    ("i1", "%t = arith.constant true\n%f = arith.constant false\n%n = arith.xori %t, %f : i1\n%r = arith.xori %a, %n : i1", "i1",
     ["arith.constant", "arith.xori"]),
    ("i32", '%i = "graph.dim"() <{value=#graph.dims<[3]>}> : () -> i64\n%j = arith.trunci %i : i64 to i32\n%r = arith.addi %a, %j : i32',
     "i32", ["arith.constant", "arith.addi"]),
]  # fmt: skip


@pytest.mark.parametrize("element, body, out, stays", FOLDS)
def test_folds_keep_every_bit(gm, element, body, out, stays):
    m = gm.program(gm.map("%m", "%x %y", body, "%r", element, out) if "%r" in body else body, "%m", element, out)
    inputs = [VALUES[element], OTHER[element]]
    want = run_graph(m, inputs)[0]
    pipeline.run(m, "simplify,dce")
    verify(m)
    assert gm.names(m) == stays
    got = run_graph(m, inputs[: len(m.body.block.first_op.body.block.args)])[0]
    np.testing.assert_array_equal(got, want)
    if want.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))


def test_roundings_go_only_when_asked(gm):
    body = "%n = arith.truncf %a : f32 to bf16\n%r = arith.extf %n : bf16 to f32"
    m = gm.program(gm.map("%m", "%x", body, "%r"))
    assert gm.names(pipeline.run(m.clone(), "simplify,dce")) == ["arith.truncf", "arith.extf"]
    assert gm.names(pipeline.run(m, "simplify{keep_rounding=false},dce")) == []


def test_division_by_a_constant_zero_is_left_alone(gm):
    body = "%p = arith.constant 1 : i32\n%q = arith.constant 0 : i32\n%s = arith.divsi %p, %q : i32\n%r = arith.addi %a, %s : i32"
    m = gm.program(gm.map("%m", "%x", body, "%r", "i32", "i32"), "%m", "i32", "i32")
    assert gm.count(pipeline.run(m, "simplify"), "arith.divsi") == 1


def test_the_index_along_one_element_is_zero(gm):
    from luban.compiler.ir.text import parse

    m = parse("""%m = "graph.map"() <{domain=#graph.dims<[1, 4]>, accesses=[]}> ({
      %i = "graph.index"() <{dim=#builtin.int<0>}> : () -> i64
      %j = "graph.index"() <{dim=#builtin.int<1>}> : () -> i64
      %s = arith.addi %i, %j : i64
      "graph.yield"(%s) : (i64) -> ()
    }) : () -> !graph.tensor<[1, 4], i64>""")
    pipeline.run(m, "simplify")
    assert gm.count(m, "graph.index") == 1 and gm.count(m, "arith.addi") == 0
