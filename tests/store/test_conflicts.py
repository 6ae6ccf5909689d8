"""What becomes of a change that another host was faster with: it is kept on this host, and holds up nothing beside it."""

import pytest
from support.fake_flusher import until
from support.tiered import content, save_at

from tierfs.errors import ConflictError, StoreError
from tierfs.flusher.nvme import NvmePersister
from tierfs.flusher.state import FlushState
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.levels import Level
from tierfs.store import discard_conflict, load, save, status, wait


def test_a_conflict_that_cannot_be_noted_holds_up_no_other_file(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    paths = [f"run-{number}/a" for number in range(5)]  # more than are uploaded at once
    failures = []

    def fail(_tier, *_about):
        failures.append(1)
        raise StoreError("nvme.db: attempt to write a readonly database", tier="nvme")

    with monkeypatch.context() as patched, here.held():
        patched.setattr(NvmeTier, "keep_as_conflict", fail)
        for path in paths:
            save(here.store, path, b"late")
            save_at(there.store, path, b"theirs", Level.OBJECT)
        wait(here.store, "", Level.LOCAL, 20)
        here.objects.down = False
        until(lambda: len(failures) > 2 * len(paths), 30)
        save(here.store, "beside/it", b"is free")
        wait(here.store, "beside/it", Level.OBJECT, 20)
        assert not status(here.store)["conflicts"]
    until(lambda: len(status(here.store)["conflicts"]) == len(paths), 60)
    assert status(here.store)["counters"]["flusher_conflicts"] == len(paths)
    with pytest.raises(ConflictError, match="theirs stands"):
        wait(here.store, paths[0], Level.OBJECT, 20)
    assert [discard_conflict(here.store, path) for path in paths] == [1] * len(paths)
    wait(here.store, "", Level.OBJECT, 20)


def test_a_large_file_whose_memory_cannot_be_seen_at_first_is_uploaded(make_host, monkeypatch):
    host = make_host(nvme=256 << 20)
    chunk, failures = FlushState.chunk, []

    def fail_once(state, reference):
        if not failures:
            failures.append(1)
            raise StoreError("/dev/shm cannot be listed: Too many open files", tier="ram")
        return chunk(state, reference)

    data = content(80 << 20)  # uploaded while it goes to the nvme tier
    with host.held():
        monkeypatch.setattr(NvmePersister, "persist", lambda *_: False)
        monkeypatch.setattr(FlushState, "chunk", fail_once)
        save(host.store, "large", data)
        until(lambda: failures, 20)
        monkeypatch.undo()
    wait(host.store, "large", Level.OBJECT, 60)
    assert load(host.plain(), "large") == data
    assert not host.flusher._state.entries.busy


def test_a_conflict_that_is_in_memory_alone_does_not_keep_the_flusher(make_host, monkeypatch):
    here, there = make_host("here"), make_host("there")
    with here.held():
        save(here.store, "a", b"late")
        wait(here.store, "a", Level.LOCAL, 20)
        monkeypatch.setattr(NvmePersister, "persist", lambda *_: False)  # as where the nvme tier is full
        save(here.store, "a", b"built on it")
        save_at(there.store, "a", b"theirs", Level.OBJECT)
    until(lambda: len(status(here.store)["conflicts"]) == 2, 20)
    assert here.flusher.is_idle()
    monkeypatch.undo()
    save(here.store, "b", b"goes on")
    wait(here.store, "b", Level.LOCAL, 20)
    assert discard_conflict(here.store, "a") == 2
    wait(here.store, "", Level.OBJECT, 20)
