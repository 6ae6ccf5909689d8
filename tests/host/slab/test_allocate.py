"""Memory of a segment is reserved as a whole or not at all, and then mapped."""

import mmap
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.forked import in_child
from support.opened import descriptors, mappings

from tierfs.errors import CapacityError, StoreError
from tierfs.host.slab import pages
from tierfs.host.slab.allocate import allocate, allocate_idly, map_shared

MIB = 1 << 20
SIZE = 13 * MIB + 4096


def anonymous(name="test"):
    fd = os.memfd_create(name)
    os.ftruncate(fd, SIZE)
    return fd


@pytest.fixture
def fd():
    fd = anonymous()
    yield fd
    os.close(fd)


def reserved(fd):
    return os.fstat(fd).st_blocks * 512


def mapped(memory, what="Rss"):
    """Return how many bytes of a mapping have pages of a kind, from the kernel's ``smaps``."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _, found = re.split(rf"^{address:x}-.*$", Path("/proc/self/smaps").read_text(), maxsplit=1, flags=re.MULTILINE)
    return int(re.search(rf"^{what}: +(\d+) kB", found, re.MULTILINE)[1]) << 10


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "tierfs.local")
    pages._say_small.cache_clear()
    return caplog


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_all_pages_are_there_and_mapped(fd, threads):
    memory = allocate(fd, SIZE, "test", threads=threads)
    assert reserved(fd) == mapped(memory) == len(memory) == SIZE
    memory[SIZE - 1] = 7
    assert os.pread(fd, 1, SIZE - 1) == b"\x07"


def test_as_much_as_whole_huge_pages_fit_into_is_in_huge_pages(fd, said):
    memory = allocate(fd, SIZE, "test", threads=2)
    if "no huge pages" in said.text:
        pytest.skip(f"this kernel has none for it: {said.text}")
    assert mapped(memory, "ShmemPmdMapped") == 12 * MIB
    assert not any(memory), "a page that is made of others has their bytes, and zeros where there were none"


def test_another_process_looks_it_up_by_huge_pages_as_well(fd, said):
    allocate(fd, SIZE, "test")
    if "no huge pages" in said.text:
        pytest.skip(f"this kernel has none for it: {said.text}")
    others = map_shared(fd, SIZE, writable=False)
    assert bytes(others[5 * MIB : 5 * MIB + 1]) == b"\0"
    assert mapped(others, "ShmemPmdMapped") == 2 * MIB


@pytest.mark.parametrize("size", [pages.HUGE_BYTES, SIZE])
def test_a_mapping_begins_where_a_huge_page_may(fd, size):
    memories = [map_shared(fd, size) for _ in range(3)]
    assert [np.frombuffer(memory, np.uint8).ctypes.data % (2 * MIB) for memory in memories] == [0, 0, 0]


def test_memory_is_allocated_by_a_process_of_its_own(fd):
    assert allocate_idly(fd, SIZE, lambda: True, lambda: None)
    assert reserved(fd) == SIZE
    memory = allocate(fd, SIZE, "test")
    assert not any(memory)


def test_that_process_has_the_lowest_priority_and_ends_with_its_parent(fd):
    def child():
        assert pages.main(fd, SIZE, os.getppid())
        assert os.getpriority(os.PRIO_PROCESS, 0) == 19
        assert not pages.main(fd, SIZE, 1), "that was its parent when it started"

    assert in_child(child) == 0


def test_a_process_that_cannot_allocate_says_so(small_shm):
    fd = os.open(small_shm / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 80 * MIB)
    assert not allocate_idly(fd, 80 * MIB, lambda: True, lambda: None)
    os.close(fd)


def test_missing_huge_pages_are_logged_once(fd, monkeypatch, said):
    monkeypatch.setattr(pages, "MADV_COLLAPSE", 12345)  # as on an older kernel
    memory = allocate(fd, SIZE, "test", threads=1)
    assert reserved(fd) == mapped(memory) == SIZE
    assert not mapped(memory, "ShmemPmdMapped")
    assert said.text.count("no huge pages") == 1
    assert "Linux 6.1" in said.text


def test_an_older_kernel_reserves_memory_with_one_warning(fd, monkeypatch, caplog):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 12345)
    pages._say_once.cache_clear()
    memory = allocate(fd, SIZE, "test", threads=1)
    assert reserved(fd) == len(memory) == SIZE
    assert caplog.text.count("Linux 5.14") == 1


def test_too_little_memory_is_an_error_and_not_a_signal_later(small_shm):
    path = small_shm / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 80 * MIB)
    with pytest.raises(CapacityError, match=f"no memory for {path}: No space left"):
        allocate(fd, 80 * MIB, str(path))
    os.close(fd)


def test_other_kernel_errors_are_raised(fd, monkeypatch):
    monkeypatch.setattr(pages, "populate", lambda *_: False)
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    monkeypatch.setattr(
        pages, "map_file", lambda fd, length, **_: memoryview(mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ))
    )
    with pytest.raises(StoreError, match="no memory for test: Bad file descriptor"):
        allocate(readable, SIZE, "test")
    os.close(readable)


def test_an_error_of_one_thread_is_raised(fd, monkeypatch, with_processors):
    def fail(*_):
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        time.sleep(0.001)
        return True

    monkeypatch.setattr(pages, "populate", fail)
    with_processors(2)
    with pytest.raises(MemoryError):
        allocate(fd, SIZE, "test", threads=2)


def test_at_the_end_of_the_interpreter_one_thread_does_it(fd, monkeypatch):
    def refuse(_self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert allocate(fd, SIZE, "test", threads=3) is not None
    assert reserved(fd) == SIZE


@pytest.mark.parametrize("writable", [True, False])
def test_a_mapping_is_of_the_file_and_keeps_no_descriptor(writable):
    name = f"mapped-{writable}"  # no other test has mapped this name
    fd = anonymous(name)
    os.pwrite(fd, b"before", SIZE - 6)
    before = descriptors()
    memory = map_shared(fd, SIZE, writable=writable)
    assert descriptors() <= before
    assert mappings(name).total() == 1
    assert memoryview(memory).readonly is not writable
    assert memory[SIZE - 6 :] == b"before"
    os.pwrite(fd, b"behind", SIZE - 6)
    assert memory[SIZE - 6 :] == b"behind"
    if writable:
        memory[:3] = b"new"
        assert os.pread(fd, 3, 0) == b"new"
    del memory
    assert not mappings(name).total()
    assert not mappings(name)
    os.close(fd)


def test_no_more_is_mapped_than_there_is(fd):
    with pytest.raises(StoreError, match=f"a segment of {SIZE + 1} bytes cannot be mapped: its file is shorter"):
        map_shared(fd, SIZE + 1)


def test_a_failed_mapping_leaves_nothing(fd):
    readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = mappings("memfd:")
    with pytest.raises(StoreError, match="cannot be mapped: Permission denied"):
        map_shared(readable, SIZE)
    assert mappings("memfd:") <= before
    os.close(readable)
