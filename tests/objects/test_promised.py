"""A tier promises what its endpoint keeps, and checks stored objects where the endpoint does not."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.waiting import HANG_S

from tierfs.clock import ManualClock
from tierfs.digest import Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    StoreError,
)
from tierfs.format import keys
from tierfs.format.descriptor import Capabilities
from tierfs.objects import (
    CREATE,
    OVERWRITE,
    Checksum,
    MemoryObjects,
    ObjectInfo,
    ObjectTier,
    PromisedObjects,
    RetryingObjects,
    Update,
    WrappedObjects,
    as_promised,
)
from tierfs.objects.checksums import compute, verify_checksum
from tierfs.objects.protocol import Create, PutMode, Version
from tierfs.objects.wrappers.verify import RACERS, STORED_WRONG_MAX
from tierfs.testing import Fault, FaultyObjects, ObjectTierTests

ALL = Capabilities(
    conditional_create=True,
    conditional_update=True,
    list_after_write=True,
    atomic_put=True,
    checksums=("xxh3-128",),
)
CONDITIONLESS = replace(ALL, conditional_create=False, conditional_update=False)


class Endpoint(WrappedObjects):
    """A remote endpoint that may store other bytes than it is sent.

    Args:
        inner: The tier that stores the objects.
        can: The capabilities that the endpoint reports.

    Attributes:
        wrong: Functions that change the content, one for each put. Later puts store it unchanged.
        modes: The mode of each put.
        before_get: Functions to call, one before each get.
    """

    def __init__(self, inner: ObjectTier, can: Capabilities = ALL) -> None:
        super().__init__(inner)
        self.can = can
        self.wrong: list[Callable[[bytes], bytes]] = []
        self.modes: list[PutMode] = []
        self.before_get: list[Callable[[], None]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.can

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        verify_checksum(checksum, data, key)  # the damage happens after this check
        content = b"".join(data)
        self.modes.append(mode)
        stored = self.wrong.pop(0)(content) if self.wrong else content
        info = super().put(key, [stored], mode=mode)
        return replace(info, size=len(content))  # it reports the size that it was sent

    def get(self, key, ranges, *, version=None):
        if self.before_get:
            self.before_get.pop(0)()
        return super().get(key, ranges, version=version)


def _flip(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def _cut(content: bytes) -> bytes:
    return content[:-1]


def _lengthen(content: bytes) -> bytes:
    return content + b"!"


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects(f"/promised-{uuid.uuid4().hex}")
    yield objects
    objects.delete([listed.key for listed in objects.list("")])


@pytest.fixture
def endpoint(memory: MemoryObjects) -> Endpoint:
    return Endpoint(memory)


@pytest.fixture
def verified(endpoint: Endpoint) -> PromisedObjects:
    objects = as_promised(endpoint, ALL, "always")
    assert isinstance(objects, PromisedObjects)
    return objects


class TestReadBack(ObjectTierTests):
    @pytest.fixture
    def objects(self, verified: PromisedObjects) -> ObjectTier:
        return verified


class TestNothingKept(ObjectTierTests):
    @pytest.fixture
    def objects(self, endpoint: Endpoint) -> ObjectTier:
        return as_promised(endpoint, Capabilities(False, False, False, False))


# Capabilities


@pytest.mark.parametrize("flag", ["conditional_create", "conditional_update", "list_after_write", "atomic_put"])
def test_a_flag_is_promised_where_both_have_it(memory: MemoryObjects, flag: str) -> None:
    for can, kept in [(True, True), (True, False), (False, True), (False, False)]:
        endpoint = Endpoint(memory, replace(ALL, **{flag: can}))
        promised = as_promised(endpoint, replace(ALL, **{flag: kept})).capabilities
        assert promised == replace(ALL, **{flag: can and kept})


def test_the_checksums_are_those_that_both_have_in_the_order_of_the_endpoint(memory: MemoryObjects) -> None:
    endpoint = Endpoint(memory, replace(ALL, checksums=("xxh3-128", "md5", "sha256")))
    promised = as_promised(endpoint, replace(ALL, checksums=("sum-of-digits", "sha256", "xxh3-128")))
    assert promised.capabilities.checksums == ("sha256", "xxh3-128")


def test_whether_it_lies_on_this_host_is_the_descriptors_to_say(memory: MemoryObjects) -> None:
    objects = as_promised(Endpoint(memory, ALL), replace(ALL, host_local=True))
    assert objects.capabilities.host_local


def test_an_endpoint_that_keeps_all_promises_is_not_wrapped(endpoint: Endpoint) -> None:
    assert as_promised(endpoint, ALL) is endpoint
    assert as_promised(endpoint, ALL, "never") is endpoint


@pytest.mark.parametrize(
    ("verify_writes", "checksums", "host_local", "reads_back"),
    [
        ("auto", True, False, False),
        ("auto", False, False, True),
        ("auto", False, True, False),
        ("always", True, False, True),
        ("always", False, True, True),
        ("never", True, False, False),
        ("never", False, False, False),
    ],
)
def test_writes_are_read_back_as_is_wanted(
    memory: MemoryObjects, verify_writes: str, checksums: bool, host_local: bool, reads_back: bool
) -> None:
    can = replace(ALL, host_local=host_local)
    objects = as_promised(
        Endpoint(memory, can), replace(can, checksums=("xxh3-128",) if checksums else ()), verify_writes
    )
    assert getattr(objects, "reads_back", False) == reads_back


def test_another_word_for_it_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(InvalidInputError, match="auto, always, never"):
        as_promised(endpoint, ALL, "yes")


# Conditions


def test_conditions_that_are_kept_are_sent(endpoint: Endpoint) -> None:
    objects = as_promised(endpoint, replace(ALL, list_after_write=False))
    info = objects.put("a", [b"1"], mode=CREATE)
    objects.put("a", [b"2"], mode=Update(info.version))
    assert endpoint.modes == [CREATE, Update(info.version)]


def test_conditions_that_are_not_kept_are_checked_and_not_sent(endpoint: Endpoint) -> None:
    objects = as_promised(endpoint, CONDITIONLESS)
    info = objects.put("a", [b"1"], mode=CREATE)
    with pytest.raises(AlreadyExistsError):
        objects.put("a", [b"2"], mode=CREATE)
    second = objects.put("a", [b"3"], mode=Update(info.version))
    with pytest.raises(ConflictError):
        objects.put("a", [b"4"], mode=Update(info.version))
    with pytest.raises(ConflictError):
        objects.put("b", [b"5"], mode=Update(second.version))
    assert endpoint.modes == [OVERWRITE, OVERWRITE]
    assert objects.read("a", 10) == (b"3", second)


@pytest.mark.parametrize("mode", ["create", "update"])
def test_one_of_many_concurrent_creates_wins(endpoint: Endpoint, mode: str) -> None:
    condition = CREATE if mode == "create" else Update(endpoint.put("a", [b"?"]).version)
    tiers = [as_promised(endpoint, CONDITIONLESS) for _ in range(12)]
    start = threading.Barrier(12, timeout=HANG_S)

    def race(racer: int) -> bool:
        start.wait()
        try:
            tiers[racer].put("a", [b"%d" % racer], mode=condition)
        except (AlreadyExistsError, ConflictError):
            return False
        return True

    with ThreadPoolExecutor(12) as pool:
        won = list(pool.map(race, range(12)))
    assert won.count(True) == 1
    assert endpoint.read("a", 10)[0] == b"%d" % won.index(True)


# Reading back


@pytest.mark.parametrize(("damage", "mode"), [(_flip, "create"), (_cut, "overwrite"), (_lengthen, "update")])
def test_a_wrongly_stored_object_is_put_again(
    endpoint: Endpoint, verified: PromisedObjects, damage: Callable[[bytes], bytes], mode: str
) -> None:
    condition: PutMode = CREATE if mode == "create" else OVERWRITE
    if mode == "update":
        condition = Update(endpoint.put("a", [b"before"]).version)
    endpoint.wrong = [damage, damage]
    info = verified.put("a", [b"con", memoryview(b"tent")], mode=condition)
    assert endpoint.read("a", 100)[0] == b"content"
    assert endpoint.head("a") == info
    assert verified.stored_wrong == 2


@pytest.mark.parametrize("flag", ["conditional_update", "conditional_create"])
def test_a_wrong_object_is_put_again_without_conditions(endpoint: Endpoint, flag: str) -> None:
    objects = as_promised(endpoint, replace(ALL, **{flag: False}), "always")
    endpoint.wrong = [_flip]
    info = objects.put("a", [b"content"], mode=CREATE)
    assert endpoint.read("a", 100) == (b"content", info)


def test_a_new_object_that_stays_wrong_is_deleted(endpoint: Endpoint, verified: PromisedObjects) -> None:
    endpoint.wrong = [_flip] * 10
    with pytest.raises(StoreError, match=f"stored wrong {STORED_WRONG_MAX} times") as caught:
        verified.put("a", [b"content"], mode=CREATE)
    assert not caught.value.transient
    assert len(endpoint.modes) == verified.stored_wrong == STORED_WRONG_MAX
    with pytest.raises(NotFoundError):
        endpoint.head("a")


def test_an_object_that_was_there_and_stays_wrong_is_not_deleted(endpoint: Endpoint, verified: PromisedObjects) -> None:
    verified.put("a", [b"before"])
    endpoint.wrong = [_flip] * 10
    with pytest.raises(StoreError, match="stored wrong"):
        verified.put("a", [b"content"])
    assert endpoint.read("a", 100)[0] == _flip(b"content")


def test_an_object_stored_by_another_client_is_kept(endpoint: Endpoint, verified: PromisedObjects) -> None:
    def replace_it() -> None:
        endpoint.inner.put("a", [b"theirs"])

    endpoint.before_get = [replace_it]
    endpoint.wrong = [_flip]
    verified.put("a", [b"content"])
    assert endpoint.read("a", 100)[0] == b"theirs"


class _ReplacedAfter(WrappedObjects):
    """Another writer replaces the object before the second put."""

    def get(self, key, ranges, *, version=None):
        info = super().get(key, ranges, version=version)
        self.inner.inner.put(key, [b"theirs"])
        return info


def test_a_wrong_object_replaced_by_another_client_is_kept(endpoint: Endpoint) -> None:
    objects = as_promised(_ReplacedAfter(endpoint), ALL, "always")
    endpoint.wrong = [_flip]
    with pytest.raises(StoreError, match="changed before it was stored again") as caught:
        objects.put("a", [b"content"], mode=CREATE)
    assert caught.value.transient
    assert endpoint.read("a", 100)[0] == b"theirs"


@pytest.mark.parametrize("mode", [CREATE, OVERWRITE])
def test_an_acknowledged_but_missing_object_is_an_error(
    endpoint: Endpoint, verified: PromisedObjects, mode: PutMode
) -> None:
    endpoint.before_get = [lambda: endpoint.inner.delete(["a"])]
    with pytest.raises(StoreError, match="acknowledged, but does not exist") as caught:
        verified.put("a", [b"content"], mode=mode)
    assert caught.value.transient


def test_a_bit_that_flips_on_the_way_back_does_no_harm(memory: MemoryObjects) -> None:
    faulty = FaultyObjects(Endpoint(memory))
    objects = as_promised(faulty, ALL, "always")
    faulty.inject(Fault.BIT_FLIP, method="get")
    info = objects.put("a", [b"content"], mode=CREATE)
    assert objects.read("a", 100) == (b"content", info)
    assert objects.stored_wrong == 1


def test_a_heal_whose_answer_is_lost_is_not_acknowledged_unseen(memory: MemoryObjects) -> None:
    endpoint = Endpoint(memory)
    faulty = FaultyObjects(endpoint)
    objects = as_promised(RetryingObjects(faulty, clock=ManualClock()), ALL, "always")
    endpoint.wrong = [_flip, _flip]
    faulty.inject(Fault.LOST_RESPONSE, method="put", after=1)
    with pytest.raises(StoreError, match="changed before it was stored again"):
        objects.put("a", [b"content"], mode=CREATE)


def test_an_empty_object_is_read_back_too(endpoint: Endpoint, verified: PromisedObjects) -> None:
    endpoint.wrong = [_lengthen]
    assert verified.put("a", []).size == 0
    assert endpoint.head("a").size == 0
    assert verified.stored_wrong == 1


def test_the_checksum_is_handed_on(memory: MemoryObjects) -> None:
    objects = as_promised(memory, memory.capabilities, "always")
    with pytest.raises(StoreError):
        objects.put("a", [b"content"], checksum=Checksum("xxh3-128", bytes(16)))
    objects.put("a", [b"content"], checksum=compute("xxh3-128", [b"content"]))


class Lax(WrappedObjects):
    """An endpoint that ignores some conditions, which it heeded when it was probed."""

    ignored: tuple[type, ...] = ()
    checks = False  # the condition, a moment before the put

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.puts: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return ALL

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        self.puts.append(key)
        if not isinstance(mode, self.ignored):
            return super().put(key, data, mode=mode)
        if self.checks:
            with contextlib.suppress(NotFoundError):
                found = self.head(key).version
                if isinstance(mode, Create):
                    raise AlreadyExistsError(key)
                if found != mode.version:
                    raise ConflictError(key)
            time.sleep(0.05)
        return super().put(key, data)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("ignored", [Create, Update])
@pytest.mark.parametrize("is_there", [True, False])
def test_conditions_that_are_ignored_after_the_probe(ignored: type, is_there: bool, checks: bool) -> None:
    lax = Lax(MemoryObjects(f"lax-{uuid.uuid4().hex}"))
    lax.put(keys.DESCRIPTOR, [b"a descriptor"])

    def connected() -> ObjectTier:
        return as_promised(lax, replace(ALL, checksums=()), "never", checks_conditions=True)

    objects = connected()
    objects.put("any", [b"1"])  # without a condition, nothing is checked
    if is_there:
        first = objects.put("a", [b"1"], mode=CREATE)
        objects.put("a", [b"2"], mode=Update(first.version))
        assert len(lax.puts) == 4 + 2 * RACERS  # the check was made once
    assert not list(lax.list(keys.PROBE))
    lax.ignored, lax.checks = (ignored,), checks
    objects, before = connected(), list(lax.puts)
    for _ in range(2):
        with pytest.raises(StoreError, match="two writers could replace each other's files"):
            objects.put("b", [b"3"], mode=CREATE)
    assert all(key.startswith(keys.PROBE) for key in lax.puts[len(before) :])
    assert not list(lax.list(keys.PROBE))


class Hashing(WrappedObjects):
    """An endpoint like S3, where equal contents have equal versions."""

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.versions: dict[str, Version] = {}

    @property
    def capabilities(self) -> Capabilities:
        return ALL

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        with self.lock:
            if isinstance(mode, Create) and key in self.versions:
                raise AlreadyExistsError(key)
            if isinstance(mode, Update) and self.versions[key] != mode.version:
                raise ConflictError(key)
            self.versions[key] = Version(compute("md5", data).value.hex())
            return replace(super().put(key, data), version=self.versions[key])


def test_versions_that_are_hashes_pass_the_race() -> None:
    hashing = Hashing(MemoryObjects(f"hashing-{uuid.uuid4().hex}"))
    for number in range(20):
        as_promised(hashing, ALL, "never", checks_conditions=True).put(f"{number}", [b"1"], mode=CREATE)
