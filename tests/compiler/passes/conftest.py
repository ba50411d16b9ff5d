"""Small graph modules for the tests of the passes."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from luban.compiler.ir.text import parse, verify

T = "!graph.tensor<[4], f32>"


def map_op(
    name: str, ins: str, body: str, value: str, element: str = "f32", out: str = "f32", access: str = "[1] + 0"
) -> str:
    """One graph.map over 4 elements; its operands are the body's %a, %b, ..."""
    operands = ins.split()
    arguments = ", ".join(f"%{c}: {element}" for c, _ in zip("abcdef", operands, strict=False))
    accesses = ", ".join([f"#graph.access<{access}>"] * len(operands))
    types = ", ".join([f"!graph.tensor<[4], {element}>"] * len(operands))
    return (
        f'{name} = "graph.map"({", ".join(operands)}) <{{domain=#graph.dims<[4]>, accesses=[{accesses}]}}> ({{\n'
        f'^bb0({arguments}):\n{body}\n"graph.yield"({value}) : ({out}) -> ()\n}}) : ({types}) -> !graph.tensor<[4], {out}>\n'
    )


def program(body: str, returned: str = "%m", element: str = "f32", out: str = "f32", inputs: str = "%x %y"):
    """A verified module with two inputs (%x, %y) of 4 elements that returns the values listed."""
    values = returned.split()
    arguments = ", ".join(f"{name}: !graph.tensor<[4], {element}>" for name in inputs.split())
    shapes, accesses = (
        ", ".join(["#graph.dims<[4]>"] * len(values)),
        ", ".join(["#graph.access<[1] + 0>"] * len(values)),
    )
    types = ", ".join([f"!graph.tensor<[4], {out}>"] * len(values))
    module = parse(
        f'"graph.func"() <{{sym_name="f"}}> ({{\n^bb0({arguments}):\n{body}'
        f'"graph.return"({", ".join(values)}) <{{shapes=[{shapes}], accesses=[{accesses}]}}> : ({types}) -> ()\n}}) : () -> ()\n'
    )
    verify(module)
    return module


def names(module) -> list[str]:
    """The operations of a module without those that hold it together."""
    held = ("builtin.module", "graph.func", "graph.return", "graph.yield", "graph.map", "graph.group")
    return [op.name for op in module.walk() if op.name not in held]


def count(module, name: str) -> int:
    return sum(op.name == name for op in module.walk())


@pytest.fixture
def gm() -> SimpleNamespace:
    helpers: dict[str, Callable] = {"map": map_op, "program": program, "names": names, "count": count}
    return SimpleNamespace(**helpers, T=T)
