"""Requests that fail for the moment are sent again, and no others."""

from __future__ import annotations

import gc
import logging
import weakref
from random import Random

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import CorruptionError, ReadOnlyError, StoreError
from tierfs.objects import CREATE, MemoryObjects, ObjectInfo, RetryingObjects
from tierfs.testing import Fault, FaultyObjects, PlannedFault

SEED = 7


@pytest.fixture
def faulty() -> FaultyObjects:
    memory = MemoryObjects("/test-retry")
    memory.delete([listed.key for listed in memory.list("")])
    memory.put("a", [b"content"])
    return FaultyObjects(memory)


def _refuse(faulty: FaultyObjects, times: int, method: str | None = None) -> None:
    for _ in range(times):
        faulty.inject(Fault.REFUSED, method=method)


def test_a_stream_is_used_from_its_beginning_again(faulty: FaultyObjects) -> None:
    for fault in (Fault.LOST_RESPONSE, Fault.REFUSED, Fault.LOST_RESPONSE):
        faulty.inject(fault, method="get")
    objects = RetryingObjects(faulty, clock=ManualClock())
    used: list[bytes] = []
    objects.stream("a", 7, lambda _, take: used.append(bytes(take(3)) + bytes(take(4))))
    assert used == [b"content"] * 3
    assert objects.retries == 3


def test_the_last_failure_is_raised(faulty: FaultyObjects) -> None:
    _refuse(faulty, 3)
    objects = RetryingObjects(faulty, attempts=3, clock=ManualClock())
    with pytest.raises(StoreError, match="refused"):
        objects.head("a")
    assert objects.retries == 2
    assert objects.head("a").size == 7


@pytest.mark.parametrize(
    ("fault", "method", "expected"),
    [
        (Fault.DENIED, "get", ReadOnlyError),
        (Fault.SHORT_READ, "get", CorruptionError),
        (Fault.TORN, "put", StoreError),
    ],
)
def test_a_final_failure_is_raised_at_once(
    faulty: FaultyObjects, fault: Fault, method: str, expected: type[Exception]
) -> None:
    faulty.inject(fault, method=method)
    objects = RetryingObjects(faulty, clock=ManualClock())
    with pytest.raises(expected):
        if method == "put":
            objects.put("b", [b"something"])
        else:
            objects.get("a", [(0, memoryview(bytearray(7)))])
    assert objects.retries == 0


def test_waits_are_random_below_a_bound_that_doubles(faulty: FaultyObjects) -> None:
    waits: list[float] = []

    class Clock(ManualClock):
        def sleep(self, seconds: float) -> None:
            waits.append(seconds)

    for _ in range(50):
        _refuse(faulty, 6)
        RetryingObjects(
            faulty, attempts=7, delay_s=0.1, delay_s_max=1.0, clock=Clock(), random=Random(SEED + len(waits))
        ).head("a")
    for attempt, bound_s in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
        these = waits[attempt::6]
        assert all(0 <= wait_s <= bound_s for wait_s in these), f"seed {SEED}: {these}"
        assert max(these) - min(these) > 0.8 * bound_s, f"seed {SEED}: {these}"


@pytest.mark.parametrize(("asked_s", "least_s"), [(None, 1.0), (3.0, 3.0), (500.0, 10.0)])
def test_the_wait_that_the_endpoint_asks_for_or_a_second_goes_before_ours(
    asked_s: float | None, least_s: float
) -> None:
    clock = ManualClock()

    class Asking(MemoryObjects):
        asked = 0

        def head(self, key: str) -> ObjectInfo:
            self.asked += 1
            if self.asked == 1:
                raise StoreError("slow down", throttled=True, retry_after_s=asked_s)
            return super().head(key)

    memory = Asking("/test-retry-after")
    memory.put("a", [b"content"])
    started_s = clock.monotonic()
    RetryingObjects(memory, delay_s=0.1, delay_s_max=10, clock=clock, random=Random(SEED)).head("a")
    waited_s = clock.monotonic() - started_s
    assert least_s < waited_s <= least_s + 0.1


def test_each_retry_is_logged(faulty: FaultyObjects, caplog: pytest.LogCaptureFixture) -> None:
    _refuse(faulty, 2)
    with caplog.at_level(logging.WARNING, logger="tierfs.objects"):
        RetryingObjects(faulty, clock=ManualClock()).head("a")
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "head a failed, attempt 1 of 5" in caplog.records[0].getMessage()


def test_a_buffer_is_sent_again_whole(faulty: FaultyObjects) -> None:
    _refuse(faulty, 2, "put")
    objects = RetryingObjects(faulty, clock=ManualClock())
    objects.put("b", [b"one", memoryview(b"two")], mode=CREATE)
    assert objects.read("b", 100)[0] == b"onetwo"


@pytest.mark.parametrize("seed", range(3))
def test_a_listing_that_breaks_off_gives_every_key_once(seed: int) -> None:
    memory = MemoryObjects("/test-retry-list")
    for number in range(30):
        memory.put(f"run/{number}", [b"something"])
    broken = [PlannedFault(Fault.LOST_RESPONSE, "list") for _ in range(4)]
    objects = RetryingObjects(FaultyObjects(memory, broken, seed=seed), clock=ManualClock())
    listed = [entry.key for entry in objects.list("run/")]
    assert sorted(listed) == sorted(f"run/{number}" for number in range(30)), repr(objects)
    assert objects.retries == 4


def test_the_last_failed_attempt_releases_buffers(faulty: FaultyObjects) -> None:
    class Lent(bytearray):
        pass

    _refuse(faulty, 1)
    lent = Lent(7)
    alive = weakref.ref(lent)
    objects = RetryingObjects(faulty, attempts=1, clock=ManualClock())
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(StoreError, match="refused"):
            objects.get("a", [(0, memoryview(lent))])
        del lent
        assert alive() is None
    finally:
        gc.enable()
