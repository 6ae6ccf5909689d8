"""No more than the limit is asked of a tier at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import InvalidInputError, NotFoundError
from tierfs.objects import LimitedObjects, MemoryObjects, ObjectInfo


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects("/test-limit")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


class Crowded(MemoryObjects):
    """Counts who is in a head at a time, and keeps everybody there until ``together`` are."""

    def __init__(self, together: int) -> None:
        super().__init__("/test-limit")
        self.inside = 0
        self.inside_max = 0
        self._lock = threading.Lock()
        self._full = threading.Barrier(together, timeout=30)

    def head(self, key: str) -> ObjectInfo:
        with self._lock:
            self.inside += 1
            self.inside_max = max(self.inside_max, self.inside)
        self._full.wait()
        with self._lock:
            self.inside -= 1
        return super().head(key)


def test_as_many_requests_as_allowed_are_in_flight_and_no_more(memory: MemoryObjects) -> None:
    memory.put("a", [b"something"])
    crowded = Crowded(together=3)
    objects = LimitedObjects(crowded, concurrency=3)
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(objects.head, ["a"] * 9))
    assert crowded.inside_max == 3


def test_a_request_that_fails_gives_its_place_back(memory: MemoryObjects) -> None:
    objects = LimitedObjects(memory, concurrency=1)
    for _ in range(3):
        with pytest.raises(NotFoundError):
            objects.head("absent")


def test_a_consumer_of_a_listing_may_send_requests(memory: MemoryObjects) -> None:
    for number in range(3):
        memory.put(f"run/{number}", [b"something"])
    objects = LimitedObjects(memory, concurrency=1)
    assert [objects.head(listed.key).size for listed in objects.list("run/")] == [9, 9, 9]


def test_a_listing_that_nobody_finishes_holds_no_place(memory: MemoryObjects) -> None:
    for number in range(3):
        memory.put(f"run/{number}", [b"something"])
    objects = LimitedObjects(memory, concurrency=1)
    unfinished = objects.list("run/")
    next(unfinished)
    assert len(list(objects.list("run/"))) == 3


def test_bytes_pass_at_the_rate(memory: MemoryObjects) -> None:
    clock = ManualClock()
    objects = LimitedObjects(memory, bytes_per_s=100, clock=clock)
    started_s = clock.monotonic()
    for number in range(10):
        objects.put(f"run/{number}", [b"x" * 100])
    assert clock.monotonic() - started_s == pytest.approx(9)  # the first second was saved up


def test_gets_and_reads_pay_as_puts_do(memory: MemoryObjects) -> None:
    memory.put("a", [b"x" * 500])
    clock = ManualClock()
    objects = LimitedObjects(memory, bytes_per_s=100, clock=clock)
    started_s = clock.monotonic()
    objects.get("a", [(0, memoryview(bytearray(200))), (300, memoryview(bytearray(200)))])
    assert clock.monotonic() - started_s == pytest.approx(3)
    objects.read("a", 500)
    assert clock.monotonic() - started_s == pytest.approx(8)


def test_an_idle_link_saves_up_one_second_and_no_more(memory: MemoryObjects) -> None:
    clock = ManualClock()
    objects = LimitedObjects(memory, bytes_per_s=100, clock=clock)
    clock.sleep(1000)
    started_s = clock.monotonic()
    objects.put("a", [b"x" * 100])
    assert clock.monotonic() == started_s
    objects.put("a", [b"x" * 100])
    assert clock.monotonic() - started_s == pytest.approx(1)


def test_an_object_larger_than_a_second_s_bytes_passes(memory: MemoryObjects) -> None:
    clock = ManualClock()
    objects = LimitedObjects(memory, bytes_per_s=10, clock=clock)
    objects.put("a", [b"x" * 1000])
    assert objects.head("a").size == 1000


def test_requests_without_bytes_do_not_wait(memory: MemoryObjects) -> None:
    clock = ManualClock()
    objects = LimitedObjects(memory, bytes_per_s=1, clock=clock)
    objects.put("a", [b"x" * 100])
    before_s = clock.monotonic()
    objects.head("a")
    list(objects.list(""))
    objects.delete(["a"])
    assert clock.monotonic() == before_s


def test_the_limits_are_shown(memory: MemoryObjects) -> None:
    assert "concurrency=32, bandwidth=unlimited" in repr(LimitedObjects(memory))
    assert "concurrency=4, bandwidth=2 MiB/s" in repr(LimitedObjects(memory, concurrency=4, bytes_per_s=2 << 20))


@pytest.mark.parametrize("limits", [{"concurrency": 0}, {"bytes_per_s": 0}, {"bytes_per_s": -1.0}])
def test_a_limit_that_makes_no_sense_is_refused(memory: MemoryObjects, limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        LimitedObjects(memory, **limits)
