"""A change that conflicts with another host's is kept on this host and blocks no other file."""

import contextlib
import threading
import time

import pytest
from support.tiered import MIB, Gate, Host, content, save_at
from support.waiting import HANG_S, until

from tierfs.errors import ConflictError, NotFoundError, StoreError
from tierfs.flusher.nvme import NvmePersister
from tierfs.flusher.publish import StorePublisher
from tierfs.flusher.scan import PendingScan
from tierfs.flusher.state import FlushState
from tierfs.flusher.upload import Uploader
from tierfs.format.keys import record_key
from tierfs.format.manifest import Tombstone
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.store import (
    WriteMode,
    Writer,
    annotate,
    delete,
    discard_conflict,
    load,
    rename,
    save,
    stat,
    status,
    wait,
)
from tierfs.store.chunks import store_chunk
from tierfs.store.maintenance.reencode import reencode

TEXT = b"nothing new under the sun\n" * (MIB // 26)


class OldReads(Gate):
    """An object tier that still returns what was at a key before its last put."""

    def __init__(self, root):
        super().__init__(root)
        self.past = {}

    def put(self, key, data, **how):
        with contextlib.suppress(NotFoundError):
            self.past[key] = super().read(key, MIB)
        return super().put(key, data, **how)

    def read(self, key, limit):
        return self.past.get(key) or super().read(key, limit)

    def head(self, key):
        return self.past[key][1] if key in self.past else super().head(key)


def test_an_old_answer_about_the_flushers_own_record_is_no_conflict(tmp_path, root, descriptor):
    host = Host(tmp_path, OldReads(root), descriptor)
    save_at(host.store, "a", b"one", Level.OBJECT)
    with host.held("put"):
        save(host.store, "a", b"two")
        delete(host.store, "a")
    wait(host.store, "a", Level.OBJECT)
    host.close()
    host.objects.past.clear()
    with pytest.raises(NotFoundError):
        stat(host.plain(), "a")


def test_a_conflict_that_cannot_be_noted_holds_up_no_other_file(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    paths = [f"run-{number}/a" for number in range(5)]  # more than the flusher uploads at once
    failures = []

    def fail(_tier, *_about):
        failures.append(1)
        raise StoreError("the disk is read-only", tier="nvme")

    with monkeypatch.context() as patched, here.held():
        patched.setattr(NvmeTier, "keep_as_conflict", fail)
        for path in paths:
            save(here.store, path, b"late")
            save_at(there.store, path, b"theirs", Level.OBJECT)
        wait(here.store, "", Level.LOCAL)
        here.objects.down = False
        until(lambda: len(failures) > 2 * len(paths))
        save(here.store, "beside/it", b"is free")
        wait(here.store, "beside/it", Level.OBJECT)
        assert not status(here.store)["conflicts"]
    until(lambda: len(status(here.store)["conflicts"]) == len(paths))
    assert status(here.store)["counters"]["flusher_conflicts"] == len(paths)
    with pytest.raises(ConflictError, match="their version is kept"):
        wait(here.store, paths[0], Level.OBJECT)
    assert [discard_conflict(here.store, path) for path in paths] == [1] * len(paths)
    wait(here.store, "", Level.OBJECT)


@pytest.mark.parametrize("is_pending", [False, True], ids=["published", "pending"])
def test_a_tombstone_that_gc_removed_is_no_conflict(make_host, objects, monkeypatch, is_pending):
    host = make_host()
    save_at(host.store, "run/a", b"first", Level.OBJECT)
    publish = StorePublisher.publish

    def publish_and_collect(publisher, draft, *rows, **how):
        publish(publisher, draft, *rows, **how)
        if isinstance(draft.record, Tombstone):
            objects.delete([record_key("run/a")])

    monkeypatch.setattr(StorePublisher, "publish", publish_and_collect)
    if not is_pending:
        delete(host.store, "run/a")
    with host.held():
        if is_pending:
            save(host.store, "run/a", b"second")
            delete(host.store, "run/a")
        save(host.store, "run/a", b"third")
        if not is_pending:
            objects.delete([record_key("run/a")])
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "run/a") == b"third"


def overwrite(store):
    save(store, "last/w", b"new")
    return {"last/w": b"new"}


def append(store):
    writer = Writer(store, "last/w", mode=WriteMode.APPEND)
    writer.write(b"tail")
    writer.commit()
    return {"last/w": TEXT + b"tail"}


def describe(store):
    annotate(store, "last/w", {"note": 1}, write_id=stat(store, "last/w").manifest.write_id)
    return {"last/w": TEXT}


def overwrite_and_remove(store):
    overwrite(store)
    delete(store, "last/w")
    return {}


def overwrite_and_move(store):
    overwrite(store)
    rename(store, "last/w", "last/v")
    return {"last/v": b"new"}


CHANGES = [overwrite, append, describe, overwrite_and_remove, overwrite_and_move]


def save_raw(store, path):
    """Save a file as a flusher with a backlog does."""
    store_chunk(store, memoryview(bytearray(TEXT)), pressure="backlog")
    save(store, path, TEXT)


def encode_anew(store):
    assert reencode(store, exclusive=True, dry_run=False, progress=lambda *_: None).count == 1


@pytest.mark.parametrize("change", CHANGES)
def test_gc_that_encodes_a_file_anew_makes_no_conflict(make_host, change):
    here, there = make_host("here"), make_host("there").plain()
    save_raw(there, "last/w")
    stat(here.store, "last/w")
    with here.held("put"):
        save(here.store, "last/other", b"so that later changes below last/ wait")
        left = change(here.store)
        encode_anew(there)
    wait(here.store, "", Level.OBJECT)
    for path in ("last/w", "last/v"):
        with contextlib.nullcontext() if path in left else pytest.raises(NotFoundError):
            assert load(there, path) == left[path]


@pytest.mark.parametrize("is_staged", [False, True])
def test_gc_that_encodes_an_open_file_anew_makes_no_conflict(make_host, is_staged):
    host = make_host()
    there = host.plain()
    save_raw(there, "w")
    writer = Writer(host.store if is_staged else there, "w")
    writer.write(b"new")
    encode_anew(there)
    writer.commit()
    wait(host.store, "w", Level.OBJECT)
    assert load(there, "w") == b"new"


def test_a_change_after_gc_encoded_a_file_anew_is_a_conflict(make_host):
    here, there = make_host("here"), make_host("there").plain()
    save_raw(there, "w")
    stat(here.store, "w")
    with here.held("put"):
        save(here.store, "w", b"late")
        encode_anew(there)
        save(there, "w", b"theirs")
    with pytest.raises(ConflictError):
        wait(here.store, "w", Level.OBJECT)
    assert load(there, "w") == b"theirs"


def test_a_large_file_whose_memory_cannot_be_seen_at_first_is_uploaded(make_host, monkeypatch):
    host = make_host(nvme=256 << 20)
    chunk, failures = FlushState.chunk, []

    def fail_once(state, reference):
        if not failures:
            failures.append(1)
            raise StoreError("/dev/shm cannot be listed: Too many open files", tier="ram")
        return chunk(state, reference)

    data = content(80 << 20)  # large enough to be uploaded while it moves to the nvme tier
    with host.held():
        monkeypatch.setattr(NvmePersister, "persist", lambda *_: False)
        monkeypatch.setattr(FlushState, "chunk", fail_once)
        save(host.store, "large", data)
        until(lambda: failures)
        monkeypatch.undo()
    wait(host.store, "large", Level.OBJECT)
    assert load(host.plain(), "large") == data
    until(host.flusher.is_idle)


def test_a_conflict_that_is_in_memory_alone_does_not_keep_the_flusher(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "a", b"late")
        wait(here.store, "a", Level.LOCAL)
        monkeypatch.setattr(NvmePersister, "persist", lambda *_: False)  # as if the nvme tier were full
        save(here.store, "a", b"built on it")
        save_at(there.store, "a", b"theirs", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    assert here.flusher.is_idle()
    monkeypatch.undo()
    save(here.store, "b", b"goes on")
    wait(here.store, "b", Level.LOCAL)
    assert discard_conflict(here.store, "a") == 2
    wait(here.store, "", Level.OBJECT)


def conflict_of(here, there, *, until_kept=2):
    """Let another host change ``a`` first, and wait until this host reports the conflict."""
    save_at(there.store, "a", b"theirs", Level.OBJECT)
    here.objects.down = False
    with pytest.raises(ConflictError):
        wait(here.store, "a", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == until_kept)


@contextlib.contextmanager
def moving(here, monkeypatch, move):
    """Hold the object tier with ``a`` in the nvme tier. ``move(batch, copy)`` moves each later batch there.

    Yields an event that is set when a move has begun: a change that is queued after its base was kept is none to move.
    """
    copy = NvmePersister._copy_chunks  # the one moment between the memory of a change and its draft in the nvme tier
    begun = threading.Event()

    def begin(self, nvme, batch):
        begun.set()
        return move(batch, lambda: copy(self, nvme, batch))

    with here.held():
        save(here.store, "a", b"late")
        wait(here.store, "a", Level.LOCAL)
        monkeypatch.setattr("tierfs.flusher.state.PERSISTING_FIRST_S", 0.0)
        monkeypatch.setattr(NvmePersister, "_copy_chunks", begin)
        yield begun


def check_kept(here, *, count=2):
    """Check that all conflicts are kept, hidden and still reported by a new flusher, and that they can be discarded."""
    for _ in range(2):
        assert load(here.store, "a") == b"theirs"
        assert [draft.state for draft in here.flusher.nvme.drafts()] == ["conflict"] * len(here.flusher.nvme.drafts())
        assert here.flusher.is_idle()
        here.close()
        here.open()
        save(here.store, "b/b", b"starts a flusher")
        wait(here.store, "b/b", Level.OBJECT)
        until(lambda: len(status(here.store)["conflicts"]) == count)
    assert discard_conflict(here.store, "a") == count
    assert here.tiers.drafts.conflicts() == []
    wait(here.store, "", Level.OBJECT)


def test_a_change_that_reaches_the_nvme_tier_while_its_base_is_marked_is_kept_as_well(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    mark, goes = NvmeTier.keep_as_conflict, threading.Event()

    def move_late(_batch, copy):
        assert goes.wait(HANG_S)
        return copy()

    def mark_late(nvme, number, note):
        goes.set()
        time.sleep(0.5)  # the change cannot get there before this function returns
        mark(nvme, number, note)

    with moving(here, monkeypatch, move_late) as begun:
        monkeypatch.setattr(NvmeTier, "keep_as_conflict", mark_late)
        save(here.store, "a", b"built on it")
        assert begun.wait(HANG_S)
        conflict_of(here, there)
    monkeypatch.undo()
    check_kept(here)


def test_a_change_that_becomes_a_conflict_on_its_way_to_the_nvme_tier_stays_one(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")

    def move(batch, copy):
        found = copy()
        until(lambda: batch[0].conflict)
        return found

    with moving(here, monkeypatch, move) as begun:
        save(here.store, "a", b"built on it")
        assert begun.wait(HANG_S)
        conflict_of(here, there)
    monkeypatch.undo()
    save(here.store, "b/b", b"goes behind it")
    wait(here.store, "b/b", Level.OBJECT)
    check_kept(here)


def test_a_change_that_cannot_be_put_into_the_nvme_tier_says_why_it_is_kept(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")

    def fail(batch, _copy):
        until(lambda: batch[0].conflict)
        raise StoreError("input/output error", tier="nvme")

    with moving(here, monkeypatch, fail) as begun:
        save(here.store, "a", b"built on it")
        assert begun.wait(HANG_S)
        conflict_of(here, there)
    until(lambda: status(here.store)["counters"].get("flusher_nvme_failures"))
    assert all("their version is kept" in conflict["message"] for conflict in status(here.store)["conflicts"])
    monkeypatch.undo()
    check_kept(here)


def test_a_conflict_is_discarded_as_soon_as_it_is_reported(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    keep = Uploader._keep

    def keep_and_linger(*arguments):
        keep(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr(Uploader, "_keep", keep_and_linger)
    with here.held():
        save(here.store, "a", b"late")
        conflict_of(here, there, until_kept=1)
    assert discard_conflict(here.store, "a") == 1


@pytest.mark.parametrize("kept", ["the first", "the last"])
def test_a_flusher_that_ends_while_it_marks_conflicts_leaves_none_behind(make_host, monkeypatch, kept):
    here, there = make_host("here"), make_host("there")
    mark, marked = NvmeTier.keep_as_conflict, []

    def mark_one(nvme, _number, note):
        number = (min if kept == "the first" else max)(draft.seq for draft in nvme.drafts())
        mark(nvme, number, note)
        marked.append(number)
        raise StoreError("disk full")

    with here.held():
        save(here.store, "a", b"late")
        save(here.store, "a", b"built on it")
        wait(here.store, "a", Level.LOCAL)
        monkeypatch.setattr(NvmeTier, "keep_as_conflict", mark_one)
        save_at(there.store, "a", b"theirs", Level.OBJECT)
    until(lambda: marked)
    here.close()
    monkeypatch.undo()
    here.open()
    save(here.store, "b/b", b"starts a flusher")
    wait(here.store, "b/b", Level.OBJECT)
    with pytest.raises(ConflictError):
        wait(here.store, "a", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    check_kept(here)


def test_a_change_whose_base_cannot_be_marked_is_not_seen_without_it(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    mark, failures = NvmeTier.keep_as_conflict, []

    def fail_for_the_first(nvme, number, note):
        if number == 1:
            failures.append([draft.state for draft in nvme.drafts()])
            raise StoreError("disk full")
        mark(nvme, number, note)

    with monkeypatch.context() as patched, here.held():
        save(here.store, "a", b"late")
        save(here.store, "a", b"built on it")
        wait(here.store, "a", Level.LOCAL)
        patched.setattr(NvmeTier, "keep_as_conflict", fail_for_the_first)
        save_at(there.store, "a", b"theirs", Level.OBJECT)
        here.objects.down = False
        until(lambda: failures)
    assert failures[0] == ["pending", "conflict"]
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    check_kept(here)


def test_a_change_that_is_found_after_its_base_was_kept_is_kept_as_well(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "a", b"late")
        wait(here.store, "a", Level.LOCAL)
        with monkeypatch.context() as patched:
            patched.setattr(PendingScan, "discover", lambda _: None)
            with here.flusher.scan._looking:  # a call that has begun would find the draft
                pass
            save(here.store, "a", b"built on it")
            conflict_of(here, there, until_kept=1)
    with pytest.raises(ConflictError):
        wait(here.store, "a", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    assert status(here.store)["counters"]["flusher_conflicts"] == 2
    check_kept(here)


def test_the_memory_of_a_change_that_was_marked_there_and_moved_on_is_given_up(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    failures = []

    def move_late(_batch, copy):
        until(lambda: failures)
        return copy()

    def fail(_nvme, _number, _note):
        failures.append(1)
        raise StoreError("disk full")

    with moving(here, monkeypatch, move_late):
        monkeypatch.setattr(NvmeTier, "keep_as_conflict", fail)
        monkeypatch.setattr(FlushState, "release", lambda *_: None)  # as if the flusher were killed before it
        save(here.store, "a", b"built on it")
        save_at(there.store, "a", b"theirs", Level.OBJECT)
        here.objects.down = False
        until(lambda: len(here.flusher.nvme.drafts()) == 2)
        here.close()
    monkeypatch.undo()
    here.open()
    save(here.store, "b/b", b"starts a flusher")
    wait(here.store, "b/b", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == 2)
    check_kept(here)
