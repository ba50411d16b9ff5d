"""cse and dce: what merges, what goes, what stays, and that both take linear time."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

import time

import numpy as np
import pytest

from luban.compiler.ir.interpret_graph import run_graph
from luban.compiler.ir.text import verify
from luban.compiler.passes import pipeline

X = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
Y = np.array([2.0, 5.0, -1.0, 4.0], np.float32)
EXP = "%r = math.exp %a : f32"


def same(m, passes):
    want = run_graph(m, [X, Y])
    pipeline.run(m, passes)
    verify(m)
    for w, g in zip(want, run_graph(m, [X, Y]), strict=True):
        np.testing.assert_array_equal(g, w)
    return m


def test_equal_maps_become_one(gm):
    body = gm.map("%p", "%x", EXP, "%r") + gm.map("%q", "%x", "%e = math.exp %a : f32", "%e")
    m = same(gm.program(body + gm.map("%m", "%p %q", "%r = arith.addf %a, %b : f32", "%r")), "cse")
    assert gm.count(m, "graph.map") == 2
    # The two operands of the sum are one value now, so its body receives it once.
    assert len(list(m.body.block.first_op.body.block.ops)[1].operands) == 1


@pytest.mark.parametrize("other", [
    dict(ins="%y", body=EXP, value="%r"),
    dict(ins="%x", body="%r = math.sin %a : f32", value="%r"),
    dict(ins="%x", body=EXP, value="%a"),
    dict(ins="%x", body=EXP, value="%r", access="[-1] + 3"),
    dict(ins="%x", body="%r = arith.truncf %a : f32 to f16\n%s = arith.extf %r : f16 to f32", value="%s"),
])  # fmt: skip
def test_different_maps_stay(gm, other):
    body = gm.map("%p", "%x", EXP, "%r") + gm.map("%q", **other)
    m = same(gm.program(body + gm.map("%m", "%p %q", "%r = arith.addf %a, %b : f32", "%r")), "cse")
    assert gm.count(m, "graph.map") == 3


def test_constants_of_different_value_or_sign_stay(gm):
    body = "%c = arith.constant 0.0 : f32\n%d = arith.constant -0.0 : f32\n%e = arith.addf %a, %c : f32\n%f = arith.addf %a, %d : f32\n"
    m = same(gm.program(gm.map("%m", "%x", body + "%r = arith.divf %e, %f : f32", "%r")), "cse")
    assert gm.count(m, "arith.constant") == 2


def test_scalars_in_a_body_merge(gm):
    body = "%p = math.exp %a : f32\n%q = math.exp %a : f32\n%r = arith.addf %p, %q : f32"
    m = same(gm.program(gm.map("%m", "%x", body, "%r")), "cse")
    assert gm.count(m, "math.exp") == 1


def test_two_returned_values_stay_two(gm):
    m = same(gm.program(gm.map("%p", "%x", EXP, "%r") + gm.map("%q", "%x", EXP, "%r"), "%p %q"), "cse")
    assert gm.count(m, "graph.map") == 2


def test_a_group_sees_what_was_computed_before_it_and_keeps_its_own(gm):
    def group(name, inner):
        return f'{name} = "graph.group"() <{{label="g"}}> ({{\n{inner}"graph.yield"(%s) : ({gm.T}) -> ()\n}}) : () -> {gm.T}\n'

    add = gm.map("%s", "%t %y", "%r = arith.addf %a, %b : f32", "%r")
    body = gm.map("%p", "%x", EXP, "%r")
    body += group("%g", gm.map("%t", "%x", EXP, "%r") + add) + group("%h", gm.map("%t", "%x", EXP, "%r") + add)
    m = same(gm.program(body + gm.map("%m", "%g %h", "%r = arith.mulf %a, %b : f32", "%r")), "cse,dce")
    assert gm.count(m, "math.exp") == 1 and gm.count(m, "graph.group") == 1


def test_dead_chains_go_and_results_that_are_used_stay(gm):
    body = (
        gm.map("%p", "%x", EXP, "%r")
        + gm.map("%q", "%p", EXP, "%r")
        + gm.map("%z", "%q %p", "%r = arith.addf %a, %b : f32", "%r")
    )
    m = same(gm.program(body + gm.map("%m", "%x", "%u = math.sin %a : f32\n" + EXP, "%r")), "dce")
    assert gm.names(m) == ["math.exp"]


def test_operands_that_no_body_reads_go_with_what_made_them(gm):
    body = gm.map("%p", "%y", EXP, "%r") + gm.map("%m", "%p %x %p", "%r = math.sin %b : f32", "%r")
    m = same(gm.program(body), "dce")
    assert gm.count(m, "graph.map") == 1 and gm.names(m) == ["math.sin"]


def test_a_scatter_keeps_its_init(gm):
    from luban.compiler.ir.text import parse

    text = """"graph.func"() <{sym_name="f"}> ({
^bb0(%x: !graph.tensor<[4], f32>, %y: !graph.tensor<[4], f32>):
  %s = "graph.scatter"(%x, %y, %x, %x) <{domain=#graph.dims<[4]>, kind="add",
    accesses=[#graph.access<[1] + 0>, #graph.access<[1] + 0>, #graph.access<[1] + 0>]}> ({
  ^bb1(%a: f32, %b: f32, %c: f32):
    %i = "graph.index"() <{dim=#builtin.int<0>}> : () -> i64
    %v = arith.addf %b, %c : f32
    "graph.yield"(%i, %v) : (i64, f32) -> ()
  }) : (!graph.tensor<[4], f32>, !graph.tensor<[4], f32>, !graph.tensor<[4], f32>, !graph.tensor<[4], f32>) -> !graph.tensor<[4], f32>
  "graph.return"(%s) <{shapes=[#graph.dims<[4]>], accesses=[#graph.access<[1] + 0>]}> : (!graph.tensor<[4], f32>) -> ()
}) : () -> ()"""
    m = parse(text)
    verify(m)
    same(m, "cse,dce")
    scatter = m.body.block.first_op.body.block.first_op
    assert len(scatter.operands) == 2 and len(scatter.accesses) == 1


def test_assignments_are_never_dead_or_merged(gm):
    body = gm.map("%p", "%x", EXP, "%r") + f'"graph.assign"(%y, %p) : ({gm.T}, {gm.T}) -> ()\n' * 2
    m = gm.program(body + gm.map("%m", "%x", "%r = math.sin %a : f32", "%r"))
    pipeline.run(m, "cse,dce")
    assert gm.count(m, "graph.assign") == 2 and gm.count(m, "math.exp") == 1


def long_module(gm, n):
    """Pairs of equal maps in a chain, a dead map beside each, and constants to fold in each body."""
    lines, last = [], "%x"
    body = "%c = arith.constant 1.0 : f32\n%d = arith.constant 2.0 : f32\n%e = arith.mulf %a, %c : f32\n%f = arith.addf %c, %d : f32\n"
    body += "%r = arith.addf %e, %f : f32"
    for i in range(n // 4):
        lines.append(
            gm.map(f"%p{i}", last, body, "%r") + gm.map(f"%q{i}", last, body, "%r") + gm.map(f"%d{i}", last, EXP, "%r")
        )
        lines.append(gm.map(f"%s{i}", f"%p{i} %q{i}", "%r = arith.maximumf %a, %b : f32", "%r"))
        last = f"%s{i}"
    return gm.program("".join(lines), last)


def test_passes_are_quick_and_linear_on_two_thousand_operations(gm):
    spent = {}
    for n in (500, 2000):
        m = long_module(gm, n)
        for name in ("simplify", "cse", "dce"):
            start = time.process_time()
            pipeline.run(m, name)
            spent[name, n] = time.process_time() - start
        verify(m)
        assert gm.count(m, "graph.map") == n // 2
    for name in ("simplify", "cse", "dce"):
        assert spent[name, 2000] < 1.0, spent  # 0.2 s alone on one core
        assert spent[name, 2000] < 12 * spent[name, 500] + 0.05, spent  # 4 when linear, 16 when quadratic
