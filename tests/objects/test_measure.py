"""Requests, errors, bytes and seconds are counted per method."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.objects import CREATE, MeasuredObjects, MemoryObjects, Update
from tierfs.testing import Fault, FaultyObjects


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects("/test-measure")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


def test_every_method_is_counted_apart(memory: MemoryObjects) -> None:
    objects = MeasuredObjects(memory, ManualClock())
    info = objects.put("a", [b"0123", memoryview(b"456789")])
    objects.get("a", [(0, memoryview(bytearray(4))), (2, memoryview(bytearray(3)))])
    objects.stream("a", 9, lambda _, take: take(2))
    objects.read("a", 100)
    objects.head("a")
    objects.head("a")
    list(objects.list(""))
    objects.delete_version("a", info.version)
    objects.delete(["a", "b"])
    counted = {method: (of["requests"], of["errors"], of["bytes"]) for method, of in objects.snapshot().items()}
    assert counted == {
        "put": (1, 0, 10),
        "get": (2, 0, 16),
        "read": (1, 0, 10),
        "head": (2, 0, 0),
        "list": (1, 0, 0),
        "delete": (1, 0, 0),
        "delete_version": (1, 0, 0),
    }


def test_time_is_counted_with_success_and_without(memory: MemoryObjects) -> None:
    clock = ManualClock()
    faulty = FaultyObjects(memory, clock=clock)
    objects = MeasuredObjects(faulty, clock)
    for seconds in (2.0, 3.0):
        faulty.inject(Fault.SLOW, seconds=seconds)
        with pytest.raises(NotFoundError):
            objects.head("absent")
    faulty.inject(Fault.SLOW, method="list", seconds=5.0)
    list(objects.list(""))
    assert objects.snapshot()["head"]["seconds"] == pytest.approx(5)
    assert objects.snapshot()["list"]["seconds"] == pytest.approx(5)


def test_the_time_a_consumer_takes_is_not_the_listing_s(memory: MemoryObjects) -> None:
    memory.put("a", [b"something"])
    clock = ManualClock()
    objects = MeasuredObjects(memory, clock)
    for _ in objects.list(""):
        clock.sleep(100)
    assert objects.snapshot()["list"]["seconds"] == 0


def test_failures_count_as_errors_and_answers_do_not(memory: MemoryObjects) -> None:
    faulty = FaultyObjects(memory)
    objects = MeasuredObjects(faulty)
    info = objects.put("a", [b"something"])
    with pytest.raises(NotFoundError):
        objects.head("absent")
    with pytest.raises(AlreadyExistsError):
        objects.put("a", [b"other"], mode=CREATE)
    objects.delete(["a"])
    with pytest.raises(ConflictError):
        objects.put("a", [b"other"], mode=Update(info.version))
    assert sum(of["errors"] for of in objects.snapshot().values()) == 0
    faulty.inject(Fault.REFUSED, method="put")
    with pytest.raises(StoreError):
        objects.put("a", [b"other"])
    faulty.inject(Fault.LOST_RESPONSE, method="list")
    with pytest.raises(StoreError):
        list(objects.list(""))
    counted = objects.snapshot()
    assert (counted["put"]["errors"], counted["put"]["bytes"]) == (1, 9)
    assert (counted["list"]["errors"], counted["list"]["requests"]) == (1, 1)


def test_all_requests_of_many_threads_are_counted(memory: MemoryObjects) -> None:
    objects = MeasuredObjects(memory)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: objects.put(f"run/{number % 10}", [b"12345"]), range(400)))
    counted = objects.snapshot()["put"]
    assert (counted["requests"], counted["bytes"]) == (400, 2000)
