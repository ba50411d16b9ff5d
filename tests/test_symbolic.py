"""Symbolic dimensions against Python's own integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luban import symbolic
from luban.errors import ConfigError
from luban.symbolic import (
    Expr,
    divide_exact,
    evaluate,
    floordiv,
    maximum,
    minimum,
    mod,
    parse,
    product,
    symbol,
    symbols,
)

ENV = {"s0": 7, "s1": 12, "u2": 1}

integers = st.integers(-50, 50)
leaves = st.one_of(integers, st.sampled_from(sorted(ENV)))
# A tree of (operation, left, right): built twice, once with dims and once with ints.
trees = st.recursive(
    leaves, lambda t: st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "max", "min"]), t, t), max_leaves=12
)
DIMS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": floordiv,
    "%": mod,
    "max": maximum,
    "min": minimum,
}
INTS = {**DIMS, "//": lambda a, b: a // b, "%": lambda a, b: a % b, "max": max, "min": min}
environments = st.fixed_dictionaries({name: st.integers(1, 64) for name in ENV})


def build(tree, operations, leaf):
    """The value of a tree; ZeroDivisionError where it divides by 0."""
    if not isinstance(tree, tuple):
        return leaf(tree)
    kind, left, right = tree
    return operations[kind](build(left, operations, leaf), build(right, operations, leaf))


def as_dim(tree):
    """The tree in dims, or None where a division by the number 0 shows at once."""
    try:
        return build(tree, DIMS, lambda x: symbol(x) if isinstance(x, str) else x)
    except ZeroDivisionError:
        return None


def as_int(tree, env):
    """The tree in ints, or None where it divides by zero."""
    try:
        return build(tree, INTS, lambda x: env[x] if isinstance(x, str) else x)
    except ZeroDivisionError:
        return None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(trees, environments)
def test_a_dim_has_the_value_of_its_integers(tree, env):
    dim, expected = as_dim(tree), as_int(tree, env)
    if dim is None or expected is None:
        return
    assert evaluate(dim, env) == expected


@settings(max_examples=400, deadline=None, derandomize=True)
@given(trees)
def test_the_text_of_a_dim_parses_back(tree):
    dim = as_dim(tree)
    if dim is not None:
        assert parse(str(dim)) == dim


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees)
def test_the_symbols_of_a_dim_are_those_it_needs(tree):
    dim = as_dim(tree)
    if dim is None or isinstance(dim, int):
        return
    needed = symbols(dim)
    assert needed <= set(ENV)
    try:
        evaluate(dim, {name: ENV[name] for name in needed})
    except ZeroDivisionError:
        pass


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees, trees)
def test_exact_division_undoes_multiplication(a, b):
    left, right = as_dim(a), as_dim(b)
    if left is None or right is None:
        return
    quotient = divide_exact(left, right)
    if quotient is not None:
        assert quotient * right == left


@settings(max_examples=200, deadline=None, derandomize=True)
@given(trees, trees, trees)
def test_sums_and_products_are_in_normal_form(a, b, c):
    x, y, z = as_dim(a), as_dim(b), as_dim(c)
    if None in (x, y, z):
        return
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) * z == x * z + y * z
    assert x - x == 0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=30))
def test_any_text_is_a_dim_or_a_config_error(text):
    try:
        value = parse(text)
    except ConfigError:
        return
    assert parse(str(value)) == value


@pytest.mark.parametrize("text", ["", "1.5", "s0 +", "max(s0)", "(s0", "s0)", "²", "floordiv(s0, )", "s0 s1", "max"])
def test_bad_text_is_refused(text):
    with pytest.raises(ConfigError):
        parse(text)


def test_views_of_symbolic_shapes_need_these():
    b, t = symbol("s0"), symbol("s1")
    assert floordiv(b * t * 64, t) == b * 64
    assert mod(b * t, b) == 0
    assert divide_exact(b * 6 + 3, 2) is None
    assert divide_exact(b * 6 + 4, 2) == b * 3 + 2
    assert product([b, 4, t]) == b * t * 4
    assert floordiv(b, 1) == b and mod(b, 1) == 0
    assert floordiv(0, b) == 0 and mod(0, b) == 0
    assert 7 // b == floordiv(7, b) and 7 % b == mod(7, b)


def test_division_by_zero_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        floordiv(3, 0)
    assert divide_exact(symbol("s0"), 0) is None
    assert divide_exact(0, 0) is None


def test_an_unbound_symbol_is_named():
    with pytest.raises(ConfigError, match="s9"):
        evaluate(symbol("s9") + 1, {"s0": 1})


@pytest.mark.parametrize("name", ["max", "min", "mod", "floordiv", "1a", "", "a b"])
def test_a_name_that_would_not_parse_back_is_refused(name):
    with pytest.raises(ConfigError):
        symbol(name)


def test_upper_case_symbols_are_found():
    assert symbols(symbol("S0") * 2 + maximum(symbol("_n"), symbolic.symbol("T"))) == {"S0", "_n", "T"}


def test_equal_dims_hash_alike():
    a, b = symbol("s0") + 1, 1 + symbol("s0")
    assert isinstance(a, Expr) and hash(a) == hash(b) and {a: 1}[b] == 1
