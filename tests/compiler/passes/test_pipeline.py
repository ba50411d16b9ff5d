"""Pipelines as text, dumps, verification after each pass, and bisection."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, ModuleOp

from luban.compiler.ir import graph
from luban.compiler.ir.text import parse, to_text
from luban.compiler.passes import pipeline, registry
from luban.compiler.passes.graph.simplify import Simplify
from luban.errors import ConfigError, VerificationError

BODY = (
    "%c = arith.constant 1.0 : f32\n%d = arith.mulf %a, %c : f32\n%e = arith.subf %d, %b : f32\n%r = math.exp %e : f32"
)


@registry.register
@dataclass(frozen=True)
class Swap:
    """Deliberately broken: swaps the operands of the n-th subtraction."""

    name: ClassVar[str] = "test-swap"
    nth: int = 0
    label: str = "x"
    scale: float | None = None
    loud: bool = False

    def apply(self, module: ModuleOp) -> None:
        op = [o for o in module.walk() if isinstance(o, arith.SubfOp)][self.nth]
        op.operands = list(op.operands)[::-1]


@registry.register
@dataclass(frozen=True)
class Break:
    """Deliberately broken: drops the accesses of every map, which no verifier accepts."""

    name: ClassVar[str] = "test-break"

    def apply(self, module: ModuleOp) -> None:
        for op in module.walk():
            if isinstance(op, graph.MapOp):
                op.properties["accesses"] = ArrayAttr([])


@registry.register
@dataclass(frozen=True)
class Lower:
    """Adds a kernel, as a pass that lowers the graph does."""

    name: ClassVar[str] = "test-lower"

    def apply(self, module: ModuleOp) -> None:
        kernel = parse(
            '"tile.kernel"() <{sym_name="k", symbols=[]}> ({\n^bb0(%x: !tile.buf<f32>):\n}) : () -> ()'
        ).body.block.first_op
        kernel.detach()
        module.body.block.add_op(kernel)


def module(gm):
    return gm.program(gm.map("%m", "%x %y", BODY, "%r"))


def inputs():
    return [np.linspace(-1, 1, 4, dtype=np.float32), torch.tensor([0.5, 0.25, -1.0, 2.0])]


def test_options_are_read_by_their_type():
    passes = pipeline.parse_pipeline(
        " simplify{keep_rounding=false} , cse,test-swap{nth=1 label=a, scale=0.5 loud=yes} ,"
    )
    assert [p.name for p in passes] == ["simplify", "cse", "test-swap"]
    assert passes[0] == Simplify(keep_rounding=False)
    assert passes[2] == Swap(nth=1, label="a", scale=0.5, loud=True)
    assert pipeline.parse_pipeline("") == []


@pytest.mark.parametrize("text, message", [
    ("simplifi", "there is no pass 'simplifi'; use one of .*cse.*simplify"),
    ("../x", "there is no pass '../x'"),
    ("simplify{", "a brace is left open"),
    ("simplify}", "braces do not match"),
    ("simplify{{}}", "braces do not match"),
    ("simplify{keep_rounding=false}x", "text follows its options"),
    ("simplify{keep_rounding}", "cannot read the option 'keep_rounding' of the pass 'simplify'"),
    ("simplify{rounding=true}", "the pass simplify has no option 'rounding'; use one of keep_rounding"),
    ("cse{a=1}", "the pass cse has no option 'a'; it takes none"),
    ("simplify{keep_rounding=maybe}", "cannot read keep_rounding=maybe; the option is of type bool"),
    ("test-swap{nth=one}", "cannot read nth=one; the option is of type int"),
    ("test-swap{scale=x}", "cannot read scale=x; the option is of type float"),
])  # fmt: skip
def test_pipelines_that_cannot_be_read_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        pipeline.parse_pipeline(text)


def test_importing_the_registry_imports_no_pass_and_finding_one_only_that():
    code = (
        "import sys; from luban.compiler.passes import registry;"
        "find = lambda: {m for m in sys.modules if 'passes.graph.' in m};"
        "assert not find(); registry.find('dce'); assert 'luban.compiler.passes.graph.simplify' not in find()"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_pass_has_a_docstring_and_is_found_by_its_name():
    for name in registry.names():
        assert registry.find(name).name == name and registry.find(name).__doc__


def test_a_dump_has_the_module_after_every_pass(gm, tmp_path, monkeypatch):
    monkeypatch.setenv("LUBAN_DUMP", str(tmp_path / "ir"))
    first, second = module(gm), module(gm)
    before = to_text(first)
    pipeline.run(first, "simplify,cse,dce")
    pipeline.run(second, "cse")
    folder = tmp_path / "ir"
    assert sorted(p.name for p in folder.glob("*.mlir")) == [
        "00-input.mlir",
        "01-simplify.mlir",
        "02-cse.mlir",
        "03-dce.mlir",
    ]
    assert (folder / "00-input.mlir").read_text() == before
    assert (folder / "03-dce.mlir").read_text() == to_text(first)
    assert "arith.mulf" not in (folder / "01-simplify.mlir").read_text()
    assert to_text(parse((folder / "03-dce.mlir").read_text())) == to_text(first)
    assert sorted(p.name for p in (folder / "2").iterdir()) == ["00-input.mlir", "01-cse.mlir"]


def test_one_dump_goes_on_over_several_runs(gm, tmp_path):
    dump = pipeline.Dump(tmp_path)
    m = module(gm)
    pipeline.run(m, "simplify", dump=dump)
    pipeline.run(m, "dce", dump=dump)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00-input.mlir",
        "01-simplify.mlir",
        "02-input.mlir",
        "03-dce.mlir",
    ]


def test_a_dump_folder_that_cannot_be_written_is_named(gm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write IR dumps into .*file"):
        pipeline.run(module(gm), "cse", dump=tmp_path / "file")


def test_verify_each_names_the_pass(gm):
    with pytest.raises(
        VerificationError, match="after the pass test-break: graph.map breaks its rule: it has one access"
    ):
        pipeline.run(module(gm), "simplify,test-break,dce", verify_each=True)


def test_bisect_finds_nothing_wrong_with_good_passes(gm):
    m = module(gm)
    before = to_text(m)
    assert pipeline.bisect(m, "simplify,cse,dce", inputs()) is None
    assert to_text(m) == before


def test_bisect_names_the_broken_pass(gm):
    culprit = pipeline.bisect(module(gm), "simplify,cse,test-swap,dce", inputs())
    assert (culprit.position, culprit.name) == (2, "test-swap")
    assert "output 0 differs by" in culprit.reason
    assert str(culprit).startswith("pass 3 (test-swap) changes the program: output 0 differs")


def test_bisect_names_passes_that_break_rules_or_fail(gm):
    culprit = pipeline.bisect(module(gm), "cse,test-break", inputs())
    assert (culprit.position, culprit.name) == (1, "test-break") and "has one access for each operand" in culprit.reason
    culprit = pipeline.bisect(module(gm), "test-swap{nth=7}", inputs())
    assert culprit.name == "test-swap" and "it fails with IndexError" in culprit.reason


def test_bisect_stops_where_the_graph_becomes_kernels(gm):
    with pytest.raises(ConfigError, match="the pass test-lower turns the graph into kernels"):
        pipeline.bisect(module(gm), "simplify,test-lower,dce", inputs())


def test_bisect_sees_what_is_assigned_and_leaves_the_inputs_alone(gm):
    text = (
        gm.map("%p", "%x %y", "%r = arith.subf %a, %b : f32", "%r")
        + f'"graph.assign"(%x, %p) : ({gm.T}, {gm.T}) -> ()\n'
    )
    m = gm.program(text, "%y")
    given = inputs()
    culprit = pipeline.bisect(m, "test-swap", given)
    assert culprit is not None and "input 0 after the run differs" in culprit.reason
    np.testing.assert_array_equal(given[0], inputs()[0])


@pytest.mark.parametrize("want, got, error", [
    ([1.0, 2.0], [1.0, 2.0], 0.0),
    ([np.nan, np.inf], [np.nan, np.inf], 0.0),
    ([1.0, 4.0], [1.0, 4.4], 0.1),
    ([1.0, np.inf], [1.0, 3.0], np.inf),
    ([1.0, 2.0], [np.nan, 2.0], np.inf),
    ([0.0, 0.0], [0.0, 1e-9], 1e-9),
    ([], [], 0.0),
])  # fmt: skip
def test_relative_errors(want, got, error):
    assert pipeline.relative_error(np.array(want), np.array(got)) == pytest.approx(error, rel=1e-9)
