"""One counted loop with values carried in SSA form: what serial loops and the strips of vector loops are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from luban.compiler.codegen.llvm.context import Context, close_loop, open_loop
from luban.compiler.codegen.llvm.values import Uniform

Carried = list[tuple[str, str]]  # (LLVM type, value before the loop)


@dataclass(frozen=True)
class Strip:
    """for i from `start` while i < `end`, by `step`; `certain`: runs at least once; `once`: never more than once."""

    start: Uniform
    end: Uniform
    step: int
    certain: bool = False
    once: bool = False


def strip_of(start: Uniform, end: Uniform, step: int) -> Strip:
    """The strip, with what numbers tell about how often it runs."""
    if start.number is None or end.number is None:
        return Strip(start, end, step)
    trip = int(end.number) - int(start.number)
    return Strip(start, end, step, trip > 0, trip <= step)


def emit_strip(
    ctx: Context, strip: Strip, carried: Carried, body: Callable[[Uniform, list[str]], list[str]]
) -> list[str]:
    """Writes the loop; `body(index, carried values)` returns their next values. Returns the values after the loop."""
    fn = ctx.fn
    if strip.once and not strip.certain and strip.start.number is not None and strip.end.number is not None:
        return [value for _, value in carried]  # known to be empty
    if strip.once and strip.certain:
        return body(strip.start, [value for _, value in carried])
    inside, after, before = fn.new_block("for"), fn.new_block("end"), fn.current
    if not strip.once:
        open_loop(ctx)
    if strip.certain:
        fn.branch(inside)
    else:
        fn.branch_if(fn.op(f"icmp slt i64 {strip.start.text}, {strip.end.text}"), inside, after)
    fn.place(inside)
    new = _once(ctx, strip, carried, body) if strip.once else _repeat(ctx, strip, carried, body, before, inside, after)
    latch = fn.current
    if strip.once:
        fn.branch(after)
    else:
        close_loop(ctx)
    fn.place(after)
    if strip.certain:
        return new
    return [
        value if value == old else fn.op(f"phi {ty} [ {old}, %{before} ], [ {value}, %{latch} ]")
        for (ty, old), value in zip(carried, new, strict=True)
    ]


def _once(ctx: Context, strip: Strip, carried: Carried, body: Callable[[Uniform, list[str]], list[str]]) -> list[str]:
    return body(strip.start, [value for _, value in carried])


def _repeat(
    ctx: Context,
    strip: Strip,
    carried: Carried,
    body: Callable[[Uniform, list[str]], list[str]],
    before: str,
    inside: str,
    after: str,
) -> list[str]:
    fn = ctx.fn
    index, successor = fn.fresh("i"), fn.fresh("n")
    names = [fn.fresh("c") for _ in carried]
    slot = len(fn.lines)  # the phis go here once the values of the back edge have names
    multiple = math.gcd(strip.start.divisor, strip.step)
    new = body(Uniform("i64", index, ctx.depth, None, _span(strip), multiple), names)
    fn.emit(f"{successor} = add nsw i64 {index}, {strip.step}")
    again = fn.op(f"icmp slt i64 {successor}, {strip.end.text}")
    latch = fn.current
    fn.branch_if(again, inside, after)
    phis = [f"  {index} = phi i64 [ {strip.start.text}, %{before} ], [ {successor}, %{latch} ]"]
    for name, (ty, old), value in zip(names, carried, new, strict=True):
        phis.append(f"  {name} = phi {ty} [ {old}, %{before} ], [ {value}, %{latch} ]")
    fn.lines[slot:slot] = phis
    return new


def _span(strip: Strip) -> tuple[int, int] | None:
    if strip.start.span is None or strip.end.span is None:
        return None
    return (strip.start.span[0], max(strip.start.span[0], strip.end.span[1] - 1))
