"""The graph interpreter against plain NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luban.compiler.ir.interpret_graph import run_graph
from luban.errors import ConfigError, LubanError, VerificationError


def noise(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


ADD = ("%r = arith.addf %a, %b : f32", ["%r"], ["f32"])
SAME = ("", ["%a"], ["f32"])


def test_map_with_transpose_broadcast_and_negative_strides(ir):
    x, y = noise((4, 5)), noise((5,), 1)
    t = ir.tensor
    body = ir.pointwise(
        "%m", [("%x", t([4, 5]), "f32", [1, 5]), ("%y", t([5]), "f32", [-1, 0], 4)], [5, 4], ADD, [t([5, 4])]
    )
    m = ir.module(ir.function({"%x": t([4, 5]), "%y": t([5])}, body, [("%m", t([5, 4]), [5, 4])]))
    np.testing.assert_array_equal(run_graph(m, [x, y])[0], x.T + y[::-1, None])


def test_map_over_a_million_elements(ir):
    t = ir.tensor([1000, 1000])
    body = ir.pointwise("%m", [("%x", t, "f32", [1, 1000]), ("%y", t, "f32", [1000, 1])], [1000, 1000], ADD, [t])
    m = ir.module(ir.function({"%x": t, "%y": t}, body, [("%m", t, [1000, 1000])]))
    x = noise((1000, 1000))
    np.testing.assert_array_equal(run_graph(m, [x, x])[0], x.T + x)


def test_map_with_index_dim_select_and_several_results(ir):
    t = ir.tensor(["s0", 6])
    lines = """%i = "graph.index"() <{dim=#builtin.int<0>}> : () -> i64
%j = "graph.index"() <{dim=#builtin.int<1>}> : () -> i64
%n = "graph.dim"() <{value=#graph.dims<["s0*6"]>}> : () -> i64
%c = arith.cmpi sge, %i, %j : i64
%z = arith.constant 0.0 : f32
%r = arith.select %c, %a, %z : f32
%p = arith.muli %i, %n : i64"""
    body = ir.pointwise(
        ("%m", "%q"),
        [("%x", t, "f32", [6, 1])],
        ["s0", 6],
        (lines, ["%r", "%p"], ["f32", "i64"]),
        [t, ir.tensor(["s0", 6], "i64")],
    )
    returned = [("%m", t, ["s0", 6], [6, 1]), ("%q", ir.tensor(["s0", 6], "i64"), ["s0", 6], [6, 1])]
    m = ir.module(ir.function({"%x": t}, body, returned, ["s0"]))
    for rows in (1, 4, 9):
        x = noise((rows, 6))
        got = run_graph(m, [x], {"s0": rows})
        np.testing.assert_array_equal(got[0], np.tril(x))
        np.testing.assert_array_equal(got[1], np.broadcast_to(np.arange(rows)[:, None] * rows * 6, (rows, 6)))


def reduce_program(ir, kinds, shape, reduced, element="f32"):
    t = ir.tensor(shape, element)
    kept = shape[: len(shape) - reduced]
    outs = [ir.tensor(kept, "i64" if k.startswith("arg") else element) for k in kinds]
    names = [f"%r{i}" for i in range(len(kinds))]
    body = ir.pointwise(
        names, [("%x", t, element, ir.contiguous(shape))], shape,
        ("", ["%a"] * len(kinds), [element] * len(kinds)), outs,
        kind="graph.reduce", reduced=f"#builtin.int<{reduced}>", kinds="[" + ", ".join(f'"{k}"' for k in kinds) + "]",
    )  # fmt: skip
    return ir.module(ir.function({"%x": t}, body, [(n, o, kept) for n, o in zip(names, outs, strict=True)]))


def test_float_reductions_of_every_kind(ir):
    kinds = ["add", "mul", "max", "min", "argmax", "argmin"]
    m = reduce_program(ir, kinds, [3, 4, 5], 2)
    x = noise((3, 4, 5))
    flat = x.reshape(3, 20)
    wide = flat.astype(np.float64)
    want = [wide.sum(1), wide.prod(1), flat.max(1), flat.min(1), flat.argmax(1), flat.argmin(1)]
    for kind, got, w in zip(kinds, run_graph(m, [x]), want, strict=True):
        np.testing.assert_array_equal(got, w.astype(got.dtype), err_msg=kind)


@pytest.mark.parametrize("element, dtype", [("i64", np.int64), ("i32", np.int32), ("i8", np.int8), ("i1", bool)])
def test_integer_reductions_wrap_in_their_own_type(ir, element, dtype):
    kinds = ["add", "mul", "max", "min", "and", "or"]
    x = np.random.default_rng(0).integers(0, 2 if dtype is bool else 120, (4, 9)).astype(dtype)
    got = run_graph(reduce_program(ir, kinds, [4, 9], 1, element), [x])
    wide = x.astype(np.int64)

    def wrap(values):
        return (values & 1).astype(bool) if dtype is bool else values.astype(dtype)

    np.testing.assert_array_equal(got[0], wrap(wide.sum(1)))
    np.testing.assert_array_equal(got[1], wrap(wide.prod(1)))
    for g, f in zip(got[2:], (np.maximum, np.minimum, np.bitwise_and, np.bitwise_or), strict=True):
        np.testing.assert_array_equal(g, f.reduce(wide, axis=1).astype(dtype))


def test_nan_wins_in_max_min_and_their_positions(ir):
    x = noise((3, 6))
    x[1, 4] = x[1, 5] = np.nan
    got = run_graph(reduce_program(ir, ["max", "min", "argmax", "argmin"], [3, 6], 1), [x])
    tx = torch.from_numpy(x)
    want = [tx.amax(1), tx.amin(1), tx.argmax(1), tx.argmin(1)]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w.numpy())


def test_reduction_of_nothing_gives_the_identity(ir):
    got = run_graph(
        reduce_program(ir, ["add", "mul", "max", "min", "argmax"], [2, 0], 1), [np.empty((2, 0), np.float32)]
    )
    assert [g[0] for g in got] == [0.0, 1.0, -np.inf, np.inf, 0]
    got = run_graph(reduce_program(ir, ["add", "max", "and"], [2, 0], 1, "i32"), [np.empty((2, 0), np.int32)])
    assert [g[0] for g in got] == [0, np.iinfo(np.int32).min, -1]
    assert run_graph(reduce_program(ir, ["add"], [0, 3], 1), [np.empty((0, 3), np.float32)])[0].shape == (0,)


def test_long_sums_are_rounded_once(ir):
    x = noise((1, 300_000)) + 1000
    got = run_graph(reduce_program(ir, ["add"], [1, 300_000], 1), [x])[0]
    assert got[0] == np.float32(x.astype(np.float64).sum())


def contract_text(ir, a, b, domain, counts, strides_a, strides_b, out, element="f32", out_element=None, offsets=(0, 0)):
    ta, tb, to = ir.tensor(a, element), ir.tensor(b, element), ir.tensor(out, out_element or element)
    text = ir.op(
        "graph.contract", ["%c"], [("%x", ta), ("%y", tb)],
        {
            "domain": f"#graph.dims<{ir.dims(domain)}>",
            "counts": "[" + ", ".join(f"#builtin.int<{c}>" for c in counts) + "]",
            "accesses": f"[{ir.access(strides_a, offsets[0])}, {ir.access(strides_b, offsets[1])}]",
        },
        [to],
    )  # fmt: skip
    return ir.module(ir.function({"%x": ta, "%y": tb}, text, [("%c", to, out)]))


def test_batched_contract_with_a_transposed_operand(ir):
    m = contract_text(ir, [2, 3, 4], [2, 5, 4], [2, 3, 5, 4], (1, 1, 1, 1), [12, 4, 0, 1], [20, 0, 4, 1], [2, 3, 5])
    x, y = noise((2, 3, 4)), noise((2, 5, 4), 1)
    want = np.einsum("bmk,bnk->bmn", x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(run_graph(m, [x, y])[0], want)


def test_convolution_as_a_contract(ir):
    x, w = noise((2, 3, 8, 9)), noise((4, 3, 3, 2), 1)
    out = [2, 6, 8, 4]  # (batch, row, column) are m, the output channel is n
    domain = [2, 6, 8, 4, 3, 3, 2]
    m = contract_text(
        ir, [2, 3, 8, 9], [4, 3, 3, 2], domain, (0, 3, 1, 3), [216, 9, 1, 0, 72, 9, 1], [0, 0, 0, 18, 6, 2, 1], out
    )
    want = torch.conv2d(torch.from_numpy(x).double(), torch.from_numpy(w).double()).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(run_graph(m, [x, w])[0], want, rtol=1e-6, atol=1e-6)


def test_contract_of_integers_bf16_and_nothing(ir):
    args = ([3, 4], [4, 5], [3, 5, 4], (0, 1, 1, 1), [4, 0, 1], [0, 1, 5], [3, 5])
    x, y = np.arange(12).reshape(3, 4), np.arange(20).reshape(4, 5)
    np.testing.assert_array_equal(run_graph(contract_text(ir, *args, element="i64"), [x, y])[0], x @ y)
    tx, ty = torch.randn(3, 4, generator=torch.manual_seed(0)).bfloat16(), torch.randn(4, 5).bfloat16()
    got = run_graph(contract_text(ir, *args, element="bf16"), [tx, ty])[0]
    np.testing.assert_array_equal(got, (tx.double() @ ty.double()).float().bfloat16().float().numpy())
    empty = contract_text(ir, [3, 0], [0, 5], [3, 5, 0], (0, 1, 1, 1), [1, 0, 1], [0, 1, 5], [3, 5])
    np.testing.assert_array_equal(
        run_graph(empty, [np.empty((3, 0), np.float32), np.empty((0, 5), np.float32)])[0], np.zeros((3, 5))
    )
    rows = contract_text(ir, [0, 4], [4, 5], [0, 5, 4], (0, 1, 1, 1), [4, 0, 1], [0, 1, 5], [0, 5])
    assert run_graph(rows, [np.empty((0, 4), np.float32), noise((4, 5))])[0].shape == (0, 5)


def scatter_program(ir, kind, element="f32", init=(6,), out="f32"):
    t, i, v = ir.tensor(list(init), element), ir.tensor([10], "i64"), ir.tensor([10], element)
    o = ir.tensor([6], out)
    text = ir.op(
        "graph.scatter", ["%s"], [("%t", t), ("%i", i), ("%v", v)],
        {"domain": "#graph.dims<[10]>", "kind": f'"{kind}"', "accesses": f"[{ir.access([1])}, {ir.access([1])}]"},
        [o], (["%p: i64", f"%w: {element}"], "", ["%p", "%w"], ["i64", element]),
    )  # fmt: skip
    return ir.module(ir.function({"%t": t, "%i": i, "%v": v}, text, [("%s", o, [6])]))


@pytest.mark.parametrize("kind", ["add", "mul", "max", "min", "set"])
def test_scatter_with_duplicates(ir, kind):
    rng = np.random.default_rng(3)
    init, values, where = noise((6,)), noise((10,), 1), rng.integers(0, 5, 10)
    want = init.astype(np.float64)
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "set": lambda a, b: b}[kind]
    for p, v in zip(where, values, strict=True):
        want[p] = combine(want[p], v)
    before = init.copy()
    np.testing.assert_array_equal(
        run_graph(scatter_program(ir, kind), [init, where, values])[0], want.astype(np.float32)
    )
    np.testing.assert_array_equal(init, before)


def test_scatter_onto_one_number_rounded_once(ir):
    """600 and ten times 0.2: in float16 every sum would be 600 again."""
    init, values, where = np.float32(600), np.full(10, 0.2, np.float32), np.full(10, 2)
    got = run_graph(scatter_program(ir, "add", init=(), out="f16"), [init, where, values])[0]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.array([600, 600, 602, 600, 600, 600], np.float16))


def test_scatter_outside_is_named(ir):
    with pytest.raises(VerificationError, match="graph.scatter writes position 6 of a tensor of 6"):
        run_graph(scatter_program(ir, "add"), [noise((6,)), np.full(10, 6), noise((10,))])


def test_concat_of_views(ir):
    x, y = noise((3, 4)), noise((2, 3), 1)
    tx, ty, to = ir.tensor([3, 4]), ir.tensor([2, 3]), ir.tensor([3, 6])
    text = ir.op(
        "graph.concat", ["%c"], [("%x", tx), ("%y", ty)],
        {
            "axis": "#builtin.int<1>",
            "extents": "#graph.dims<[4, 2]>",
            "accesses": f"[{ir.access([4, 1])}, {ir.access([1, 3])}]",
        },
        [to],
    )  # fmt: skip
    m = ir.module(ir.function({"%x": tx, "%y": ty}, text, [("%c", to, [3, 6])]))
    np.testing.assert_array_equal(run_graph(m, [x, y])[0], np.concatenate([x, y.T], 1))


def embedding(ir, checked):
    t, i, o = ir.tensor([7, 3]), ir.tensor([5], "i64"), ir.tensor([5, 3])
    lines = f"""%j = "graph.index"() <{{dim=#builtin.int<1>}}> : () -> i64
%n = arith.constant 3 : i64
%r = arith.muli %b, %n : i64
%p = arith.addi %r, %j : i64
%v = "graph.load"(%a, %p) <{{checked={checked}}}> : ({t}, i64) -> f32"""
    body = ir.pointwise("%m", [("%t", t, "f32", None), ("%i", i, "i64", [1, 0])], [5, 3], (lines, ["%v"], ["f32"]), [o])
    return ir.module(ir.function({"%t": t, "%i": i}, body, [("%m", o, [5, 3])]))


def test_indirect_loads(ir):
    table, where = noise((7, 3)), np.array([6, 0, 3, 3, 1])
    np.testing.assert_array_equal(run_graph(embedding(ir, "true"), [table, where])[0], table[where])
    where[2] = 7
    with pytest.raises(LubanError, match="graph.load met index 21 of a tensor of 21"):
        run_graph(embedding(ir, "true"), [table, where])
    with pytest.raises(VerificationError, match="graph.load reads index 21 of a tensor of 21"):
        run_graph(embedding(ir, "false"), [table, where])


def test_random_numbers_in_a_body(ir):
    o = ir.tensor([1000])
    lines = """%s = arith.constant 42 : i64
%i = "graph.index"() <{dim=#builtin.int<0>}> : () -> i64
%u = "graph.random"(%s, %i) <{kind="uniform"}> : (i64, i64) -> f32
%n = "graph.random"(%s, %i) <{kind="normal"}> : (i64, i64) -> f32
%b = "graph.random"(%s, %i) <{kind="bits"}> : (i64, i64) -> i64"""
    body = ir.pointwise(
        ("%x", "%y", "%z"),
        [],
        [1000],
        (lines, ["%u", "%n", "%b"], ["f32", "f32", "i64"]),
        [o, o, ir.tensor([1000], "i64")],
    )
    m = ir.module(
        ir.function({}, body, [("%x", o, [1000]), ("%y", o, [1000]), ("%z", ir.tensor([1000], "i64"), [1000])])
    )
    u, n, b = run_graph(m, [])
    assert (u >= 0).all() and (u < 1).all() and abs(u.mean() - 0.5) < 0.03
    assert abs(n.mean()) < 0.1 and abs(n.std() - 1) < 0.1
    np.testing.assert_array_equal(u, ((b >> 8) * 2.0**-24).astype(np.float32))


def test_returned_views_are_copies(ir):
    t = ir.tensor([4, 6])
    body = ir.pointwise("%m", [("%x", t, "f32", [6, 1])], [4, 6], SAME, [t])
    returned = [("%m", t, [6, 4], [1, 6]), ("%m", t, [2, 3], [-6, 2], 19), ("%x", t, [5], [0], 7), ("%x", t, [4, 6])]
    m = ir.module(ir.function({"%x": t}, body, returned))
    x = noise((4, 6))
    got = run_graph(m, [x])
    np.testing.assert_array_equal(got[0], x.T)
    np.testing.assert_array_equal(got[1], x[3:1:-1, 1::2])
    np.testing.assert_array_equal(got[2], np.full(5, x[1, 1]))
    got[3][...] = 0
    assert x.any()


def test_assign_happens_after_every_read(ir):
    t = ir.tensor([3])
    assign = f'"graph.assign"(%x, %y) : ({t}, {t}) -> ()\n"graph.assign"(%y, %x) : ({t}, {t}) -> ()\n'
    body = assign + ir.pointwise("%m", [("%x", t, "f32", [1]), ("%y", t, "f32", [1])], [3], ADD, [t])
    m = ir.module(ir.function({"%x": t, "%y": t}, body, [("%m", t, [3]), ("%x", t, [3])]))
    x, y = np.array([1, 2, 3], np.float32), torch.tensor([10.0, 20.0, 30.0])
    total, old = run_graph(m, [x, y])
    np.testing.assert_array_equal(total, [11, 22, 33])
    np.testing.assert_array_equal(old, [1, 2, 3])
    np.testing.assert_array_equal(x, [10, 20, 30])
    np.testing.assert_array_equal(y.numpy(), [1, 2, 3])


def test_groups_and_values_of_zero_rank(ir):
    s = ir.tensor([])
    inner = ir.pointwise("%m", [("%x", s, "f32", [])], [], ("%r = math.exp %a : f32", ["%r"], ["f32"]), [s])
    body = f'%g = "graph.group"() <{{label="g"}}> ({{\n{inner}"graph.yield"(%m) : ({s}) -> ()\n}}) : () -> {s}\n'
    m = ir.module(ir.function({"%x": s}, body, [("%g", s, [])]))
    got = run_graph(m, [np.array(2.0, np.float32)])[0]
    assert got.shape == () and got == np.float32(np.exp(2.0))


def test_inputs_that_do_not_fit_are_named(ir):
    t = ir.tensor(["s0", 3])
    body = ir.pointwise("%m", [("%x", t, "f32", [3, 1])], ["s0", 3], SAME, [t])
    m = ir.module(ir.function({"%x": t}, body, [("%m", t, ["s0", 3])], ["s0"]))
    with pytest.raises(ConfigError, match="takes 1 inputs, got 0"):
        run_graph(m, [], {"s0": 2})
    with pytest.raises(ConfigError, match=r"input 0 of f has shape \(3, 3\), the program wants \(2, 3\)"):
        run_graph(m, [noise((3, 3))], {"s0": 2})
    with pytest.raises(ConfigError, match="input 0 of f has dtype float64 where the program wants f32"):
        run_graph(m, [noise((2, 3), dtype=np.float64)], {"s0": 2})
    with pytest.raises(ConfigError, match="the symbol s0 has no value"):
        run_graph(m, [noise((2, 3))])
    with pytest.raises(ConfigError, match="holds no graph.func"):
        run_graph(ir.module("builtin.module {}"), [])


def test_symbolic_reads_outside_are_named(ir):
    t, o = ir.tensor(["s0"]), ir.tensor(["s1"])
    body = ir.pointwise("%m", [("%x", t, "f32", [1])], ["s1"], SAME, [o])
    m = ir.module(ir.function({"%x": t}, body, [("%m", o, ["s1"])], ["s0", "s1"]))
    with pytest.raises(VerificationError, match="graph.map reads elements 0 to 4 of a tensor of 4"):
        run_graph(m, [noise((4,))], {"s0": 4, "s1": 5})


def test_unsigned_bytes_come_in_as_they_are(ir):
    t, o = ir.tensor([4], "i8"), ir.tensor([4], "i32")
    body = ir.pointwise("%m", [("%x", t, "i8", [1])], [4], ("%r = arith.extui %a : i8 to i32", ["%r"], ["i32"]), [o])
    m = ir.module(ir.function({"%x": t}, body, [("%m", o, [4])]))
    for x in (np.array([0, 127, 128, 255], np.uint8), torch.tensor([0, 127, 128, 255], dtype=torch.uint8)):
        np.testing.assert_array_equal(run_graph(m, [x])[0], [0, 127, 128, 255])


def test_assign_of_another_shape_keeps_the_order_of_elements(ir):
    a, b = ir.tensor([2, 3]), ir.tensor([6])
    body = f'"graph.assign"(%x, %y) : ({a}, {b}) -> ()\n'
    m = ir.module(ir.function({"%x": a, "%y": b}, body, [("%y", b, [6])]))
    x, y = torch.zeros(3, 2).t(), noise((6,))
    run_graph(m, [x, y])
    np.testing.assert_array_equal(x.numpy(), y.reshape(2, 3))
