"""Dims (numbers and expressions in symbols) as integer instructions."""

from __future__ import annotations

from collections.abc import Mapping

from luban.compiler.codegen.llvm.emitter import Function
from luban.errors import ConfigError
from luban.symbolic import Dim, parse, split_call


def emit_dim(fn: Function, dim: Dim, symbol_values: Mapping[str, str]) -> str:
    """The value of `dim` as an i64 operand; `symbol_values` maps symbol names to i64 operands.

    floordiv and mod round towards minus infinity, as Python does. Raises ConfigError for an unbound symbol.
    """
    if isinstance(dim, int):
        return str(dim)
    total = ""
    for factors, coefficient in dim.terms:
        texts = [_factor(fn, f, symbol_values) for f in factors]
        if coefficient != 1 or not texts:
            texts.append(str(coefficient))
        term = texts[0]
        for text in texts[1:]:
            term = fn.op(f"mul nsw i64 {term}, {text}")
        total = fn.op(f"add nsw i64 {total}, {term}") if total else term
    return total or "0"


def _factor(fn: Function, factor: str, symbol_values: Mapping[str, str]) -> str:
    call = split_call(factor)
    if call is None:
        if factor not in symbol_values:
            raise ConfigError(f"the symbol {factor} has no value here; bound are {sorted(symbol_values)}")
        return symbol_values[factor]
    kind, a, b = call
    left, right = (emit_dim(fn, parse(text), symbol_values) for text in (a, b))
    if kind in ("max", "min"):
        return fn.intrinsic(f"llvm.s{kind}.i64", "i64", [("i64", left), ("i64", right)])
    return floor_division(fn, left, right)[0 if kind == "floordiv" else 1]


def floor_division(fn: Function, left: str, right: str) -> tuple[str, str]:
    """Quotient and remainder, rounded towards minus infinity, of i64 operands."""
    quotient, remainder = fn.op(f"sdiv i64 {left}, {right}"), fn.op(f"srem i64 {left}, {right}")
    inexact = fn.op(f"icmp ne i64 {remainder}, 0")
    opposite = fn.op(f"icmp slt i64 {fn.op(f'xor i64 {remainder}, {right}')}, 0")
    down = fn.op(f"and i1 {inexact}, {opposite}")
    lower = fn.op(f"sub i64 {quotient}, {fn.op(f'zext i1 {down} to i64')}")
    return lower, fn.op(f"select i1 {down}, i64 {fn.op(f'add i64 {remainder}, {right}')}, i64 {remainder}")
