"""The arena and the output pool: memory stays, and is never handed out while anyone holds it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from luban.errors import OutOfMemoryError
from luban.runtime import arena, memory, pools

SIZE = pools.size_class(1 << 20)


@pytest.fixture
def pool():
    return pools.OutputPool()


def hand_out(pool, size=SIZE, dtype=torch.float32):
    """One tensor over a block, as a program call makes it."""
    block = pool.take(size)
    made = pools.view(block.base(dtype), (1000,), (1,), 0)
    pool.give(block)
    return made


def test_arena_is_aligned_and_stays():
    arena.release()
    first = arena.address(1000)
    assert first % memory.HUGE_PAGE == 0 and arena.size() == memory.HUGE_PAGE
    assert arena.address(memory.HUGE_PAGE) == first
    arena.address(5 * memory.HUGE_PAGE + 1)
    assert arena.size() == 6 * memory.HUGE_PAGE
    arena.release()
    assert arena.size() == 0


def test_each_thread_has_an_arena_of_its_own():
    mine = arena.address(4096)
    found = []
    thread = threading.Thread(target=lambda: found.append(arena.address(4096)))
    thread.start()
    thread.join()
    assert found[0] != mine


def test_too_much_memory_is_a_sentence():
    with pytest.raises(OutOfMemoryError, match="smaller batch"):
        memory.reserve(1 << 60)


def test_the_heap_is_trimmed_where_the_library_can():
    memory.trim_heap()
    blocks = [bytes(100_000) for _ in range(50)]
    del blocks[::2]
    memory.trim_heap()
    assert all(b == bytes(100_000) for b in blocks)


def test_a_dropped_output_is_used_again(pool):
    first = hand_out(pool)
    address = first.data_ptr()
    del first
    assert hand_out(pool).data_ptr() == address
    assert pool.bytes() == SIZE


HOLDERS = {
    "tensor": lambda t: t,
    "view": lambda t: t.view(10, 100)[3:],
    "detached": lambda t: t.detach(),
    "array": lambda t: t.numpy(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "storage": lambda t: t.untyped_storage(),
    "other dtype": lambda t: t.view(torch.int32),
    "graph": lambda t: (t.requires_grad_() * t).sum(),
    "parameter": lambda t: torch.nn.Parameter(t),
    "buffer": lambda t: memoryview(t.numpy()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_no_block_is_used_again_while_somebody_holds_it(pool, holder):
    made = hand_out(pool)
    address = made.data_ptr()
    held = HOLDERS[holder](made)
    del made
    others = [hand_out(pool) for _ in range(3)]
    assert address not in [o.data_ptr() for o in others]
    del held, others
    gc.collect()
    assert address in [t.data_ptr() for t in [hand_out(pool) for _ in range(1)] + [hand_out(pool) for _ in range(4)]]


def test_blocks_of_every_dtype(pool):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        made = hand_out(pool, dtype=dtype)
        assert made.dtype == dtype and made.is_contiguous() and not made.requires_grad and not made.is_inference()
        del made
    assert pool.bytes() == SIZE


def test_outputs_are_ordinary_tensors_even_when_first_made_in_inference_mode(pool):
    with torch.inference_mode():
        made = hand_out(pool)
    del made
    x = hand_out(pool).fill_(2.0).requires_grad_()
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((1000,), 4.0))


def test_each_output_has_its_own_version_counter(pool):
    first = hand_out(pool)
    first.add_(1)
    version = first._version
    del first
    assert hand_out(pool)._version == 0 < version


def test_a_block_whose_memory_was_exchanged_is_not_used_again(pool):
    made = hand_out(pool).fill_(1.0)
    made.share_memory_()
    address = made.data_ptr()
    del made
    assert hand_out(pool).data_ptr() != address


def test_two_threads_never_get_the_same_block(pool):
    clash = []

    def work():
        for i in range(300):
            a, b = hand_out(pool), hand_out(pool)
            mark = threading.get_ident() * 1000 + i
            a.view(torch.int64)[:] = mark
            b.view(torch.int64)[:] = -mark
            if not (a.view(torch.int64) == mark).all() or a.data_ptr() == b.data_ptr():
                clash.append(i)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not clash


def test_idle_blocks_leave_the_pool(pool):
    del (made := [hand_out(pool)])[:]
    for _ in range(pools._IDLE_CALLS - 1):
        pool.tick()
    assert pool.bytes() == SIZE
    pool.tick()
    assert pool.bytes() == 0 and not made


def test_blocks_held_for_long_belong_to_their_holder(pool):
    kept = hand_out(pool).fill_(5.0)
    for _ in range(pools._IDLE_CALLS):
        pool.tick()
    assert pool.bytes() == 0
    gc.collect()
    assert torch.equal(kept, torch.full((1000,), 5.0))


def test_free_memory_is_bounded_when_sizes_keep_changing(pool, monkeypatch):
    monkeypatch.setattr(pools, "_KEEP", 16 << 20)
    monkeypatch.setattr(pools, "_FRESH", 4 << 20)
    for i in range(60):
        hand_out(pool, pools.size_class((1 << 20) * (i + 1)))
        pool.tick()
    assert pool.bytes() <= (16 << 20) + 2 * pools.size_class(60 << 20)


def test_trim_drops_the_longest_idle_first(pool):
    for i in range(3):
        hand_out(pool, pools.size_class((2 + i) << 20))
        pool.tick()
    assert pool.trim(keep=7 << 20) == 2 << 20
    assert sorted(size for size, queue in pool.queues.items() if queue) == [3 << 20, 4 << 20]


@pytest.mark.parametrize("size", [1, 4096, 65536, 65537, 1_000_000, 123_456_789, 1 << 40])
def test_size_classes_waste_little(size):
    rounded = pools.size_class(size)
    assert size <= rounded <= max(4096, size * 1.125 + 4096) and rounded % 4096 == 0
    assert pools.size_class(rounded) == rounded


def test_the_public_way_to_make_a_view_gives_the_same():
    base = torch.arange(100.0)
    for offset, shape, strides in ((0, (4, 5), (5, 1)), (7, (3,), (10,)), (2, (), ())):
        assert torch.equal(pools._view_slow(base, shape, strides, offset), base.as_strided(shape, strides, offset))
        assert torch.equal(pools.view(base, shape, strides, offset), base.as_strided(shape, strides, offset))
