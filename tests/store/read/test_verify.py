"""`verify` of a sample, by an executor, and of a store whose object tier fails."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.damaging import chunk_of, content, make_store, middle, reopened

from tierfs.clock import ManualClock, Pace
from tierfs.format import keys
from tierfs.store import save, verify
from tierfs.store.read.verify import verify_chunks
from tierfs.testing import Fault, PlannedFault

KEYS = {
    "record": lambda store: keys.record_key("f0"),
    "chunk": lambda store: chunk_of(store, "f0"),
    "lease": lambda store: keys.LEASES,
}


@pytest.fixture
def store():
    store = make_store()
    for number in range(40):
        save(store, f"f{number}", content(number))
    return store


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.DENIED])
@pytest.mark.parametrize("which", KEYS.values(), ids=KEYS)
def test_an_object_that_cannot_be_fetched_is_unread_and_not_damaged(store, which, fault):
    method = "get" if which is KEYS["chunk"] else "read"
    report = verify(reopened(store, PlannedFault(fault, method, key_part=which(store))))
    assert report.damage == []
    assert len(report.unread) == 1
    middle(store, chunk_of(store, "f1"))
    report = verify(reopened(store, PlannedFault(fault, method, key_part=which(store))))
    assert [(each.path, len(report.unread)) for each in report.damage] == [("f1", 1)]


def test_a_sample_reads_all_records_and_a_share_of_the_chunks(store):
    report = verify(store, sample=0.5)
    assert report.files == 40
    assert 5 < report.chunks < 35


def test_a_bandwidth_is_kept(store):
    clock = store.clock = ManualClock()
    size = sum(item.size for item in store.objects.list(keys.CHUNKS))
    begun = clock.monotonic()
    verify(store, bandwidth=size / 10)
    assert 9 < clock.monotonic() - begun < 11


def test_batches_run_on_any_executor(store):
    middle(store, chunk_of(store, "f1"))
    seen = []
    with ThreadPoolExecutor(2) as executor:
        report = verify(
            store,
            workers=2,
            executor=executor,
            run_batch=lambda jobs: verify_chunks(reopened(store), jobs, pace=Pace(store.clock, None)),
            progress=seen.append,
        )
    assert [each.path for each in report.damage] == ["f1"]
    assert (report.chunks, sum(seen)) == (40, report.raw_bytes)
