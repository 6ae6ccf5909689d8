"""Publish a draft whose chunk is in a segment that the flusher cannot open for a while."""

import gc
import uuid
from types import SimpleNamespace

import pytest

from tierfs import digest
from tierfs.clock import SystemClock
from tierfs.digest import DigestKind, local_name
from tierfs.errors import CorruptionError, StoreError
from tierfs.flusher.access import Access
from tierfs.flusher.nvme import WAITS_MAX, NvmePersister
from tierfs.flusher.queue import FlushItem, FlushStage
from tierfs.flusher.state import FlushState, NotYetError
from tierfs.flusher.upload import Uploader
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Kind, Manifest, Row, content_digest
from tierfs.host.host import Host
from tierfs.host.pending.record import Draft, ObservedBase, SlotRef
from tierfs.host.slab import ram
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment
from tierfs.host.slab.table import SlotKind
from tierfs.store.encode.keyframes import FilePlan

STORE = uuid.uuid4().hex
MIB = 1 << 20


@pytest.fixture
def make_tier(tmp_path):
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    made = []

    def make():
        host = Host(tmp_path / "state", shm)
        made.append(RamTier(host, STORE, budget_bytes=64 * MIB, clock=SystemClock(), segment_bytes_max=MIB))
        return made[-1]

    yield make
    for tier in made:
        tier.close()
    made.clear()  # a host releases its locks when nothing refers to it
    gc.collect()


def named(data):
    return digest.digests_of(DigestKind.XXH3_128, data)[1]


class Pending:
    """A draft with one chunk, in a segment that the flusher cannot open yet. It also serves as the publisher."""

    def __init__(self, make, monkeypatch, stored=b"trained"):
        self.writer, self.own = make(), make()
        self.patch = monkeypatch
        monkeypatch.setattr(ram, "Segment", SimpleNamespace(attach=self.refuse))
        name = named(b"trained")
        content = content_digest(DigestKind.XXH3_128, 7, [name])
        rows = (Row(ChunkName(name), 7, 0),)
        record = Manifest(Kind.FILE, bytes(16), 7, 0, 0, DigestKind.XXH3_128, content, rows=rows)
        slot = self.writer.take(SlotKind.CHUNK, 7, timeout_s=0)
        slot.segment.view(slot)[:] = stored
        self.slot = slot.segment.seal(slot, local_name(DigestKind.XXH3_128, name), b"", stamp_ns=1)
        draft = Draft("run/a", record, ObservedBase(), (SlotRef.of(slot),))
        self.entry = FlushItem(draft, draft.turn(""), slot=self.slot, stage=FlushStage.READY)
        self.state = FlushState(self.own, None, clock=SystemClock(), random=lambda: 0.5, fault=lambda _: None)
        self.state.entries.add(self.entry)
        self.state.access.use(self)
        self.uploader = Uploader(self.state, bandwidth=0)
        self.while_asked = lambda: None

    def refuse(self, path):
        raise MemoryError

    def let_open(self):
        self.patch.setattr(ram, "Segment", Segment)

    def attempt(self):
        self.uploader.advance(self.entry)
        return self.entry.error

    def plan(self, draft, local):
        return FilePlan()

    def put_chunk(self, raw, digests, context, **about):
        return Row(ChunkName(named(bytes(raw))), len(raw), len(raw)), True

    def find_chunk(self, row):
        self.while_asked()
        raise CorruptionError("it is not in the object tier")

    def publish(self, draft, plan, rows, local):
        self.published = rows


@pytest.fixture
def pending(make_tier, monkeypatch, caplog):
    made = []

    def make(**arguments):
        made.append(Pending(make_tier, monkeypatch, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.uploader.stop()
        vars(one).clear()
    caplog.get_records("call").clear()  # a logged error keeps its frames alive, and the objects in them


def test_a_chunk_in_a_segment_that_cannot_be_opened_is_waited_for(pending):
    draft = pending()
    assert isinstance(draft.attempt(), NotYetError)
    draft.let_open()
    draft.attempt()
    assert [row.stored_length for row in draft.published] == [7]


def test_a_segment_that_is_opened_while_other_tiers_are_asked_is_not_lost(pending):
    draft = pending()
    draft.while_asked = draft.let_open
    assert isinstance(draft.attempt(), NotYetError)
    draft.attempt()
    assert draft.published


@pytest.mark.parametrize("what", ["damaged", "reused", "removed"])
def test_a_chunk_that_is_not_to_be_had_is_said_to_be_lost(pending, what):
    draft = pending(stored=b"another" if what == "damaged" else b"trained")
    draft.let_open()
    if what == "removed":
        draft.slot.segment.unlink()
    if what == "reused":
        draft.slot.segment.give(draft.slot)
    error = draft.attempt()
    assert isinstance(error, CorruptionError)
    assert "no tier has a sound copy" in str(error)


@pytest.mark.parametrize("is_told", [True, False], ids=["the object tier is away", "nobody has said where it is"])
def test_a_draft_waits_until_it_can_be_asked_whether_the_object_tier_has_its_chunk(pending, is_told):
    def down():
        raise StoreError("away", transient=True)

    draft = pending()
    draft.while_asked = down
    draft.state.nvme = SimpleNamespace(holds=lambda _: False, protect=lambda _: None)
    draft.state.nvme_bytes = MIB
    if not is_told:
        draft.state.access = Access()
    draft.entry.stage = FlushStage.WAITING
    persister = NvmePersister(draft.state)
    for _ in range(WAITS_MAX):
        assert not persister.persist([draft.entry])
        assert isinstance(draft.entry.error, NotYetError)
    assert persister.persist([draft.entry]) == is_told
    assert draft.entry.past_nvme == is_told
    persister.stop()


def test_a_draft_on_its_way_to_the_nvme_tier_waits_for_its_segment(pending):
    draft = pending()
    draft.state.nvme = SimpleNamespace(holds=lambda _: False, protect=lambda _: None)
    draft.state.nvme_bytes = MIB
    draft.entry.stage = FlushStage.WAITING
    persister = NvmePersister(draft.state)
    for _ in range(WAITS_MAX):
        assert not persister.persist([draft.entry])
        assert isinstance(draft.entry.error, NotYetError)
        assert not draft.entry.past_nvme
    assert not draft.state.counters["nvme_failures"]
    assert persister.persist([draft.entry]), "those of other processes do not wait for as long as this one likes"
    assert draft.entry.past_nvme
    persister.stop()
