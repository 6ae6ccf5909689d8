"""A process lists the records that another process of the host has seen, without fetching them."""

import os
import sqlite3
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import pytest

from tierfs.objects import MeasuredObjects, MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, delete, list_directory, save
from tierfs.store.create import create_store
from tierfs.store.tree.host_records import HostRecords


class RemoteReplica(WrappedObjects):
    """An object tier that is not on this host."""

    @property
    def capabilities(self):
        return replace(self.inner.capabilities, host_local=False)


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def tier():
    return MeasuredObjects(RemoteReplica(MemoryObjects(f"/host-{uuid.uuid4().hex}")))


@pytest.fixture
def open_store(state, tier):
    """A function that opens the store as another process does."""
    descriptor, _ = create_store(tier, "store", random_bytes=os.urandom(16))
    return lambda: Store(tier, descriptor, url="store")


def reads(tier):
    counts = tier.snapshot()
    return counts["read"]["requests"] + counts["get"]["requests"]


def listed(store):
    return {entry.path: entry.length for entry in list_directory(store, "")}


def test_a_listing_fetches_nothing_that_another_process_wrote_or_listed(open_store, tier):
    writer = open_store()
    for number in range(20):
        save(writer, f"file{number}", b"x" * number)
    writer.host_records.flush()
    before = reads(tier)
    assert listed(open_store()) == {f"file{number}": number for number in range(20)}
    assert reads(tier) == before


def test_a_record_in_another_version_is_fetched(open_store, tier):
    writer = open_store()
    save(writer, "a", b"1")
    save(writer, "b", b"1")
    writer.host_records.flush()
    save(writer, "a", b"22")
    before = reads(tier)
    assert listed(open_store()) == {"a": 2, "b": 1}
    assert reads(tier) == before + 1


def test_a_deleted_file_is_not_brought_back(open_store):
    writer = open_store()
    save(writer, "a", b"1")
    writer.host_records.flush()
    delete(writer, "a")
    assert listed(open_store()) == {}


def test_a_damaged_record_on_the_host_is_fetched_anew_and_logged(open_store, state, caplog):
    writer = open_store()
    save(writer, "a", b"1")
    writer.host_records.flush()
    with sqlite3.connect(state / "records.sqlite") as connection:
        connection.execute("UPDATE records SET data = x'00112233'")
    connection.close()
    assert listed(open_store()) == {"a": 1}
    assert "fetched again" in caplog.text


def test_a_damaged_file_is_logged_once_and_replaced(open_store, state, caplog):
    writer = open_store()
    save(writer, "a", b"1")
    writer.host_records.flush()
    (state / "records.sqlite").write_bytes(b"rubbish" * 1000)
    reader = open_store()
    assert listed(reader) == {"a": 1}
    assert listed(reader) == {"a": 1}
    assert caplog.text.count("cannot be used") == 1
    assert reader.host_records.failures == 1
    again = open_store()
    assert listed(again) == {"a": 1}
    again.host_records.flush()
    assert again.host_records.failures == 0


def test_a_state_directory_that_others_may_read_is_not_used(open_store, state, caplog):
    state.mkdir(mode=0o755)
    writer = open_store()
    save(writer, "a", b"1")
    writer.host_records.flush()
    assert "chmod 700" in caplog.text
    assert not (state / "records.sqlite").exists()
    reader = open_store()
    assert listed(reader) == {"a": 1}
    reader.host_records.flush()


def test_the_file_has_a_bound(state, monkeypatch):
    monkeypatch.setattr("tierfs.store.tree.host_records.FILE_BYTES_MAX", 2_000_000)
    monkeypatch.setattr("tierfs.store.tree.host_records.DROPPED_ROWS", 100)
    records = HostRecords("0" * 32, state)
    for number in range(4000):
        records.add(f"short{number}", "1", b"x" * 100)
    for number in range(1000):
        records.add(f"long{number}", "1", b"x" * 5000)
        assert records.status()["bytes"] <= 2_000_000
    records.flush()
    assert records.status() == {"bytes": records.status()["bytes"], "bytes_max": 2_000_000}
    assert records.status()["bytes"] > 1_000_000
    assert records.newest("long999") == ("1", b"x" * 5000)
    assert records.newest("short0") is None  # the oldest ones are dropped


def test_noted_records_are_written_at_exit(state):
    script = (
        "from pathlib import Path; from tierfs.store.tree.host_records import HostRecords\n"
        f"HostRecords('0' * 32, Path({str(state)!r})).add('key', '1', b'data')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with sqlite3.connect(state / "records.sqlite") as connection:
        assert connection.execute("SELECT key, data FROM records").fetchall() == [("key", b"data")]
    connection.close()


def test_a_late_write_does_not_replace_a_newer_record(state):
    early, late, reader = (HostRecords("0" * 32, state) for _ in range(3))
    early.add("key", "1", b"one")
    late.add("key", "2", b"two")
    late.flush()
    assert early.newest("key") == ("2", b"two")
    early.flush()
    assert reader.newest("key") == ("2", b"two")


def test_a_clock_set_back_does_not_keep_old_records(state, monkeypatch):
    records = HostRecords("0" * 32, state)
    records.add("key", "1", b"one")
    records.flush()
    monkeypatch.setattr(time, "time_ns", lambda: 1_600_000_000_000_000_000)
    records.add("key", "2", b"two")
    records.flush()
    assert records.newest("key") == ("2", b"two")


def test_a_store_on_this_host_keeps_no_records_beside_it(state):
    tier = MemoryObjects(f"/host-{uuid.uuid4().hex}")
    descriptor, _ = create_store(tier, "store", random_bytes=os.urandom(16))
    assert Store(tier, descriptor, url="store").host_records is None


@pytest.mark.parametrize("is_written", [False, True])
def test_a_late_answer_replaces_no_version_that_was_seen_later(state, is_written):
    records = HostRecords("0" * 32, state)
    before = time.time_ns()
    records.add("key", "2", b"published")
    if is_written:
        records.flush()
    records.forget("key", before)
    records.add("key", "1", b"read before", before)
    assert records.newest("key") == ("2", b"published")
    records.flush()
    assert HostRecords("0" * 32, state).newest("key") == ("2", b"published")
