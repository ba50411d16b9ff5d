"""Where threads of one program must wait for each other: memory that one writes and another reads.

Lanes at the same address text belong to the same thread, so that a block that is stored and loaded through one address
needs no barrier; a scalar is stored by one thread and read by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from xdsl.ir import SSAValue

Key = str | None  # the address as text; None where it may be anything
SCALAR = ""  # the key of scalars, wherever they are
Accesses = dict[SSAValue, set[Key]]


@dataclass
class Hazards:
    """Accesses since the last barrier, and, for every open loop, all accesses of its body."""

    reads: Accesses = field(default_factory=dict)
    writes: Accesses = field(default_factory=dict)
    bodies: list[tuple[Accesses, Accesses]] = field(default_factory=list)

    def load(self, buffer: SSAValue, key: Key) -> bool:
        """Notes a load; whether a barrier has to stand before it."""
        wait = _crosses(self.writes.get(buffer, set()), key)
        self._note(0, self.reads, buffer, key, wait)
        return wait

    def store(self, buffer: SSAValue, key: Key) -> bool:
        """Notes a store; whether a barrier has to stand before it."""
        wait = _crosses(self.reads.get(buffer, set()), key) or _differ(self.writes.get(buffer, {key}) | {key})
        self._note(1, self.writes, buffer, key, wait)
        return wait

    def before_loop(self, touched: set[SSAValue], stored: set[SSAValue]) -> bool:
        """Whether a loop that touches and stores these had better wait once, before it starts."""
        return any(None in self.writes.get(v, ()) for v in touched) or any(
            None in self.reads.get(v, ()) for v in stored
        )

    def _note(self, kind: int, accesses: Accesses, buffer: SSAValue, key: Key, wait: bool) -> None:
        if wait:
            self.clear()
        accesses.setdefault(buffer, set()).add(key)
        for body in self.bodies:
            body[kind].setdefault(buffer, set()).add(key)

    def clear(self) -> None:
        """A barrier."""
        self.reads.clear()
        self.writes.clear()

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The body of a loop; `needs_tail` tells before its end whether the next iteration has to wait for this one."""
        self.bodies.append(({}, {}))
        yield
        reads, writes = self.bodies.pop()
        for pending, body in ((self.reads, reads), (self.writes, writes)):
            for buffer in body:
                if buffer in pending:
                    pending[buffer] = {None}

    def needs_tail(self) -> bool:
        """Whether what an iteration stores may be touched by another thread in the next one."""
        reads, writes = self.bodies[-1]
        return any(buffer in reads and _crosses(reads[buffer] | keys, *keys) for buffer, keys in writes.items())


def _differ(keys: set[Key]) -> bool:
    return None in keys or len(keys) > 1


def _crosses(known: set[Key], *keys: Key) -> bool:
    """Whether a thread may meet with another's access: all read a scalar, one writes it."""
    return bool(known) and (_differ(known | set(keys)) or SCALAR in known)
