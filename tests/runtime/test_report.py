"""Reports see what happens inside their block, nested and side by side."""

from __future__ import annotations

import threading

import pytest

from luban.runtime import report as reports
from luban.runtime.program import Program
from luban.runtime.report import Kernel, report


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(reports.time, "perf_counter", lambda: Clock.now)
    return Clock


def kernel(name):
    return Kernel(name, "generated", "native", 1, 2)


def test_an_empty_report():
    with report() as r:
        pass
    assert (r.graphs, r.cache_hits, r.fallbacks, r.kernels) == (0, 0, [], [])
    assert r.seconds == {"frontend": 0, "passes": 0, "codegen": 0, "load": 0, "total": 0}


def test_nested_blocks_both_count():
    with report() as outer:
        reports.add_graph([kernel("a")])
        with report() as inner:
            reports.add_graph(kernel(n) for n in "bc")
            reports.add_cache_hit()
        reports.add_fallback("aten.sort.default")
        reports.add_fallback("aten.sort.default")
    reports.add_graph([kernel("later")])
    assert [k.name for k in outer.kernels] == ["a", "b", "c"] and [k.name for k in inner.kernels] == ["b", "c"]
    assert (outer.graphs, inner.graphs, outer.cache_hits, inner.cache_hits) == (2, 1, 1, 1)
    assert (outer.fallbacks, inner.fallbacks) == (["aten.sort.default"], [])


def test_threads_do_not_see_each_others():
    found = {}
    barrier = threading.Barrier(2)

    def work(name):
        with report() as r:
            barrier.wait()
            reports.add_graph([kernel(name)])
            barrier.wait()
        found[name] = [k.name for k in r.kernels]

    workers = [threading.Thread(target=work, args=(n,)) for n in "ab"]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert found == {"a": ["a"], "b": ["b"]}


def test_a_block_closes_after_an_error():
    with pytest.raises(ValueError, match="x"), report() as r:
        raise ValueError("x")
    reports.add_cache_hit()
    assert r.cache_hits == 0


def test_stages_and_their_total(clock):
    with report() as r, reports.stage("total"):
        clock.now += 1
        with reports.stage("frontend"):
            clock.now += 2
            with reports.stage("passes"):
                clock.now += 4
        with reports.stage("codegen"):
            clock.now += 8
    assert r.seconds == {"frontend": 2, "passes": 4, "codegen": 8, "load": 0, "total": 15}


def test_stages_without_an_outer_block_add_up(clock):
    with report() as r:
        for name in ("passes", "codegen", "passes"):
            with reports.stage(name):
                clock.now += 1
        reports.add_seconds("load", 5)
    assert r.seconds == {"frontend": 0, "passes": 2, "codegen": 1, "load": 5, "total": 8}


def test_kernels_of_a_program():
    program = Program({"target": "native", "kernels": [{"name": "k", "kind": "library", "flops": 3, "bytes": 4}]}, b"")
    assert reports.kernels_of(program, {}) == [Kernel("k", "library", "native", 3, 4)]


def test_kernels_with_open_sizes_count_at_the_sizes_given():
    kernel = {"name": "k", "kind": "generated", "flops": "s0*s1*6", "bytes": "s0*4 + max(s0, 8)"}
    program = Program({"target": "native", "kernels": [kernel]}, b"")
    assert reports.kernels_of(program, {"s0": 5, "s1": 7}) == [Kernel("k", "generated", "native", 210, 28)]
    assert reports.kernels_of(program, {"s0": 9}) == [Kernel("k", "generated", "native", 0, 45)], "s1 is not known"
