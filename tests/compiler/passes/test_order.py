"""The order of groups: valid, never more memory than on demand, weight gradients next to what they read."""

from __future__ import annotations

import random

import pytest

from luban.compiler.passes.graph.order import Task, _on_demand, order


def resting(tasks, turns):
    """Bytes of temporaries alive after each task, counted from scratch."""
    sizes = {v: size for task in tasks for v, size in task.makes.items()}
    maker = {v: n for n, task in enumerate(tasks) for v in task.makes}
    live = []
    for at in range(len(turns)):
        done, later = set(turns[: at + 1]), turns[at + 1 :]
        live.append(sum(sizes[v] for v in sizes if maker[v] in done and any(v in tasks[n].reads for n in later)))
    return live


def peak(tasks, turns):
    return max(resting(tasks, turns), default=0)


def random_tasks(seed):
    r = random.Random(seed)
    tasks: list[Task] = []
    values: list[tuple[int, int]] = []  # (value, maker)
    for n in range(r.randrange(1, 25)):
        read = r.sample(values, min(len(values), r.randrange(4)))
        ancestors = 0
        for m in {m for _, m in read} | ({r.randrange(n)} if n and r.random() < 0.1 else set()):
            ancestors |= tasks[m].ancestors | 1 << m
        made = {len(values) + k: r.choice([0, 1, 3, 10]) for k in range(r.randrange(3))}
        values += [(v, n) for v in made]
        flags = [r.random() < p for p in (0.3, 0.2, 0.2)]
        tasks.append(Task(ancestors, made, frozenset(v for v, _ in read), *flags))
    read_somewhere = {v for task in tasks for v in task.reads}
    return [
        Task(
            t.ancestors,
            {v: s for v, s in t.makes.items() if v in read_somewhere},
            t.reads,
            t.wanted,
            t.fails,
            t.changes,
        )
        for t in tasks
    ]


@pytest.mark.parametrize("seed", range(300))
def test_random_tasks(seed):
    tasks = random_tasks(seed)
    turns = order(tasks)
    assert sorted(turns) == list(range(len(tasks)))
    at = {n: k for k, n in enumerate(turns)}
    for n, task in enumerate(tasks):
        assert all(at[k] < at[n] for k in range(len(tasks)) if task.ancestors >> k & 1)
    given = _on_demand(tasks)
    assert peak(tasks, turns) <= peak(tasks, given)
    stood = {n: k for k, n in enumerate(given)}
    for n, task in enumerate(tasks):
        if task.changes:  # bad data still stops the program before an argument changes
            assert all(at[k] < at[n] for k, t in enumerate(tasks) if t.fails and stood[k] < stood[n])


def test_gradients_of_weights_do_not_wait_for_the_end():
    """A chain of layers: the gradient of each layer's result is read by the next layer's and by a weight's gradient."""
    layers = 10
    tasks = []
    for n in range(layers):
        earlier = sum(1 << 2 * k for k in range(n))
        tasks.append(Task(earlier, {n: 100}, frozenset([n - 1] if n else []), wanted=False))
        tasks.append(Task(earlier | 1 << 2 * n, {}, frozenset([n]), wanted=True))
    tasks.append(Task(sum(1 << 2 * k for k in range(layers)), {}, frozenset([layers - 1]), wanted=True))
    assert peak(tasks, order(tasks)) == 100
    assert peak(tasks, list(range(0, 2 * layers, 2)) + list(range(1, 2 * layers + 1, 2))) >= layers * 100


def test_nothing_to_order():
    assert order([]) == []
