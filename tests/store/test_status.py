"""What a store's status says of its object tier: what was asked of it, by whom, and where it fell back."""

import pytest
from tiered import MIB, Host, content

from tierfs.clock import ManualClock
from tierfs.errors import StoreError
from tierfs.flush.levels import Level
from tierfs.objects import LimitedObjects, MeasuredObjects, MemoryObjects, PromisedObjects, RetryingObjects
from tierfs.store import load, save, status, wait
from tierfs.store.store import Store


class Endpoint(MemoryObjects):
    """Asks for fewer requests at the first puts, and stores the next ones with another last byte.

    Attributes:
        throttles: How many puts it does not answer.
        spoils: How many it stores wrong after these.
    """

    throttles = spoils = 0

    def put(self, key, data, **options):
        if self.throttles:
            self.throttles -= 1
            raise StoreError("slow down", transient=True, throttled=True)
        if self.spoils:
            self.spoils -= 1
            options.pop("checksum", None)  # it goes wrong behind that
            raw = bytearray(b"".join(data))
            raw[-1] ^= 1
            data = [raw]
        return super().put(key, data, **options)


def connected(endpoint):
    """As `tierfs.objects.connect` and `as_promised` make it, with writes read back."""
    measured = MeasuredObjects(RetryingObjects(LimitedObjects(endpoint), clock=ManualClock()))
    return PromisedObjects(measured, endpoint.capabilities, reads_back=True)


class ApartHost(Host):
    """One whose flusher has its own way to the object tier, as one in another process has.

    Attributes:
        endpoint: Where the flusher's leads.
    """

    def __init__(self, tmp_path, root, descriptor):
        self.endpoint = Endpoint(root)
        super().__init__(tmp_path, connected(Endpoint(root)), descriptor)

    def plain(self):
        return Store(connected(self.endpoint), self.descriptor, url="memory://store")


@pytest.fixture
def apart(tmp_path, root, descriptor):
    host = ApartHost(tmp_path, root, descriptor)
    yield host
    host.close()


@pytest.fixture
def bare(root, descriptor):
    """A store without local tiers: its endpoint, and itself."""
    endpoint = Endpoint(root)
    return endpoint, Store(connected(endpoint), descriptor, url="memory://store")


def test_requests_are_counted_by_method_and_those_never_made_are_not_named(bare):
    _, store = bare
    save(store, "a", content(MIB))
    load(store, "a")
    requests = status(store)["tiers"]["object"]["requests"]
    assert {name.partition("_")[0] for name in requests} == {"process"}
    assert requests["process_put"]["bytes"] > MIB
    assert requests["process_put"]["errors"] == 0
    assert requests["process_get"]["seconds"] > 0
    assert "process_delete_version" not in requests


def test_what_was_throttled_is_counted_and_so_is_what_was_sent_again(bare):
    endpoint, store = bare
    endpoint.throttles = 2
    save(store, "a", b"x")
    report = status(store)["tiers"]["object"]
    assert report["fallbacks"] == {"process_throttled": 2, "process_retried": 2, "process_stored_wrong": 0}
    assert report["requests"]["process_put"]["errors"] == 0  # they were answered in the end


def test_what_was_stored_wrong_is_counted_and_reading_back_is_said(bare):
    endpoint, store = bare
    endpoint.spoils = 1
    save(store, "a", b"x")
    report = status(store)["tiers"]["object"]
    assert report["reads_back"]
    assert report["fallbacks"]["process_stored_wrong"] == 1
    assert load(store, "a") == b"x"


def test_an_object_tier_without_wrappers_counts_nothing(objects, descriptor):
    report = status(Store(objects, descriptor, url="memory://store"))["tiers"]["object"]
    assert not report["reads_back"]
    assert report["requests"] == report["fallbacks"] == {}


def test_what_the_flusher_asked_is_told_apart_from_what_this_process_asked(apart):
    apart.endpoint.throttles = 1
    save(apart.store, "a", content(MIB))
    wait(apart.store, "a", Level.OBJECT, 20)
    report = status(apart.store)["tiers"]["object"]
    assert "process_head" in report["requests"]
    assert "process_put" not in report["requests"]
    assert report["requests"]["flusher_put"]["bytes"] > MIB
    assert (report["fallbacks"]["flusher_throttled"], report["fallbacks"]["process_throttled"]) == (1, 0)
    assert report["fallbacks"]["flusher_retried"] == 1


def test_a_flusher_that_has_no_way_to_the_object_tier_yet_counts_nothing(apart):
    apart.tiers.flusher.request("status")  # which starts it
    report = status(apart.store)
    assert report["flusher"]["running"]
    assert not any(name.startswith("flusher_") for name in report["tiers"]["object"]["fallbacks"])


def test_a_host_without_segments_in_shared_memory_is_said_to_be_one(make_host, monkeypatch, tmp_path):
    monkeypatch.setenv("TIERFS_SHM_DIR", str(tmp_path / "missing"))
    assert status(make_host().store)["counters"]["process_no_segment_files"] == 1
