"""The tile interpreter against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from luban.compiler.ir import interpret_tile
from luban.compiler.ir.interpret_tile import run_kernel
from luban.compiler.ir.numeric_types import round_to_bf16
from luban.compiler.ir.tile import find_kernels
from luban.errors import ConfigError, LubanError, VerificationError


def noise(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(tl, text, buffers, symbols=None):
    run_kernel(find_kernels(tl.module(text))[0], buffers, symbols)


@pytest.fixture(params=["lanes", "plain"])
def execution(request, monkeypatch):
    """Both ways of running a loop: all iterations at once, and one after another."""
    if request.param == "plain":
        monkeypatch.setattr(interpret_tile.Machine, "is_simple", lambda self, root: False)
    return request.param


def softmax(tl):
    row = ["%i", "%j"], [30, 1]
    body = tl.number("%c0", 0) + '%n = "tile.dim"() <{value=#graph.dims<[30]>}> : () -> i64\n'
    body += tl.number("%low", "0xff800000", "f32") + tl.number("%zero", "0.0", "f32")
    first = tl.load("%v", "%x", *row) + "%w = arith.maximumf %acc, %v : f32\n"
    rows = tl.loop("%j", "%c0", "%n", "vector", first, [("%m", "%acc", "%low", "f32", "max", "%w")])
    second = tl.load("%v", "%x", *row) + "%d = arith.subf %v, %m : f32\n%e = math.exp %d : f32\n"
    second += tl.store("%e", "%y", *row) + "%w = arith.addf %acc, %e : f32\n"
    rows += tl.loop("%j", "%c0", "%n", "vector", second, [("%s", "%acc", "%zero", "f32", "add", "%w")])
    third = tl.load("%v", "%y", *row) + "%d = arith.divf %v, %s : f32\n" + tl.store("%d", "%y", *row)
    rows += tl.loop("%j", "%c0", "%n", "vector", third)
    return tl.kernel({"%x": "f32", "%y": "f32"}, body + tl.loop("%i", "%c0", "%s0", "parallel", rows), ["s0"])


def test_softmax_by_three_vector_loops(tl, execution):
    x, y = noise((17, 30)), np.full(17 * 30, np.nan, np.float32)
    run(tl, softmax(tl), [x.reshape(-1), y], {"s0": 17})
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y.reshape(x.shape), e / e.sum(1, keepdims=True), rtol=1e-6)


def test_a_million_elements(tl):
    x, y = noise((33_000, 30)), np.empty(990_000, np.float32)
    run(tl, softmax(tl), [x.reshape(-1), y], {"s0": 33_000})
    np.testing.assert_allclose(y.reshape(x.shape).sum(1, dtype=np.float64), 1, rtol=1e-6)


def test_lanes_in_pieces_give_the_same(tl, monkeypatch):
    monkeypatch.setattr(interpret_tile, "MOST_LANES", 64)
    test_softmax_by_three_vector_loops(tl, "lanes")


@pytest.mark.parametrize("kind, op", [("add", "addf"), ("mul", "mulf"), ("max", "maximumf"), ("min", "minimumf")])
def test_vector_reductions_start_from_init(tl, execution, kind, op):
    body = tl.number("%c0", 0) + tl.number("%n", 9) + tl.number("%init", "0.5", "f32")
    step = tl.load("%v", "%x", ["%i"], [1]) + f"%w = arith.{op} %acc, %v : f32\n"
    body += tl.loop("%i", "%c0", "%n", "vector", step, [("%r", "%acc", "%init", "f32", kind, "%w")])
    x, y = noise(9), np.zeros(1, np.float32)
    run(tl, tl.kernel({"%x": "f32", "%y": "f32"}, body + tl.store("%r", "%y", [], [])), [x, y])
    reduce = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[kind]
    np.testing.assert_allclose(y[0], reduce.reduce(x.astype(np.float64), initial=0.5), rtol=1e-6)


@pytest.mark.parametrize("kind, op, want", [("max", "maxui", 200), ("min", "minui", 3)])
def test_unsigned_reductions_compare_without_sign(tl, execution, kind, op, want):
    body = tl.number("%c0", 0) + tl.number("%n", 4) + tl.number("%init", 7, "i8")
    step = tl.load("%v", "%x", ["%i"], [1], "i8") + f"%w = arith.{op} %acc, %v : i8\n"
    body += tl.loop("%i", "%c0", "%n", "vector", step, [("%r", "%acc", "%init", "i8", kind, "%w")])
    x, y = np.array([3, 200, 7, 100], np.uint8).view(np.int8), np.zeros(1, np.int8)
    run(tl, tl.kernel({"%x": "i8", "%y": "i8"}, body + tl.store("%r", "%y", [], [], "i8")), [x, y])
    assert y.view(np.uint8)[0] == want


def test_serial_loops_inside_lanes_carry_per_lane(tl, execution):
    """y[i] = x[i] ** 5, by a serial loop inside a vector loop."""
    body = tl.number("%c0", 0) + tl.number("%n", 8) + tl.number("%five", 5) + tl.number("%one", "1.0", "f32")
    inner = tl.loop(
        "%p",
        "%c0",
        "%five",
        "serial",
        "%w = arith.mulf %acc, %v : f32\n",
        [("%r", "%acc", "%one", "f32", "none", "%w")],
    )
    step = tl.load("%v", "%x", ["%i"], [1]) + inner + tl.store("%r", "%y", ["%i"], [1])
    x, y = noise(8), np.zeros(8, np.float32)
    run(tl, tl.kernel({"%x": "f32", "%y": "f32"}, body + tl.loop("%i", "%c0", "%n", "vector", step)), [x, y])
    np.testing.assert_allclose(y, x.astype(np.float64) ** 5, rtol=1e-5)


def test_bounds_that_differ_by_iteration_run_one_by_one(tl):
    """y[i] = sum of x[0..i]: the inner bound depends on the outer index."""
    body = tl.number("%c0", 0) + tl.number("%n", 6) + tl.number("%one", 1) + tl.number("%zero", "0.0", "f32")
    inner = tl.load("%v", "%x", ["%j"], [1]) + "%w = arith.addf %acc, %v : f32\n"
    step = "%end = arith.addi %i, %one : i64\n"
    step += tl.loop("%j", "%c0", "%end", "vector", inner, [("%s", "%acc", "%zero", "f32", "add", "%w")])
    step += tl.store("%s", "%y", ["%i"], [1])
    x, y = noise(6), np.zeros(6, np.float32)
    run(tl, tl.kernel({"%x": "f32", "%y": "f32"}, body + tl.loop("%i", "%c0", "%n", "parallel", step)), [x, y])
    np.testing.assert_allclose(y, np.cumsum(x, dtype=np.float64), rtol=1e-6)


def test_masks_keep_loads_and_stores_inside(tl, execution):
    body = tl.number("%c0", 0) + tl.number("%n", 16)
    step = "%ok = arith.cmpi slt, %i, %s0 : i64\n" + tl.load("%v", "%x", ["%i"], [1], mask="%ok")
    step += (
        "%w = arith.addf %v, %v : f32\n"
        + tl.store("%w", "%y", ["%i"], [1], mask="%ok")
        + tl.store("%v", "%z", ["%i"], [1])
    )
    text = tl.kernel({"%x": "f32", "%y": "f32", "%z": "f32"}, body + tl.loop("%i", "%c0", "%n", "vector", step), ["s0"])
    for n in (0, 5, 16):
        x, y, z = noise(n), np.full(n, 9, np.float32), np.full(16, 9, np.float32)
        run(tl, text, [x, y, z], {"s0": n})
        np.testing.assert_array_equal(y, 2 * x)
        np.testing.assert_array_equal(z, np.concatenate([x, np.zeros(16 - n)]))


@pytest.mark.parametrize("kind", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("element", ["f32", "bf16", "i64"])
def test_stores_combine_duplicates(tl, execution, kind, element):
    body = tl.number("%c0", 0) + tl.number("%n", 12)
    step = tl.load("%p", "%at", ["%i"], [1], "i64") + tl.load("%v", "%x", ["%i"], [1], element)
    step += tl.store("%v", "%y", ["%p"], [1], element, combine=kind)
    text = tl.kernel({"%at": "i64", "%x": element, "%y": element}, body + tl.loop("%i", "%c0", "%n", "vector", step))
    at = np.random.default_rng(0).integers(0, 4, 12)
    x, y = round_to_bf16(noise(12)), round_to_bf16(noise(4, 1))
    if element == "i64":
        x, y = (x * 10).astype(np.int64), (y * 10).astype(np.int64)
    want = y.copy()
    f = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[kind]
    for p, v in zip(at, x, strict=True):
        want[p] = round_to_bf16(f(want[p], v)) if element == "bf16" else f(want[p], v)
    run(tl, text, [at, x, y])
    np.testing.assert_array_equal(y, want)


def test_a_combining_store_counts_every_lane(tl, execution):
    body = tl.number("%c0", 0) + tl.number("%n", 7) + tl.number("%one", "1.0", "f32")
    y = np.zeros(1, np.float32)
    step = tl.store("%one", "%y", [], [], combine="add")
    run(tl, tl.kernel({"%y": "f32"}, body + tl.loop("%i", "%c0", "%n", "vector", step)), [y])
    assert y[0] == 7


@pytest.mark.parametrize("what", ["load", "store"])
def test_an_access_outside_names_operation_and_index(tl, execution, what):
    body = tl.number("%c0", 0) + tl.number("%n", 5) + tl.number("%v", "0.0", "f32")
    step = tl.load("%w", "%x", ["%i"], [2], offset=-1) if what == "load" else tl.store("%v", "%x", ["%i"], [2])
    text = tl.kernel({"%x": "f32"}, body + tl.loop("%i", "%c0", "%n", "vector", step))
    reached = "-1" if what == "load" else "8"
    with pytest.raises(
        VerificationError, match=f"tile.{what} in kernel k .* reaches element {reached} of buffer 0 of k, which has 8"
    ):
        run(tl, text, [noise(8)])


def test_check_names_the_index(tl):
    body = tl.number("%i", 5) + '%c = "tile.check"(%i) <{bound=#graph.dims<[s0]>}> : (i64) -> i64\n'
    text = tl.kernel({"%y": "i64"}, body + tl.store("%c", "%y", [], [], "i64"), ["s0"])
    y = np.zeros(1, np.int64)
    run(tl, text, [y], {"s0": 6})
    assert y[0] == 5
    with pytest.raises(LubanError, match=r"tile.check in kernel k .* met index 5 outside \[0, 5\)"):
        run(tl, text, [y], {"s0": 5})


def test_scratch_memory_is_poisoned(tl):
    body = '%t = "tile.alloc"() <{elements=#graph.dims<["s0*2"]>}> : () -> !tile.buf<f32>\n' + tl.number("%one", 1)
    body += tl.load("%v", "%x", [], []) + tl.store("%v", "%t", ["%one"], [1]) + tl.load("%w", "%t", ["%one"], [1])
    body += tl.load("%u", "%t", [], []) + tl.store("%w", "%x", [], []) + tl.store("%u", "%x", [], [], offset=1)
    x = noise(2)
    first = x[0]
    run(tl, tl.kernel({"%x": "f32"}, body, ["s0"]), [x], {"s0": 1})
    assert x[0] == first and np.isnan(x[1])


def test_random_numbers_are_those_of_graph_random(tl):
    from luban.compiler.ir.scalar_semantics import random

    body = tl.number("%c0", 0) + tl.number("%n", 50) + tl.number("%seed", 11)
    step = '%v = "tile.random"(%seed, %i) <{kind="normal"}> : (i64, i64) -> f32\n' + tl.store("%v", "%y", ["%i"], [1])
    y = np.zeros(50, np.float32)
    run(tl, tl.kernel({"%y": "f32"}, body + tl.loop("%i", "%c0", "%n", "vector", step)), [y])
    np.testing.assert_array_equal(y, random("normal", 11, np.arange(50)).astype(np.float32))


def pack_text(tl, source, base, outer, k, target, strides, panel, kk, element="f32", to="f32"):
    return (
        f'"tile.pack"({source}, {base}, {outer}, {k}, {target}) <{{strides=#graph.dims<{tl.dims(strides)}>, '
        f"panel=#builtin.int<{panel}>, kk=#builtin.int<{kk}>}}> "
        f": (!tile.buf<{element}>, i64, i64, i64, !tile.buf<{to}>) -> ()\n"
    )


def test_pack_layout_and_zero_padding(tl):
    body = tl.number("%base", 3) + tl.number("%outer", 5) + tl.number("%k", 3)
    text = tl.kernel(
        {"%x": "f32", "%y": "bf16"}, body + pack_text(tl, "%x", "%base", "%outer", "%k", "%y", [1, 5], 4, 2, to="bf16")
    )
    x, y = noise(18), np.full(2 * 2 * 4 * 2, np.nan, np.float32)
    run(tl, text, [x, y])
    want = np.zeros((2, 2, 4, 2), np.float32)
    for i in range(5):
        for p in range(3):
            want[i // 4, p // 2, i % 4, p % 2] = x[3 + i + 5 * p]
    np.testing.assert_array_equal(y, round_to_bf16(want.reshape(-1)))


def test_pairs_are_the_bits_of_two_neighbours(tl, execution):
    """Halves that change places in 32 bits are neighbours that change places in memory, NaN and infinity included."""
    pairs = '{} = "tile.pairs"({}) : (!tile.buf<bf16>) -> !tile.buf<i32>\n'
    body = tl.number("%c0", 0) + tl.number("%n", 4) + tl.number("%h", 16, "i32")
    body += pairs.format("%p", "%x") + pairs.format("%q", "%y")
    inner = tl.load("%v", "%p", ["%i"], [1], "i32") + "%l = arith.shli %v, %h : i32\n%r = arith.shrui %v, %h : i32\n"
    inner += "%w = arith.ori %l, %r : i32\n" + tl.store("%w", "%q", ["%i"], [1], "i32")
    text = tl.kernel({"%x": "bf16", "%y": "bf16"}, body + tl.loop("%i", "%c0", "%n", "vector", inner))
    x, y = round_to_bf16(noise(8)), np.zeros(8, np.float32)
    x[2:5] = np.nan, np.inf, -0.0
    run(tl, text, [x, y])
    np.testing.assert_array_equal(y, x.reshape(4, 2)[:, ::-1].reshape(-1))


def test_patches_are_columns_with_zeros_outside_the_window(tl):
    body = tl.number("%base", -5) + tl.number("%first", 3) + tl.number("%count", 6)
    lists = ", ".join(f"#graph.dims<{n}>" for n in ("[3, 4]", "[1, 2]", "[2, 1]", "[1, 1]"))
    op = (
        '"tile.patches"(%x, %base, %first, %count, %y) <{points=#graph.dims<[2, 3, 2]>, '
        "point_strides=#graph.dims<[24, 4, 2]>, taps=#graph.dims<[2, 2, 3]>, tap_strides=#graph.dims<[12, 8, 1]>, "
        f"window=[{lists}], panel=#builtin.int<4>}}> : (!tile.buf<f32>, i64, i64, i64, !tile.buf<f32>) -> ()\n"
    )
    x, y = noise(48), np.full(2 * 12 * 4, np.nan, np.float32)
    run(tl, tl.kernel({"%x": "f32", "%y": "f32"}, body + op), [x, y])
    padded = np.pad(x.reshape(2, 2, 3, 4), ((0, 0), (0, 0), (1, 1), (1, 1)))
    want = np.zeros((2, 12, 4), np.float32)
    for i in range(6):
        n, row, column = np.unravel_index(3 + i, (2, 3, 2))
        for p in range(12):
            c, u, v = np.unravel_index(p, (2, 2, 3))
            want[i // 4, p, i % 4] = padded[n, c, row + 2 * u, 2 * column + v] if row + 2 * u < 5 else 0
    np.testing.assert_array_equal(y, want.reshape(-1))


def dot_text(tl, body, a, b, a_strides, b_strides, a_panel, b_panel, kk, element="f32"):
    names = {"a_panel": a_panel, "b_panel": b_panel, "kk": kk, "rows": 4, "columns": 16}
    ints = ", ".join(f"{k}=#builtin.int<{v}>" for k, v in names.items())
    return (
        f'"tile.dot"({a}, %abase, {b}, %bbase, %m, %n, %k) <{{a_strides=#graph.dims<{tl.dims(a_strides)}>, '
        f'b_strides=#graph.dims<{tl.dims(b_strides)}>, unit="fma", {ints}}}> ({{\n'
        f'^bb0(%acc: f32, %i: i64, %j: i64):\n{body}"tile.yield"() : () -> ()\n}}) '
        f": (!tile.buf<{element}>, i64, !tile.buf<{element}>, i64, i64, i64, i64) -> ()\n"
    )


def dot_sizes(tl, abase, bbase):
    pairs = {"%abase": abase, "%bbase": bbase, "%m": 5, "%n": 6, "%k": 7}
    return "".join(tl.number(name, value) for name, value in pairs.items())


def test_strided_dot_with_bias_in_its_body(tl, execution):
    """c = a @ b + bias, a stored transposed."""
    inner = (
        tl.load("%v", "%bias", ["%j"], [1])
        + "%r = arith.addf %acc, %v : f32\n"
        + tl.store("%r", "%c", ["%i", "%j"], [6, 1])
    )
    text = dot_sizes(tl, 2, 0) + dot_text(tl, inner, "%a", "%b", [1, 5], [1, 6], 0, 0, 1)
    a, b, bias, c = noise(2 + 35), noise(42, 1), noise(6, 2), np.zeros(30, np.float32)
    run(tl, tl.kernel({"%a": "f32", "%b": "f32", "%bias": "f32", "%c": "f32"}, text), [a, b, bias, c])
    want = a[2:].reshape(7, 5).T.astype(np.float64) @ b.reshape(7, 6) + bias
    np.testing.assert_allclose(c.reshape(5, 6), want, rtol=1e-6, atol=1e-6)


def test_packed_dot_reads_what_pack_wrote(tl):
    def alloc(n):
        return f'"tile.alloc"() <{{elements=#graph.dims<[{n}]>}}> : () -> !tile.buf<f32>\n'

    inner = tl.store("%acc", "%c", ["%i", "%j"], [6, 1])
    text = dot_sizes(tl, 0, 0) + "%pa = " + alloc(8 * 8) + "%pb = " + alloc(16 * 8)
    text += pack_text(tl, "%a", "%abase", "%m", "%k", "%pa", [7, 1], 4, 2)
    text += pack_text(tl, "%b", "%bbase", "%n", "%k", "%pb", [1, 6], 16, 2)
    text += dot_text(tl, inner, "%pa", "%pb", [0, 0], [0, 0], 4, 16, 2)
    a, b, c = noise((5, 7)), noise((7, 6), 1), np.zeros(30, np.float32)
    run(tl, tl.kernel({"%a": "f32", "%b": "f32", "%c": "f32"}, text), [a.reshape(-1), b.reshape(-1), c])
    np.testing.assert_array_equal(c.reshape(5, 6), (a.astype(np.float64) @ b).astype(np.float32))


def test_dot_outside_its_buffer_is_named(tl):
    text = dot_sizes(tl, 1, 0) + dot_text(tl, "", "%a", "%b", [7, 1], [1, 6], 0, 0, 1)
    with pytest.raises(
        VerificationError, match="tile.dot in kernel k .* reaches element 35 of buffer 0 of k, which has 35"
    ):
        run(tl, tl.kernel({"%a": "f32", "%b": "f32"}, text), [noise(35), noise(42)])


def test_buffers_that_do_not_fit_are_named(tl):
    text = tl.kernel({"%x": "f32"}, "", ["s0"])
    for buffers, symbols, message in (
        ([], {"s0": 1}, "k takes 1 buffers, got 0"),
        ([noise((2, 2))], {"s0": 1}, "buffer 0 of k is not a flat contiguous array"),
        ([np.zeros(2)], {"s0": 1}, "buffer 0 of k has dtype float64 where the program wants f32"),
        ([noise(2)], {}, "the symbol s0 has no value"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tl, text, buffers, symbols)
