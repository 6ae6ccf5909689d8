"""A tier gets at most as many requests at a time as the limit allows."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import HANG_S

from tierfs.clock import ManualClock
from tierfs.errors import NotFoundError, StoreError, TierfsError
from tierfs.objects import LimitedObjects, Listed, MemoryObjects, ObjectInfo


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects("/test-limit")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


class Crowded(MemoryObjects):
    """Counts the concurrent calls of `head`, and holds each of them until ``together`` calls are inside."""

    def __init__(self, together: int) -> None:
        super().__init__("/test-limit")
        self.inside = 0
        self.inside_max = 0
        self._lock = threading.Lock()
        self._full = threading.Barrier(together, timeout=HANG_S)

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


class Answering(MemoryObjects):
    """Takes ``seconds`` for a head. A head, or a step of a listing, raises the next of ``errors`` unless it is None."""

    def __init__(self, errors: Iterable[TierfsError | None] = (), seconds: float = 0.0) -> None:
        super().__init__("/test-limit")
        self.errors = iter(list(errors))  # threads cannot share a generator
        self.seconds = seconds
        self.clock = ManualClock()

    def head(self, key: str) -> ObjectInfo:
        self.clock.sleep(self.seconds)
        error = next(self.errors, None)
        if error is not None:
            raise error
        return super().head(key)

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        for listed in super().list(prefix, delimiter=delimiter):
            error = next(self.errors, None)
            if error is not None:
                raise error
            yield listed


def _ask(objects: LimitedObjects, times: int = 1) -> None:
    for _ in range(times):
        try:
            objects.head("a")
        except TierfsError:
            continue


SLOW_DOWN = StoreError("slow down", throttled=True)
BROKEN = StoreError("broken", transient=True)
ABSENT = NotFoundError("absent")


def test_the_limit_is_halved_when_the_endpoint_asks_for_it(
    memory: MemoryObjects, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Answering([SLOW_DOWN] * 8)
    objects = LimitedObjects(endpoint, concurrency=32, clock=endpoint.clock)
    limits = []
    with caplog.at_level(logging.WARNING, logger="tierfs.objects"):
        for _ in range(8):
            _ask(objects)
            limits.append(objects.limit)
            endpoint.clock.sleep(1)
    assert limits == [16, 8, 4, 2, 1, 1, 1, 1]
    assert objects.throttled == 8
    assert [record.getMessage() for record in caplog.records] == [
        "the object tier asks for fewer requests: sending at most 16 at a time instead of 32, and more again as it answers"
    ]
    assert "concurrency=32 (1 for now, throttled 8 times))" in repr(objects)


def test_a_burst_of_refusals_counts_once(memory: MemoryObjects) -> None:
    class Refusing(MemoryObjects):
        together = threading.Barrier(32, timeout=HANG_S)

        def head(self, key: str) -> ObjectInfo:
            self.together.wait()
            raise SLOW_DOWN

    objects = LimitedObjects(Refusing("/test-limit"), clock=ManualClock())
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda _: _ask(objects), range(32)))
    assert (objects.limit, objects.throttled) == (16, 32)


def test_one_more_is_let_through_for_each_second_with_an_answer(memory: MemoryObjects) -> None:
    memory.put("a", [b"something"])
    endpoint = Answering([SLOW_DOWN, None, ABSENT, None], seconds=0.5)
    objects = LimitedObjects(endpoint, concurrency=8, clock=endpoint.clock)
    limits = []
    for _ in range(15):
        _ask(objects)
        limits.append(objects.limit)
    assert limits == [4, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 8, 8, 8, 8]


def test_a_listing_is_heard_too(memory: MemoryObjects) -> None:
    memory.put("a", [b"something"])
    objects = LimitedObjects(Answering([SLOW_DOWN]), clock=ManualClock())
    with pytest.raises(StoreError):
        list(objects.list(""))
    assert objects.limit == 16


@given(
    concurrency=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from([SLOW_DOWN, BROKEN, ABSENT]), st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.booleans()),
        max_size=60,
    ),
)
def test_the_limit_stays_in_its_bounds_and_moves_no_more_than_once_a_second(
    concurrency: int, steps: list[tuple[TierfsError, float, bool]]
) -> None:
    endpoint = Answering(error for error, _, _ in steps)
    objects = LimitedObjects(endpoint, concurrency=concurrency, clock=endpoint.clock)
    moved_s: dict[bool, float] = {}
    for error, seconds, is_latency in steps:
        endpoint.seconds = seconds if is_latency else 0
        before = objects.limit
        _ask(objects)
        now_s = endpoint.clock.monotonic()
        assert 1 <= objects.limit <= concurrency
        if objects.limit != before:
            is_up = objects.limit > before
            assert objects.limit == (before + 1 if is_up else max(1, before // 2))
            assert is_up == (error is ABSENT)
            assert now_s >= moved_s.get(is_up, 0) + 1
            moved_s[is_up] = now_s
        endpoint.clock.sleep(0 if is_latency else seconds)
    endpoint.seconds = 1
    _ask(objects, 2 * concurrency)
    assert objects.limit == concurrency


def test_a_higher_limit_admits_waiting_requests(memory: MemoryObjects) -> None:
    memory.put("a", [b"something"])
    together = threading.Barrier(2, timeout=HANG_S)

    class Endpoint(Answering):
        asked = 0

        def head(self, key: str) -> ObjectInfo:
            self.asked += 1
            if self.asked == 2:
                time.sleep(0.2)  # the other two wait by then
            elif self.asked > 2:
                together.wait()  # passes only if both calls come at the same time
            return super().head(key)

    endpoint = Endpoint([SLOW_DOWN])
    objects = LimitedObjects(endpoint, concurrency=2, clock=endpoint.clock)
    _ask(objects)
    assert objects.limit == 1
    endpoint.clock.sleep(1)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: objects.head("a"), range(3)))
    assert objects.limit == 2


@pytest.mark.parametrize("seed", range(2))
def test_no_request_is_stuck_while_the_limit_changes(memory: MemoryObjects, seed: int) -> None:
    memory.put("a", [b"something"])
    choose = random.Random(seed)

    class Endpoint(Answering):
        inside = inside_max = 0
        lock = threading.Lock()

        def head(self, key: str) -> ObjectInfo:
            with self.lock:
                self.inside += 1
                self.inside_max = max(self.inside, self.inside_max)
            try:
                return super().head(key)
            finally:
                with self.lock:
                    self.inside -= 1

    endpoint = Endpoint((choose.choice([SLOW_DOWN, None, None, ABSENT, BROKEN]) for _ in range(4000)), seconds=0.2)
    objects = LimitedObjects(endpoint, concurrency=6, clock=endpoint.clock)
    threads = [threading.Thread(target=_ask, args=(objects, 100), daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not [thread for thread in threads if thread.is_alive()], f"seed {seed}: {objects!r}"
    assert endpoint.inside_max <= 6
    assert objects.throttled > 0
