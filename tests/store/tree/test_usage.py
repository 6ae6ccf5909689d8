"""The bytes that files hold, share and free on deletion, and the few requests that it takes to count them."""

import importlib
import logging
import os
import uuid
from dataclasses import replace

import pytest

from tierfs.digest import CHUNK_BYTES, DigestKind
from tierfs.errors import CorruptionError, NotFoundError
from tierfs.format import keys
from tierfs.format.header import Kind
from tierfs.format.manifest import Manifest, content_digest
from tierfs.objects import MeasuredObjects, MemoryObjects, WrappedObjects
from tierfs.store import Store, Usage, delete, make_directory, save, stat, usage, usages
from tierfs.store.create import create_store
from tierfs.store.tree.records import observe, publish

KIB = 1024
measured = importlib.import_module("tierfs.store.tree.usage")


@pytest.fixture
def tier():
    return MemoryObjects(f"/usage-{uuid.uuid4().hex}")


@pytest.fixture
def opened(tier, tmp_path):
    """A function that opens the store anew, without any knowledge, over an object tier that counts."""
    descriptor, _ = create_store(tier, "memory://s", digest=DigestKind.XXH3_128, random_bytes=os.urandom(16))
    numbers = iter(range(100))
    return lambda: Store(
        MeasuredObjects(tier), descriptor, url="memory://s", state_dir=tmp_path / f"host{next(numbers)}"
    )


@pytest.fixture
def store(opened):
    return opened()


def asked(store):
    """Return the number of requests by method, without unused methods."""
    return {method: counts["requests"] for method, counts in store.objects.snapshot().items() if counts["requests"]}


def chunk(store, size=100 * KIB):
    """Return the row of a chunk in the store that no file names."""
    path = f"tmp-{uuid.uuid4().hex}"
    (row,) = save(store, path, os.urandom(size)).rows
    delete(store, path)
    return row


def put(store, path, *rows):
    """Publish a file of exactly these chunks."""
    length = sum(row.raw_length for row in rows)
    kind = store.descriptor.digest_kind
    manifest = Manifest(
        kind=Kind.FILE,
        write_id=os.urandom(16),
        length=length,
        created_ns=0,
        modified_ns=0,
        digest_kind=kind,
        digest=content_digest(kind, length, [row.name.digest for row in rows]),
        rows=rows,
    )
    publish(store, observe(store, path), manifest)


def record_bytes(tier, *paths):
    return sum(tier.head(keys.record_key(path)).size for path in paths)


def test_shared_chunks_are_freed_by_no_single_directory(store, tier):
    both, first, second = (chunk(store, size * KIB) for size in (300, 200, 100))
    put(store, "run/step_1/a", both, first)
    put(store, "run/step_1/b", first)
    put(store, "run/step_2/a", both, second, both)
    found = usages(store, ["run/step_1", "run/step_2"])
    records = record_bytes(tier, "run/step_1/a", "run/step_1/b")
    assert found["run/step_1"] == Usage(
        files=2,
        logical_bytes=700 * KIB,
        stored_bytes=both.stored_length + first.stored_length + records,
        shared_bytes=both.stored_length,
        freed_bytes=first.stored_length + records,
        deduplicated_bytes=200 * KIB,
        chunks=2,
    )
    assert found["run/step_2"].shared_bytes == both.stored_length
    assert usage(store, "run/step_2") == found["run/step_2"]
    # Together the two steps share nothing with other files.
    assert usage(store, "run").shared_bytes == usage(store, "").shared_bytes == 0
    assert usage(store, "run").freed_bytes == usage(store, "run").stored_bytes
    # For a single file, chunks that its neighbour needs count as shared.
    assert usage(store, "run/step_1/b").shared_bytes == first.stored_length


def test_files_of_an_inner_directory_count_there(store):
    outer, inner = chunk(store), chunk(store)
    put(store, "run/a", outer)
    put(store, "run/step_1/deep/a", inner, outer)
    found = usages(store, ["run", "run/step_1"])
    assert (found["run"].files, found["run"].chunks) == (1, 1)
    assert (found["run/step_1"].files, found["run/step_1"].chunks) == (1, 2)
    assert found["run"].shared_bytes == found["run/step_1"].shared_bytes == outer.stored_length
    assert usages(store, ["", "run/step_1"])[""] == found["run"]


def test_names_that_begin_alike_are_told_apart(store):
    put(store, "run/step_1/a", chunk(store))
    put(store, "run/step_10/a", chunk(store))
    put(store, "run/step_1.bak", chunk(store))
    assert usage(store, "run/step_1").files == usages(store, ["run/step_1"])["run/step_1"].files == 1


def test_small_files_and_those_of_others_are_counted(store, tier):
    save(store, "run/small", b"x" * 1000)
    tier.put("run/theirs", [b"y" * 500])
    tier.put("other", [b"y" * 50])
    found = usage(store, "run")
    size = record_bytes(tier, "run/small")
    assert found == Usage(
        files=1,
        logical_bytes=1000,
        stored_bytes=size,
        shared_bytes=0,
        freed_bytes=size + 500,
        foreign_files=1,
        foreign_bytes=500,
    )
    assert (usage(store, "run/theirs").foreign_bytes, usage(store, "run/theirs").freed_bytes) == (500, 500)
    assert (usage(store).foreign_files, usage(store).foreign_bytes) == (2, 550)


class Vanishing(WrappedObjects):
    """Another process deletes a record before each read."""

    def read(self, key, limit):
        self.delete([keys.record_key("run/a")])
        return super().read(key, limit)


def test_a_file_that_goes_while_it_is_counted_is_not_counted(store, tier):
    put(store, "run/a", chunk(store))
    put(store, "run/b", chunk(store))
    assert usage(Store(Vanishing(tier), store.descriptor, url="memory://s"), "").files == 1


@pytest.mark.usefixtures("indirect")
def test_the_chunks_of_a_table_of_chunks_are_counted(store, tier):
    manifest = save(store, "large", os.urandom(CHUNK_BYTES + 100 * KIB))
    assert manifest.indirect
    found = usage(store)
    assert found.chunks == 3
    assert found.stored_bytes == sum(info.size for info in tier.list(keys.CHUNKS)) + record_bytes(tier, "large")
    assert (found.logical_bytes, found.deduplicated_bytes) == (manifest.length, 0)


def test_usage_of_an_empty_store_is_zero(store):
    make_directory(store, "run/empty")
    assert usage(store, "run/empty") == Usage(shared_bytes=0, freed_bytes=0)
    assert usages(store, ["nothing"]) == {"nothing": Usage(shared_bytes=0, freed_bytes=0)}
    assert usages(store, []) == {}
    with pytest.raises(NotFoundError):
        usage(store, "nothing")


# -- bases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_base_that_no_file_is_made_of_any_more_is_asked_for_its_size(store, opened, monkeypatch, one_by_one, shared):
    if not one_by_one:
        monkeypatch.setattr(measured, "HEADS_MAX", 0)
    base, changed = chunk(store, 300 * KIB), chunk(store, 90 * KIB)
    for number in range(3):
        put(store, f"run/step_{number}/a", replace(changed, bases=(base.name,)))
    fresh = opened()
    found = usages(fresh, ["run/step_1", "run/step_2"], shared=shared)["run/step_1"]
    size = record_bytes(fresh.objects, "run/step_1/a")
    assert found.stored_bytes == base.stored_length + changed.stored_length + size
    assert found.shared_bytes == (base.stored_length + changed.stored_length if shared else None)
    assert found.freed_bytes == (size if shared else None)
    asked_chunks = asked(fresh)
    assert asked_chunks["read"] == (3 if shared else 2)
    # The last listing is that of the chunks with the base's first digits.
    assert asked_chunks["list"] == (2 if one_by_one else 3)
    assert asked_chunks.get("head", 0) - 1 == (1 if one_by_one else 0) + (0 if shared else 1)


@pytest.mark.parametrize("heads", [0, 1000])
def test_a_base_that_is_lost_is_warned_of(store, tier, monkeypatch, caplog, heads):
    monkeypatch.setattr(measured, "HEADS_MAX", heads)
    base, changed = chunk(store), chunk(store)
    put(store, "delta", replace(changed, bases=(base.name,)))
    tier.delete([keys.chunk_key(base.name)])
    with caplog.at_level(logging.WARNING, "tierfs"):
        assert usage(store).stored_bytes == changed.stored_length + record_bytes(tier, "delta")
    assert f"1 chunks that files need are missing, for example memory://s/{keys.chunk_key(base.name)}" in caplog.text


# -- cost --------------------------------------------------------------------------------------------------------------


def test_the_whole_store_is_one_listing_and_a_request_for_each_record(store, opened):
    row = chunk(store)
    for number in range(30):
        put(store, f"run/step_{number % 3}/{number}", row)
        make_directory(store, f"run/empty_{number}")
    fresh = opened()
    paths = [f"run/step_{number}" for number in range(3)]
    usages(fresh, paths)
    assert asked(fresh) == {"list": 2, "read": 30}
    usages(fresh, paths)
    assert asked(fresh) == {"list": 4, "read": 30}


def test_records_read_by_another_process_are_not_read_again(store, tier, tmp_path):
    descriptor = replace(store.descriptor, endpoint=replace(store.descriptor.endpoint, host_local=False))
    for number in range(5):
        save(store, f"run/{number}", os.urandom(100 * KIB))
    stores = [
        Store(MeasuredObjects(tier), descriptor, url="memory://s", state_dir=tmp_path / "shared") for _ in range(2)
    ]
    first = usage(stores[0], "")
    stores[0].host_records.flush()
    assert usage(stores[1], "") == first
    assert [asked(one).get("read", 0) for one in stores] == [5, 0]


def test_without_what_is_shared_nothing_but_the_directories_is_read(store, opened):
    row = chunk(store)
    for directory in ("run/step_1", "run/step_2", "run/step_3", "elsewhere"):
        put(store, f"{directory}/a", row)
    fresh = opened()
    found = usages(fresh, ["run/step_1", "run/step_3"], shared=False)
    assert asked(fresh)["read"] == 2
    assert [(one.files, one.shared_bytes, one.freed_bytes) for one in found.values()] == [(1, None, None)] * 2
    assert usage(opened(), "run/step_1/a", shared=False) == found["run/step_1"]


class Listing(WrappedObjects):
    """Notes the keys of all listed objects."""

    def __init__(self, inner):
        super().__init__(inner)
        self.listed = []

    def list(self, prefix, *, delimiter=False):
        for item in super().list(prefix, delimiter=delimiter):
            self.listed.append(item.key)
            yield item


def test_looking_at_the_root_lists_no_chunks(store, tier):
    save(store, "run/a", os.urandom(100 * KIB))
    tier.put("theirs/deep/file", [b"y"])
    tier.put("top", [b"yy"])
    objects = Listing(tier)
    assert usage(Store(objects, store.descriptor, url="memory://s")).foreign_bytes == 3
    assert not [key for key in objects.listed if key.startswith(keys.CHUNKS)]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_record_elsewhere_is_passed_over_and_one_here_is_an_error(store, tier, opened, caplog):
    row = chunk(store)
    put(store, "run/good", row)
    put(store, "other/bad", row)
    key = keys.record_key("other/bad")
    data, _ = tier.read(key, 1 << 20)
    tier.put(key, [data[:-1]])
    with caplog.at_level(logging.WARNING, "tierfs"):
        assert usage(opened(), "run").files == 1
        assert usages(opened(), ["other"])["other"].files == 0
    assert caplog.text.count("a file is not counted") == 1, "a process says it once"
    with pytest.raises(CorruptionError):
        usage(opened(), "other")
    assert stat(store, "run/good").length == row.raw_length
