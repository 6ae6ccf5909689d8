"""Faults strike the calls they are planned for, and do what their names say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.objects import CREATE, MemoryObjects, ObjectInfo, Update
from tierfs.testing import Fault, FaultyObjects, PlannedFault


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects("/test-faults")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


@pytest.fixture
def faulty(memory: MemoryObjects) -> FaultyObjects:
    return FaultyObjects(memory, seed=3)


def _differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_without_a_plan_every_call_passes(faulty: FaultyObjects) -> None:
    faulty.put("a", [b"something"])
    assert faulty.read("a", 100)[0] == b"something"
    assert faulty.fired == []


def test_a_fault_strikes_once(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.REFUSED)
    with pytest.raises(StoreError):
        faulty.put("a", [b"something"])
    faulty.put("a", [b"something"])
    assert faulty.fired == [(Fault.REFUSED, "put", "a")]
    assert faulty.pending == 0


def test_a_fault_waits_for_its_method_key_and_turn(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.DENIED, method="put", key_part="tree/", after=2)
    for key in ("tree/a", "chunks/b", "tree/c"):
        faulty.put(key, [b"something"])
    faulty.head("tree/a")
    with pytest.raises(ReadOnlyError):
        faulty.put("tree/d", [b"something"])


def test_faults_strike_in_the_order_of_the_plan(memory: MemoryObjects) -> None:
    faulty = FaultyObjects(memory, [PlannedFault(Fault.FULL, after=1), PlannedFault(Fault.DENIED, "put")])
    with pytest.raises(ReadOnlyError):
        faulty.put("a", [b"something"])
    with pytest.raises(CapacityError):
        faulty.put("a", [b"something"])


def test_faults_that_have_not_struck_can_be_taken_back(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.REFUSED)
    faulty.clear()
    faulty.put("a", [b"something"])


def test_a_fault_that_could_never_strike_is_refused(faulty: FaultyObjects) -> None:
    with pytest.raises(InvalidInputError):
        faulty.inject(Fault.TORN, method="get")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(Fault.REFUSED, StoreError), (Fault.DENIED, ReadOnlyError), (Fault.FULL, CapacityError)],
)
def test_a_refused_call_changes_nothing(faulty: FaultyObjects, fault: Fault, expected: type[Exception]) -> None:
    faulty.inject(fault)
    with pytest.raises(expected):
        faulty.put("a", [b"something"])
    assert list(faulty.list("")) == []


def test_a_call_that_loses_its_response_happens(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.LOST_RESPONSE, method="put")
    with pytest.raises(StoreError) as caught:
        faulty.put("a", [b"something"], mode=CREATE)
    assert caught.value.transient
    assert faulty.head("a").size == 9
    faulty.inject(Fault.LOST_RESPONSE, method="delete")
    with pytest.raises(StoreError):
        faulty.delete(["a"])
    assert list(faulty.list("")) == []


def test_a_refusal_is_not_a_lost_response(faulty: FaultyObjects) -> None:
    faulty.put("a", [b"something"])
    faulty.inject(Fault.LOST_RESPONSE, method="put")
    with pytest.raises(AlreadyExistsError):
        faulty.put("a", [b"other"], mode=CREATE)


def test_a_late_put_happens_when_it_is_delivered(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.LATE)
    lent = bytearray(b"something")
    with pytest.raises(StoreError) as caught:
        faulty.put("a", [lent], mode=CREATE)
    assert caught.value.transient
    lent[:] = b"reused!!!"
    with pytest.raises(NotFoundError):
        faulty.head("a")
    assert faulty.late == 1
    assert faulty.deliver_late() == [faulty.head("a")]
    assert faulty.read("a", 100)[0] == b"something"
    assert faulty.deliver_late() == []


def test_a_late_operation_meets_what_happened_meanwhile(faulty: FaultyObjects) -> None:
    first = faulty.put("a", [b"first"])
    faulty.put("b", [b"first"])
    for _ in range(3):
        faulty.inject(Fault.LATE)
    with pytest.raises(StoreError):
        faulty.put("a", [b"late"], mode=Update(first.version))
    with pytest.raises(StoreError):
        faulty.delete_version("a", first.version)
    with pytest.raises(StoreError):
        faulty.delete(["b"])
    faulty.put("a", [b"newer"])
    outcomes = faulty.deliver_late()
    assert [type(outcome) for outcome in outcomes] == [ConflictError, ConflictError, type(None)]
    assert faulty.read("a", 100)[0] == b"newer"
    assert [listed.key for listed in faulty.list("")] == ["a"]


def test_a_torn_put_leaves_a_part(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.TORN)
    with pytest.raises(StoreError) as caught:
        faulty.put("a", [b"01234", memoryview(b"56789")])
    assert not caught.value.transient
    left = faulty.read("a", 100)[0]
    assert len(left) < 10
    assert b"0123456789".startswith(left)


def test_a_torn_create_still_asks_whether_something_is_there(faulty: FaultyObjects) -> None:
    faulty.put("a", [b"something"])
    faulty.inject(Fault.TORN)
    with pytest.raises(AlreadyExistsError):
        faulty.put("a", [b"other"], mode=CREATE)
    assert faulty.read("a", 100)[0] == b"something"


def test_one_bit_of_a_read_flips(faulty: FaultyObjects, memory: MemoryObjects) -> None:
    faulty.put("a", [b"something"])
    faulty.inject(Fault.BIT_FLIP, method="read")
    assert _differing_bits(faulty.read("a", 100)[0], b"something") == 1
    assert faulty.read("a", 100)[0] == memory.read("a", 100)[0] == b"something"


def test_one_bit_of_all_ranges_flips(faulty: FaultyObjects) -> None:
    faulty.put("a", [b"something"])
    for _ in range(20):
        faulty.inject(Fault.BIT_FLIP)
        out = memoryview(bytearray(9))
        faulty.get("a", [(0, out[:4]), (4, out[4:])])
        assert _differing_bits(bytes(out), b"something") == 1


def test_one_bit_of_a_stream_flips(faulty: FaultyObjects, memory: MemoryObjects) -> None:
    faulty.put("a", [b"something"])
    for _ in range(20):
        faulty.inject(Fault.BIT_FLIP, method="get")
        pieces: list[bytes] = []
        faulty.stream("a", 9, lambda _, take, pieces=pieces: pieces.extend(bytes(take(3)) for _ in range(3)))  # type: ignore[misc]
        assert _differing_bits(b"".join(pieces), b"something") == 1
    assert memory.read("a", 100)[0] == b"something"


def test_an_empty_read_has_no_bit_to_flip(faulty: FaultyObjects) -> None:
    faulty.put("a", [])
    faulty.inject(Fault.BIT_FLIP)
    assert faulty.read("a", 100)[0] == b""


def test_a_short_read_is_corruption(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.SHORT_READ)
    with pytest.raises(NotFoundError):
        faulty.read("a", 100)
    faulty.put("a", [b"something"])
    faulty.inject(Fault.SHORT_READ)
    with pytest.raises(CorruptionError):
        faulty.get("a", [(0, memoryview(bytearray(9)))])


def test_a_slow_call_takes_its_time(memory: MemoryObjects) -> None:
    clock = ManualClock()
    faulty = FaultyObjects(memory, clock=clock)
    faulty.inject(Fault.SLOW, seconds=500.0)
    before_s = clock.monotonic()
    assert isinstance(faulty.put("a", [b"something"]), ObjectInfo)
    assert clock.monotonic() - before_s == pytest.approx(500)


def test_a_listing_that_loses_its_response_breaks_off(faulty: FaultyObjects) -> None:
    keys = {f"run/{number}" for number in range(10)}
    for key in keys:
        faulty.put(key, [b"something"])
    faulty.inject(Fault.LOST_RESPONSE, method="list")
    seen: set[str] = set()
    with pytest.raises(StoreError):
        seen.update(listed.key for listed in faulty.list("run/"))
    assert seen < keys or seen == keys


@pytest.mark.parametrize("fault", list(Fault))
def test_the_same_seed_does_the_same_again(memory: MemoryObjects, fault: Fault) -> None:
    def run() -> list[object]:
        memory.delete([listed.key for listed in memory.list("")])
        faulty = FaultyObjects(memory, [PlannedFault(fault, after=after) for after in (0, 0, 1)], seed=11)
        seen: list[object] = []
        for action in (
            lambda: faulty.put("a", [b"0123456789"]).size,
            lambda: faulty.read("a", 100)[0],
            lambda: [listed.key for listed in faulty.list("")],
            lambda: faulty.put("b", [b"0123456789"] * 9).size,
            lambda: faulty.read("b", 100)[0],
            lambda: faulty.delete(["a"]),
            lambda: len(faulty.deliver_late()),
            lambda: [listed.key for listed in faulty.list("")],
        ):
            try:
                seen.append(action())
            except (CapacityError, CorruptionError, NotFoundError, ReadOnlyError, StoreError) as error:
                seen.append(str(error))
        return [*seen, faulty.fired]

    assert run() == run()


def test_repr_shows_planned_faults(faulty: FaultyObjects) -> None:
    faulty.inject(Fault.SLOW)
    assert "seed=3, pending=1, late=0" in repr(faulty)
