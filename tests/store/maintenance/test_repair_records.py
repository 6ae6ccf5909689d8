"""How repair treats single records, and other objects that end with a checksum."""

import pytest
from support.damaging import content, lost_keys, make_store, reopened, run

from tierfs.format import keys
from tierfs.store import save
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
