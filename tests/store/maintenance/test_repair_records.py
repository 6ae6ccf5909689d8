"""Repair of single records, and of other objects that end with a checksum."""

import pytest
from support.damaging import content, lost_keys, make_store, reopened, run

from tierfs.format import keys
from tierfs.format.header import CHECKSUM_BYTES, seal
from tierfs.store import delete, save
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.repair.records import RECORD_BYTES_MAX


@pytest.fixture
def store():
    store = make_store()
    save(store, "a", content(0))
    return store


def test_an_object_too_large_for_a_record_is_left(store):
    key = keys.record_key("a")
    large = bytes(RECORD_BYTES_MAX + 1)
    store.objects.put(key, [large])
    report = run(reopened(store))
    assert store.objects.read(key, len(large))[0] == large
    assert [each.key for each in report.left] == [key]
    assert (report.moved, lost_keys(store)) == ([], [])


def test_lists_of_a_newer_tierfs_are_left(store):
    delete(store, "a")
    store.clock.sleep(100)
    collect(store, GcOptions(concurrency=1))
    found = [item.key for prefix in (keys.LEASES, keys.GC) for item in store.objects.list(prefix)]
    for key in found:
        body = bytearray(store.objects.read(key, 1 << 20)[0][:-CHECKSUM_BYTES])
        body[8] += 1  # its format version
        store.objects.put(key, [seal(bytes(body))])
    versions = [store.objects.head(key).version for key in found]
    report = run(reopened(store))
    assert [each.key for each in report.left] == found
    assert {each.how for each in report.left} == {"a newer tierfs may have written it"}
    assert (report.mended, report.moved) == ([], [])
    assert [store.objects.head(key).version for key in found] == versions
