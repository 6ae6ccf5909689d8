"""Repair while the object tier fails, loses answers, or is changed by others."""

from dataclasses import replace

import pytest
from support.damaging import LOOK, chunk_of, content, lost_keys, make_store, middle, reopened, run, twice

from tierfs.errors import StoreError
from tierfs.format import keys
from tierfs.objects import OVERWRITE, RetryingObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import delete, load, make_directory, save
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.scrub import scrub
from tierfs.testing import Fault, FaultyObjects, PlannedFault


@pytest.fixture
def store():
    store = make_store()
    save(store, "a", content(0))
    return store


def copy_of(store):
    copy = make_store()
    for item in store.objects.list(""):
        copy.objects.put(item.key, [store.objects.read(item.key, 64 << 20)[0]])
    return reopened(copy)


def test_a_record_is_kept_if_the_bytes_of_a_copy_cannot_be_put(store):
    copy = copy_of(store)
    middle(store, keys.record_key("a"))
    with pytest.raises(StoreError):
        run(reopened(store, PlannedFault(Fault.REFUSED, "put", key_part=keys.TREE)), replicas=[copy])
    assert lost_keys(store) == []
    assert [each.how for each in run(reopened(store), replicas=[copy]).mended] == [copy.url]
    assert load(reopened(store), "a") == content(0)


@pytest.mark.parametrize("has_copy", [False, True])
def test_an_answer_that_is_lost_ends_no_repair(store, has_copy):
    sound, _ = store.objects.read(keys.record_key("a"), 1 << 20)
    replicas = [copy_of(store)] if has_copy else []
    middle(store, keys.record_key("a"))
    damaged, _ = store.objects.read(keys.record_key("a"), 1 << 20)
    lost = [PlannedFault(Fault.LOST_RESPONSE, "put", key_part=part) for part in (keys.TREE, keys.LOST)]
    objects = RetryingObjects(FaultyObjects(store.objects, lost), delay_s=0)
    report = run(reopened(store, objects=objects), replicas=replicas)
    if has_copy:
        assert [each.how for each in report.mended] == [replicas[0].url]
        assert store.objects.read(keys.record_key("a"), 1 << 20)[0] == sound
    else:
        assert report.lost_files == ["a"]
        assert [store.objects.read(key, 1 << 20)[0] for key in lost_keys(store)] == [damaged]


def test_an_object_is_reported_as_moved_if_an_answer_is_lost(store):
    stray = f"{chunk_of(store, 'a')}x"
    store.objects.put(stray, [b"not ours"])
    lost = FaultyObjects(store.objects, [PlannedFault(Fault.LOST_RESPONSE, "delete_version")])
    report = run(reopened(store, objects=RetryingObjects(lost, delay_s=0)))
    assert [(each.key, each.how) for each in report.moved] == [(stray, *lost_keys(store))]


class Untouched(WrappedObjects):
    """Fail at every put or delete."""

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        raise AssertionError(f"put {key}")

    def delete(self, keys):
        raise AssertionError(f"delete {keys}")

    def delete_version(self, key, version):
        raise AssertionError(f"delete {key}")


def test_a_dry_run_asks_for_no_change(store):
    save(store, "b", content(2))
    make_directory(store, "d")
    store.clock.sleep(100)
    save(store, "old", content(1))
    delete(store, "old")
    store.clock.sleep(100)
    collect(store, GcOptions(concurrency=1))
    listed = next(item.key for item in store.objects.list(keys.GC) if keys.is_condemned_key(item.key))
    twice(store, listed)
    store.clock.sleep(100)
    for key in (keys.record_key("a"), keys.marker_key("d"), chunk_of(store, "b")):
        twice(store, key)
    untouched = reopened(store, objects=Untouched(store.objects))
    found = scrub(untouched, replace(LOOK, heal=True, dry_run=True))
    assert [each.key for each in found.damage] == [chunk_of(store, "b")]
    report = run(untouched, damaged=[each.key for each in found.damage], dry_run=True)
    assert [each.key for each in report.moved] == [keys.record_key("a")]
    assert [each.path for each in report.lost] == ["b"]
    assert [each.key for each in report.mended] == [keys.marker_key("d")]
    assert collect(untouched, GcOptions(concurrency=1, dry_run=True)).is_blocked
