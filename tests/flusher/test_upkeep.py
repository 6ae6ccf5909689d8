"""The flusher's policies for gc and scrub: when they run, what they count, and how they stop with the flusher."""

import threading
import uuid

import pytest
from support.served import ServedObjects
from support.waiting import until

from tierfs.cli.commands._status_prometheus import exposition
from tierfs.cli.commands.status import table
from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import StoreError
from tierfs.flusher.upkeep import Upkeep
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.store import Store, delete, save, status
from tierfs.store.status import condition
from tierfs.testing.faults import flip_bit, remove

HOUR = 3600


@pytest.fixture
def store():
    clock = ManualClock()
    tier = ServedObjects(f"/upkeep-{uuid.uuid4().hex}", clock)
    descriptor = Descriptor("0" * 32, 0, DigestKind.XXH3_128, tier.capabilities, inline_bytes=0, lease_s=20, grace_s=60)
    tier.put(keys.DESCRIPTOR, [descriptor.encode()])
    store = Store(tier, descriptor, url="store", clock=clock)
    save(store, "a", b"a" * 3000)
    save(store, "b", bytes(range(256)) * 20)
    return store


class SkewedClock:
    """A host's clock that differs from the object tier's."""

    def __init__(self, true, ahead_s):
        self.monotonic, self.sleep = true.monotonic, true.sleep
        self.now_ns = lambda: true.now_ns() + int(ahead_s * 1e9)


def make(store, **policy):
    upkeep = Upkeep(lambda: store, **policy, turn_s=1)
    return upkeep, upkeep.counters


def test_gc_runs_when_nobody_has_for_so_long(store):
    upkeep, counts = make(store, gc_every_s=6 * HOUR)
    other, others = make(store, gc_every_s=6 * HOUR)
    delete(store, "a")
    for _ in range(24):
        upkeep.turn()
        other.turn()
        store.clock.sleep(HOUR)
    assert counts["gc_runs"] + others["gc_runs"] == 4, "they share a schedule"
    assert counts["gc_deleted_bytes"] + others["gc_deleted_bytes"] > 0


@pytest.mark.parametrize("ahead_s", [-10 * HOUR, 10 * HOUR])
def test_gc_keeps_its_interval_with_a_clock_that_is_wrong(store, ahead_s):
    upkeep, counts = make(store, gc_every_s=6 * HOUR)
    upkeep.turn()
    store.clock = SkewedClock(store.clock, ahead_s)
    for _ in range(48):
        upkeep.turn()
        store.clock.sleep(HOUR / 2)
    assert counts["gc_runs"] in {4, 5}


def test_a_blocked_gc_is_counted_and_shown(store, caplog):
    flip_bit(store.objects, keys.record_key("a"), 300)
    upkeep, counts = make(store, gc_every_s=HOUR)
    upkeep.turn()
    assert (counts["gc_runs"], counts["gc_blocked"]) == (1, 1)
    assert "gc deletes nothing" in caplog.text
    report = status(store) | condition(store)
    assert any("BLOCKED: 1 records cannot be read or have vanished: a" in line for line in table(report, None))
    assert 'tierfs_gc_unreadable_records{store="store"} 1\n' in exposition(report)


def test_a_blocked_gc_does_not_move_the_time_of_success(store):
    upkeep, _ = make(store, gc_every_s=HOUR)
    upkeep.turn()
    good = condition(store)["upkeep"]["gc"]
    store.clock.sleep(2 * HOUR)
    flip_bit(store.objects, keys.record_key("a"), 300)
    upkeep.turn()
    blocked = condition(store)["upkeep"]["gc"]
    assert blocked["ended_ns"] > good["ended_ns"] == good["succeeded_ns"] == blocked["succeeded_ns"]
    text = exposition(status(store) | condition(store))
    assert f'tierfs_gc_last_success_timestamp_seconds{{store="store"}} {good["succeeded_ns"] / 1e9}\n' in text
    assert "tierfs_gc_last_duration_seconds{" in text


@pytest.mark.parametrize("policy", [{"gc_every_s": HOUR}, {"scrub_bandwidth": 1 << 20}], ids=["gc", "scrub"])
def test_missing_chunks_and_the_time_of_success_are_metrics(store, policy):
    remove(store.objects, next(item.key for item in store.objects.list(keys.CHUNKS)))
    make(store, **policy)[0].turn()
    store.objects.put(f"{keys.LOST}1/tree/a!", [bytes(100)])
    for step in (9, 100):
        save(store, f"team/run/step_{step}/.metadata", b"m")
    save(store, "team/run/step_101/a", b"not complete")
    save(store, "team/run/step_102/.metadata", b"m")
    delete(store, "team/run/step_102/.metadata")
    report = status(store) | condition(store)
    text = exposition(report)
    job = "gc" if "gc_every_s" in policy else "scrub"
    assert 'tierfs_missing_chunks{store="store"} 1\n' in text
    assert any("1 chunks that files need are MISSING" in line for line in table(report, None))
    assert f"tierfs_{job}_last_success_timestamp_seconds{{" in text
    assert 'tierfs_lost_bytes{store="store"} 100\n' in text
    assert 'tierfs_checkpoint_newest_step{store="store",run="team/run"} 100\n' in text
    assert "tierfs_build_info{" in text


def test_the_records_are_compared_once_a_day(store):
    upkeep, _ = make(store, scrub_bandwidth=1 << 20)
    upkeep.turn()
    remove(store.objects, next(item.key for item in store.objects.list(keys.CHUNKS)))
    upkeep.turn()
    assert condition(store)["missing_chunks"] == 0
    store.clock.sleep(25 * HOUR)
    upkeep.turn()
    assert condition(store)["missing_chunks"] == 1


def test_chunks_are_verified_at_a_bandwidth_and_not_again_for_a_while(store):
    upkeep, counts = make(store, scrub_bandwidth=2000)
    for _ in range(300):
        upkeep.turn()
        store.clock.sleep(60)
    assert counts["scrubbed_chunks"] == 2
    store.clock.sleep(8 * 24 * HOUR)
    for _ in range(300):
        upkeep.turn()
    assert counts["scrubbed_chunks"] == 4
    (key, *_) = [item.key for item in store.objects.list(keys.CHUNKS)]
    flip_bit(store.objects, key, 8 * (store.objects.head(key).size - 3))
    store.clock.sleep(8 * 24 * HOUR)
    for _ in range(300):
        upkeep.turn()
    assert counts["scrub_damaged"] == 1
    report = status(store) | condition(store)
    assert 'tierfs_scrub_damaged_chunks{store="store"} 1\n' in exposition(report)
    assert any("1 are DAMAGED" in line for line in table(report, None))


@pytest.mark.parametrize(
    ("error", "counter"),
    [(StoreError("away", transient=True), "upkeep_failures"), (ZeroDivisionError("a bug"), "unforeseen_errors")],
    ids=["known", "unforeseen"],
)
def test_it_goes_on_after_an_error_and_ends_when_it_is_told_to(store, caplog, error, counter):
    def connect():
        raise error

    upkeep = Upkeep(connect, gc_every_s=1, turn_s=0.01)
    counts = upkeep.counters
    upkeep.start()
    until(lambda: counts[counter] >= 3)
    upkeep.stop()
    assert str(error) in caplog.text
    assert "tierfs-upkeep" not in {thread.name for thread in threading.enumerate()}


def test_a_gc_under_way_ends_with_the_flusher(store):
    upkeep, counts = make(store, gc_every_s=1)
    upkeep.stop()
    upkeep.turn()
    assert counts["gc_runs"] == 0
    other, others = make(store, gc_every_s=1)
    other.turn()
    assert others["gc_runs"] == 1, "it has given its turn back"
