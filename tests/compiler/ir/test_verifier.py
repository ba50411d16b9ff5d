"""One broken module for every rule, with the message that names the operation and the rule."""

# ruff: noqa: E501 - IR text reads better unbroken

from __future__ import annotations

import pytest

from luban.compiler.ir.text import parse, verify
from luban.errors import VerificationError

T = "!graph.tensor<[4], f32>"
HEAD = f'"graph.func"() <{{sym_name="f"}}> ({{\n^bb0(%x: {T}, %y: {T}, %i: !graph.tensor<[4], i64>):\n'
END = f'"graph.return"(%x) <{{shapes=[#graph.dims<[4]>], accesses=[#graph.access<[1] + 0>]}}> : ({T}) -> ()\n}}) : () -> ()\n'
A = "#graph.access<[1] + 0>"


def graph_map(ins="%x", types=T, domain="[4]", accesses=A, arguments="%a: f32", body="", value="%a", vt="f32", out=T):
    return (
        f'%m = "graph.map"({ins}) <{{domain=#graph.dims<{domain}>, accesses=[{accesses}]}}> ({{\n^bb0({arguments}):\n{body}'
        f'"graph.yield"({value}) : ({vt}) -> ()\n}}) : ({types}) -> {out}\n'
    )


def reduce(reduced=1, kinds='"add"', out="!graph.tensor<[], f32>", value="%a", vt="f32"):
    return (
        f'%r = "graph.reduce"(%x) <{{domain=#graph.dims<[4]>, reduced=#builtin.int<{reduced}>, kinds=[{kinds}], accesses=[{A}]}}> ({{\n'
        f'^bb0(%a: f32):\n"graph.yield"({value}) : ({vt}) -> ()\n}}) : ({T}) -> {out}\n'
    )


def contract(counts=(0, 1, 1, 1), a="[1, 0, 0] + 0", b="[0, 1, 0] + 0", out="[4, 4]", first="#graph.access"):
    listed = ", ".join(f"#builtin.int<{c}>" for c in counts)
    left = f"{first}<{a}>" if first == "#graph.access" else first
    return (
        f'%c = "graph.contract"(%x, %y) <{{domain=#graph.dims<[4, 4, 2]>, counts=[{listed}], '
        f"accesses=[{left}, #graph.access<{b}>]}}> : ({T}, {T}) -> !graph.tensor<{out}, f32>\n"
    )


def scatter(kind="add", out=T, values="%p, %v", vt="i64, f32"):
    return (
        f'%s = "graph.scatter"(%y, %i, %x) <{{domain=#graph.dims<[4]>, kind="{kind}", accesses=[{A}, {A}]}}> ({{\n'
        f'^bb0(%p: i64, %v: f32):\n"graph.yield"({values}) : ({vt}) -> ()\n}}) : ({T}, !graph.tensor<[4], i64>, {T}) -> {out}\n'
    )


def concat(axis=0, extents="[4, 4]", accesses=f"{A}, {A}", out="!graph.tensor<[8], f32>"):
    return (
        f'%c = "graph.concat"(%x, %y) <{{axis=#builtin.int<{axis}>, extents=#graph.dims<{extents}>, accesses=[{accesses}]}}> '
        f": ({T}, {T}) -> {out}\n"
    )


Q = "!graph.tensor<[1, 1, 2, 2], f32>"


def attention(
    count=3,
    domain="[1, 1, 2, 2, 2]",
    strides="[4, 4, 2, 1]",
    access="#graph.access",
    out=Q,
    lse="!graph.tensor<[1, 1, 2], f32>",
):
    one = f"{access}<{strides} + 0>" if access == "#graph.access" else access
    return (
        f'%q = "graph.concat"() <{{axis=#builtin.int<0>, extents=#graph.dims<[]>, accesses=[]}}> : () -> !graph.tensor<[0, 1, 2, 2], f32>\n'
        f'%z = "graph.map"() <{{domain=#graph.dims<[1, 1, 2, 2]>, accesses=[]}}> ({{\n%o = arith.constant 0.0 : f32\n'
        f'"graph.yield"(%o) : (f32) -> ()\n}}) : () -> {Q}\n'
        f'%a, %l = "graph.attention"({", ".join(["%z"] * count)}) <{{domain=#graph.dims<{domain}>, scale=1.0 : f32, causal=false, '
        f"accesses=[{', '.join([one] * count)}]}}> : ({', '.join([Q] * count)}) -> ({out}, {lse})\n"
    )


def backward(count=6, grad=Q, domain="[1, 1, 2, 2, 2]"):
    lse = "!graph.tensor<[1, 1, 2], f32>"
    values, types = ["%z"] * 5 + ["%l"], [Q] * 5 + [lse]
    accesses = ["#graph.access<[4, 4, 2, 1] + 0>"] * 5 + ["#graph.access<[2, 2, 1] + 0>"]
    return attention() + (
        f'%gq, %gk, %gv = "graph.attention_backward"({", ".join(values[:count])}) <{{domain=#graph.dims<{domain}>, scale=1.0 : f32, '
        f"causal=false, accesses=[{', '.join(accesses[:count])}]}}> : ({', '.join(types[:count])}) -> ({grad}, {Q}, {Q})\n"
    )


INDEX = '%%n = "graph.index"() <{dim=#builtin.int<%d>}> : () -> i64\n'
LOAD = '%n = "graph.load"(%a, %b) <{checked=true}> : (f32, i64) -> f32\n'
TABLE = f'%n = "graph.load"(%a, %b) <{{checked=true}}> : ({T}, i64) -> f64\n'

GRAPH_RULES = [
    ("graph.map breaks its rule: it has one access for each operand", graph_map(accesses=f"{A}, {A}")),
    ("graph.map breaks its rule: it reads operands through #graph.access or #graph.indirect", graph_map(accesses="7 : i32")),
    ("graph.map breaks its rule: it has one stride for each dim of its domain", graph_map(accesses="#graph.access<[1, 1] + 0>")),
    ("graph.map breaks its rule: it stays inside its operand \\(reads elements 1 to 4 of 4\\)", graph_map(accesses="#graph.access<[1] + 1>")),
    ("graph.map breaks its rule: it stays inside its operand \\(reads elements -1 to 2 of 4\\)", graph_map(accesses="#graph.access<[-1] + 2>")),
    ("graph.map breaks its rule: it passes each operand to its body", graph_map(arguments="%a: f32, %b: f32")),
    ("graph.map breaks its rule: it passes operands to its body by their element type", graph_map(arguments="%a: f64", vt="f64")),
    ("graph.map breaks its rule: it yields one value for each result", graph_map(value="%a, %a", vt="f32, f32")),
    ("graph.map breaks its rule: it gives results of its domain's shape \\[4\\]", graph_map(out="!graph.tensor<[5], f32>")),
    ("graph.map breaks its rule: it gives results of the type that its body yields", graph_map(out="!graph.tensor<[4], f64>")),
    ("graph.index breaks its rule: it names a dim of the domain", graph_map(body=INDEX % 1)),
    ("graph.index breaks its rule: it stands in the body of an operation with a domain", INDEX % 0),
    ("graph.dim breaks its rule: it gives one dim", graph_map(body='%n = "graph.dim"() <{value=#graph.dims<[1, 2]>}> : () -> i64\n')),
    ("graph.load breaks its rule: it reads a tensor that the body receives whole",
     graph_map("%x, %i", f"{T}, !graph.tensor<[4], i64>", accesses=f"{A}, {A}", arguments="%a: f32, %b: i64", body=LOAD)),
    ("graph.load breaks its rule: it gives the element type of its table",
     graph_map("%x, %i", f"{T}, !graph.tensor<[4], i64>", accesses=f"#graph.indirect, {A}", arguments=f"%a: {T}, %b: i64", body=TABLE,
               value="%n", vt="f64")),
    ("graph.random breaks its rule: it has a kind among uniform, normal, bits",
     graph_map(body=INDEX % 0 + '%q = "graph.random"(%n, %n) <{kind="poisson"}> : (i64, i64) -> f32\n')),
    ("graph.random breaks its rule: it gives f32, or i64 when its kind is bits",
     graph_map(body=INDEX % 0 + '%q = "graph.random"(%n, %n) <{kind="bits"}> : (i64, i64) -> f32\n')),
    ("graph.reduce breaks its rule: it reduces at least one and at most all dims", reduce(reduced=2)),
    ("graph.reduce breaks its rule: it reduces at least one and at most all dims", reduce(reduced=0)),
    ("graph.reduce breaks its rule: it names one kind for each result", reduce(kinds='"add", "max"')),
    ("graph.reduce breaks its rule: it has kinds among add, mul", reduce(kinds='"median"')),
    ("graph.reduce breaks its rule: it yields one value for each result", reduce(value="%a, %a", vt="f32, f32")),
    ("graph.reduce breaks its rule: it gives results of its domain's shape \\[\\]", reduce(out="!graph.tensor<[4], f32>")),
    ("graph.reduce breaks its rule: it gives results of the type that its body yields \\(i64\\)", reduce(kinds='"argmax"')),
    ("graph.contract breaks its rule: it counts every dim of its domain once", contract((0, 1, 1, 2))),
    ("graph.contract breaks its rule: it has four counts", contract((1, 1, 1))),
    ("graph.contract breaks its rule: it gives results of its domain's shape", contract(out="[4, 2]")),
    ("graph.contract breaks its rule: it has one operand that does not move along its n dims", contract(a="[0, 1, 0] + 0")),
    ("graph.contract breaks its rule: it has one operand that does not move along its m dims", contract(b="[1, 0, 0] + 0")),
    ("graph.contract breaks its rule: it reads both operands through #graph.access", contract(first="#graph.indirect")),
    ("graph.scatter breaks its rule: it has a kind among add, mul, max, min, set", scatter("sub")),
    ("graph.scatter breaks its rule: it has an init of its result's shape, or one number", scatter(out="!graph.tensor<[5], f32>")),
    ("graph.scatter breaks its rule: it gives elements like its init's, or narrower floats", scatter(out="!graph.tensor<[4], f64>")),
    ("graph.scatter breaks its rule: it gives elements like its init's, or narrower floats", scatter(out="!graph.tensor<[4], i32>")),
    ("graph.scatter breaks its rule: it yields an i64 position and a value", scatter(values="%p, %p", vt="i64, i64")),
    ("graph.scatter breaks its rule: it yields a position and a value", scatter(values="%p", vt="i64")),
    ("graph.concat breaks its rule: it has one access and one extent for each piece", concat(extents="[8]")),
    ("graph.concat breaks its rule: it has extents that add up to the result's axis", concat(extents="[4, 3]")),
    ("graph.concat breaks its rule: it joins along an axis of its result", concat(axis=1)),
    ("graph.concat breaks its rule: it joins pieces of its result's element type", concat(out="!graph.tensor<[8], f64>")),
    ("graph.concat breaks its rule: it stays inside its operand", concat(extents="[3, 5]")),
    ("graph.attention breaks its rule: it has five dims in its domain", attention(domain="[1, 1, 2, 2]")),
    ("graph.attention breaks its rule: it has 3 operands and an optional bias", attention(count=2)),
    ("graph.attention breaks its rule: it reads its operands through #graph.access", attention(access="#graph.indirect")),
    ("graph.attention breaks its rule: it has one stride for each dim", attention(strides="[1, 1]")),
    ("graph.attention breaks its rule: it gives out over", attention(out="!graph.tensor<[1, 1, 2], f32>")),
    ("graph.attention breaks its rule: it gives a float32 log-sum-exp", attention(lse="!graph.tensor<[1, 1, 2], bf16>")),
    ("graph.attention_backward breaks its rule: it has 6 operands and an optional bias", backward(count=5)),
    ("graph.attention_backward breaks its rule: it gives gradients over", backward(grad="!graph.tensor<[1, 1, 4], f32>")),
    ("graph.attention_backward breaks its rule: it has five dims in its domain", backward(domain="[1]")),
    ("graph.assign breaks its rule: it assigns as many elements as its target has",
     f'%e = "graph.concat"(%x, %x) <{{axis=#builtin.int<0>, extents=#graph.dims<[4, 4]>, accesses=[{A}, {A}]}}> : ({T}, {T}) '
     f'-> !graph.tensor<[8], f32>\n"graph.assign"(%x, %e) : ({T}, !graph.tensor<[8], f32>) -> ()\n'),
    ("graph.assign breaks its rule: it assigns a value of its target's element type",
     f'"graph.assign"(%x, %i) : ({T}, !graph.tensor<[4], i64>) -> ()\n'),
    ("graph.assign breaks its rule: it writes into an argument of its function",
     graph_map() + f'"graph.assign"(%m, %x) : ({T}, {T}) -> ()\n'),
    ("graph.group breaks its rule: it yields what its results promise",
     f'%g = "graph.group"() <{{label="g"}}> ({{\n"graph.yield"(%i) : (!graph.tensor<[4], i64>) -> ()\n}}) : () -> {T}\n'),
]  # fmt: skip


@pytest.mark.parametrize("message, text", GRAPH_RULES)
def test_graph_rules(message, text):
    module = parse(HEAD + text + END)
    with pytest.raises(VerificationError, match=message):
        verify(module)


@pytest.mark.parametrize("text", [graph_map(), reduce(), contract(), scatter(), concat(), backward()])
def test_the_unbroken_forms_are_accepted(text):
    if "graph.attention" in text:
        text = text.replace('%q = "graph.concat"() <{axis=#builtin.int<0>, extents=#graph.dims<[]>, accesses=[]}> : () -> '
                            "!graph.tensor<[0, 1, 2, 2], f32>\n", "")  # fmt: skip
    verify(parse(HEAD + text + END))


def test_return_rules():
    two = HEAD + END.replace("accesses=[", f"accesses=[{A}, ")
    with pytest.raises(
        VerificationError, match="graph.return breaks its rule: it has one shape and one access for each value"
    ):
        verify(parse(two))
    with pytest.raises(VerificationError, match="graph.return breaks its rule: it stays inside its operand"):
        verify(parse(HEAD + END.replace("dims<[4]>]", "dims<[5]>]")))
    with pytest.raises(VerificationError, match="graph.return breaks its rule: it shows values through"):
        verify(parse(HEAD + END.replace("[#graph.dims<[4]>]", '["4"]')))
    with pytest.raises(VerificationError, match="graph.func breaks its rule: it ends with graph.return"):
        verify(
            parse(
                f'"graph.func"() <{{sym_name="f"}}> ({{\n^bb0(%x: {T}):\n"graph.yield"(%x) : ({T}) -> ()\n}}) : () -> ()'
            )
        )


FOR = (
    '%r = "tile.for"(%z, %z, %f) <{role="ROLE", combines=[COMBINES]}> ({\n^bb1(%i: i64, %acc: f32):\n'
    '"tile.yield"(%acc) : (f32) -> ()\n}) : (i64, i64, f32) -> f32\n'
)


def loop(role="vector", combines='"add"'):
    return FOR.replace("ROLE", role).replace("COMBINES", combines)


def load(strides="[1]", offset="[0]", result="f32", mask="", kind="i1"):
    extra, types, n = (", %f", f", {kind}", 1) if mask else ("", "", 0)
    return (
        f'%v = "tile.load"(%x, %z{extra}) <{{strides=#graph.dims<{strides}>, offset=#graph.dims<{offset}>, '
        f"operandSegmentSizes=array<i32: 1, 1, {n}>}}> : (!tile.buf<f32>, i64{types}) -> {result}\n"
    )


def store(strides="[1]", offset="[0]", value="%f", ty="f32", combine="none"):
    return (
        f'"tile.store"({value}, %x, %z) <{{strides=#graph.dims<{strides}>, offset=#graph.dims<{offset}>, combine="{combine}", '
        f"operandSegmentSizes=array<i32: 1, 1, 1, 0>}}> : ({ty}, !tile.buf<f32>, i64) -> ()\n"
    )


def pack(strides="[1, 1]", panel=4):
    return (
        f'"tile.pack"(%x, %z, %z, %z, %x) <{{strides=#graph.dims<{strides}>, panel=#builtin.int<{panel}>, kk=#builtin.int<1>}}> '
        ": (!tile.buf<f32>, i64, i64, i64, !tile.buf<f32>) -> ()\n"
    )


def patches(taps="[2, 3]", window="[1], [1], [1], [0]", panel=4):
    lists = ", ".join(f"#graph.dims<{numbers}>" for numbers in window.split(", "))
    return (
        '"tile.patches"(%x, %z, %z, %z, %x) <{points=#graph.dims<[2, 4]>, point_strides=#graph.dims<[4, 1]>, '
        f"taps=#graph.dims<{taps}>, tap_strides=#graph.dims<[4, 1]>, window=[{lists}], panel=#builtin.int<{panel}>}}> "
        ": (!tile.buf<f32>, i64, i64, i64, !tile.buf<f32>) -> ()\n"
    )


def dot(strides="[1, 1]", arguments="%acc: f32, %i: i64, %j: i64", panel=0, kk=1):
    return (
        f'"tile.dot"(%x, %z, %x, %z, %z, %z, %z) <{{a_strides=#graph.dims<{strides}>, b_strides=#graph.dims<[1, 1]>, '
        f'a_panel=#builtin.int<{panel}>, b_panel=#builtin.int<0>, kk=#builtin.int<{kk}>, unit="fma", rows=#builtin.int<1>, '
        f'columns=#builtin.int<1>}}> ({{\n^bb1({arguments}):\n"tile.yield"() : () -> ()\n}}) '
        ": (!tile.buf<f32>, i64, !tile.buf<f32>, i64, i64, i64, i64) -> ()\n"
    )


TILE_RULES = [
    ("tile.for breaks its rule: it has a role among serial, parallel, vector, unroll", loop("fast")),
    ("tile.for breaks its rule: it passes its index and what it carries", loop().replace("(%i: i64, %acc: f32)", "(%acc: f32)")),
    ("tile.for breaks its rule: it yields the next value of all that it carries", loop().replace('"(%acc) : (f32)', '"() : ()')),
    ("tile.for breaks its rule: it gives the last value of all that it carries", loop().replace("f32) -> f32", "f32) -> f64")),
    ("tile.for breaks its rule: it names one combine for each carried value", loop(combines="")),
    ("tile.for breaks its rule: it has combines among add, mul", loop(combines='"sub"')),
    ("tile.for breaks its rule: it has combines among add, mul", loop(combines="1 : i32")),
    ("tile.for breaks its rule: it is parallel only at the top of a kernel and carries nothing", loop("parallel")),
    ("tile.for breaks its rule: it carries only reductions when it is a vector loop", loop(combines='"none"')),
    ("tile.for breaks its rule: it ends its body with tile.yield", loop().replace("tile.yield", "graph.yield")),
    ("tile.load breaks its rule: it has one stride for each index", load("[1, 1]")),
    ("tile.load breaks its rule: it has one offset", load(offset="[]")),
    ("tile.load breaks its rule: it gives its buffer's element type", load(result="f64")),
    ("tile.load breaks its rule: it has a mask of type i1", load(mask="%f", kind="f32")),
    ("tile.store breaks its rule: it has one stride for each index", store("[]")),
    ("tile.store breaks its rule: it has one offset", store(offset="[1, 2]")),
    ("tile.store breaks its rule: it stores its buffer's element type", store(value="%z", ty="i64")),
    ("tile.store breaks its rule: it has a combine among add, mul", store(combine="sub")),
    ("tile.dim breaks its rule: it gives one dim", '%d = "tile.dim"() <{value=#graph.dims<[]>}> : () -> i64\n'),
    ("tile.alloc breaks its rule: it has one number of elements", '%d = "tile.alloc"() <{elements=#graph.dims<[1, 2]>}> : () -> !tile.buf<f32>\n'),
    ("tile.check breaks its rule: it has one bound", '%d = "tile.check"(%z) <{bound=#graph.dims<[]>}> : (i64) -> i64\n'),
    ("tile.random breaks its rule: it has a kind among", '%d = "tile.random"(%z, %z) <{kind="x"}> : (i64, i64) -> f32\n'),
    ("tile.random breaks its rule: it gives f32, or i64", '%d = "tile.random"(%z, %z) <{kind="normal"}> : (i64, i64) -> f64\n'),
    ("tile.pack breaks its rule: it has two strides", pack("[1]")),
    ("tile.pack breaks its rule: it has a panel and a kk of at least 1", pack(panel=0)),
    ("tile.patches breaks its rule: it has one stride for each dim", patches("[2]")),
    ("tile.patches breaks its rule: it has a panel of at least 1", patches(panel=0)),
    ("tile.patches breaks its rule: it has a window of four lists", patches(window="[1], [1], [1]")),
    ("tile.patches breaks its rule: it has a window of four lists", patches(window="[1], [1], [s0], [1]")),
    ("tile.dot breaks its rule: it has two strides for each operand", dot("[1]")),
    ("tile.dot breaks its rule: it passes the sum and its row and column", dot(arguments="%acc: f32, %i: i64")),
    ("tile.dot breaks its rule: it has a kk of at least 1 where an operand is packed", dot(panel=4, kk=0)),
    ("tile.dot breaks its rule: it ends its body with tile.yield", dot().replace("tile.yield", "graph.yield")),
]  # fmt: skip
KERNEL = '"tile.kernel"() <{sym_name="k", symbols=[]}> ({\n^bb0(%x: !tile.buf<f32>):\n%z = arith.constant 0 : i64\n%f = arith.constant 0.0 : f32\n'


@pytest.mark.parametrize("message, text", TILE_RULES)
def test_tile_rules(message, text):
    module = parse(KERNEL + text + "}) : () -> ()\n")
    with pytest.raises(VerificationError, match=message):
        verify(module)


@pytest.mark.parametrize("text", [loop(), loop("serial", '"none"'), load(), store(), pack(), patches(), dot()])
def test_the_unbroken_tile_forms_are_accepted(text):
    verify(parse(KERNEL + text + "}) : () -> ()\n"))


@pytest.mark.parametrize("arguments, symbols, message", [
    ("%x: !tile.buf<f32>", '"s0"', "tile.kernel breaks its rule: it takes one i64 for each of its symbols last"),
    ("%s: i64, %x: !tile.buf<f32>", '"s0"', "tile.kernel breaks its rule: it takes its buffers first"),
    ("", '"s0"', "tile.kernel breaks its rule: it takes one i64 for each of its symbols last"),
])  # fmt: skip
def test_kernel_rules(arguments, symbols, message):
    with pytest.raises(VerificationError, match=message):
        verify(
            parse(f'"tile.kernel"() <{{sym_name="k", symbols=[{symbols}]}}> ({{\n^bb0({arguments}):\n}}) : () -> ()\n')
        )
