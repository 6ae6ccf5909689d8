"""A process reads from a holder that answers rightly, wrongly, or not at all."""

import contextlib
import json
import os
import threading
from types import SimpleNamespace

import pytest

from tierfs.clock import SystemClock
from tierfs.digest import BLOCK_BYTES, DigestKind, combine, digests_of, local_name
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.lease import PeerRecord
from tierfs.format.manifest import Manifest, Row
from tierfs.host.chunk_sources import ChunkSources
from tierfs.host.events import Counters
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.peers.members import MEMBERS_FILE
from tierfs.peers.reads import PeerReader
from tierfs.peers.settings import Identity
from tierfs.peers.wire import accept, listen

pytest.importorskip("cryptography")
KIND = DigestKind.XXH3_128
DATA = os.urandom(2 * BLOCK_BYTES + 1000)
BLOCKS, DIGEST = digests_of(KIND, DATA)
NAME, ROW = local_name(KIND, DIGEST), Row(ChunkName(DIGEST), len(DATA), 0)
FILE = Manifest(Kind.FILE, os.urandom(16), len(DATA), 1, 1, KIND, combine(KIND, len(DATA), [DIGEST]), (ROW,))
DRAFT = Draft("run/x", FILE, ObservedBase(), (None,), boot="boot", stamp_ns=1).encode()


class Holder:
    """Answers over TLS. ``read`` is the answer to the request of this name, with its body."""

    def __init__(self, directory, trusted):
        directory.mkdir()
        self.identity = Identity(directory)
        self.context = self.identity.context([trusted], server=True)
        self.listener = listen("127.0.0.1", 0)
        self.drafts = {"changes": 1, "lengths": [len(DRAFT)], "next": None}, DRAFT
        self.read = {"digests": [each.hex() for each in BLOCKS]}, DATA
        self.hangs, self.ends = threading.Event(), threading.Event()
        threading.Thread(target=self.serve, daemon=True).start()

    def record(self):
        port = self.listener.getsockname()[1]
        return PeerRecord(0, 60, "127.0.0.1", port, "", "holder", self.identity.certificate)

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(sock,), daemon=True).start()

    def answer(self, sock):
        with contextlib.suppress(OSError), contextlib.closing(accept(sock, self.context, 5)) as connection:
            while (received := connection.receive()) is not None:
                outcome, body = {"drafts": self.drafts, "read": self.read}.get(received[0]["do"], ({}, b""))
                if self.hangs.is_set():
                    self.ends.wait(60)
                connection.answer(outcome, [memoryview(body)] if body else (), len(body))


@pytest.fixture
def world(tmp_path):
    (tmp_path / "reader").mkdir()
    me = Identity(tmp_path / "reader")
    holder = Holder(tmp_path / "holder", me.certificate)
    record = holder.record()
    (tmp_path / "reader" / MEMBERS_FILE).write_text(json.dumps({record.id: record.encode().hex()}))
    flusher, counters = SimpleNamespace(is_running=lambda: True), Counters()
    reader = PeerReader(tmp_path / "reader", "store", flusher, counters, SystemClock(), reads_once=False)
    yield holder, reader, counters
    holder.ends.set()
    reader.close()
    holder.listener.close()


def read(reader, counters=None):
    out = memoryview(bytearray(len(DATA)))
    digests = ChunkSources(KIND, [reader], counters).read_whole(ROW, out)
    return None if digests is None else (digests, bytes(out))


def test_held_changes_are_read(world):
    _, reader, counters = world
    assert [draft.encode() for draft in reader.drafts("run/x")] == [DRAFT]
    assert list(reader.paths_below("run")) == ["run/x"]
    assert list(reader.drafts("run")) == []
    assert read(reader, counters) == (BLOCKS, DATA)
    assert counters["peer_read_bytes"] == len(DATA)


@pytest.mark.parametrize(
    "answer",
    [
        ({"digests": [each.hex() for each in BLOCKS]}, DATA[:-1] + bytes([DATA[-1] ^ 1])),
        ({"digests": [each.hex() for each in reversed(BLOCKS)]}, DATA),
        ({"digests": [each.hex() for each in BLOCKS[:2]]}, DATA),
        ({"digests": [each.hex() for each in BLOCKS]}, DATA[:-1]),
        ({"digests": [each.hex() for each in BLOCKS]}, b""),
        ({"digests": None}, DATA),
        ({"digests": None}, b""),
        ({"digests": 7}, DATA),
        ({"digests": ["zz"] * 3}, DATA),
        ({}, b""),
    ],
)
def test_no_wrong_byte_of_a_holder_is_used(world, answer):
    holder, reader, counters = world
    holder.read = answer
    assert reader.drafts("run/x")
    assert read(reader, counters) is None
    assert not counters["peer_read_bytes"]


@pytest.mark.parametrize(
    "answer",
    [
        ({"changes": 1, "lengths": [len(DRAFT) + 1], "next": None}, DRAFT),
        ({"changes": 1, "lengths": [-1, len(DRAFT) + 1], "next": None}, DRAFT),
        ({"changes": 1, "lengths": [9, len(DRAFT) - 9], "next": None}, DRAFT),
        ({"changes": "x", "lengths": [len(DRAFT)], "next": None}, DRAFT),
        ({"changes": 1}, DRAFT),
        ({}, b""),
    ],
)
def test_rubbish_in_place_of_drafts_is_no_draft(world, answer, monkeypatch):
    holder, reader, counters = world
    monkeypatch.setattr("tierfs.peers.reads.MEET_S", 0.0)  # a public constant: how long a host may refuse this one
    holder.drafts = answer
    assert list(reader.drafts("run/x")) == []
    assert counters["peer_read_failures"]


def test_a_holder_that_hangs_rests(world):
    holder, reader, counters = world
    assert reader.drafts("run/x")
    holder.hangs.set()
    assert reader.silent(NAME) == ""
    assert read(reader, counters) is None
    assert "holder at 127.0.0.1" in reader.silent(NAME)
    holder.hangs.clear()
    assert read(reader) == (BLOCKS, DATA)  # although it rests, because nothing else has the chunk
    assert reader.silent(NAME) == ""
    assert counters["peer_read_failures"]
