"""A file is published whole, and an open file keeps its bytes."""

import errno
import os
import random
import re
import threading
import time
from datetime import datetime, timezone

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.mount_hand import Hand
from support.waiting import HANG_S

from tierfs import store as verbs
from tierfs.errors import CapacityError, ConflictError, ReadOnlyError, StoreError
from tierfs.flusher.upload import Uploader
from tierfs.mount import overlay, process, reading
from tierfs.mount.attributes import attributes_of
from tierfs.mount.state import Recent
from tierfs.mount.wire import SetAttr, Valid
from tierfs.store import Writer

MIB = 1 << 20


def set_attributes(hand, node, valid, *, size=0, mtime_ns=0, mode=0):
    hand.files.set_attributes(node, SetAttr(valid, 0, size, mtime_ns, mode, 0, 0))


def test_a_new_file_is_in_the_store_once_it_is_closed(hand):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"hello"))
    assert verbs.kind_of(hand.state.store, "a") is None
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == b"hello"


def test_an_empty_file_is_published_when_it_is_released(hand):
    hand.files.release(hand.create("a"))
    assert verbs.load(hand.state.store, "a") == b""


def test_a_sync_publishes_and_writing_goes_on(hand):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"one"))
    hand.files.sync(handle)
    assert verbs.load(hand.state.store, "a") == b"one"
    hand.files.write(handle, 3, memoryview(b"two"))
    assert hand.read(handle) == b"onetwo"
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == b"onetwo"


def test_random_writes_end_up_where_they_belong(hand):
    chance = random.Random(5)
    model = bytearray(chance.randbytes(5 * MIB + 17))
    hand.write_file("a", bytes(model))
    handle = hand.open("a", os.O_RDWR)
    for _ in range(60):
        offset, data = chance.randrange(6 * MIB), chance.randbytes(chance.randrange(1, 100_000))
        if offset > len(model):
            model.extend(bytes(offset - len(model)))
        model[offset : offset + len(data)] = data
        hand.files.write(handle, offset, memoryview(data))
        if chance.random() < 0.2:
            length = chance.randrange(7 * MIB)
            del model[length:]
            model.extend(bytes(length - len(model)))
            set_attributes(hand, handle.node, Valid.SIZE, size=length)
        if chance.random() < 0.1:
            hand.files.sync(handle)
        assert hand.read(handle, offset // 2, 3 * MIB) == bytes(model[offset // 2 : offset // 2 + 3 * MIB])
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == bytes(model)


def test_an_append_stores_the_end_alone(hand):
    hand.write_file("a", os.urandom(40 * MIB))
    before = {row.name for row in verbs.stat(hand.state.store, "a").manifest.rows}
    handle = hand.open("a", os.O_WRONLY | os.O_APPEND)
    hand.files.write(handle, 40 * MIB, memoryview(b"x"))
    hand.close(handle)
    after = {row.name for row in verbs.stat(hand.state.store, "a").manifest.rows}
    assert len({name.digest for name in before} & {name.digest for name in after}) == 2


def test_a_file_that_was_replaced_keeps_its_bytes_for_who_has_it_open(hand):
    hand.write_file("a", b"old" * MIB)
    handle = hand.open("a")
    hand.write_file("a", b"new" * MIB)
    assert hand.read_file("a") == b"new" * MIB
    assert hand.read(handle) == b"old" * MIB
    assert handle.node is not hand.node("a")


def test_a_file_that_others_keep_opening_can_be_emptied(hand):
    hand.write_file("a", b"old")
    first = hand.open("a")
    with pytest.raises(OSError) as caught:
        hand.files.open(hand.node("a"), os.O_WRONLY | os.O_TRUNC)
    assert caught.value.errno == errno.ESTALE
    second = hand.open("a")
    hand.close(hand.open("a"))
    handle = hand.files.open(hand.node("a"), os.O_WRONLY | os.O_TRUNC)  # the kernel tries no third time
    hand.files.write(handle, 0, memoryview(b"new"))
    hand.close(handle)
    assert hand.read(first) == b"old"
    assert hand.read(second) == hand.read_file("a") == b"new"


def test_a_file_that_cannot_be_emptied_by_its_descriptor_keeps_its_bytes(hand):
    hand.write_file("a", b"old")
    first = hand.open("a")
    for _ in range(2):  # the kernel repeats the open on the same inode
        with pytest.raises(OSError) as caught:
            hand.files.open(first.node, os.O_WRONLY | os.O_TRUNC)
        assert caught.value.errno == errno.ESTALE
    assert hand.read(first) == hand.read_file("a") == b"old"
    assert hand.files.dirty() == []


def test_a_file_opened_to_read_and_truncate_is_emptied(hand):
    hand.write_file("a", b"old")
    hand.close(hand.open("a", os.O_RDONLY | os.O_TRUNC))
    assert verbs.load(hand.state.store, "a") == hand.read_file("a") == b""


def test_a_file_that_another_host_replaced_is_another_inode(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.write_file("a", b"old" * MIB)
    handle = hand.open("a")
    verbs.save(other, "a", b"new" * MIB)
    assert hand.read_file("a") == b"new" * MIB
    assert hand.read(handle) == b"old" * MIB


def test_a_file_that_is_replaced_all_the_time_can_be_opened(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.state.stale = Recent(HANG_S)
    hand.write_file("a", b"0")
    node = hand.node("a")
    verbs.save(other, "a", b"replaced")
    with pytest.raises(OSError) as caught:
        hand.files.open(node, os.O_RDONLY)
    assert caught.value.errno == errno.ESTALE
    again = hand.node("a")
    verbs.save(other, "a", b"1")
    handle = hand.files.open(again, os.O_RDONLY)  # the kernel does not try a third time
    assert hand.read(handle) == b"replaced"
    assert hand.read_file("a") == b"1"
    hand.close(handle)


def test_each_thread_that_had_an_old_version_opens_the_next(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.state.stale = Recent(HANG_S)  # however long this takes
    hand.write_file("a", b"0")
    node = hand.node("a")
    hand.state.nodes.told(node)
    handle = hand.open("a")
    verbs.save(other, "a", b"replaced")

    def is_stale(node, thread):
        with pytest.raises(OSError) as caught:
            hand.files.open(node, os.O_RDONLY, thread)
        return caught.value.errno == errno.ESTALE

    threads = (11, 12, 13)
    assert all(is_stale(node, thread) for thread in threads)
    again = [hand.node("a") for _ in threads]  # the kernel looks the name up again for each thread
    verbs.save(other, "a", b"1")
    assert is_stale(again[0], 14)
    handles = [hand.files.open(one, os.O_RDONLY, thread) for one, thread in zip(again, threads, strict=True)]
    assert [hand.read(one) for one in handles] == [b"replaced"] * 3
    assert all(is_stale(again[0], thread) for thread in threads)
    for one in (*handles, handle):
        hand.close(one)


def test_a_version_that_another_host_published_is_not_overwritten(hand, other):
    if hand.state.store.tiers is not None:
        pytest.skip("what is staged here is not seen there")
    hand.write_file("a", b"first")
    handle = hand.open("a", os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"ours!"))
    verbs.save(other, "a", b"theirs")
    with pytest.raises(ConflictError):
        hand.files.flush(handle)
    assert hand.node("a").attributes.size == len(b"theirs")
    between = hand.open("a")  # the kernel releases a handle some time after `close`
    with pytest.raises(ConflictError):
        hand.files.release(handle)
    assert hand.read(between) == b"theirs"
    hand.close(between)
    assert hand.read_file("a") == b"theirs"


def test_a_file_that_was_removed_can_be_read_and_written_by_who_has_it_open(hand):
    hand.write_file("a", b"bytes" * MIB)
    reading, writing = hand.open("a"), hand.create("b")
    hand.files.write(writing, 0, memoryview(b"b"))
    for name in ("a", "b"):
        hand.tree.remove_file(hand.state.nodes.root, name)
    assert hand.names() == []
    assert hand.read(reading) == b"bytes" * MIB
    hand.files.write(writing, 1, memoryview(b"b"))
    assert hand.read(writing) == b"bb"
    hand.close(writing)
    hand.close(reading)
    assert verbs.kind_of(hand.state.store, "b") is None


def opened_twice(hand, node, flags):
    """Open an inode as the kernel does, which repeats an open that ends with ESTALE."""
    with pytest.raises(OSError) as caught:
        hand.files.open(node, flags)
    assert caught.value.errno == errno.ESTALE
    return hand.files.open(node, flags)


@pytest.mark.parametrize("size", [100, MIB])
def test_a_removed_file_can_be_opened_by_its_descriptor(hand, size):
    hand.write_file("a", b"x" * size)
    first = hand.open("a")
    hand.tree.remove_file(hand.state.nodes.root, "a")
    second = opened_twice(hand, first.node, os.O_RDWR)
    hand.files.write(second, 0, memoryview(b"y"))
    hand.close(second)
    assert hand.read(first) == b"y" + b"x" * (size - 1)
    emptied = opened_twice(hand, first.node, os.O_WRONLY | os.O_TRUNC)
    hand.close(emptied)
    assert hand.read(first) == b""
    hand.close(first)
    assert hand.names() == []


def test_a_small_file_that_is_renamed_over_while_opened_is_read(hand):
    hand.write_file("a", b"old")
    hand.write_file("tmp", b"new")
    node = hand.node("a")
    hand.state.nodes.told(node)
    hand.tree.rename(*hand.parent("tmp"), *hand.parent("a"), 0)
    assert hand.read(opened_twice(hand, node, os.O_RDONLY)) == b"old"
    assert hand.read_file("a") == b"new"


def test_an_open_file_whose_bytes_cannot_be_kept_is_not_removed(hand, monkeypatch):
    if hand.state.store.tiers is None:
        pytest.skip("what is in the object tier can be read there")
    monkeypatch.setattr(Uploader, "next", lambda _: None)  # the flusher is this process's: nothing gets there
    data = random.Random(1).randbytes(12 * MIB)
    hand.write_file("a", data)
    handle = hand.open("a")
    reader, read_into = verbs.Reader, verbs.Reader.read_into

    def failing(self, offset, out):
        if offset:
            raise StoreError("the memory is gone")
        read_into(self, offset, out)

    with monkeypatch.context() as patch:
        patch.setattr(reader, "read_into", failing)
        with pytest.raises(StoreError):
            hand.tree.remove_file(hand.state.nodes.root, "a")
    assert hand.read(handle) == data
    hand.close(handle)
    assert hand.read_file("a") == data


def test_mode_and_time_are_kept_with_the_file(hand):
    hand.write_file("a", b"x")
    node = hand.node("a")
    set_attributes(hand, node, Valid.MODE | Valid.MTIME, mode=0o100755, mtime_ns=1_500_000_000_123_456_789)
    entry = verbs.stat(hand.state.store, "a")
    assert entry.manifest.metadata["posix"] == {"mode": 0o755, "mtime_ns": 1_500_000_000_123_456_789}
    assert node is hand.node("a")
    assert verbs.load(hand.state.store, "a") == b"x"


@pytest.mark.parametrize("year", [1, 1700, 2261, 9999])
def test_a_time_that_is_far_away_is_kept_or_the_nearest(hand, tmp_path, year):
    wanted_ns = int(datetime(year, 1, 1, tzinfo=timezone.utc).timestamp()) * 10**9
    hand.write_file("a", b"x")
    set_attributes(hand, hand.node("a"), Valid.MTIME, mtime_ns=wanted_ns)
    shown_ns = hand.node("a").attributes.mtime_ns
    assert shown_ns == (wanted_ns if abs(wanted_ns) < 1 << 63 else (1 << 63) - 1 if wanted_ns > 0 else 1 - (1 << 63))
    assert Hand(hand.state.store, tmp_path).node("a").attributes.mtime_ns == shown_ns


def test_the_times_of_a_file_stay_once_it_is_closed(hand, tmp_path):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"x"))
    time.sleep(0.01)
    hand.close(handle)
    set_attributes(hand, handle.node, Valid.MODE, mode=0o600)
    shown = handle.node.attributes
    assert hand.node("a").attributes == shown
    assert Hand(hand.state.store, tmp_path).node("a").attributes == shown


def test_metadata_of_fsspec_stays_with_a_file(hand):
    verbs.save(hand.state.store, "a", b"x", metadata={"run": 7})
    handle = hand.open("a", os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"y"))
    hand.close(handle)
    assert verbs.stat(hand.state.store, "a").manifest.metadata["run"] == 7


def test_a_write_that_fails_does_not_extend_the_file(hand, monkeypatch):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"abc"))
    real = os.pwrite

    def full_halfway(fd, data, offset):
        if len(data) == 1:
            raise OSError(errno.ENOSPC, "no room")
        return real(fd, data[:1], offset)

    with monkeypatch.context() as patch:
        patch.setattr(overlay.os, "pwrite", full_halfway)
        for offset in (3, 5000):
            with pytest.raises(OSError, match="no room"):
                hand.files.write(handle, offset, memoryview(b"xy"))
    assert hand.read(handle) == b"abc"
    set_attributes(hand, handle.node, Valid.SIZE, size=6)
    assert hand.read(handle) == b"abc\0\0\0"
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == b"abc\0\0\0"


def test_a_length_that_the_local_disk_refuses_is_an_error(hand, monkeypatch):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"abc"))

    def too_large(*_):
        raise OSError(errno.EFBIG, "too large")

    with monkeypatch.context() as patch:
        patch.setattr(overlay.os, "ftruncate", too_large)
        with pytest.raises(OSError, match="too large"):
            set_attributes(hand, handle.node, Valid.SIZE, size=1 << 20)
    hand.close(handle)
    assert verbs.load(hand.state.store, "a") == b"abc"


def test_a_hole_cannot_be_punched(hand):
    handle = hand.create("a")
    with pytest.raises(OSError) as caught:
        hand.files.allocate(handle, 0, 10, 3)
    assert caught.value.errno == errno.EOPNOTSUPP
    hand.files.allocate(handle, 0, 10, 0)
    hand.close(handle)
    assert hand.read_file("a") == bytes(10)


def test_a_truncation_by_path_is_published_at_once(hand):
    hand.write_file("a", b"hello")
    set_attributes(hand, hand.node("a"), Valid.SIZE, size=2)
    assert verbs.load(hand.state.store, "a") == b"he"
    assert not hand.node("a").has_changes


def test_a_file_that_tierfs_did_not_write_is_read_only(hand, tmp_path):
    MemoryFileSystem().pipe_file(f"{tmp_path}/store/theirs", b"abc")
    assert hand.read_file("theirs") == b"abc"
    with pytest.raises(PermissionError):
        hand.open("theirs", os.O_RDWR)


def test_sequential_reads_give_their_memory_back(hand):
    def taken():
        return int(re.search(r"(\d+) taken", repr(reading.piece_buffers))[1])

    before = taken()
    data = os.urandom(30 * MIB)
    hand.write_file("a", data)
    handle = hand.open("a")
    got = b"".join(hand.read(handle, offset, 128 * 1024) for offset in range(0, len(data), 128 * 1024))
    assert got == data
    hand.close(handle)
    for _ in range(100):
        if taken() <= before:
            break
        time.sleep(0.05)
    assert taken() <= before


def test_a_file_that_tierfs_did_not_write_cannot_be_changed_by_its_path(hand, tmp_path):
    MemoryFileSystem().pipe_file(f"{tmp_path}/store/theirs", b"abc")
    hand.write_file("ours", b"x")
    node, root = hand.node("theirs"), hand.state.nodes.root
    for change in (
        lambda: set_attributes(hand, node, Valid.SIZE, size=0),
        lambda: set_attributes(hand, hand.node("theirs"), Valid.MODE, mode=0o600),
        lambda: hand.tree.remove_file(root, "theirs"),
        lambda: hand.tree.rename(root, "theirs", root, "new", 0),
        lambda: hand.tree.rename(root, "ours", root, "theirs", 0),
    ):
        with pytest.raises((PermissionError, ReadOnlyError)):
            change()
    assert hand.read_file("theirs") == b"abc"
    assert hand.names() == ["ours", "theirs"]


def test_unstored_bytes_are_not_shown_as_the_file(hand, monkeypatch):
    hand.write_file("a", b"stands")
    handle = hand.open("a", os.O_RDWR)
    hand.files.write(handle, 0, memoryview(b"cannot"))
    no_room(monkeypatch)
    for end in (hand.files.flush, hand.files.release):
        with pytest.raises(CapacityError):
            end(handle)
    monkeypatch.undo()
    assert hand.read_file("a") == b"stands"
    # The kernel has pages of the old inode that were never stored.
    assert hand.node("a") is not handle.node


def test_a_reader_of_a_file_that_was_lost_gets_an_error(hand, monkeypatch):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"lost"))
    reader = hand.open("a")
    no_room(monkeypatch)
    for end in (hand.files.flush, hand.files.release):
        with pytest.raises(CapacityError):
            end(handle)
    with pytest.raises(OSError, match="lost") as caught:
        hand.read(reader)
    assert caught.value.errno == errno.EIO


def no_room(monkeypatch):
    """Let no file be stored from now on."""

    def fail(writer):
        writer.abort()
        raise CapacityError("no room")

    monkeypatch.setattr(Writer, "commit", fail)


def test_a_file_without_a_name_has_no_links(hand):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"x"))
    assert not handle.node.attributes.is_gone
    hand.tree.remove_file(hand.state.nodes.root, "a")
    assert handle.node.attributes.is_gone
    hand.files.write(handle, 1, memoryview(b"x"))
    assert handle.node.attributes.is_gone
    hand.close(handle)


def test_an_unmount_waits_for_the_release_of_a_closed_file(hand):
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"hello"))
    hand.files.flush(handle)
    set_attributes(hand, handle.node, Valid.MODE, mode=0o600)
    late = threading.Timer(0.2, hand.files.release, [handle])
    late.start()
    try:
        assert process.publish_all(hand.requests, 20, with_open=False) == []
    finally:
        late.join()
    assert attributes_of(verbs.stat(hand.state.store, "a"), 7, started_ns=0).mode & 0o777 == 0o600


def test_an_unmount_leaves_a_file_that_stays_open(hand, monkeypatch):
    monkeypatch.setattr(process, "RELEASE_S", 0.05)
    handle = hand.create("a")
    hand.files.write(handle, 0, memoryview(b"hello"))
    assert process.publish_all(hand.requests, 20, with_open=False) == ["a is open for writing and not published"]
    hand.close(handle)
