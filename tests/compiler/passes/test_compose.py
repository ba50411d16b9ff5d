"""Reading through maps: composed accesses against numpy, over random windows of reshaped, permuted and sliced tensors."""

from __future__ import annotations

import itertools
import random

import pytest

from luban.compiler.ir.attributes import Access, contiguous
from luban.compiler.passes.graph.compose import through, window


def elements(access, domain):
    """The flat index at each point of the domain."""
    return [
        access.offset + sum(i * s for i, s in zip(at, access.strides, strict=True))
        for at in itertools.product(*map(range, domain))
    ]


def random_access(r, shape):
    """A window of a dense tensor: dims permuted, sliced, flipped or repeated; and its domain."""
    strides = contiguous(shape)
    offset, found = 0, []
    for n, s in zip(shape, strides, strict=True):
        step = r.choice((1, 1, 1, 2, -1))
        length = r.randint(1, max(1, n // abs(step)))
        low = r.randint(0, n - (length - 1) * abs(step) - 1)
        offset += s * (low if step > 0 else low + (length - 1) * -step)
        found.append((length, s * step))
    found += [(r.randint(1, 3), 0)] * r.randint(0, 1)
    r.shuffle(found)
    return Access.of([s for _, s in found], offset), [n for n, _ in found]


@pytest.mark.parametrize("seed", range(300))
def test_what_is_read_through_a_map_is_what_the_map_read(seed):
    r = random.Random(seed)
    source = [r.choice((1, 2, 3, 4, 6)) for _ in range(r.randint(1, 3))]
    inner, made = random_access(r, source)
    if r.random() < 0.5:  # what the map made is seen under another shape
        outer, domain = random_access(r, made)
    else:
        outer, domain = Access.of([1]), [len(elements(inner, made))]
    copied = elements(inner, made)
    got = through(outer, domain, made, inner)
    if got is not None:
        assert elements(got, domain) == [copied[i] for i in elements(outer, domain)]


@pytest.mark.parametrize(
    "access,domain,shape,expected",
    [
        (Access.of([12, 4, 1], 0), [2, 3, 4], [2, 3, 4], True),
        (Access.of([12, 1, 4], 2), [2, 2, 3], [2, 3, 4], True),
        (Access.of([1], 0), [24], [2, 3, 4], False),  # one dim over all of them
        (Access.of([1], 3), [2], [3, 4], False),  # crosses the end of a row
        (Access.of([-4, 1], 8), [3, 4], [3, 4], True),
        (Access.of([0, 1], 4), [5, 4], [3, 4], True),
    ],
)
def test_windows_stay_within_their_dims(access, domain, shape, expected):
    assert (window(access, domain, shape) is not None) == expected


def test_merged_dims_are_read_as_one():
    """A copy to (6, 4) of a dense tensor is read through as 24 elements in a row."""
    assert through(Access.of([1], 0), [24], [6, 4], Access.of([4, 1], 0)) == Access.of([1], 0)
    assert through(Access.of([1], 0), [24], [6, 4], Access.of([1, 6], 0)) is None


def test_symbolic_sizes_compose_where_strides_match():
    from luban.symbolic import symbol

    s = symbol("s0")
    inner = Access.of([4, 1], 0)
    assert through(Access.of([4, 1], 0), [s, 4], [s, 4], inner) == inner
    assert through(Access.of([1, 4], 0), [4, s], [s, 4], Access.of([1, s], 0)) == Access.of([s, 1], 0)
