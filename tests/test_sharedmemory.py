"""Memory that others can map, and where in it bytes lie."""

from __future__ import annotations

import gc
import mmap
import os

import pytest

from tierfs import sharedmemory
from tierfs.buffers import Buffers, fresh
from tierfs.sharedmemory import Place, SharedMemory, shared_memory

LENGTH = 1 << 16


def test_a_region_can_be_mapped_for_as_long_as_somebody_has_it() -> None:
    memory = SharedMemory()
    view = memory.allocate(LENGTH)
    assert view is not None
    view[5:8] = b"abc"
    ((number, descriptor),) = memory.descriptors().items()
    assert memory.find(view[5:8]) == Place(number, 5, 3)
    with mmap.mmap(descriptor, LENGTH) as other:
        assert other[5:8] == b"abc"
        other[6] = ord("x")
    part = view[5:8]
    del view
    gc.collect()
    assert (bytes(part), len(memory.descriptors())) == (b"axc", 1)
    del part
    gc.collect()
    assert memory.descriptors() == {}
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_what_is_not_shared_is_not_found() -> None:
    memory = SharedMemory()
    assert memory.find(memoryview(bytearray(8))) is None
    views = [memory.allocate(LENGTH) for _ in range(3)]
    assert memory.find(memoryview(bytearray(8))) is None
    places = [memory.find(view[7:]) for view in views if view is not None]
    assert len({place.region for place in places if place is not None}) == 3
    assert {place[1:] for place in places if place is not None} == {(7, LENGTH - 7)}


def test_what_nobody_has_takes_no_memory_where_it_is_still_mapped() -> None:
    memory = SharedMemory()
    view = memory.allocate(LENGTH)
    assert view is not None
    view[:] = b"x" * LENGTH
    (descriptor,) = (os.dup(each) for each in memory.descriptors().values())
    del view
    gc.collect()
    assert (os.fstat(descriptor).st_size, os.fstat(descriptor).st_blocks) == (0, 0)
    os.close(descriptor)


def test_memory_where_a_region_was_is_not_found_in_it() -> None:
    memory = SharedMemory()
    for _ in range(50):
        dropped = memory.allocate(LENGTH)
        del dropped
        other = memoryview(mmap.mmap(-1, 2 * LENGTH))
        assert memory.find(other[LENGTH:]) is None
        larger = memory.allocate(2 * LENGTH)
        assert larger is not None
        place = memory.find(larger[LENGTH:])
        assert place is not None
        assert (place.region, place.at) == (max(memory.descriptors()), LENGTH)


def test_buffers_are_shared_where_that_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shared_memory().is_on
    monkeypatch.setattr(sharedmemory.shared_memory, "shared", SharedMemory())
    assert shared_memory().find(fresh(LENGTH)) is None
    shared_memory().is_on = True
    with Buffers().lend(1 << 20) as buffer:
        assert shared_memory().find(buffer) is not None
        assert not any(buffer)


@pytest.mark.parametrize("fails", ["memfd_create", "ftruncate"])
def test_where_there_can_be_none_memory_is_private(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(sharedmemory.shared_memory, "shared", SharedMemory())
    shared_memory().is_on = True

    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(sharedmemory.os, fails, fail)
    view = fresh(LENGTH)
    assert (len(view), shared_memory().find(view)) == (LENGTH, None)
