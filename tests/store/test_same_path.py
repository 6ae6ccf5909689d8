"""When several writers of one host change one path at once, one succeeds and the others get an error at once."""

import errno
import itertools
import os
import signal
import threading
import time

import pytest
from support.forked import forked
from support.tiered import MIB, content
from support.waiting import HANG_S

from tierfs.errors import AlreadyExistsError, CapacityError, ConflictError, StoreError
from tierfs.host.pending.levels import Level
from tierfs.host.write import writer as slabwriter
from tierfs.store import WriteMode, Writer, delete, load, rename, save, status, wait
from tierfs.store.write import staging


def outcomes_of(*changes):
    """Start each change on its own thread at once. Return their errors, None for a success."""
    outcomes = [None] * len(changes)
    begin = threading.Barrier(len(changes))

    def make(number):
        begin.wait(HANG_S)
        try:
            changes[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=make, args=(number,)) for number in range(len(changes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return outcomes


@pytest.fixture
def slow_looks(monkeypatch):
    """Delay the seals of `outcomes_of` after the check of the version that they replace."""
    look = staging._check_unchanged

    def look_slowly(*arguments):
        look(*arguments)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)

    monkeypatch.setattr(staging, "_check_unchanged", look_slowly)


def written(store, path, mode=WriteMode.OVERWRITE):
    writer = Writer(store, path, mode=mode)
    writer.write(content(MIB))
    return writer


CHANGES = ["overwrite", "append", "create", "delete", "rename", "rename onto", "first"]
BY_TIER = [
    *(("both", change) for change in CHANGES),
    *itertools.product(["ram", "nvme"], ["overwrite", "create", "delete"]),
]


@pytest.mark.usefixtures("slow_looks")
@pytest.mark.parametrize(("any_host", "change"), BY_TIER, indirect=["any_host"])
def test_one_of_two_simultaneous_changes_is_made(any_host, change):
    host, store = any_host, any_host.store
    mode = {"append": WriteMode.APPEND, "create": WriteMode.CREATE}.get(change, WriteMode.OVERWRITE)
    writers = [written(store, "run/a", mode) for _ in range(2)] if change in ("create", "first") else []
    with host.held():
        save(store, "run/b", b"other")
        if not writers:
            save(store, "run/a", b"before")
            writers = [written(store, "run/a", mode) for _ in range(2)]
        theirs = {
            "delete": lambda: delete(store, "run/a"),
            "rename": lambda: rename(store, "run/a", "run/c"),
            "rename onto": lambda: rename(store, "run/b", "run/a"),
        }.get(change, writers[1].commit)
        outcomes = outcomes_of(writers[0].commit, theirs)
    writers[1].abort()
    lost = [outcome for outcome in outcomes if outcome is not None]
    assert [type(error) for error in lost] == [AlreadyExistsError if change == "create" else ConflictError], outcomes
    wait(store, "", Level.OBJECT)
    assert host.tiers.drafts.conflicts() == []
    host.tiers.away_until_s = 0
    save(store, "run/a", b"again")
    wait(store, "", Level.OBJECT)
    assert load(host.plain(), "run/a") == b"again"
    assert status(store)["tiers"]["ram"]["dirty_bytes"] == 0


@pytest.mark.usefixtures("slow_looks")
def test_changes_of_several_paths_at_one_moment_are_all_made(host):
    writers = [written(host.store, f"run/{number}") for number in range(4)]
    assert outcomes_of(*(writer.commit for writer in writers)) == [None] * 4


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_change_based_on_a_pending_one_sees_a_conflict(host, is_changed):
    with host.held():
        save(host.store, "run/a", b"pending")
        late = written(host.store, "run/a", WriteMode.APPEND)
    wait(host.store, "", Level.OBJECT)
    host.tiers.away_until_s = 0
    if is_changed:
        save(host.store, "run/a", b"newer")
        wait(host.store, "", Level.OBJECT)
        with pytest.raises(ConflictError, match="on this host"):
            late.commit()
    else:
        late.commit()
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "run/a")[:7] == (b"newer" if is_changed else b"pending")


def test_a_process_stopped_in_a_seal_delays_its_path_only(host, make_host, monkeypatch):
    monkeypatch.setattr(slabwriter, "SEAL_S", 0.5)
    save(host.store, "run/a", b"before")
    wait(host.store, "", Level.OBJECT)

    def stop_in_seal():
        monkeypatch.setattr(staging, "_check_unchanged", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        save(make_host().store, "run/a", b"from the child")

    child = forked(stop_in_seal)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        used = status(host.store)["tiers"]["ram"]["used_bytes"]
        for _ in range(2):
            with pytest.raises(StoreError, match="stopped") as caught:
                save(host.store, "run/a", b"after")
            assert caught.value.transient
        assert status(host.store)["tiers"]["ram"]["used_bytes"] == used
        save(host.store, "run/b", b"elsewhere")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    save(host.store, "run/a", b"after")
    wait(host.store, "", Level.OBJECT)
    assert load(host.plain(), "run/a") == b"after"


def test_a_change_that_cannot_be_sealed_for_want_of_room_says_so(host, monkeypatch):
    def full(_self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tierfs.host.name_locks.NameLocks._open", full)
    with pytest.raises(CapacityError, match="a cannot be sealed: No space"):
        save(host.store, "a", b"1")
    monkeypatch.undo()
    save(host.store, "a", b"1")
