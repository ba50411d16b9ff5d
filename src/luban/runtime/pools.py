"""Memory for program outputs that is used again: torch storages over huge-page memory.

A fresh output would fault its pages in at every step, which costs more than most kernels. A block is used again once
nobody outside holds its storage: torch counts the holders (tensors, views, arrays, saved tensors), and Python counts
who holds the storage object itself. Blocks that stay unused for many calls go back to the system.
"""

from __future__ import annotations

import mmap
import sys
from collections import deque
from weakref import WeakValueDictionary

import torch

from luban.runtime import memory

SMALL = 64 << 10  # bytes; smaller outputs are plain torch tensors, malloc keeps their pages anyway
_CHUNK = 8 << 20  # blocks below a huge page are cut from chunks of this size
_SCAN = 32  # blocks looked at before a new one is made
_IDLE_CALLS = 256  # a block that was not handed out for so many calls leaves the pool
_FRESH = 64 << 20  # after so many bytes of new blocks, free ones beyond the limit below are dropped
_KEEP = 256 << 20  # bytes of free blocks that may stay even when little is in use

_use_count = torch._C._storage_Use_Count
_guards = getattr(torch._C._dynamo, "guards", None)


def _view_slow(base: torch.Tensor, shape, strides, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=base.dtype).set_(base.untyped_storage(), base.storage_offset() + offset, shape, strides)


def _empty_slow(shape, strides, dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


# Inductor's helpers make a tensor in half a microsecond, without the dispatcher; the public calls do the same in two.
view = getattr(_guards, "_reinterpret_tensor", _view_slow)
empty = getattr(_guards, "_empty_strided_cpu", _empty_slow)


class Block:
    """One storage: its address, size class and a base tensor for each dtype it was used with."""

    __slots__ = ("address", "size", "last_call", "storage", "storage_id", "bases", "owner", "quiet", "__weakref__")

    def __init__(self, mapping: mmap.mmap, offset: int, size: int):
        with torch.inference_mode(False):
            base = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
        self.bases = {torch.uint8: base}
        self.storage = base.untyped_storage()
        self.storage_id = self.storage._cdata
        self.owner = base
        self.address, self.size, self.last_call = base.data_ptr(), size, 0
        self.quiet = self._holders()

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `dtype` over the whole block."""
        found = self.bases.get(dtype)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                before = self._holders()
                found = self.bases[dtype] = self.owner.view(dtype)
            # The new base is a holder of our own: what counts as nobody's grows by exactly that.
            after = self._holders()
            self.quiet = (self.quiet[0] + after[0] - before[0], self.quiet[1] + after[1] - before[1])
        return found

    def free(self) -> bool:
        """True when nobody but the pool holds the storage: as many holders as when the block was made."""
        return (_use_count(self.storage_id), sys.getrefcount(self.storage)) == self.quiet

    def held_by(self, tensors: int) -> bool:
        """True when nobody but the pool and so many tensors holds the storage."""
        count, references = self.quiet
        return self._holders() == (count + tensors, references)

    def _holders(self) -> tuple[int, int]:
        return _use_count(self.storage_id), sys.getrefcount(self.storage)

    def moved(self) -> bool:
        """True when someone exchanged the memory under the storage (`share_memory_`): the block is lost to the pool."""
        return self.owner.data_ptr() != self.address


class OutputPool:
    """All blocks of the process, in one queue a size class, oldest first.

    Safe among threads: a block is out of its queue while it is handled.
    """

    def __init__(self) -> None:
        self.queues: dict[int, deque[Block]] = {}
        self.saved: WeakValueDictionary[int, Block] = (
            WeakValueDictionary()
        )  # blocks of kept values, by their storage's id
        self.calls = 0
        self._fresh = 0
        self._chunk: tuple[mmap.mmap, int, int] | None = None

    def take(self, size: int) -> Block:
        """A free block of the size class; the caller makes its tensors and then calls `give`."""
        queue = self.queues.get(size)
        if queue is None:
            queue = self.queues.setdefault(size, deque())
        for _ in range(min(len(queue), _SCAN)):
            try:
                block = queue.popleft()
            except IndexError:  # another thread took it
                break
            if block.free():
                if block.moved():
                    continue
                block.last_call = self.calls
                return block
            queue.append(block)
        return self._make(size)

    def give(self, block: Block) -> None:
        """Puts a block back behind the others of its class, its tensors alive."""
        self.queues[block.size].append(block)

    def tick(self) -> None:
        """Counts one program call; now and then drops what has been idle for long."""
        self.calls += 1
        if self.calls % _IDLE_CALLS == 0:
            self.trim()

    def trim(self, keep: int | None = None) -> int:
        """Drops blocks idle for long and, beyond `keep` bytes, the longest idle free ones; returns the bytes dropped.

        A block still held after so long leaves the pool too: it belongs to its holder then, and goes when that does.
        """
        free: list[tuple[int, int, Block]] = []
        for queue in list(self.queues.values()):
            for block in list(queue):
                if block.free():
                    free.append((block.last_call, block.size, block))
                elif self.calls - block.last_call >= _IDLE_CALLS:
                    self._remove(block)
        free.sort(key=lambda entry: entry[0])
        total = sum(size for _, size, _ in free)
        dropped = 0
        for last, size, block in free:
            excess = keep is not None and total - dropped > keep
            if (excess or self.calls - last >= _IDLE_CALLS) and self._remove(block):
                dropped += size
        return dropped

    def _remove(self, block: Block) -> bool:
        try:
            self.queues[block.size].remove(block)
        except ValueError:  # another thread took it
            return False
        return True

    def bytes(self, held: bool = False) -> int:
        """Address space of all blocks, or of those that someone holds; pages that were never touched take no memory."""
        return sum(b.size for queue in list(self.queues.values()) for b in list(queue) if not held or not b.free())

    def _make(self, size: int) -> Block:
        self._fresh += size
        if self._fresh > _FRESH:
            self._fresh = 0
            self.trim(keep=max(_KEEP, self.bytes(held=True)))
        if size >= memory.HUGE_PAGE:
            mapping, offset = memory.reserve(size)
        else:
            mapping, offset = self._cut(size)
        block = Block(mapping, offset, size)
        block.last_call = self.calls
        return block

    def _cut(self, size: int) -> tuple[mmap.mmap, int]:
        chunk, self._chunk = self._chunk, None  # taken away while in use, so that no other thread cuts the same piece
        if chunk is None or chunk[1] + size > chunk[2]:
            mapping, offset = memory.reserve(_CHUNK)
            chunk = (mapping, offset, offset + _CHUNK)
        mapping, offset, end = chunk
        self._chunk = (mapping, offset + size, end)
        return mapping, offset


def size_class(size: int) -> int:
    """Bytes rounded up to eight steps an octave, in whole pages, so that changing shapes share blocks.

    The pages beyond the asked size are never touched and so take no memory.
    """
    step = max(4096, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


outputs = OutputPool()
