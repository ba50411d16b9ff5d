"""In which order the groups of a function run, so that few temporaries lie about at once.

First on demand: each as late as its readers allow. (In the order in which they can run, Llama's backward kept 155 MB of
temporaries.) Then whatever takes no more memory than it gives back moves ahead to where it can run: a weight's gradient
is only the caller's, but it is the last to read the gradient of a layer's results. (On demand alone, the bfloat16
backward of a BERT of 6 layers kept those of all layers, 71 MB; this way 13.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A group: the groups that must run before it, as bits; its temporaries with their bytes; the temporaries it reads.

    `wanted`  the caller waits for a result of it
    `fails`   it may meet bad data, which ends the program
    `changes` it overwrites an argument
    """

    ancestors: int
    makes: dict[int, int]
    reads: frozenset[int]
    wanted: bool
    fails: bool = False
    changes: bool = False


def order(tasks: Sequence[Task]) -> list[int]:
    """The numbers of the tasks, each after its ancestors."""
    return _ahead(tasks, _on_demand(tasks))


def _on_demand(tasks: Sequence[Task]) -> list[int]:
    """What the caller waits for in the order in which it can run; before each what it needs, the longest chain first."""
    ready = _ready_order(tasks)
    order: dict[int, None] = {}
    for root in [*(n for n in ready if tasks[n].wanted), *ready]:
        stack = [root]
        while stack:
            n = stack[-1]
            missing = [p for p in _direct(tasks, n) if p not in order]
            if missing:
                stack.append(max(missing, key=lambda p: tasks[p].ancestors.bit_count()))
            else:
                order[stack.pop()] = None
    return list(order)


def _ready_order(tasks: Sequence[Task]) -> list[int]:
    """Tasks so that each comes after its ancestors, else in their own order."""
    done = 0
    order: list[int] = []
    waiting = list(range(len(tasks)))
    while waiting:
        later = []
        for n in waiting:
            if tasks[n].ancestors & ~done:
                later.append(n)
            else:
                order.append(n)
                done |= 1 << n
        waiting = later
    return order


def _direct(tasks: Sequence[Task], n: int) -> list[int]:
    """The ancestors of a task that are no ancestors of another one of its ancestors."""
    bits = tasks[n].ancestors
    listed = [k for k in range(bits.bit_length()) if bits >> k & 1]
    behind = 0
    for k in listed:
        behind |= tasks[k].ancestors
    return [k for k in listed if not behind >> k & 1]


def _ahead(tasks: Sequence[Task], given: list[int]) -> list[int]:
    """The given order, but what adds no memory runs as soon as it can, that which frees most first."""
    before = _with_checks(tasks, given)
    readers: dict[int, int] = {}
    for task in tasks:
        for v in task.reads:
            readers[v] = readers.get(v, 0) + 1
    sizes = {v: size for task in tasks for v, size in task.makes.items()}

    def added(n: int) -> int:
        freed = sum(sizes[v] for v in tasks[n].reads if readers[v] == 1)
        return sum(tasks[n].makes.values()) - freed

    order: list[int] = []
    waiting, done = list(given), 0
    while waiting:
        ready = [n for n in waiting if not before[n] & ~done]
        best = min(ready, key=added)
        chosen = best if added(best) <= 0 else waiting[0]
        waiting.remove(chosen)
        order.append(chosen)
        done |= 1 << chosen
        for v in tasks[chosen].reads:
            readers[v] -= 1
    return order


def _with_checks(tasks: Sequence[Task], given: list[int]) -> list[int]:
    """The ancestors; for what overwrites an argument also the checks that stood before it: bad data must stop it."""
    before = [task.ancestors for task in tasks]
    checks = 0
    for n in given:
        if tasks[n].changes:
            before[n] |= checks
        if tasks[n].fails:
            checks |= 1 << n
    return before
