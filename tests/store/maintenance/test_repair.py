"""Repair heals objects, moves some aside, and reports the lost ones."""

import json
import uuid
from dataclasses import replace

import pytest
from support.damaging import LOOK, chunk_of, content, lost_keys, make_store, middle, reopened, run, twice
from support.saving import Training

from tierfs.errors import CorruptionError, NotFoundError
from tierfs.format import keys
from tierfs.format.header import CHECKSUM_BYTES, Kind, seal
from tierfs.objects import LocalObjects, MemoryObjects
from tierfs.store import (
    Store,
    annotate_directory,
    delete,
    list_directory,
    load,
    make_directory,
    remove_directory,
    save,
    stat,
    verify,
)
from tierfs.store.chunks import store_chunk
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.repair_records import RECORD_BYTES_MAX
from tierfs.store.maintenance.scrub import ScrubOptions, scrub
from tierfs.store.read.fetch import fetch
from tierfs.store.read.reader import expand_rows
from tierfs.store.tree.records import observe
from tierfs.testing.faults import flip_bit, remove, truncate


@pytest.fixture
def store():
    store = make_store()
    for number, name in enumerate(("a", "b", "run/c")):
        save(store, name, content(number))
    make_directory(store, "empty")
    save(store, "gone", content(77))
    delete(store, "gone")
    return store


def test_a_sound_store_is_left_as_it_is(store):
    before = {item.key: item.version for item in store.objects.list("") if not item.key.startswith(keys.LEASES)}
    report = run(store)
    assert (report.mended, report.moved, report.left, report.lost, report.is_whole) == ([], [], [], [], True)
    assert (report.records, report.chunks) == (5, 3)
    after = {item.key: item.version for item in store.objects.list("") if not item.key.startswith(keys.LEASES)}
    assert after == before


def tombstone(store):
    return keys.record_key("gone")


def record(store):
    return keys.record_key("a")


def marker(store):
    return keys.marker_key("empty")


def lease(store):
    return next(item.key for item in store.objects.list(keys.LEASES))


def condemned(store):
    save(store, "old", content(88))
    delete(store, "old")
    store.clock.sleep(100)
    collect(store, GcOptions(concurrency=1))
    return next(item.key for item in store.objects.list(keys.GC) if keys.is_condemned_key(item.key))


def collector(store):
    collect(store, GcOptions(concurrency=1))
    return keys.COLLECTOR


def scrub_record(store):
    scrub(store, LOOK)
    return keys.SCRUB


OBJECTS = [tombstone, record, marker, lease, condemned, collector, scrub_record]


@pytest.mark.parametrize("which", [*OBJECTS, lambda store: chunk_of(store, "a")])
def test_gc_scrub_and_repair_lose_nothing_that_is_sound(store, which):
    key = which(store)
    twice(store, key)
    store.clock.sleep(100)
    for _ in range(4):
        collect(store, GcOptions(concurrency=1))
        store.clock.sleep(100)
    scrub(store, ScrubOptions(concurrency=1))
    report = run(store)
    for _ in range(4):
        assert not collect(store, GcOptions(concurrency=1)).is_blocked
        store.clock.sleep(100)
    other = Store(store.objects, store.descriptor, url="again", clock=store.clock)
    assert load(other, "b") == content(1)
    assert load(other, "run/c") == content(2)
    assert [entry.path for entry in list_directory(other, "")] == [
        *(["a"] if which is not record else []),
        "b",
        "empty",
        "run",
    ]
    save(other, "new", content(9))
    if which is record:
        assert report.lost_files == ["a"]
        assert len(lost_keys(store)) == 1
    elif "/chunks/" in key:
        assert [each.path for each in report.lost] == ["a"]
    else:
        assert report.is_whole
        assert load(other, "a") == content(0)


def test_a_record_that_cannot_be_saved_is_moved_aside_and_leaves_a_tombstone(store):
    key = record(store)
    twice(store, key)
    damaged = store.objects.read(key, 1 << 20)[0]
    report = run(store)
    assert report.lost_files == ["a"]
    (kept,) = lost_keys(store)
    assert (report.moved[0].how, store.objects.read(kept, 1 << 20)[0]) == (kept, damaged)
    with pytest.raises(NotFoundError):
        load(Store(store.objects, store.descriptor, url="again"), "a")
    assert verify(store).damage == []


@pytest.mark.parametrize(
    ("damage", "at"),
    [(truncate, 100), (truncate, 28), (flip_bit, 8 * 9)],
    ids=["cut short", "cut in its write id", "another format version"],
)
def test_a_record_comes_back_from_another_copy_of_the_store(store, damage, at):
    key = record(store)
    copy = MemoryObjects(f"/copy-{uuid.uuid4().hex}")
    for item in list(store.objects.list("")):
        copy.put(item.key, [store.objects.read(item.key, 1 << 20)[0]])
    damage(store.objects, key, at)
    other = Store(copy, store.descriptor, url="copy")
    assert [each.how for each in run(store, replicas=[other]).mended] == ["copy"]
    assert load(Store(store.objects, store.descriptor, url="again"), "a") == content(0)


def test_a_record_of_another_write_is_not_taken_from_a_copy(store):
    copy = make_store()
    save(copy, "a", b"something else")
    twice(store, record(store))
    flip_bit(store.objects, record(store), 8 * 20)
    report = run(store, replicas=[copy])
    assert report.lost_files == ["a"]


def test_a_missing_chunk_is_named_with_its_file_and_place(store):
    save(store, "both", content(9) + content(0))
    save(store, "copy", content(0))
    remove(store.objects, chunk_of(store, "a"))
    report = run(store)
    assert [(each.path, each.ranges) for each in report.lost] == [("a", ((0, 3000),)), ("copy", ((0, 3000),))]
    assert not report.is_whole
    json.dumps(report.as_dict())


def test_a_chunk_is_healed_from_another_object_of_its_content_in_a_directory(tmp_path):
    tier = LocalObjects(str(tmp_path))
    store = Store(tier, replace(make_store().descriptor, endpoint=tier.capabilities), url="store")
    save(store, "a", content(0))
    key = chunk_of(store, "a")
    unreadable(store, key)
    save(reopened(store), "b", content(0))
    assert chunk_of(store, "b") != key
    scrub(store, LOOK)
    assert [each.key for each in run(reopened(store)).mended] == [key]
    assert load(reopened(store), "a") == content(0)


def test_a_dry_run_changes_nothing_and_says_the_same(store):
    twice(store, record(store))
    middle(store, marker(store))
    remove(store.objects, chunk_of(store, "run/c"))
    before = {item.key: item.version for item in store.objects.list("")}
    would = run(store, dry_run=True)
    assert {item.key: item.version for item in store.objects.list("")} == before
    did = run(store)
    for name in ("mended", "moved", "left"):
        assert [each.key for each in getattr(would, name)] == [each.key for each in getattr(did, name)]
    assert would.lost == did.lost


@pytest.mark.parametrize("damage", ["envelope", "block", "length", "removed"])
def test_a_dry_run_heals_what_a_run_heals(damage):
    store, replica = make_store("all"), make_store("all")
    for target in (store, replica):
        save(target, "a", Training().file())
    key = keys.chunk_key(max(observe(store, "a").manifest.rows, key=lambda row: row.stored_length).name)
    size = store.objects.head(key).size
    if damage == "envelope":
        flip_bit(store.objects, key, 8 * 20 + 1)
    elif damage == "block":
        flip_bit(store.objects, key, 8 * (size - 5))
    elif damage == "length":
        truncate(store.objects, key, 500)
    else:
        remove(store.objects, key)
    scrub(store, LOOK)
    before = {item.key: item.version for item in store.objects.list("")}
    would = run(reopened(store), replicas=[replica], dry_run=True)
    assert {item.key: item.version for item in store.objects.list("")} == before
    did = run(reopened(store), replicas=[replica])
    assert [each.key for each in would.mended] == [each.key for each in did.mended]
    assert (would.left, would.moved, would.lost) == (did.left, did.moved, did.lost) == ([], [], [])
    assert did.mended


def test_a_chunk_with_one_bad_block_stays_because_the_others_can_be_read():
    store = make_store()
    data = content(1, 3 << 20)
    save(store, "a", data)
    key = chunk_of(store, "a")
    flip_bit(store.objects, key, 8 * (store.objects.head(key).size - 5))
    scrub(store, LOOK)
    report = run(store)
    assert [each.how for each in report.left] == ["its sound blocks can still be read"]
    assert [each.ranges for each in report.lost] == [((2 << 20, 1 << 20),)], "no more than the block is lost"
    assert store.objects.head(key)
    with pytest.raises(CorruptionError):
        load(store, "a")


def test_a_chunk_of_which_nothing_can_be_read_makes_way(store):
    key = chunk_of(store, "run/c")
    for bit in (100, 200, 333):
        flip_bit(store.objects, key, bit)
    scrub(store, LOOK)
    report = run(store)
    assert [each.key for each in report.moved] == [key]
    save(Store(store.objects, store.descriptor, url="again", clock=store.clock), "elsewhere", content(2))
    assert load(store, "run/c") == content(2), "saving the bytes anywhere heals all that names them"


def unreadable(store, key):
    for bit in (100, 200, 333):
        flip_bit(store.objects, key, bit)


def test_no_chunk_is_moved_while_a_record_is_of_a_newer_tierfs(store):
    key = chunk_of(store, "a")
    body = bytearray(store.objects.read(record(store), 1 << 20)[0][:-CHECKSUM_BYTES])
    body[8] += 1  # its format version
    store.objects.put(record(store), [seal(bytes(body))])
    unreadable(store, key)
    scrub(store, LOOK)
    stray = f"{key}x"
    store.objects.put(stray, [b"not ours"])
    report = run(store)
    assert [each.key for each in report.left] == [record(store), key, stray]
    assert (report.moved, lost_keys(store)) == ([], [])


def test_no_chunk_is_moved_that_a_newer_tierfs_may_have_written(store):
    key = chunk_of(store, "a")
    flip_bit(store.objects, key, 8 * 8)
    flip_bit(store.objects, key, 8 * 30)
    scrub(store, LOOK)
    report = run(store)
    assert [each.how for each in report.left] == ["a newer tierfs may have written it"]
    assert [each.path for each in report.lost] == ["a"]
    assert report.moved == []


@pytest.mark.parametrize("codecs", ["off", "all"])
@pytest.mark.usefixtures("indirect")
def test_chunks_of_a_healed_table_are_checked_in_the_same_run(codecs):
    store, replica = make_store(codecs), make_store()
    data = content(5, (16 << 20) + 5000)
    written = save(store, "a", data)
    (table,) = written.rows
    first, _ = expand_rows(store, written, "a")
    raw = memoryview(bytearray(table.raw_length))
    fetch(store, table, [(0, raw)], "")
    store_chunk(replica, raw)
    unreadable(store, keys.chunk_key(first.name))
    unreadable(store, keys.chunk_key(table.name))
    scrub(store, LOOK)
    would = run(reopened(store), replicas=[replica], dry_run=True)
    assert (len(would.mended), would.moved, would.lost) == (1, [], [])
    assert would.left[0].how == "a run without --dry-run heals it, then checks the chunks"
    report = run(reopened(store), replicas=[replica])
    assert (len(report.mended), len(report.moved)) == (1, 1)
    assert [(each.path, each.ranges) for each in report.lost] == [("a", ((0, 16 << 20),))]


@pytest.mark.usefixtures("indirect")
def test_a_file_whose_table_is_lost_is_lost(store):
    save(store, "large", content(6))
    (table,) = observe(store, "large").manifest.rows
    remove(store.objects, keys.chunk_key(table.name))
    would, did = run(reopened(store), dry_run=True), run(reopened(store))
    assert [(each.path, each.ranges) for each in did.lost] == [("large", ((0, 3006),))]
    assert would.lost == did.lost


def test_foreign_objects_are_moved_aside(store):
    strays = [f"{keys.TREE}stray", f"{keys.CHUNKS}ab/stray", f"{keys.CHUNKS}{chunk_of(store, 'a')[15:17]}/x"]
    for key in strays:
        store.objects.put(key, [b"not ours"])
    report = run(store)
    assert sorted(each.key for each in report.moved) == sorted(strays)
    assert all(store.objects.read(each.how, 100)[0] == b"not ours" for each in report.moved)
    assert report.is_whole


def test_a_marker_is_made_again_from_its_name(store):
    twice(store, marker(store))
    report = run(store)
    assert [each.how for each in report.mended] == ["its name"]
    assert stat(store, "empty").is_directory
    assert observe(store, "b").manifest.kind is Kind.FILE


def test_a_directory_whose_attributes_are_lost_is_named(store):
    annotate_directory(store, "empty", {"posix": {"mode": 0o700}})
    twice(store, marker(store))
    flip_bit(store.objects, marker(store), 8 * 30)
    damaged = store.objects.read(marker(store), 1 << 20)[0]
    assert run(store, dry_run=True).lost_files == ["empty/"]
    report = run(reopened(store))
    assert (report.lost_files, report.mended) == (["empty/"], [])
    assert [store.objects.read(key, 1 << 20)[0] for key in lost_keys(store)] == [damaged]
    assert stat(reopened(store), "empty").is_directory


def test_a_removed_directory_does_not_come_back(store):
    remove_directory(store, "empty")
    twice(store, marker(store))
    assert [each.how for each in run(reopened(store)).mended] == ["its size"]
    with pytest.raises(NotFoundError):
        stat(reopened(store), "empty")


def test_a_writer_whose_lease_was_damaged_takes_a_new_one(store):
    twice(store, lease(store))
    store.clock.sleep(15)
    save(store, "new", content(9))
    assert load(store, "new") == content(9)


def test_an_object_too_large_for_a_record_is_left(store):
    key = keys.record_key("a")
    large = bytes(RECORD_BYTES_MAX + 1)
    store.objects.put(key, [large])
    report = run(reopened(store))
    assert store.objects.read(key, len(large))[0] == large
    assert [each.key for each in report.left] == [key]
    assert (report.moved, lost_keys(store)) == ([], [])
