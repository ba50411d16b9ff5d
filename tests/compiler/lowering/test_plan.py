"""Where temporaries live, equal kernels, and the names of kernels."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luban import symbolic
from luban.compiler.lowering.plan import ALIGN, Life, plan_arena

LIVES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 8)), max_size=30)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    LIVES, st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(0, 8)), max_size=6), st.integers(1, 99)
)
def test_what_lives_at_the_same_time_shares_no_bytes(fixed, symbolics, n):
    lives = [Life(size, first, first + more) for size, first, more in fixed]
    lives += [Life(symbolic.symbol("n") * factor, first, first + more) for factor, first, more in symbolics]
    plan = plan_arena(lives)
    value = lambda dim: symbolic.evaluate(dim, {"n": n})  # noqa: E731
    spans = [(value(o), value(o) + value(life.bytes), life) for o, life in zip(plan.offsets, lives, strict=True)]
    for i, (start, end, life) in enumerate(spans):
        assert start % ALIGN == 0 and 0 <= start and end <= value(plan.bytes)
        for other_start, other_end, other in spans[:i]:
            if life.first <= other.last and other.first <= life.last:
                assert end <= other_start or other_end <= start


def test_memory_is_used_again():
    lives = [Life(1000, i, i + 1) for i in range(10)]
    assert plan_arena(lives).bytes <= 2 * 1024


def test_equal_groups_share_a_kernel_and_others_do_not(machine):
    x, w = torch.randn(6, 8), [torch.randn(8, 8) for _ in range(4)]
    run = machine.check(lambda x, *w: (x @ w[0]).relu() @ w[1].relu() + (x @ w[2]).relu() @ w[3].relu(), x, *w)
    assert len(set(run.kernels)) < len(run.kernels)
    twice = machine.check(
        lambda a, b: ((a - b).softmax(1), (b - a).softmax(1), (a + b).softmax(1)), x, torch.randn(6, 8)
    )
    assert len(set(twice.kernels)) >= 2 or len(twice.kernels) == 1


def test_kernels_are_named_by_what_they_do(machine):
    run = machine.compile(lambda x: x.softmax(-1), (torch.randn(3, 4),))
    assert run.kernels == ["k0_max_sum_sub_exp_div"]
