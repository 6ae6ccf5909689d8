"""Small files at level ``local`` before the flusher has them, and after their process, their memory or the host is gone."""

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from tierfs.clock import SystemClock
from tierfs.errors import CapacityError, NotFoundError, StoreError
from tierfs.flusher import journals
from tierfs.flusher.journals import Journals
from tierfs.flusher.nvme import NvmePersister
from tierfs.flusher.scan import PendingScan
from tierfs.host.nvme.writer import NvmeTier
from tierfs.host.pending.journal import clear_entry, journals_in, read_entries
from tierfs.host.pending.levels import Level
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, SlotKind, SlotState
from tierfs.session.left_behind import is_pending
from tierfs.store import Writer, delete, load
from tierfs.store.waiting import wait

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SMALL = 100 << 10


class Crash(BaseException):
    """The process ends here."""


class Story:
    """A host, what its callers were told, and a process that can end at a step."""

    def __init__(self, make_host, dies_at=""):
        self.make_host = make_host
        self.dies_at = dies_at
        self.is_dead = False
        self.safe = {}
        self.doubtful = {}
        self.open()

    def open(self):
        self.host = self.make_host(ack=Level.LOCAL)
        self.host.tiers.writer._fault = self.step

    def step(self, point):
        self.is_dead |= point == self.dies_at
        if self.is_dead:
            raise Crash(point)

    def ready(self):
        """Have a flusher, whose steps count, and a journal."""
        self.save("first", os.urandom(10))
        wait(self.host.store, "", Level.OBJECT, 20)
        state = self.host.flusher._state
        state.fault = state.journals._fault = self.step
        # A process that ends does not give its room back.
        self.host.tiers.writer._journal.give_back = lambda room: None
        return self

    def save(self, path, data):
        self.doubtful[path] = data
        _save(self.host.store, path, data)
        self.safe[path] = self.doubtful.pop(path)

    def end(self, *, of):
        """The process ends; and with its memory if that is the end of the host."""
        self.is_dead = True
        tiers = self.host.tiers
        tiers.close()
        if of == "host":
            for file in tiers.ram.host.segments.glob("*.slab"):
                file.unlink()
        own = tiers.ram.host._own
        if own is not None:
            own.release()
        self.is_dead, self.dies_at = False, ""

    def check(self):
        store = self.host.store
        for path, data in self.safe.items():
            assert load(store, path) in {data, self.doubtful.get(path, data)}
        wait(store, "", Level.OBJECT, 20)
        plain = self.host.plain()
        for path, data in self.safe.items():
            assert load(plain, path) in {data, self.doubtful.get(path, data)}
        assert store.tiers.drafts.conflicts() == []


def _save(store, path, data, level=None):
    writer = Writer(store, path, level=level)
    try:
        writer.write(data)
        writer.commit()
    except Exception:  # not where the process ends
        writer.abort()
        raise


@pytest.fixture
def idle(monkeypatch):
    """A flusher that takes nothing to the nvme tier."""
    monkeypatch.setattr(NvmePersister, "persist_all", lambda self: time.sleep(0.01))


@pytest.fixture
def story(make_host):
    return Story(make_host).ready()


def drafts(host):
    return {path: found.draft for path, found in host.tiers.drafts.pending_below("").items()}


def test_a_small_file_is_local_without_the_flusher(story, idle):
    data = os.urandom(SMALL)
    story.save("d/a", data)
    story.save("d/b", b"inline")
    host = story.host
    assert [host.tiers.drafts.level(path) for path in ("d/a", "d/b")] == [Level.LOCAL] * 2
    assert all(draft.journal is not None for draft in drafts(host).values())
    wait(host.store, "d", Level.LOCAL, 5)
    assert load(host.store, "d/a") == data


def test_what_is_in_the_nvme_tier_is_not_in_the_journal(story):
    for number in range(20):
        story.save(f"d/{number}", os.urandom(SMALL))
    with story.host.held():
        story.save("e", os.urandom(SMALL))
        ((_, path),) = journals_in(story.host.tiers.nvme.directory)
        ends = time.monotonic() + 10
        while list(read_entries(path)):
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert "e" in drafts(story.host)
    story.check()


@pytest.mark.parametrize("of", ["host", "process"])
def test_a_file_in_the_journal_outlives(story, idle, monkeypatch, of):
    with story.host.held():
        for number in range(5):
            story.save(f"d/{number}", os.urandom(SMALL))
        story.save("d/1", b"again")
        story.save("small", b"inline")
        story.end(of=of)
        directory = story.host.tiers.nvme.directory
        assert is_pending(story.host.settings.directory, directory)
        monkeypatch.undo()
        story.open()
        assert load(story.host.store, "d/1") == b"again"
    story.check()
    story.end(of="process")
    story.open()
    story.check()
    story.save("after", b"")  # which starts a flusher
    is_alive, ends = story.host.tiers.ram.host.is_alive, time.monotonic() + 10
    while not all(is_alive(owner) for owner, _ in journals_in(directory)):
        assert time.monotonic() < ends, "a journal without entries stays"
        time.sleep(0.05)


def test_a_file_is_not_journaled_before_one_that_memory_alone_has(story, idle):
    host = story.host
    _save(host.store, "d/deep/staged", os.urandom(SMALL), Level.STAGED)
    assert host.tiers.drafts.follows_volatile("d/after")
    assert host.tiers.drafts.follows_volatile("after")
    assert host.tiers.drafts.follows_volatile("d/deep/after")
    assert not host.tiers.drafts.follows_volatile("d/other/after")
    story.save("d/other/a", b"x")
    assert drafts(host)["d/other/a"].journal is not None
    host.store.timeout_s = 0.2
    with pytest.raises(TimeoutError):
        story.save("d/a", b"x")
    assert drafts(host)["d/a"].journal is None
    host.store.timeout_s = 20


def test_a_large_file_and_one_that_waits_for_less_are_not_journaled(story, idle):
    host = story.host
    host.store.timeout_s = 0.2
    with pytest.raises(TimeoutError):
        story.save("a/large", os.urandom(2 << 20))
    _save(host.store, "b/staged", b"x", Level.STAGED)
    assert {draft.journal for draft in drafts(host).values()} == {None}
    host.store.timeout_s = 20


def test_a_full_journal_has_files_wait_for_the_flusher(story, monkeypatch):
    monkeypatch.setattr(type(story.host.tiers.writer._journal), "reserve", lambda self, *_: None)
    story.save("d/a", os.urandom(SMALL))
    assert story.host.tiers.nvme.draft("d/a") or load(story.host.plain(), "d/a")
    story.check()


def test_a_disk_that_fails_has_files_wait_for_the_flusher(story, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(type(story.host.tiers.writer._journal), "write", fail)
        story.save("d/a", os.urandom(SMALL))
    assert story.host.tiers.counters["journal_failures"] == 1
    story.check()


WRITER = ["before journal.write", "after journal.write", "before draft.seal", "after draft.seal"]
FLUSHER = [
    "before settle.commit",
    "after settle.commit",
    "before journal.clear",
    "after journal.clear",
    "before release.chunks",
    "before release.draft",
    "after release.draft",
    "before publish.record",
    "after publish.record",
    "before finish.release",
    "after finish.release",
]


@pytest.mark.parametrize("of", ["host", "process"])
@pytest.mark.parametrize("point", [*WRITER, *FLUSHER])
def test_nothing_acknowledged_is_lost_by_a_crash_at_any_step(make_host, point, of):
    story = Story(make_host).ready()
    story.save("d/a", os.urandom(SMALL))
    story.save("d/b", b"inline")
    story.dies_at = point
    try:
        for number in range(3):
            for path in ("d/a", "d/b", f"d/{number}"):
                story.save(path, os.urandom(SMALL))
        ends = time.monotonic() + 10
        while not story.is_dead:
            assert time.monotonic() < ends, "it did not come to that step"
            time.sleep(0.01)
    except Crash:
        pass
    story.end(of=of)
    story.open()
    story.check()
    story.save("d/a", b"life goes on")
    story.check()


@pytest.mark.parametrize("point", ["before journal.commit", "after journal.commit", "before journal.clear"])
def test_a_crash_while_a_journal_is_taken_to_the_nvme_tier(make_host, monkeypatch, point):
    story = Story(make_host).ready()
    with monkeypatch.context() as idle, story.host.held():
        idle.setattr(NvmePersister, "persist_all", lambda self: time.sleep(0.01))
        for number in range(5):
            story.save(f"d/{number}", os.urandom(SMALL))
        story.end(of="host")
    story.dies_at = point
    host, directory, clock = story.host.tiers.ram.host, story.host.tiers.nvme.directory, SystemClock()
    ram = RamTier(host, story.host.descriptor.uuid, budget_bytes=128 << 20, clock=clock)
    nvme = NvmeTier(directory, budget_bytes=128 << 20, clock=clock)
    journals = Journals(ram, nvme, clock, story.step, Counter())
    with contextlib.closing(ram), contextlib.closing(nvme), pytest.raises(Crash):
        journals.recover(lambda *_: None, at_once=True)
    story.is_dead, story.dies_at = False, ""
    story.open()
    story.check()


def test_a_draft_that_was_never_sealed_makes_way_for_a_later_one(make_host, monkeypatch):
    """Its process died between the journal and the slab; another one then wrote the same path, and the host died."""
    story = Story(make_host).ready()
    monkeypatch.setattr(NvmePersister, "persist_all", lambda self: time.sleep(0.01))
    story.dies_at = "before draft.seal"
    with pytest.raises(Crash):
        story.save("d/a", b"never seen")
    story.is_dead, story.dies_at = False, ""
    del story.doubtful["d/a"]
    with pytest.raises(NotFoundError):
        load(story.host.store, "d/a")
    story.save("d/a", b"seen")
    story.end(of="host")
    monkeypatch.undo()
    story.open()
    story.check()
    assert load(story.host.store, "d/a") == b"seen"


def test_a_removal_after_a_file_in_the_journal(story, idle, monkeypatch):
    story.save("d/a", os.urandom(SMALL))
    story.host.store.timeout_s = 0.2
    with pytest.raises(TimeoutError):
        delete(story.host.store, "d/a")
    monkeypatch.undo()
    wait(story.host.store, "", Level.OBJECT, 20)
    story.safe.pop("d/a")
    story.end(of="host")
    story.open()
    with pytest.raises(NotFoundError):
        load(story.host.store, "d/a")
    story.check()


def test_a_journal_that_cannot_be_taken_up_has_readers_fail_and_not_see_the_old_file(story, idle, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("no room", tier="nvme")

    story.save("d/a", b"old")
    monkeypatch.undo()
    wait(story.host.store, "", Level.OBJECT, 20)
    with monkeypatch.context() as stuck:
        stuck.setattr(NvmePersister, "persist_all", lambda self: time.sleep(0.01))
        story.save("d/a", b"new")
        story.end(of="host")
    with monkeypatch.context() as full:
        full.setattr(NvmeTier, "write", refuse)
        full.setattr(NvmeTier, "commit", refuse)
        story.open()
        for _ in range(2):
            with pytest.raises(StoreError, match="journal"):
                load(story.host.store, "d/a")
        with pytest.raises(StoreError, match="journal"):
            wait(story.host.store, "", Level.OBJECT, 5)
    assert load(story.host.store, "d/a") == b"new"
    story.check()


def test_what_a_flusher_cleared_before_it_died_is_flushed_by_the_next_one(story, idle, monkeypatch):
    story.save("d/a", b"x")
    state, draft = story.host.flusher._state, drafts(story.host)["d/a"]
    ((_, path),) = journals_in(story.host.tiers.nvme.directory)
    fd = os.open(path, os.O_RDWR)
    clear_entry(fd, draft.journal[1], draft.write_id)
    os.close(fd)
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    state.journals.clear([draft])
    assert str(path) in flushed


def test_an_entry_that_cannot_be_cleared_now_is_cleared_later(story, monkeypatch):
    """Its draft is published and replaced meanwhile; and must not come back when its process ends, and its slab is gone."""

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(journals, "clear_entry", refuse)
        story.save("d/a", b"old")
        wait(story.host.store, "", Level.OBJECT, 20)
    ((_, path),) = journals_in(story.host.tiers.nvme.directory)
    assert story.host.flusher._state.counters["journal_failures"]
    story.save("d/a", b"new")
    wait(story.host.store, "", Level.OBJECT, 20)
    ends = time.monotonic() + 10
    while list(read_entries(path)):
        assert time.monotonic() < ends, "the entry stays"
        time.sleep(0.05)
    story.end(of="process")
    story.open()
    story.save("d/b", b"more")
    story.check()


def test_a_draft_that_was_never_sealed_does_not_appear_when_its_segment_goes(story, idle, monkeypatch):
    """The process dies after the flusher looked for journals of the dead, and before it gives back what they were filling."""
    ram, real, dying = story.host.tiers.ram, PendingScan.recover, threading.Event()
    directory = story.host.tiers.nvme.directory

    def recover(self, *arguments, **options):
        real(self, *arguments, **options)
        if dying.is_set():
            dying.clear()
            for slot in [slot for segment in ram.own_segments() for slot in segment.slots(states=(SlotState.CLEAN,))]:
                slot.segment.give(slot)
            ram.host._own.release()

    story.dies_at = "before draft.seal"
    with pytest.raises(Crash):
        story.save("d/a", b"never seen")
    story.is_dead, story.dies_at = False, ""
    (segment,) = ram.own_segments()
    monkeypatch.setattr(PendingScan, "recover", recover)
    dying.set()
    ends = time.monotonic() + 10
    while segment.path.exists() or journals_in(directory):
        assert time.monotonic() < ends, "it stays"
        time.sleep(0.05)
    with pytest.raises(NotFoundError):
        load(story.host.store, "d/a")
    assert story.host.flusher._state.counters["journal_files"] == 0


def test_a_conflict_is_no_later_write_that_did_not_see_an_entry(story, idle, monkeypatch):
    """The path was deleted after the conflict, so that the file in the journal replaces what the one in conflict was to replace."""
    story.save("d/a", b"saved")
    draft = drafts(story.host)["d/a"]
    story.end(of="host")
    host, directory, clock = story.host.tiers.ram.host, story.host.tiers.nvme.directory, SystemClock()
    ram = RamTier(host, story.host.descriptor.uuid, budget_bytes=128 << 20, clock=clock)
    nvme = NvmeTier(directory, budget_bytes=128 << 20, clock=clock)
    with contextlib.closing(ram), contextlib.closing(nvme):
        kept = replace(draft, record=replace(draft.record, write_id=os.urandom(16)), journal=None)
        (number,) = nvme.commit(drafts=[(kept.write_id, kept.path, kept.encode(), kept.names)])
        nvme.set_state(number, "conflict", "somebody was faster")
        taken = []
        found = Journals(ram, nvme, clock, lambda _: None, Counter())
        found.recover(lambda _, one: taken.append(one.write_id), at_once=True)
    assert taken == [draft.write_id]


def test_a_draft_is_not_found_without_one_that_was_sealed_before_it(story, idle, monkeypatch):
    """While the flusher looks into one segment after the other, a file is saved in the first of them, and then one in the last."""
    state, scan = story.host.flusher._state, story.host.flusher.scan
    other = story.make_host(ack=Level.LOCAL)
    story.host.tiers.writer._fault = other.tiers.writer._fault = lambda point: None
    _save(other.store, "e/first", b"x")
    _save(story.host.store, "e/second", b"x")
    mine, theirs = (host.tiers.ram.own_segments()[0].id for host in (story.host, other))
    real, seen = Segment.slots, []

    def slots(self, **options):
        found = real(self, **options)
        if options.get("kind") is SlotKind.DRAFT and threading.current_thread() is this and not seen:
            seen.append(self.id)
            earlier, later = (story.host, other) if self.id == mine else (other, story.host)
            _save(earlier.store, "d/earlier", b"x")
            _save(later.store, "d/later", b"x")
        return found

    this = threading.current_thread()
    monkeypatch.setattr(Segment, "slots", slots)
    with story.host.held():
        scan.discover()
        assert seen[0] in {mine, theirs}
        with state.changed:
            found = {entry.path for entry in state.entries}
        assert "d/later" not in found or "d/earlier" in found


def test_what_was_never_sealed_is_cleared_before_what_replaced_it_goes_on(story, monkeypatch):
    """Once that is published, nothing tells any more that it did not see the other one."""
    ((_, path),) = journals_in(story.host.tiers.nvme.directory)
    left = []

    def step(point):
        if point == "before settle.commit":
            left.extend(entry.draft.record.inline for entry in read_entries(path))

    other = story.make_host(ack=Level.LOCAL)
    monkeypatch.setattr(PendingScan, "sweep", lambda self: None)
    story.dies_at = "before draft.seal"
    with pytest.raises(Crash):
        story.save("d/a", b"never sealed")
    story.is_dead, story.dies_at = False, ""
    assert [entry.draft.record.inline for entry in read_entries(path)] == [b"never sealed"]
    story.host.tiers.ram.host._own.release()
    story.host.flusher._state.fault = step
    _save(other.store, "d/a", b"sealed")
    wait(other.store, "", Level.OBJECT, 20)
    assert left == []
