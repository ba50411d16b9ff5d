"""Contractions of any number of dims become products with one m, one n and one k, and compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xdsl.dialects.builtin import i32

from luban.compiler.frontend.torch.importer import import_graph
from luban.compiler.ir.graph import ContractOp, ReduceOp
from luban.compiler.ir.interpret_graph import find_function, run_graph
from luban.compiler.ir.text import verify
from luban.compiler.passes.pipeline import run

CASES = {
    "plain": ("ik,kj->ij", (3, 4), (4, 5)),
    "two k dims": ("iab,abj->ij", (3, 4, 2), (4, 2, 5)),
    "turned k dims": ("iab,baj->ij", (3, 4, 2), (2, 4, 5)),
    "two m dims": ("abk,kj->abj", (3, 4, 2), (2, 5)),
    "turned m dims": ("abk,kj->baj", (3, 4, 2), (2, 5)),
    "heads": ("bihd,bjhd->bhij", (2, 5, 3, 4), (2, 6, 3, 4)),
    "heads back": ("bhij,bjhd->bihd", (2, 3, 5, 6), (2, 6, 3, 4)),
    "many batches": ("abcik,abckj->abcij", (2, 3, 2, 4, 5), (2, 3, 2, 5, 3)),
    "everything": ("abc,abc->", (2, 3, 4), (2, 3, 4)),
    "outer": ("i,j->ij", (3,), (4,)),
    "ones": ("ik,kj->ij", (1, 1), (1, 1)),
}


def contracts(module):
    return [op for op in module.walk() if isinstance(op, ContractOp)]


def imported(machine, equation, a, b):
    return import_graph(machine.traced(lambda a, b: torch.einsum(equation, a, b), (a, b)), "main").module


@pytest.mark.parametrize("name", CASES)
def test_the_normal_form_computes_the_same(machine, name):
    equation, *shapes = CASES[name]
    a, b = (torch.randn(*s, dtype=torch.float64) for s in shapes)
    module = imported(machine, equation, a, b)
    arguments = find_function(module).body.block.args
    inputs = [x.numpy().reshape(argument.type.shape) for x, argument in zip((a, b), arguments, strict=True)]
    run(module, "simplify,cse,dce")
    want = run_graph(module, inputs)
    run(module, "contract_layout")
    verify(module)
    for op in contracts(module):
        assert [c.data for c in op.counts.data][1:] == [1, 1, 1]
    for got, expected in zip(run_graph(module, inputs), want, strict=True):
        np.testing.assert_allclose(got.reshape(-1), expected.reshape(-1), rtol=1e-12, atol=1e-12)
    machine.check(lambda a, b: torch.einsum(equation, a, b), a.float(), b.float())


def test_an_operand_that_lies_in_rows_is_not_copied(machine):
    module = imported(machine, "ik,jk->ij", torch.randn(6, 8), torch.randn(5, 8))
    run(module, "simplify,cse,dce,contract_layout")
    assert not any(op.name == "graph.map" for op in module.walk())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_integer_products_become_reductions(machine, dtype):
    a, b = torch.randint(-5, 5, (2, 6, 33)).to(dtype), torch.randint(-5, 5, (2, 33, 7)).to(dtype)
    module = import_graph(machine.traced(torch.bmm, (a, b)), "main").module
    run(module, "simplify,contract_layout")
    verify(module)
    assert not contracts(module) and any(isinstance(op, ReduceOp) for op in module.walk())
    machine.check(torch.bmm, a, b, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_products_of_bytes_stay_and_sum_in_32_bits(machine, dtype):
    a, b = torch.randint(0, 100, (2, 6, 33)).to(dtype), torch.randint(0, 100, (2, 33, 7)).to(dtype)
    module = import_graph(machine.traced(torch.bmm, (a, b)), "main").module
    run(module, "simplify,contract_layout")
    verify(module)
    (op,) = contracts(module)
    assert op.out.type.dtype == i32 and (op.unsigned is not None) == (dtype is torch.uint8)
    machine.check(torch.bmm, a, b, tolerance=0)


def test_a_strided_convolution(machine):
    x, w = torch.randn(2, 3, 11, 9), torch.randn(5, 3, 3, 2)
    machine.check(lambda x, w: torch.conv2d(x, w, stride=(2, 1)), x, w)
