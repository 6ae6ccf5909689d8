"""What readers rely on in each tier that holds chunks: ram, nvme, the room for other hosts, and other hosts."""

import json
import os
import uuid
from collections import Counter
from types import SimpleNamespace

import pytest
from support.nvme_tools import file_named

from tierfs.clock import SystemClock
from tierfs.digest import BLOCK_BYTES, DigestKind, combine, digests_of, foreign_name, local_name
from tierfs.errors import NotFoundError
from tierfs.format.envelope import STORE, Block, Envelope
from tierfs.format.header import Kind
from tierfs.format.keys import ChunkName
from tierfs.format.lease import PeerRecord
from tierfs.format.manifest import Manifest, Row
from tierfs.host.chunk_sources import ChunkRequest, ChunkSources, FileChunks, RamChunks, check_copies
from tierfs.host.events import Counters
from tierfs.host.host import Host
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import SlotKind

KIND = DigestKind.XXH3_128
RAW = os.urandom(3 * BLOCK_BYTES + 1000)
BLOCKS, DIGEST = digests_of(KIND, RAW)
NAME, ROW = local_name(KIND, DIGEST), Row(ChunkName(DIGEST), len(RAW), 0)
WANTED = ChunkRequest(NAME, len(RAW), ROW)
META = Envelope(KIND, DIGEST, len(RAW), tuple(map(Block, BLOCKS, [STORE] * 4, [BLOCK_BYTES] * 3 + [1000]))).encode()
BUDGET = 64 << 20


class InRam:
    """The ram tier. ``is_mapped`` is as for `RamChunks`."""

    is_mapped = True

    def __init__(self, base):
        shm = base / "shm"
        shm.mkdir(mode=0o700)
        self.ram = RamTier(Host(base / "state", shm), uuid.uuid4().hex, budget_bytes=BUDGET, clock=SystemClock())
        self.counters = Counter()
        self.tier = RamChunks(self.ram, self.counters, is_mapped=self.is_mapped)
        self.bad = "ram_quarantined"

    def put(self, name=NAME):
        slot = self.ram.take(SlotKind.CHUNK, len(RAW), timeout_s=0)
        slot.segment.view(slot)[:] = RAW
        self.slot = slot.segment.seal(slot, name, META, stamp_ns=1)

    def flip(self, at, _name=NAME):
        with open(self.slot.segment.path, "r+b") as file:
            file.seek(self.slot.offset + at)
            file.write(bytes([RAW[at] ^ 1]))

    def drop(self):
        self.slot.segment.give(self.slot)

    def close(self):
        self.ram.close()


class InRamUnmapped(InRam):
    is_mapped = False


class InFiles:
    """The nvme tier, as its writer sees it."""

    name = "nvme"

    def __init__(self, base):
        self.files = NvmeTier(base / "files", budget_bytes=BUDGET, clock=SystemClock())
        self.counters = Counter()
        self.bad = f"{self.name}_quarantined"
        self.tier = FileChunks(self.opened(), self.files.quarantine, self.counters, self.bad, name=self.name)

    def opened(self):
        return self.files

    def put(self, name=NAME):
        self.files.write(name, META, memoryview(RAW))

    def flip(self, at, name=NAME):
        with open(file_named(NvmeReader(self.files.directory), name), "r+b") as file:
            place = file.read().find(RAW[:64]) + at
            file.seek(place)
            file.write(bytes([RAW[at] ^ 1]))

    def drop(self):
        self.files.quarantine(NAME)

    def close(self):
        pass


class InFilesOfReaders(InFiles):
    """The nvme tier, as other processes see it."""

    def opened(self):
        return NvmeReader(self.files.directory)


class InRoom(InFiles):
    name = "room"


class OnPeer(InFiles):
    """Another host, which has the chunk in its room and answers over TLS."""

    def __init__(self, base):
        super().__init__(base)
        pytest.importorskip("cryptography")
        from tierfs.peers.members import MEMBERS_FILE
        from tierfs.peers.reads import PeerReader
        from tierfs.peers.room import PeerRoom
        from tierfs.peers.server import PeerServer
        from tierfs.peers.settings import Identity, PeerSettings

        for name in ("reader", "holder"):
            (base / name).mkdir()
        me, holder = Identity(base / "reader"), Identity(base / "holder")
        self.room = PeerRoom([(base / "files", BUDGET)], base / "published", SystemClock())
        (self.files,) = self.room.tiers
        held = ChunkSources(KIND, [FileChunks(self.files, self.files.quarantine, self.counters, self.bad)])
        self.server = PeerServer(
            holder,
            PeerSettings(1, "127.0.0.1", 0),
            "store",
            self.room,
            SimpleNamespace(certificates=lambda: [me.certificate]),
            sources=lambda _: held,
            bring=None,
            adopt=None,
            greet=lambda: None,
        )
        self.server.start()
        record = PeerRecord(0, 60, "127.0.0.1", self.server.port, "", "holder", holder.certificate)
        (base / "reader" / MEMBERS_FILE).write_text(json.dumps({record.id: record.encode().hex()}))
        flusher = SimpleNamespace(is_running=lambda: True)
        self.tier = PeerReader(base / "reader", "store", flusher, Counters(), SystemClock(), reads_once=False)

    def put(self):
        super().put()
        whole = combine(KIND, len(RAW), [DIGEST])
        file = Manifest(Kind.FILE, os.urandom(16), len(RAW), 1, 1, KIND, whole, (ROW,))
        draft = Draft("run/x", file, ObservedBase(), (None,), boot="boot", stamp_ns=1)
        assert self.room.take_draft(0, "ab" * 16, draft.encode()) == []

    def close(self):
        self.tier.close()
        self.server.stop()


NAMED_BY_DIGEST = [InRam, InRamUnmapped, InFiles, InFilesOfReaders, InRoom, OnPeer]
NAMED_AT_WILL = NAMED_BY_DIGEST[:-1]


@pytest.fixture
def place(request, tmp_path):
    made = request.param(tmp_path)
    yield made
    made.close()


def every(kinds):
    return pytest.mark.parametrize("place", kinds, indirect=True, ids=lambda kind: kind.__name__)


def read(place, *spans, wanted=WANTED):
    """Return the tier that served these parts, the digests, and the parts."""
    parts = [(begin, memoryview(bytearray(end - begin))) for begin, end in spans]
    found = ChunkSources(KIND, [place.tier]).read(wanted, parts)
    return found and (*found, [bytes(out) for _, out in parts])


@every(NAMED_BY_DIGEST)
def test_a_chunk_that_a_tier_lacks_is_not_found(place):
    assert read(place, (0, len(RAW))) is None
    assert check_copies(place.tier, WANTED) is None
    assert not place.tier.holds(NAME)
    assert list(place.tier.chunks()) == []


@every(NAMED_BY_DIGEST)
def test_a_chunk_is_found_listed_and_read(place):
    place.put()
    assert list(place.tier.chunks()) == [(NAME, len(RAW))]
    assert place.tier.holds(NAME)
    assert read(place, (0, len(RAW))) == (place.tier.name, BLOCKS, [RAW])
    assert check_copies(place.tier, WANTED) == ""


@every(NAMED_BY_DIGEST)
@pytest.mark.parametrize(
    ("spans", "blocks"),
    [
        ([(0, 10)], [0]),
        ([(5, 2 * BLOCK_BYTES)], [0, 1]),
        ([(BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 1)], [0, 1, 2, 3]),
        ([(3 * BLOCK_BYTES, len(RAW)), (7, 9), (8, BLOCK_BYTES)], [0, 3]),
        ([(0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES)], [0, 1]),
        ([(9, 9), (len(RAW) - 1, len(RAW))], [3]),
    ],
)
def test_any_parts_are_read_with_the_digests_of_their_blocks(place, spans, blocks):
    place.put()
    parts = [RAW[begin:end] for begin, end in spans]
    assert read(place, *spans) == (place.tier.name, [BLOCKS[index] for index in blocks], parts)


@every(NAMED_BY_DIGEST)
@pytest.mark.parametrize("span", [(0, len(RAW)), (BLOCK_BYTES + 5, BLOCK_BYTES + 9)], ids=["whole", "part"])
def test_a_damaged_copy_is_counted_once_and_not_read_again(place, span):
    place.put()
    place.flip(BLOCK_BYTES + 7)
    assert read(place, span) is None
    assert read(place, span) is None
    assert place.counters[place.bad] == 1


@every(NAMED_BY_DIGEST)
def test_sound_blocks_beside_a_damaged_one_are_read(place):
    place.put()
    place.flip(BLOCK_BYTES + 7)
    assert read(place, (0, BLOCK_BYTES)) == (place.tier.name, BLOCKS[:1], [RAW[:BLOCK_BYTES]])
    assert not place.counters[place.bad]


@every(NAMED_BY_DIGEST)
def test_a_copy_that_is_dropped_after_it_was_found_is_gone(place):
    place.put()
    copy = next(place.tier.copies(WANTED))
    place.drop()
    out = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(NotFoundError):
        copy.read(0, out)
        copy.table()
    assert read(place, (0, len(RAW))) is None
    assert not place.counters[place.bad]


@every(NAMED_AT_WILL)
@pytest.mark.parametrize("is_damaged", [False, True], ids=["sound", "damaged"])
def test_a_chunk_that_is_not_named_by_its_digest_is_verified(place, is_damaged):
    name = foreign_name("a.bin", "version", 0)
    place.put(name)
    if is_damaged:
        place.flip(BLOCK_BYTES + 7, name)
    found = read(place, (0, len(RAW)), wanted=ChunkRequest(name, len(RAW)))
    assert found == (None if is_damaged else (place.tier.name, BLOCKS, [RAW]))
    assert place.counters[place.bad] == is_damaged
