"""Scratch memory: each thread has its own, or borrows memory that another thread used before."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from tierfs.codec import Codec, Coding, decode_block, encode_block
from tierfs.codec import numbers as module
from tierfs.codec.numbers import lent, scratch


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """The memory that waits for its next user: none at first."""
    free = []
    monkeypatch.setattr(module, "_free", free)
    return free


def on_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def address():
    return scratch("test", 1, 1000).ctypes.data


def test_a_thread_has_memory_of_its_own():
    assert address() == address() != on_a_thread(address)


def test_scratch_memory_is_reused():
    def borrow():
        with lent():
            return address()

    first = borrow()
    assert [on_a_thread(borrow) for _ in range(3)] == [first] * 3
    assert address() != first


def test_two_at_once_have_two(free):
    with lent():
        outer = address()

        def borrow():
            with lent():
                return address()

        assert on_a_thread(borrow) != outer
        with lent():
            assert address() != outer
        assert address() == outer
    assert len(free) == 2


def test_scratch_memory_kept_for_reuse_is_bounded(free):
    with contextlib.ExitStack() as stack:
        for _ in range(3 * module.KEPT_MAX):
            stack.enter_context(lent())
            address()
    assert len(free) == module.KEPT_MAX


def test_scratch_memory_is_returned_after_an_error(free):
    own = address()
    with pytest.raises(ValueError, match="no"), lent():
        raise ValueError("no")
    assert address() == own
    assert len(free) == 1


def test_threads_that_decode_in_turns_share_memory(free):
    raw = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32).tobytes()
    out = memoryview(bytearray(len(raw)))
    codec, length = encode_block(memoryview(raw), Coding(Codec.PLANE, 4), None, out)
    assert codec is Codec.PLANE

    def decode():
        found = memoryview(bytearray(len(raw)))
        decode_block(codec, out[:length], found, None, "here")
        return bytes(found)

    assert all(on_a_thread(decode) == raw for _ in range(5))
    assert len(free) == 1
