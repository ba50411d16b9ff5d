"""Text form: every operation survives printing and parsing; what cannot be read is named."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.dialects.builtin import ModuleOp, StringAttr, f32
from xdsl.ir import Block, Region

from luban.compiler.ir import graph, tile
from luban.compiler.ir.attributes import Access, Dims, TensorType
from luban.compiler.ir.text import parse, to_text, verify
from luban.errors import ConfigError
from luban.symbolic import floordiv, maximum, minimum, mod, symbol

EVERYTHING = """
builtin.module {
  "graph.func"() <{sym_name = "step", symbols = ["s0"]}> ({
  ^bb0(%x: !graph.tensor<[s0, 4], f32>, %i: !graph.tensor<[4], i64>, %q: !graph.tensor<[1, 2, 4, 8], bf16>, %w: !graph.tensor<[1, 2, 4], f32>):
    %g = "graph.group"() <{label = "pointwise"}> ({
      %m = "graph.map"(%x, %i) <{domain = #graph.dims<[s0, 4]>, accesses = [#graph.access<[4, 1] + 0>, #graph.indirect]}> ({
      ^bb1(%a: f32, %t: !graph.tensor<[4], i64>):
        %d = "graph.index"() <{dim = #builtin.int<1>}> : () -> i64
        %s = "graph.dim"() <{value = #graph.dims<["s0*4 + 1"]>}> : () -> i64
        %l = "graph.load"(%t, %d) <{checked = true}> : (!graph.tensor<[4], i64>, i64) -> i64
        %r = "graph.random"(%l, %s) <{kind = "normal"}> : (i64, i64) -> f32
        %y = arith.addf %a, %r : f32
        %k = math.exp %y : f32
        "graph.yield"(%k) : (f32) -> ()
      }) : (!graph.tensor<[s0, 4], f32>, !graph.tensor<[4], i64>) -> !graph.tensor<[s0, 4], f32>
      "graph.yield"(%m) : (!graph.tensor<[s0, 4], f32>) -> ()
    }) : () -> !graph.tensor<[s0, 4], f32>
    %sum, %at = "graph.reduce"(%g) <{domain = #graph.dims<[s0, 4]>, reduced = #builtin.int<1>, kinds = ["add", "argmax"],
      accesses = [#graph.access<[4, 1] + 0>]}> ({
    ^bb1(%a: f32):
      "graph.yield"(%a, %a) : (f32, f32) -> ()
    }) : (!graph.tensor<[s0, 4], f32>) -> (!graph.tensor<[s0], f32>, !graph.tensor<[s0], i64>)
    %c = "graph.contract"(%g, %g) <{domain = #graph.dims<[s0, s0, 4]>,
      counts = [#builtin.int<0>, #builtin.int<1>, #builtin.int<1>, #builtin.int<1>],
      accesses = [#graph.access<[4, 0, 1] + 0>, #graph.access<[0, 4, 1] + 0>]}>
      : (!graph.tensor<[s0, 4], f32>, !graph.tensor<[s0, 4], f32>) -> !graph.tensor<[s0, s0], f32>
    %sc = "graph.scatter"(%i, %i) <{domain = #graph.dims<[4]>, kind = "set", accesses = [#graph.access<[-1] + 3>]}> ({
    ^bb1(%p: i64):
      "graph.yield"(%p, %p) : (i64, i64) -> ()
    }) : (!graph.tensor<[4], i64>, !graph.tensor<[4], i64>) -> !graph.tensor<[4], i64>
    %cc = "graph.concat"(%x, %x) <{axis = #builtin.int<0>, extents = #graph.dims<[s0, 2]>,
      accesses = [#graph.access<[4, 1] + 0>, #graph.access<[0, 1] + "floordiv(s0, 2)*4">]}>
      : (!graph.tensor<[s0, 4], f32>, !graph.tensor<[s0, 4], f32>) -> !graph.tensor<["s0 + 2", 4], f32>
    %out, %lse = "graph.attention"(%q, %q, %q) <{domain = #graph.dims<[1, 2, 4, 4, 8]>, scale = 0.125 : f32, causal = true,
      accesses = [#graph.access<[64, 32, 8, 1] + 0>, #graph.access<[64, 32, 8, 1] + 0>, #graph.access<[64, 32, 8, 1] + 0>]}>
      : (!graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>)
      -> (!graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4], f32>)
    %gq, %gk, %gv = "graph.attention_backward"(%q, %q, %q, %q, %out, %lse) <{domain = #graph.dims<[1, 2, 4, 4, 8]>,
      scale = 0.125 : f32, causal = true, accesses = [#graph.access<[64, 32, 8, 1] + 0>, #graph.access<[64, 32, 8, 1] + 0>,
      #graph.access<[64, 32, 8, 1] + 0>, #graph.access<[64, 32, 8, 1] + 0>, #graph.access<[64, 32, 8, 1] + 0>,
      #graph.access<[8, 4, 1] + 0>]}> : (!graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>,
      !graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>,
      !graph.tensor<[1, 2, 4], f32>)
      -> (!graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>, !graph.tensor<[1, 2, 4, 8], bf16>)
    "graph.assign"(%x, %g) : (!graph.tensor<[s0, 4], f32>, !graph.tensor<[s0, 4], f32>) -> ()
    "graph.return"(%sum, %cc) <{shapes = [#graph.dims<[s0]>, #graph.dims<[4, "s0 + 2"]>],
      accesses = [#graph.access<[1] + 0>, #graph.access<[1, 4] + 0>]}> : (!graph.tensor<[s0], f32>, !graph.tensor<["s0 + 2", 4], f32>) -> ()
  }) : () -> ()
  "tile.kernel"() <{sym_name = "k", symbols = ["s0"]}> ({
  ^bb0(%x: !tile.buf<f32>, %y: !tile.buf<bf16>, %s: i64):
    %zero = arith.constant 0 : i64
    %f = arith.constant 0.0 : f32
    %t = "tile.alloc"() <{elements = #graph.dims<["s0*2"]>}> : () -> !tile.buf<bf16>
    %pairs = "tile.pairs"(%t) : (!tile.buf<bf16>) -> !tile.buf<i32>
    "tile.for"(%zero, %s) <{role = "parallel", combines = []}> ({
    ^bb1(%i: i64):
      %n = "tile.dim"() <{value = #graph.dims<["mod(s0, 8)"]>}> : () -> i64
      %sum = "tile.for"(%zero, %n, %f) <{role = "vector", combines = ["add"]}> ({
      ^bb2(%j: i64, %acc: f32):
        %in = arith.cmpi slt, %j, %n : i64
        %c = "tile.check"(%j) <{bound = #graph.dims<[s0]>}> : (i64) -> i64
        %v = "tile.load"(%x, %i, %c, %in) <{strides = #graph.dims<[8, 1]>, offset = #graph.dims<[2]>,
          operandSegmentSizes = array<i32: 1, 2, 1>}> : (!tile.buf<f32>, i64, i64, i1) -> f32
        %r = "tile.random"(%j, %i) <{kind = "uniform"}> : (i64, i64) -> f32
        %w = arith.mulf %v, %r : f32
        %next = arith.addf %acc, %w : f32
        "tile.yield"(%next) : (f32) -> ()
      }) : (i64, i64, f32) -> f32
      "tile.store"(%sum, %x, %i) <{strides = #graph.dims<[1]>, offset = #graph.dims<[0]>, combine = "add",
        operandSegmentSizes = array<i32: 1, 1, 1, 0>}> : (f32, !tile.buf<f32>, i64) -> ()
      "tile.yield"() : () -> ()
    }) : (i64, i64) -> ()
    "tile.pack"(%x, %zero, %s, %s, %t) <{strides = #graph.dims<[s0, 1]>, panel = #builtin.int<16>, kk = #builtin.int<2>}>
      : (!tile.buf<f32>, i64, i64, i64, !tile.buf<bf16>) -> ()
    "tile.patches"(%x, %zero, %zero, %s, %x) <{points = #graph.dims<[s0, 4]>, point_strides = #graph.dims<[16, 1]>,
      taps = #graph.dims<[2, 3]>, tap_strides = #graph.dims<[4, 1]>, panel = #builtin.int<16>,
      window = [#graph.dims<[4]>, #graph.dims<[1]>, #graph.dims<[1]>, #graph.dims<[1]>]}>
      : (!tile.buf<f32>, i64, i64, i64, !tile.buf<f32>) -> ()
    "tile.dot"(%y, %zero, %t, %zero, %s, %s, %s) <{a_strides = #graph.dims<[s0, 1]>, b_strides = #graph.dims<[0, 0]>,
      a_panel = #builtin.int<0>, b_panel = #builtin.int<16>, kk = #builtin.int<2>, unit = "amx", rows = #builtin.int<2>,
      columns = #builtin.int<2>}> ({
    ^bb1(%acc: f32, %i: i64, %j: i64):
      "tile.yield"() : () -> ()
    }) : (!tile.buf<bf16>, i64, !tile.buf<bf16>, i64, i64, i64, i64) -> ()
  }) : () -> ()
}
"""


def test_every_operation_survives_printing_and_parsing():
    first = parse(EVERYTHING)
    verify(first)
    text = to_text(first)
    second = parse(text)
    verify(second)
    assert to_text(second) == text
    assert first.is_structurally_equivalent(second)


def test_the_sample_holds_every_operation_of_both_dialects():
    seen = {op.name for op in parse(EVERYTHING).walk()}
    assert {op.name for op in [*graph.GRAPH.operations, *tile.TILE.operations]} <= seen


def dim(depth=2):
    names = st.sampled_from(["s0", "s1", "s27"]).map(symbol)
    leaf = st.one_of(st.integers(-9, 999), names)
    if depth == 0:
        return leaf
    sub = dim(depth - 1)
    positive = st.integers(2, 9)
    return st.one_of(
        leaf,
        st.tuples(sub, sub).map(lambda p: p[0] + p[1]),
        st.tuples(sub, sub).map(lambda p: p[0] * p[1]),
        st.tuples(sub, positive).map(lambda p: floordiv(*p)),
        st.tuples(sub, positive).map(lambda p: mod(*p)),
        st.tuples(sub, sub).map(lambda p: maximum(*p)),
        st.tuples(sub, sub).map(lambda p: minimum(*p)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(dim(), min_size=0, max_size=4), dim(), st.lists(dim(), min_size=0, max_size=3))
def test_any_dims_and_accesses_survive(strides, offset, shape):
    entry = Block(arg_types=[TensorType.of(shape, f32)])
    op = graph.FuncOp.create(
        properties={"sym_name": StringAttr("f")},
        attributes={"a": Access.of(strides, offset), "d": Dims(tuple(shape))},
        regions=[Region(entry)],
    )
    again = parse(to_text(ModuleOp([op])))
    back = next(iter(again.ops))
    assert back.attributes == op.attributes
    assert back.body.block.args[0].type == entry.args[0].type


@pytest.mark.parametrize("text, message", [
    ('"graph.nothing"() : () -> ()', "line 1: .*graph.nothing.*"),
    ("builtin.module {\n\n  %0 = arith.constant 1 : f99\n}", "line 3"),
    ("builtin.module {", "line 1"),
    ('"graph.func"() <{sym_name="f"}> ({\n^bb0(%x: !graph.tensor<["s0*"], f32>):\n}) : () -> ()', "the dimension 's0\\*' ends early"),
    ('"graph.func"() <{sym_name="f"}> ({\n^0(%x: f32):\n}) : () -> ()', "Block name"),
    ("\x00", "line 1"),
])  # fmt: skip
def test_text_that_cannot_be_read_is_named_in_one_sentence(text, message):
    with pytest.raises(ConfigError, match=f"cannot read the IR in broken.mlir.*{message}") as caught:
        parse(text, "broken.mlir")
    assert "\n" not in str(caught.value)
