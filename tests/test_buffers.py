"""`tierfs.buffers`: pools that reuse buffers."""

import gc
import os
import threading

import pytest
from support.forked import answer_of
from support.waiting import HANG_S

from tierfs.buffers import Buffers, block_buffers, buffers, fresh
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES
from tierfs.objects.backends.local import LocalObjects


def test_a_buffer_is_used_again_and_is_as_large_as_a_chunk():
    pool = Buffers()
    first = pool.take()
    assert len(first) == CHUNK_BYTES
    pool.give(first)
    assert pool.take() is first


def test_those_of_a_block_take_no_more_than_that():
    pool = Buffers(BLOCK_BYTES)
    assert len(pool.take()) == BLOCK_BYTES
    with pool.lend(BLOCK_BYTES - 1) as memory:
        assert len(memory) == BLOCK_BYTES - 1
        assert repr(pool) == "Buffers(2 taken, 0 free)"


def test_reading_by_blocks_takes_the_memory_of_one_block(tmp_path):
    objects = LocalObjects(tmp_path)
    objects.put("whole", [b"x" * (3 * BLOCK_BYTES)])
    before = repr(buffers()), repr(block_buffers())
    seen = []

    def use(_, take):
        seen.append((repr(buffers()), repr(block_buffers())))

    objects.stream("whole", 3 * BLOCK_BYTES, use)
    assert seen[0][0] == before[0]
    assert seen[0][1] != before[1]


def test_as_many_are_kept_as_are_in_use_and_a_few_at_least():
    pool = Buffers(kept=2)
    taken = [pool.take() for _ in range(8)]
    for buffer in taken[:4]:
        pool.give(buffer)
    assert repr(pool) == "Buffers(4 taken, 4 free)"
    again = [pool.take() for _ in range(4)]
    assert {id(buffer) for buffer in again} == {id(buffer) for buffer in taken[:4]}
    for buffer in [*taken[4:], *again]:
        pool.give(buffer)
    assert repr(pool) == "Buffers(0 taken, 2 free)"


def test_one_that_never_comes_back_keeps_no_more_than_itself():
    pool = Buffers(kept=1)
    taken = [pool.take() for _ in range(6)]
    lost = taken.pop()
    for buffer in taken:
        pool.give(buffer)
    assert len(lost) == CHUNK_BYTES
    assert repr(pool) == "Buffers(1 taken, 1 free)"


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_memory_of_any_length_is_lent_and_comes_back_after_an_error(length):
    pool = Buffers()
    with pytest.raises(ZeroDivisionError), pool.lend(length) as memory:
        assert len(memory) == length
        memory[-1:] = b"x" * min(length, 1)
        raise ZeroDivisionError
    assert repr(pool).startswith("Buffers(0 taken")


def test_garbage_that_gives_a_buffer_back_may_be_collected_at_any_time():
    pool = Buffers()

    class Held:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            pool.give(memoryview(b"x"))

    class Collecting(list):
        def pop(self):
            Held()
            gc.collect()
            return super().pop()

    free = pool._free = Collecting([memoryview(b"y")])
    assert bytes(pool.take()) in {b"x", b"y"}
    assert free


def test_a_child_has_buffers_of_its_own():
    shared = buffers()
    held, done = threading.Event(), threading.Event()

    def hold():
        with shared._lock:
            held.set()
            done.wait(HANG_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(HANG_S)
    answer = answer_of(lambda: buffers() is not shared and len(buffers().take()) == CHUNK_BYTES)
    done.set()
    holder.join()
    assert answer == "True"


def test_fresh_memory_is_had_page_by_page():
    before = resident()
    memory = fresh(64 << 20)
    memory[0] = 1
    assert memory[:2] == b"\1\0"
    assert resident() - before < 32 << 20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
