"""Segments without a file go from who made them to the flusher, and from it to everybody else."""

import gc
import os
import uuid
from types import SimpleNamespace

import pytest
from support.fake_flusher import Running, until

from tierfs import digest
from tierfs.clock import SystemClock
from tierfs.digest import DigestKind
from tierfs.errors import CorruptionError, InvalidInputError, StoreError
from tierfs.flusher.access import Access
from tierfs.flusher.engine import FlushEngine
from tierfs.flusher.nvme import WAITS_MAX, Settler
from tierfs.flusher.queue import Entry
from tierfs.flusher.state import FlushState, NotAskedError, NotHandedOverError
from tierfs.flusher.upload import Uploader
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Kind, Manifest, Row, content_digest
from tierfs.host.counters import Counters
from tierfs.host.host import Host
from tierfs.host.pending.record import Base, Draft, SlotRef, local_name
from tierfs.host.rpc import protocol as wire
from tierfs.host.rpc.client import FlusherClient
from tierfs.host.rpc.handover import Handover, copies_of
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, SlotKind, SlotState

STORE = uuid.uuid4().hex
MIB = 1 << 20
MANY = 2 * wire.DESCRIPTORS_MAX + 1


class Process:
    """A process of the host, as far as this is concerned: its ram tier, and its way to the flusher."""

    def __init__(self, tmp_path, shm):
        host = Host(tmp_path / "state", shm)
        self.ram = RamTier(host, STORE, budget_bytes=64 * MIB, clock=SystemClock(), segment_bytes_max=MIB)
        self.directory = host.store_directory(STORE)
        self.counters = Counters()
        self.client = FlusherClient(self.directory, self.launch, "1.0", dict)
        self.handover = Handover(self.ram, self.client, self.counters)

    def launch(self):
        raise AssertionError("one is running")

    def write(self, name):
        """A chunk that takes a segment of its own."""
        slot = self.ram.take(SlotKind.CHUNK, MIB, timeout_s=0)
        slot.segment.view(slot)[: len(name)] = name
        return slot.segment.seal(slot, name, b"", stamp_ns=1)

    def read(self, name):
        slot = self.ram.find(name)
        if slot is None:
            return None
        out = bytearray(len(name))
        slot.segment.read(slot, 0, memoryview(out))
        return bytes(out)

    def close(self):
        self.client.close()
        self.ram.close()


class Flusher(SimpleNamespace):
    """What `FlushEngine` needs of one."""

    def start(self):
        pass

    stop = close = nudge = start

    def is_idle(self):
        return True


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Makes processes of one host whose shared memory has no room."""
    monkeypatch.setattr("tierfs.host.slab.budget.Shares.free_bytes", lambda *_: 0)
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    made = []

    def make():
        made.append(Process(tmp_path, shm))
        return made[-1]

    yield make
    for one in made:
        one.close()
        vars(one).clear()  # a host lets go of its locks when nobody refers to it
    gc.collect()


@pytest.fixture
def flusher(process):
    """The process of a flusher that runs."""
    own = process()
    running = Running(own.directory, engine=FlushEngine(lambda: Flusher(ram=own.ram)))
    until(lambda: wire.identity_of(own.directory))
    yield own
    running.stop()


def names(count=MANY):
    return [b"chunk-%d" % number for number in range(count)]


def test_more_segments_than_fit_into_a_message_get_from_one_process_to_the_other(process, flusher):
    writer, reader = process(), process()
    for name in names():
        writer.write(name)
    assert len(writer.ram.own_segments()) == MANY
    writer.handover.ask("draft", {})
    until(lambda: len(flusher.ram.segments()) == MANY)
    assert reader.ram.segments() == []
    reader.handover.look_around()
    assert len(reader.ram.segments()) == MANY
    assert [reader.read(name) for name in names()] == names()
    assert not reader.ram.unseen()


def test_nothing_is_asked_where_nothing_is_missing(process, flusher, monkeypatch):
    writer, reader = process(), process()
    writer.write(b"a")
    writer.handover.ask("draft", {})
    reader.handover.look_around()
    monkeypatch.setattr(reader.client, "request_fds", lambda *_, **__: pytest.fail("asked"))
    reader.handover.look_around()
    writer.handover.look_around()
    assert reader.read(b"a") == b"a"


def test_what_the_flusher_gets_later_is_seen_then(process, flusher):
    writer, reader = process(), process()
    writer.write(b"a")
    reader.handover.look_around()
    assert reader.read(b"a") is None
    writer.handover.ask("draft", {})
    reader.handover.look_around()
    assert reader.read(b"a") == b"a"


def test_what_a_dead_process_left_is_kept_by_who_was_handed_it_only_while_something_of_it_is_pending(process, flusher):
    writer, reader = process(), process()
    slot = writer.write(b"a")
    writer.handover.ask("draft", {})
    reader.handover.look_around()
    reader.ram.let_go()
    writer.ram.host._own.release()  # as when its process ends
    reader.ram.let_go()
    assert reader.read(b"a") == b"a"
    slot.segment.mark(slot, SlotState.CLEAN)
    reader.ram.let_go()
    assert reader.read(b"a") is None
    flusher.ram.reap()
    writer.ram.close()
    assert not notes(writer)


def test_without_a_flusher_nothing_is_handed_over_and_none_is_started(process):
    writer, reader = process(), process()
    writer.write(b"a")
    reader.handover.look_around()
    assert reader.ram.segments() == []


def test_no_descriptor_but_the_segments_own_stays_open(process, flusher):
    writer, reader = process(), process()
    for name in names():
        writer.write(name)
    writer.handover.ask("draft", {})
    until(lambda: len(flusher.ram.segments()) == MANY)
    reader.handover.look_around()
    inodes = {os.fstat(segment.fd).st_ino for segment in writer.ram.own_segments()}

    def open_memory():
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                status = os.stat(f"/proc/self/fd/{number}")
            except FileNotFoundError:
                continue
            if status.st_ino in inodes:
                found.append(status.st_ino)
        return found

    before = {inode: open_memory().count(inode) for inode in inodes}
    for _ in range(3):
        writer.handover.ask("draft", {})
        wire.close_all(reader.client.request_fds("segments", {"names": sorted(notes(writer))[:3]}))
    until(lambda: {inode: open_memory().count(inode) for inode in inodes} == before)


def notes(writer):
    return {path.name for path in writer.ram.host.segments.glob("*.memfd")}


def test_only_what_is_named_is_sent_and_no_more_than_a_message_carries(process, flusher):
    writer, reader = process(), process()
    for name in names():
        writer.write(name)
    writer.handover.ask("draft", {})
    until(lambda: len(flusher.ram.segments()) == MANY)
    for wanted, count in (
        ([], 0),
        (["no such"], 0),
        (sorted(notes(writer))[:2], 2),
        (sorted(notes(writer)), wire.DESCRIPTORS_MAX),
    ):
        came = reader.client.request_fds("segments", {"names": wanted})
        assert len(came) == count
        wire.close_all(came)


@pytest.mark.parametrize("arguments", [{}, {"names": 3}, {"names": [[]]}])
def test_what_is_no_list_of_names_is_refused(process, flusher, arguments):
    with pytest.raises(InvalidInputError, match="bad arguments"):
        process().client.request_fds("segments", arguments)


def test_a_descriptor_that_is_no_segment_is_passed_over_and_counted(process, flusher, monkeypatch, caplog):
    writer, reader = process(), process()
    writer.write(b"a")
    monkeypatch.setattr(reader.client, "request_fds", lambda *_, **__: [os.open(os.devnull, os.O_RDWR)])
    for _ in range(3):
        reader.handover.look_around()
    assert reader.counters["hidden_segments"] == 3
    assert caplog.text.count("cannot be looked into") == 1
    caplog.clear()  # a logged error keeps what it met


def test_a_copy_outlives_the_segment_and_a_closed_segment_has_none(process):
    writer = process()
    writer.write(b"a")
    writer.write(b"b")
    first, second = writer.ram.own_segments()
    second.close()
    (copy,) = copies_of([first, second])
    inode = os.fstat(first.fd).st_ino
    first.close()
    assert os.fstat(copy).st_ino == inode
    os.close(copy)


@pytest.mark.parametrize("files", [0, 20])
def test_a_segment_that_is_closed_while_it_is_copied_never_leads_to_another_file(process, tmp_path, monkeypatch, files):
    """Its number is nobody's by then, or of one of many files that were opened since."""
    writer = process()
    writer.write(b"a")
    (segment,) = writer.ram.own_segments()
    (tmp_path / "other").write_text("somebody's")
    plain, opened = os.dup, []

    def dup(number):
        segment.close()
        opened.extend(os.open(tmp_path / "other", os.O_RDONLY) for _ in range(files))
        assert bool(files) == (number in opened)
        return plain(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", dup)
        assert copies_of([segment]) == []
    wire.close_all(opened)


# -- a flusher that has not got a draft's memory yet -------------------------------------------------------------------


def named(data):
    return digest.hash_bytes(DigestKind.XXH3_128, data)


class Pending:
    """A draft whose one chunk lies in memory without a file, and a flusher that did not get that yet; its publisher, too."""

    def __init__(self, make, stored=b"trained"):
        self.writer, self.own = make(), make()
        name = named(b"trained")
        content = content_digest(DigestKind.XXH3_128, 7, [name])
        rows = (Row(ChunkName(name), 7, 0),)
        record = Manifest(Kind.FILE, bytes(16), 7, 0, 0, DigestKind.XXH3_128, content, rows=rows)
        slot = self.writer.ram.take(SlotKind.CHUNK, 7, timeout_s=0)
        slot.segment.view(slot)[:] = stored
        self.slot = slot.segment.seal(slot, local_name(DigestKind.XXH3_128, name), b"", stamp_ns=1)
        draft = Draft("run/a", record, Base(), (SlotRef(slot.segment.id, slot.index, slot.serial),))
        self.entry = Entry(draft, draft.turn(""), 0.0, slot=self.slot, settled=True)
        self.state = FlushState(self.own.ram, None, clock=SystemClock(), random=lambda: 0.5, fault=lambda _: None)
        self.state.entries.add(self.entry)
        self.state.access.use(self)
        self.uploader = Uploader(self.state, bandwidth=0)
        self.while_asked = lambda: None

    def hand_over(self):
        for descriptor in copies_of([self.slot.segment]):
            self.own.ram.add(Segment.attach_fd(descriptor))
            os.close(descriptor)

    def attempt(self):
        self.uploader.advance(self.entry)
        return self.entry.error

    def plan(self, draft, read):
        return ()

    def put_chunk(self, length, fill, hint, rows, *, read, pace):
        raw = bytearray(length)
        assert fill(memoryview(raw))
        return Row(ChunkName(named(bytes(raw))), len(raw), len(raw))

    def find_chunk(self, row):
        self.while_asked()
        raise CorruptionError("it is not in the object tier")

    def publish(self, draft, rows, *, read):
        self.published = rows


@pytest.fixture
def pending(process, caplog):
    made = []

    def make(**arguments):
        made.append(Pending(process, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.uploader.stop()
        vars(one).clear()
    caplog.get_records("call").clear()  # a logged error keeps what it met


def test_a_chunk_whose_memory_was_not_handed_over_yet_is_waited_for(pending):
    draft = pending()
    assert isinstance(draft.attempt(), NotHandedOverError)
    draft.hand_over()
    draft.attempt()
    assert [row.stored_length for row in draft.published] == [7]


def test_a_chunk_whose_memory_is_handed_over_while_the_other_tiers_are_asked_is_not_lost(pending):
    draft = pending()
    draft.while_asked = draft.hand_over
    assert isinstance(draft.attempt(), NotHandedOverError)
    draft.attempt()
    assert draft.published


@pytest.mark.parametrize("what", ["damaged", "reused", "its process ended"])
def test_a_chunk_that_is_not_to_be_had_is_said_to_be_lost(pending, monkeypatch, what):
    draft = pending(stored=b"another" if what == "damaged" else b"trained")
    if what == "its process ended":
        monkeypatch.setattr(draft.own.ram.host, "is_alive", lambda _: False)
    else:
        draft.hand_over()
    if what == "reused":
        draft.slot.segment.give(draft.slot)
    error = draft.attempt()
    assert isinstance(error, CorruptionError)
    assert "no tier has a sound copy" in str(error)


def test_memory_that_its_owner_gave_back_is_kept_by_nobody_who_was_handed_it(process, flusher):
    writer, reader = process(), process()
    slot = writer.write(b"a")
    writer.handover.ask("draft", {})
    reader.handover.look_around()
    slot.segment.mark(slot, SlotState.CLEAN)
    assert len(notes(writer)) == 1
    del slot
    reader.ram.take(SlotKind.CHUNK, MIB, timeout_s=0)
    with reader.ram._shares.wanting(64 * MIB):
        writer.ram._supply._asked_s -= 60  # so it is idle
        assert writer.ram.make_room_for_others()
    assert not writer.ram.own_segments()
    reader.ram.let_go()
    flusher.ram.reclaim(lambda _: ())
    assert len(notes(writer)) == 1, "the reader's own"
    assert reader.read(b"a") is None


@pytest.mark.parametrize("is_told", [True, False], ids=["the object tier is away", "nobody has said where it is"])
def test_a_draft_waits_until_it_can_be_asked_whether_the_object_tier_has_its_chunk(pending, is_told):
    def down():
        raise StoreError("away", transient=True)

    draft = pending()
    draft.while_asked = down
    draft.state.nvme = SimpleNamespace(has=lambda _: False, commit=lambda: None)
    draft.state.nvme_bytes = MIB
    if not is_told:
        draft.state.access = Access()
    draft.entry.settled = False
    settler = Settler(draft.state, draft.uploader.put)
    for _ in range(WAITS_MAX):
        assert not settler.settle([draft.entry])
        assert isinstance(draft.entry.error, NotAskedError)
    assert settler.settle([draft.entry]) == is_told
    assert draft.entry.settled == is_told
    settler.stop()


def test_a_draft_on_its_way_to_the_nvme_tier_waits_for_its_memory_and_keeps_those_behind_it_waiting(pending):
    draft = pending()
    draft.state.nvme = SimpleNamespace(has=lambda _: False, commit=lambda: None)
    draft.state.nvme_bytes = MIB
    draft.entry.settled = False
    settler = Settler(draft.state, draft.uploader.put)
    for _ in range(WAITS_MAX):
        assert not settler.settle([draft.entry])
        assert isinstance(draft.entry.error, NotHandedOverError)
        assert not draft.entry.settled
    assert not draft.state.counters["nvme_failures"]
    assert settler.settle([draft.entry]), "those of other processes do not wait for as long as this one likes"
    assert draft.entry.settled
    settler.stop()
