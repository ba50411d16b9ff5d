"""Short ways to write IR text, for the tests of this folder."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

from types import SimpleNamespace

import pytest

from luban.compiler.ir.text import parse, verify


def dims(values) -> str:
    return (
        "["
        + ", ".join(
            v if isinstance(v, str) and v.isalnum() else f'"{v}"' if isinstance(v, str) else str(v) for v in values
        )
        + "]"
    )


def tensor(shape, dtype="f32") -> str:
    return f"!graph.tensor<{dims(shape)}, {dtype}>"


def access(strides, offset=0) -> str:
    return "#graph.indirect" if strides is None else f"#graph.access<{dims(strides)} + {dims([offset])[1:-1]}>"


def contiguous(shape) -> list:
    out, running = [], 1
    for n in reversed(shape):
        out.append(running)
        running = (
            running * n
            if isinstance(n, int) and isinstance(running, int)
            else (n if running == 1 else f"{n}*{running}")
        )
    return out[::-1]


def op(name, results, ins, properties, result_types, body=None) -> str:
    """One generic operation; ins are (value, type) pairs, body is (arguments, lines, yielded, yielded types)."""
    head = f"{', '.join(results)} = " if results else ""
    listed = ", ".join(f"{k}={v}" for k, v in properties.items())
    region = ""
    if body is not None:
        arguments, lines, yielded, types = body
        region = (
            f" ({{\n^bb0({', '.join(arguments)}):\n{lines}\n"
            f'"graph.yield"({", ".join(yielded)}) : ({", ".join(types)}) -> ()\n}})'
        )
    types = ", ".join(t for _, t in ins)
    return f'{head}"{name}"({", ".join(v for v, _ in ins)}) <{{{listed}}}>{region} : ({types}) -> ({", ".join(result_types)})\n'


def pointwise(name, ins, domain, body, out, kind="graph.map", **properties) -> str:
    """A map or reduce: ins are (value, type, element, strides, offset), out the result types, body (lines, yielded, types)."""
    lines, yielded, types = body
    arguments = [f"%{c}: {i[2] if i[3] is not None else i[1]}" for c, i in zip("abcdefgh", ins, strict=False)]
    listed = {"domain": f"#graph.dims<{dims(domain)}>", **properties}
    listed["accesses"] = "[" + ", ".join(access(i[3], i[4] if len(i) > 4 else 0) for i in ins) + "]"
    results = [name] if isinstance(name, str) else list(name)
    return op(kind, results, [(i[0], i[1]) for i in ins], listed, out, (arguments, lines, yielded, types))


def function(arguments, body, returned, symbols=()) -> str:
    """A graph.func: arguments {name: type}, returned [(value, type, shape, strides, offset)]."""
    head = ", ".join(f"{k}: {v}" for k, v in arguments.items())
    shapes = ", ".join(f"#graph.dims<{dims(r[2])}>" for r in returned)
    accesses = ", ".join(access(r[3] if len(r) > 3 else contiguous(r[2]), r[4] if len(r) > 4 else 0) for r in returned)
    values, types = ", ".join(r[0] for r in returned), ", ".join(r[1] for r in returned)
    named = f", symbols=[{', '.join(chr(34) + s + chr(34) for s in symbols)}]" if symbols else ""
    return (
        f'"graph.func"() <{{sym_name="f"{named}}}> ({{\n^bb0({head}):\n{body}'
        f'"graph.return"({values}) <{{shapes=[{shapes}], accesses=[{accesses}]}}> : ({types}) -> ()\n}}) : () -> ()\n'
    )


def module(text):
    """Parsed and verified."""
    found = parse(text)
    verify(found)
    return found


@pytest.fixture
def ir():
    return SimpleNamespace(
        dims=dims,
        tensor=tensor,
        access=access,
        contiguous=contiguous,
        op=op,
        pointwise=pointwise,
        function=function,
        module=module,
    )


def load(name, buffer, indices, strides, element="f32", offset=0, mask=None) -> str:
    values = ", ".join([buffer, *indices, *([mask] if mask else [])])
    types = ", ".join([f"!tile.buf<{element}>", *["i64"] * len(indices), *(["i1"] if mask else [])])
    sizes = f"array<i32: 1, {len(indices)}, {int(bool(mask))}>"
    properties = (
        f"strides=#graph.dims<{dims(strides)}>, offset=#graph.dims<{dims([offset])}>, operandSegmentSizes={sizes}"
    )
    return f'{name} = "tile.load"({values}) <{{{properties}}}> : ({types}) -> {element}\n'


def store(value, buffer, indices, strides, element="f32", offset=0, mask=None, combine="none") -> str:
    values = ", ".join([value, buffer, *indices, *([mask] if mask else [])])
    types = ", ".join([element, f"!tile.buf<{element}>", *["i64"] * len(indices), *(["i1"] if mask else [])])
    sizes = f"array<i32: 1, 1, {len(indices)}, {int(bool(mask))}>"
    properties = f'strides=#graph.dims<{dims(strides)}>, offset=#graph.dims<{dims([offset])}>, combine="{combine}"'
    return f'"tile.store"({values}) <{{{properties}, operandSegmentSizes={sizes}}}> : ({types}) -> ()\n'


def loop(index, lower, upper, role, body, carried=()) -> str:
    """A tile.for; carried are (result, block argument, init, type, combine, next value)."""
    results = ", ".join(c[0] for c in carried)
    arguments = ", ".join([f"{index}: i64", *(f"{c[1]}: {c[3]}" for c in carried)])
    combines = ", ".join(f'"{c[4]}"' for c in carried)
    types = ", ".join(c[3] for c in carried)
    operands = ", ".join([lower, upper, *(c[2] for c in carried)])
    return (
        f'{results + " = " if results else ""}"tile.for"({operands}) <{{role="{role}", combines=[{combines}]}}> ({{\n'
        f'^bb0({arguments}):\n{body}"tile.yield"({", ".join(c[5] for c in carried)}) : ({types}) -> ()\n'
        f"}}) : (i64, i64{''.join(', ' + c[3] for c in carried)}) -> ({types})\n"
    )


def kernel(buffers, body, symbols=()) -> str:
    """A tile.kernel: buffers {name: element}, symbols as names, which are block arguments %name too."""
    arguments = ", ".join([*(f"{k}: !tile.buf<{v}>" for k, v in buffers.items()), *(f"%{s}: i64" for s in symbols)])
    named = ", ".join(f'"{s}"' for s in symbols)
    return f'"tile.kernel"() <{{sym_name="k", symbols=[{named}]}}> ({{\n^bb0({arguments}):\n{body}}}) : () -> ()\n'


def number(name, value, ty="i64") -> str:
    return f"{name} = arith.constant {value} : {ty}\n"


@pytest.fixture
def tl():
    return SimpleNamespace(load=load, store=store, loop=loop, kernel=kernel, number=number, dims=dims, module=module)
