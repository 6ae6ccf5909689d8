"""The room for other hosts: chunks that arrive, drafts that need them, and its bounds."""

import os
import socket
import threading
from dataclasses import replace

import pytest

from tierfs import digest
from tierfs.clock import SystemClock
from tierfs.digest import BLOCK_BYTES, DigestKind
from tierfs.errors import CapacityError, CorruptionError
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.peers.room import PeerRoom
from tierfs.peers.wire import Connection

OWNER = "ab" * 16
DATA = os.urandom(BLOCK_BYTES + 1000)


@pytest.fixture
def room(tmp_path):
    return made(tmp_path)


def made(directory, ram=4 << 20, nvme=16 << 20):
    for name in ("ram", "disk"):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    return PeerRoom([(directory / "ram", ram), (directory / "disk", nvme)], directory / "published", SystemClock())


def named(data):
    digests = [
        digest.hash_bytes(DigestKind.XXH3_128, data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)
    ]
    return digest.combine(DigestKind.XXH3_128, len(data), digests)


def arrive(room, number, name, sent):
    """Send bytes to the room over a socket, as a chunk with this name."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        thread = threading.Thread(target=ours.sendall, args=(sent,))
        thread.start()
        room.take_chunk(number, bytes([DigestKind.XXH3_128]) + name, len(sent), Connection(theirs))
        thread.join()


def draft_of(data, stamp_ns=1, stored_length=0):
    row = Row(ChunkName(named(data)), len(data), stored_length)
    kind, content = DigestKind.XXH3_128, digest.combine(DigestKind.XXH3_128, len(data), [named(data)])
    record = Manifest(Kind.FILE, os.urandom(16), len(data), 1, 1, kind, content, (row,))
    return Draft(f"run/{stamp_ns}", record, ObservedBase(), (None,), boot="boot", stamp_ns=stamp_ns)


def test_a_draft_is_held_once_its_chunks_are(room):
    draft = draft_of(DATA)
    assert room.take_draft(0, OWNER, draft.encode()) == list(draft.names)
    assert not len(room)
    arrive(room, 0, named(DATA), DATA)
    assert room.lacking(0, draft.names) == []
    assert room.take_draft(0, OWNER, draft.encode()) == []
    assert room.owners() == {OWNER}
    assert room.take_draft(0, OWNER, draft.encode()) == []  # a repeated request


def test_bytes_that_were_damaged_on_the_way_are_refused(room):
    damaged = bytearray(DATA)
    damaged[BLOCK_BYTES + 5] ^= 1
    with pytest.raises(CorruptionError):
        arrive(room, 0, named(DATA), bytes(damaged))
    assert room.lacking(0, draft_of(DATA).names) == [0]


def test_drafts_are_there_after_a_restart_in_closing_order(room, tmp_path):
    arrive(room, 1, named(DATA), DATA)
    drafts = [draft_of(DATA, stamp_ns) for stamp_ns in (2, 1)]
    for draft in drafts:
        assert room.take_draft(1, OWNER, draft.encode()) == []
    again = made(tmp_path)
    assert [each.draft.path for each in again.held(OWNER)] == ["run/1", "run/2"]
    again.forget([drafts[0].write_id])
    assert [each.draft.path for each in made(tmp_path).held()] == ["run/1"]


def test_a_published_draft_gives_its_room_back(room):
    arrive(room, 0, named(DATA), DATA)
    draft = draft_of(DATA)
    room.take_draft(0, OWNER, draft.encode())
    assert room.tiers[0].usage().dirty_bytes > len(DATA)
    room.forget([draft.write_id])
    assert room.tiers[0].usage().dirty_bytes == 0


def test_a_chunk_in_the_object_tier_is_not_needed_here(room):
    draft = draft_of(DATA, stored_length=500)
    assert room.take_draft(0, OWNER, draft.encode()) == []


def test_the_disk_takes_what_memory_has_no_room_for(room):
    assert room.choose(1 << 20) == 0
    assert room.choose(8 << 20) == 1
    assert room.choose(64 << 20) is None


def test_a_full_tier_keeps_what_drafts_need(tmp_path):
    room = made(tmp_path, ram=2 << 20, nvme=0)
    arrive(room, 0, named(DATA), DATA)
    draft = draft_of(DATA)
    room.take_draft(0, OWNER, draft.encode())
    other = os.urandom(len(DATA))
    with pytest.raises(CapacityError):
        arrive(room, 0, named(other), other)
    assert room.lacking(0, draft.names) == []


def test_a_conflict_stays_one_after_a_restart(room, tmp_path):
    arrive(room, 1, named(DATA), DATA)
    draft = replace(draft_of(DATA), path="run/x")
    room.take_draft(1, OWNER, draft.encode())
    room.keep_as_conflict(draft.write_id, "changed by another writer")
    assert made(tmp_path).held()[0].is_conflict


def test_a_draft_published_here_is_not_stored_again(room, tmp_path):
    arrive(room, 1, named(DATA), DATA)
    draft = draft_of(DATA)
    room.take_draft(1, OWNER, draft.encode())
    room.finish([draft.write_id])
    for each in (room, made(tmp_path)):
        assert not len(each)
        assert each.write_ids(OWNER) == [draft.write_id]
        assert each.take_draft(1, OWNER, draft.encode()) == []
        assert not len(each)
    room.forget([draft.write_id])
    assert not made(tmp_path).write_ids(OWNER)
