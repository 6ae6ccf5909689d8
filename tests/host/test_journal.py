"""The journal of a process: a ring of entries, each durable before it counts."""

import os
import threading
import time
from pathlib import Path

import pytest

from tierfs.digest import DigestKind
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row, content_digest, inline_digest
from tierfs.host.pending import journal as module
from tierfs.host.pending.journal import Journal, JournalChunk, clear_entry, journals_in, read_entries
from tierfs.host.pending.record import Draft, ObservedBase, SlotRef

OWNER = "0123456789abcdef"
SLOT = SlotRef("ab" * 16, 7, 9)
KIB = 1 << 10


def make_draft(number, chunks=1):
    digests = [bytes([number, part]) * 8 for part in range(chunks)]
    rows = tuple(Row(ChunkName(digest), 100, 0) for digest in digests)
    kind, inline = DigestKind.XXH3_128, None if chunks else b"x"
    digest = content_digest(kind, 100 * chunks, digests) if chunks else inline_digest(kind, b"x")
    record = Manifest(
        Kind.FILE, number.to_bytes(16, "big"), 100 * chunks or 1, 0, 0, kind, digest, rows=rows, inline=inline
    )
    return Draft(f"d/{number}", record, ObservedBase(None), (SLOT,) * chunks, boot="00", stamp_ns=number)


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.setattr(module, "JOURNAL_BYTES", 64 * KIB)


@pytest.fixture
def journal(tmp_path, ring):
    journal = Journal(tmp_path, lambda: OWNER)
    yield journal
    journal.close()


def write(journal, number, size=100, chunks=1):
    """Write a draft, if there is room. Returns its place."""
    parts = [JournalChunk(b"meta%d" % part, memoryview(bytes([number + part]) * size)) for part in range(chunks)]
    room = journal.reserve(KIB, parts)
    if room is None:
        return None
    draft = make_draft(number, chunks)
    journal.write(room, SLOT, draft, draft.encode(), parts)
    return room


def found(tmp_path):
    return [entry.draft.stamp_ns for entry in read_entries(tmp_path / f"{OWNER}.journal")]


def clear(tmp_path, room, number):
    fd = os.open(tmp_path / f"{OWNER}.journal", os.O_RDWR)
    try:
        return clear_entry(fd, room.offset, number.to_bytes(16, "big"))
    finally:
        os.close(fd)


def test_entries_are_read_as_they_were_written(journal, tmp_path):
    write(journal, 1, chunks=3)
    write(journal, 2, chunks=0)
    first, second = read_entries(tmp_path / f"{OWNER}.journal")
    assert (first.draft, first.slot, first.data) == (make_draft(1, 3), SLOT, make_draft(1, 3).encode())
    assert [(chunk.meta, bytes(chunk.data)) for chunk in first.chunks] == [
        (b"meta%d" % part, bytes([1 + part]) * 100) for part in range(3)
    ]
    assert (second.draft.stamp_ns, second.chunks) == (2, ())
    assert journals_in(tmp_path) == [(OWNER, tmp_path / f"{OWNER}.journal")]


def test_an_entry_that_is_damaged_or_cut_short_is_none(journal, tmp_path):
    rooms = [write(journal, number, size=9000) for number in (1, 2, 3)]
    file = Path(tmp_path / f"{OWNER}.journal")
    with file.open("r+b") as opened:
        opened.seek(rooms[1].offset + 8000)
        opened.write(b"x")
    assert found(tmp_path) == [1, 3]
    os.truncate(file, rooms[2].offset + 8000)
    assert found(tmp_path) == [1]


def test_an_entry_is_cleared_for_its_own_draft_alone(journal, tmp_path):
    room = write(journal, 1)
    assert not clear(tmp_path, room, 2)
    assert found(tmp_path) == [1]
    assert clear(tmp_path, room, 1)
    assert found(tmp_path) == []
    assert not clear(tmp_path, room, 1)


def test_room_is_used_again_when_its_entry_was_cleared_and_not_before(journal, tmp_path):
    rooms = {}
    number = 0
    while (room := write(journal, number + 1, size=9000)) is not None:
        number += 1
        rooms[number] = room
    assert number >= 4
    assert found(tmp_path) == list(rooms)
    assert write(journal, 99) is not None, "there is a little room at the end"
    while write(journal, 100) is not None:
        pass
    clear(tmp_path, rooms[2], 2)
    assert write(journal, 101) is None, "the oldest entry is still needed"
    clear(tmp_path, rooms[1], 1)
    again = write(journal, 102, size=9000)
    assert again.offset == rooms[1].offset
    assert write(journal, 103, size=9000).offset == rooms[2].offset
    assert write(journal, 104, size=9000) is None
    assert {102, 103, *list(rooms)[2:]} <= set(found(tmp_path))


def test_many_laps_of_entries_of_all_sizes(journal, tmp_path):
    living = []
    for number in range(1, 200):
        while (room := write(journal, number, size=number * 577 % 14_000)) is None:
            old_number, old = living.pop(0)
            assert clear(tmp_path, old, old_number)
        living.append((number, room))
        assert sorted(found(tmp_path)) == [each for each, _ in living]


def test_a_write_that_fails_leaves_no_entry(journal, tmp_path, monkeypatch):
    def refuse(fd):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", refuse)
        with pytest.raises(OSError, match="Input/output"):
            write(journal, 1)
    assert found(tmp_path) == []
    assert write(journal, 2) is None


def test_no_entry_counts_as_flushed_after_a_flush_that_failed(journal, monkeypatch):
    """Of two threads that wrote, the kernel tells one of the error, perhaps not the one whose bytes were lost."""
    begun, go = threading.Event(), threading.Event()
    outcomes = []

    def fail(fd):
        begun.set()
        assert go.wait(10)
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    def save(number):
        try:
            write(journal, number)
            outcomes.append("on disk")
        except OSError:
            outcomes.append("failed")

    monkeypatch.setattr(os, "fdatasync", fail)
    threads = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    while len(journal._rooms) < 2 or journal._written < 2:
        time.sleep(0.001)
    go.set()
    for thread in threads:
        thread.join()
    assert outcomes == ["failed", "failed"]


def test_entries_of_several_threads_share_a_flush(journal, tmp_path, monkeypatch):
    real, flushes, full = os.fdatasync, [], threading.Event()

    def slow(fd):
        if not flushes:
            full.wait(10)
        flushes.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    threads = [threading.Thread(target=write, args=(journal, number)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    while journal._written < len(threads):
        time.sleep(0.001)
    full.set()
    for thread in threads:
        thread.join()
    assert len(flushes) == 2
    assert sorted(found(tmp_path)) == [1, 2, 3, 4, 5]


def test_a_journal_goes_with_its_last_entry(journal, tmp_path):
    room = write(journal, 1)
    clear(tmp_path, room, 1)
    journal.close()
    assert journals_in(tmp_path) == []
    assert journal.reserve(1) is None


def test_a_journal_that_is_needed_stays(journal, tmp_path):
    write(journal, 1)
    journal.close()
    assert found(tmp_path) == [1]


def test_an_entry_can_be_given_back_after_another_thread_closed_the_journal(journal, tmp_path):
    """Its segment is closed as well, so that its draft is not sealed; the segment may go, and the entry would count."""
    room = write(journal, 1)
    journal.close()
    assert found(tmp_path) == [1]
    journal.give_back(room)
    assert found(tmp_path) == []


def test_a_forked_child_leaves_it_to_its_parent(journal, tmp_path):
    write(journal, 1)
    journal._renew()
    journal._owner = lambda: "fedcba9876543210"
    write(journal, 2)
    assert [owner for owner, _ in journals_in(tmp_path)] == [OWNER, "fedcba9876543210"]
    assert found(tmp_path) == [1]


def test_nothing_is_journaled_where_no_file_can_be_made(tmp_path, ring, caplog):
    journal = Journal(tmp_path / "missing", lambda: OWNER)
    assert journal.reserve(1) is None
    assert "no journal can be made" in caplog.text


def test_a_write_that_is_interrupted_gives_its_room_back(journal, tmp_path, monkeypatch):
    def interrupt(fd):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdatasync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(journal, 1)
    assert found(tmp_path) == []
    assert write(journal, 2).offset == 0
