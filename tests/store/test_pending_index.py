"""A lookup of a pending file returns the drafts of its path, and drops or hides none."""

import contextlib
import threading

import pytest
from support.tiered import save_at
from support.waiting import HANG_S

from tierfs.errors import StoreError
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.pending.levels import Level
from tierfs.host.slab.segment import Segment
from tierfs.store import level_of, load, wait
from tierfs.store.write.writer import Writer


def put(host, path, data):
    writer = Writer(host.store, path, level=Level.STAGED)
    writer.write(data)
    writer.commit()


def pending(host, path):
    found = host.tiers.drafts.pending(path)
    return None if found is None else found.draft.length


def test_a_draft_that_was_unreadable_once_is_found_later(make_host, monkeypatch):
    host = make_host(nvme=0)  # drafts stay in memory
    with host.held():
        put(host, "a", b"x" * 10)
        assert pending(host, "a") == 10
        put(host, "a", b"x" * 20)
        put(host, "b", b"x" * 30)
        with monkeypatch.context() as broken:

            def fail(*_):
                raise StoreError("the file cannot be read just now", tier="ram")

            broken.setattr(Segment, "read", fail)
            with pytest.raises(StoreError, match="just now"):
                pending(host, "b")
        assert pending(host, "b") == 30
        assert pending(host, "a") == 20


def test_the_flusher_retries_a_draft_that_it_cannot_read_now(make_host, monkeypatch):
    host = make_host()
    save_at(host.store, "first", b"1", Level.LOCAL)  # starts the flusher
    read = Segment.read_all  # the one way to a draft in memory

    def fail(segment, slot):
        if threading.current_thread() is threading.main_thread():
            return read(segment, slot)
        raise StoreError("the memory cannot be read just now", tier="ram")

    with monkeypatch.context() as broken:
        broken.setattr(Segment, "read_all", fail)
        put(host, "b", b"2")
        with pytest.raises((StoreError, TimeoutError)):
            wait(host.store, "b", Level.LOCAL, timeout_s=0.3)
    wait(host.store, "b", Level.OBJECT, timeout_s=HANG_S)
    assert load(host.plain(), "b") == b"2"


def test_the_newest_of_several_drafts_of_a_path_counts(make_host):
    host = make_host()
    with host.held():
        for length in range(1, 6):
            put(host, "a", b"x" * length)
            put(host, f"dir/{length}", b"y")
            assert pending(host, "a") == length
        assert set(host.tiers.drafts.pending_below("dir")) == {f"dir/{length}" for length in range(1, 6)}
        assert host.tiers.drafts.pending_below("di") == {}
        assert set(host.tiers.drafts.pending_below("")) == {"a", *(f"dir/{length}" for length in range(1, 6))}


def test_a_save_looks_at_no_draft_of_another_path(make_host, monkeypatch):
    host = make_host(nvme=0)
    with host.held():
        for number in range(50):
            put(host, f"f{number}", b"z")
        assert pending(host, "f0") == 1
        decoded = host.tiers.drafts._decoded
        looked, real = [], decoded.in_slot

        def in_slot(slot):
            looked.append(slot)
            return real(slot)

        monkeypatch.setattr(decoded, "in_slot", in_slot)
        assert pending(host, "f3") == 1
        assert pending(host, "none") is None
    assert len({(slot.segment.id, slot.index) for slot in looked}) == 1


@pytest.fixture
def stopped(make_host):
    """A host whose flusher stops at a point of its work, and the event that lets it go on."""
    go = threading.Event()

    def stop(at):
        host = make_host()
        save_at(host.store, "first", b"1", Level.LOCAL)  # starts the flusher
        host.flushing.fault = lambda point: point == at and go.wait(HANG_S)
        return host, go

    yield stop
    go.set()


def test_a_draft_leaves_its_slot_before_it_is_published(stopped, monkeypatch):
    monkeypatch.setattr("tierfs.flusher.state.PERSISTING_FIRST_S", 0)  # as if the nvme tier were slow
    host, _ = stopped("before release.chunks")
    save_at(host.store, "second", b"2", Level.LOCAL)
    with contextlib.suppress(TimeoutError):
        wait(host.store, "second", Level.OBJECT, timeout_s=0.3)
    assert level_of(host.store, "second") >= Level.LOCAL


def test_a_draft_that_moves_during_a_lookup_is_at_its_new_level(stopped, monkeypatch):
    host, go = stopped("before settle.commit")
    put(host, "a", b"x")
    real = NvmeReader.draft

    def draft(reader, path):
        go.set()
        wait(host.store, path, Level.OBJECT, timeout_s=HANG_S)
        return real(reader, path)

    monkeypatch.setattr(NvmeReader, "draft", draft)  # between the looks at both tiers
    assert host.tiers.level("a") is Level.OBJECT
