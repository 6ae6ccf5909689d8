"""The probe detects endpoints that break a promise of their kind. Each test breaks one."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.format.descriptor import Capabilities
from tierfs.objects import (
    OVERWRITE,
    MemoryObjects,
    Update,
    WrappedObjects,
    probe,
)
from tierfs.objects.checksums import compute, verify_checksum
from tierfs.objects.protocol import Create, Listed, Version
from tierfs.objects.wrappers.limits import ATTEMPTS, RetryingObjects
from tierfs.testing import Fault, FaultyObjects

NOTHING = Capabilities(conditional_create=False, conditional_update=False, list_after_write=False, atomic_put=False)


@pytest.fixture
def memory() -> Iterator[MemoryObjects]:
    objects = MemoryObjects(f"/probe-{uuid.uuid4().hex}")
    yield objects
    left = [listed.key for listed in objects.list("")]
    objects.delete(left)
    assert left == [], "the probe left something behind"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    retrying = partial(RetryingObjects, clock=ManualClock())
    monkeypatch.setattr(sys.modules[probe.__module__], "RetryingObjects", retrying)


class IgnoresCreates(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        return self.inner.put(key, data, mode=OVERWRITE if isinstance(mode, Create) else mode, checksum=checksum)


class RefusesEveryCreate(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if isinstance(mode, Create):
            raise AlreadyExistsError(key)
        return self.inner.put(key, data, mode=mode, checksum=checksum)


class DoesNotKnowConditions(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if mode is not OVERWRITE:
            raise StoreError("HTTP status 501: a header you provided implies functionality that is not implemented")
        return self.inner.put(key, data, checksum=checksum)


class IgnoresUpdates(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        return self.inner.put(key, data, mode=OVERWRITE if isinstance(mode, Update) else mode, checksum=checksum)


class UpdatesWhatIsNotThere(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        with contextlib.suppress(FileNotFoundError):
            self.inner.head(key)
            return self.inner.put(key, data, mode=mode, checksum=checksum)
        return self.inner.put(key, data, checksum=checksum)


class RefusesEveryUpdate(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if isinstance(mode, Update):
            raise ConflictError(key)
        return self.inner.put(key, data, mode=mode, checksum=checksum)


class ChecksCreatesEarly(WrappedObjects):
    """An endpoint that checks a condition, and puts a moment later whatever is there then."""

    early: type = Create

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if not isinstance(mode, self.early):
            return self.inner.put(key, data, mode=mode, checksum=checksum)
        with contextlib.suppress(NotFoundError):
            found = self.inner.head(key).version
            if isinstance(mode, Create):
                raise AlreadyExistsError(key)
            if found == mode.version:
                time.sleep(0.05)
                return self.inner.put(key, data, checksum=checksum)
        if isinstance(mode, Update):
            raise ConflictError(key)
        time.sleep(0.05)
        return self.inner.put(key, data, checksum=checksum)


class ChecksUpdatesEarly(ChecksCreatesEarly):
    early = Update


class HasOneVersion(WrappedObjects):
    """An endpoint whose versions are times in whole days."""

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if isinstance(mode, Update):
            mode = Update(self.inner.head(key).version)
        return replace(self.inner.put(key, data, mode=mode, checksum=checksum), version=Version("today"))

    def get(self, key, ranges, *, version=None):
        return replace(self.inner.get(key, ranges), version=Version("today"))

    def list(self, prefix, *, delimiter=False):
        for listed in self.inner.list(prefix, delimiter=delimiter):
            yield replace(listed, version=Version("today"))


class IgnoresChecksums(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        return self.inner.put(key, data, mode=mode)


class RefusesEveryChecksum(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if checksum is not None:
            raise StoreError("HTTP status 400: no such header")
        return self.inner.put(key, data, mode=mode)


class RefusesAndStores(WrappedObjects):
    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        info = self.inner.put(key, data, mode=mode)
        verify_checksum(checksum, data, key)
        return info


class ChecksumsOfTheFirstByte(WrappedObjects):
    """An endpoint that detects only one of the two wrong checksums that the probe tries."""

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if checksum is not None:
            checksum = replace(checksum, value=bytes([checksum.value[0] & 0xFE]) + checksum.value[1:])
        try:
            return self.inner.put(key, data, mode=mode, checksum=checksum)
        except StoreError:
            return self.inner.put(key, data, mode=mode)


class ListsLate(WrappedObjects):
    """An endpoint that lists the objects of the previous listing."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.before: list[Listed] = []

    def list(self, prefix, *, delimiter=False):
        now = list(self.inner.list(prefix, delimiter=delimiter))
        before, self.before = self.before, now
        return iter(before)


class ListsWhatWasDeleted(WrappedObjects):
    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.ever: dict[str, Listed] = {}

    def list(self, prefix, *, delimiter=False):
        self.ever.update({listed.key: listed for listed in self.inner.list(prefix, delimiter=delimiter)})
        return iter(list(self.ever.values()))


class ListsOldVersions(WrappedObjects):
    def list(self, prefix, *, delimiter=False):
        for listed in self.inner.list(prefix, delimiter=delimiter):
            yield replace(listed, version=Version("old"))


class IgnoresRanges(WrappedObjects):
    def get(self, key, ranges, *, version=None):
        return self.inner.get(key, [(0, out) for _, out in ranges], version=version)


class CutsAnswersShort(WrappedObjects):
    def get(self, key, ranges, *, version=None):
        if any(offset for offset, _ in ranges):
            raise CorruptionError(f"{key} ends at byte 20")
        return self.inner.get(key, ranges, version=version)


class IgnoresPins(WrappedObjects):
    def get(self, key, ranges, *, version=None):
        return self.inner.get(key, ranges)


class RefusesEveryPin(WrappedObjects):
    def get(self, key, ranges, *, version=None):
        if version is not None:
            raise ConflictError(key)
        return self.inner.get(key, ranges)


LIES = [
    (IgnoresCreates, "conditional create", "was replaced", "conditional_create"),
    (RefusesEveryCreate, "conditional create", "held was refused", "conditional_create"),
    (DoesNotKnowConditions, "conditional create", "does not support it.*501", "conditional_create"),
    (DoesNotKnowConditions, "conditional update", "does not support it.*501", "conditional_update"),
    (IgnoresUpdates, "conditional update", "a changed object was replaced", "conditional_update"),
    (UpdatesWhatIsNotThere, "conditional update", "a missing object was created", "conditional_update"),
    (RefusesEveryUpdate, "conditional update", "held was refused", "conditional_update"),
    (ChecksCreatesEarly, "conditional create", "several were accepted", "conditional_create"),
    (ChecksUpdatesEarly, "conditional update", "several were accepted", "conditional_update"),
    (HasOneVersion, "conditional update", "two different contents have the same version", "conditional_update"),
    (HasOneVersion, "reads pinned to a version", "another version was read", None),
    (IgnoresChecksums, "checksum xxh3-128", "wrong checksum were stored", "checksums"),
    (RefusesEveryChecksum, "checksum xxh3-128", "a correct checksum was refused.*400", "checksums"),
    (RefusesAndStores, "checksum xxh3-128", "refused, but stored", "checksums"),
    (ChecksumsOfTheFirstByte, "checksum xxh3-128", "wrong checksum were stored", "checksums"),
    (ListsLate, "list-after-write", "lacked an object that had been written", "list_after_write"),
    (ListsWhatWasDeleted, "list-after-write", "showed a deleted object", "list_after_write"),
    (ListsOldVersions, "list-after-write", "lacked an object that had been written", "list_after_write"),
    (IgnoresRanges, "ranged reads", "other bytes arrived", None),
    (CutsAnswersShort, "ranged reads", "too few bytes arrived", None),
    (IgnoresPins, "reads pinned to a version", "another version was read", None),
    (RefusesEveryPin, "reads pinned to a version", "the current version was refused", None),
]


@pytest.mark.parametrize(
    ("kind", "name", "detail", "capability"),
    LIES,
    ids=[f"{kind.__name__}-{name.split()[-1]}" for kind, name, *_ in LIES],
)
def test_a_lie_is_found_out_and_named(
    memory: MemoryObjects, kind: type[WrappedObjects], name: str, detail: str, capability: str | None
) -> None:
    findings = probe(kind(memory))
    found = {test.name: test for test in findings.tests}
    assert not found[name].kept
    assert re.search(detail, found[name].detail), found[name].detail
    lies = {lie[1] for lie in LIES if lie[0] is kind}
    assert {test.name for test in findings.tests if not test.kept} == lies
    if capability is not None:
        assert not getattr(findings.capabilities, capability)


def test_a_faithful_endpoint_keeps_everything(memory: MemoryObjects) -> None:
    findings = probe(memory)
    assert findings.capabilities == memory.capabilities
    assert all(test.kept and not test.detail for test in findings.tests)
    assert [test.name for test in findings.tests] == [
        "conditional create",
        "conditional update",
        "list-after-write",
        "checksum xxh3-128",
        "ranged reads",
        "reads pinned to a version",
    ]


def test_a_client_that_sends_a_request_twice_does_not_pass_for_an_endpoint_that_refuses(memory: MemoryObjects) -> None:
    class SendsTwice(WrappedObjects):
        """A client that repeats the first request of each kind, as HTTP clients do after losing a connection."""

        def __init__(self, inner: MemoryObjects) -> None:
            super().__init__(inner)
            self.sent: set[type] = set()

        def put(self, key, data, *, mode=OVERWRITE, checksum=None):
            if type(mode) not in self.sent:
                self.sent.add(type(mode))
                self.inner.put(key, data, mode=mode, checksum=checksum)
            return self.inner.put(key, data, mode=mode, checksum=checksum)

    assert probe(SendsTwice(memory)).capabilities == memory.capabilities


def test_a_probe_skips_requests_that_cannot_be_made(memory: MemoryObjects) -> None:
    class Plain(WrappedObjects):
        @property
        def capabilities(self) -> Capabilities:
            return NOTHING

        def put(self, key, data, *, mode=OVERWRITE, checksum=None):
            assert mode is OVERWRITE
            assert checksum is None
            return self.inner.put(key, data)

    findings = probe(Plain(memory))
    assert findings.capabilities == NOTHING
    kept = {test.name: test.kept for test in findings.tests}
    assert kept == {
        "conditional create": False,
        "conditional update": False,
        "list-after-write": False,
        "checksums": False,
        "ranged reads": True,
        "reads pinned to a version": True,
        "atomic puts": False,
    }
    assert all("not tried" in test.detail for test in findings.tests if not test.kept)


def _requests(memory: MemoryObjects) -> list[str]:
    """Return the methods that a whole probe calls, in order."""
    called: list[str] = []

    class Noting(WrappedObjects):
        def _around(self, request, send):
            called.append(request.method)
            return send()

        def _around_list(self, request, send):
            called.append("list")
            return send()

    probe(Noting(memory))
    return called


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_RESPONSE])
def test_a_failure_for_the_moment_at_any_request_changes_nothing(memory: MemoryObjects, fault: Fault) -> None:
    called = _requests(memory)
    for number, method in enumerate(called):
        faulty = FaultyObjects(memory)
        faulty.inject(fault, method=method, after=called[:number].count(method))
        assert probe(faulty).capabilities == memory.capabilities
        assert list(memory.list("")) == []


def test_a_probes_refused_request_is_not_retried(memory: MemoryObjects) -> None:
    sent: list[bool] = []

    class Counting(WrappedObjects):
        def put(self, key, data, *, mode=OVERWRITE, checksum=None):
            try:
                verify_checksum(checksum, data, key)
            except StoreError:
                sent.append(True)
            return self.inner.put(key, data, mode=mode, checksum=checksum)

    probe(Counting(memory))
    assert len(sent) == 2


def test_a_bucket_that_takes_nothing_without_a_checksum_can_be_probed(memory: MemoryObjects) -> None:
    class Locked(WrappedObjects):
        """An endpoint that needs a checksum, like an S3 bucket with a default retention."""

        @property
        def capabilities(self) -> Capabilities:
            return replace(self.inner.capabilities, checksums=("md5",))

        def put(self, key, data, *, mode=OVERWRITE, checksum=None):
            if checksum is None:
                raise StoreError("Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests")
            if compute("md5", data) != checksum:
                raise StoreError("BadDigest", transient=True)
            return self.inner.put(key, data, mode=mode)

    assert probe(Locked(memory)).capabilities == Locked(memory).capabilities


@pytest.mark.parametrize("come_back_after", [1, 3, 1000])
def test_an_outage_does_not_pass_for_a_server_that_heeds_checksums(memory: MemoryObjects, come_back_after: int) -> None:
    class Flaky(IgnoresChecksums):
        """An endpoint that answers 503 to some requests, beginning with the first wrong checksum."""

        left = come_back_after
        begun = False

        def put(self, key, data, *, mode=OVERWRITE, checksum=None):
            try:
                verify_checksum(checksum, data, key)
            except StoreError:
                self.begun = True
            if self.begun and self.left:
                self.left -= 1
                raise StoreError("HTTP status 503", transient=True)
            return super().put(key, data, mode=mode)

    with contextlib.suppress(StoreError):
        assert probe(Flaky(memory)).capabilities.checksums == ()


@pytest.mark.parametrize(("fault", "kind"), [(Fault.DENIED, ReadOnlyError), (Fault.FULL, CapacityError)])
@pytest.mark.parametrize("after", [0, 5])
def test_a_place_that_cannot_be_written_to_is_told(
    memory: MemoryObjects, fault: Fault, kind: type[Exception], after: int
) -> None:
    faulty = FaultyObjects(memory)
    faulty.inject(fault, method="put", after=after)
    with pytest.raises(kind):
        probe(faulty)


def test_a_failure_to_tidy_up_is_logged_and_hides_nothing(
    memory: MemoryObjects, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyObjects(memory)
    called = _requests(memory)
    for _ in range(ATTEMPTS):
        faulty.inject(Fault.REFUSED, method="delete", after=called.count("delete") - 1)
    with caplog.at_level(logging.WARNING, logger="tierfs.objects"):
        assert probe(faulty).capabilities == memory.capabilities
    assert "the probe's objects below .tierfs/probe/" in caplog.text
    memory.delete([listed.key for listed in memory.list("")])


def test_an_interrupt_leaves_nothing_behind(memory: MemoryObjects) -> None:
    class Interrupted(WrappedObjects):
        def get(self, key, ranges, *, version=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(Interrupted(memory))


def test_probes_at_once_do_not_disturb_each_other(memory: MemoryObjects) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: probe(memory).capabilities, range(8)))
    assert set(found) == {memory.capabilities}
