"""Test which promises of its kind an endpoint keeps.

Servers that speak a cloud's protocol differ: many accept a condition or a checksum and silently ignore it. So each
promise has a test that only a server that keeps it can pass. The tests use a few small objects beside the store's own,
and delete them afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tierfs.digest import Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, NotFoundError, StoreError, TierfsError
from tierfs.format import keys
from tierfs.format.descriptor import Capabilities
from tierfs.objects.checksums import compute
from tierfs.objects.protocol import CREATE, OVERWRITE, Checksum, ObjectInfo, ObjectTier, PutMode, Update
from tierfs.objects.wrappers.limits import RetryingObjects
from tierfs.objects.wrappers.verify import RACERS, race

_CONTENT = b"tierfs tries what this endpoint heeds. "
_ROUNDS = 3  # each may miss the moment between a check and its put
_SEVERAL = f"of {RACERS} puts at once, several were accepted"
_REFUSED = "a request whose condition held was refused"
_logger = logging.getLogger("tierfs.objects")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one test.

    Attributes:
        name: The tested promise, in words for a person.
        kept: Whether the endpoint keeps it.
        detail: How the endpoint behaves instead, or why nothing was tested. Empty if it keeps the promise.
    """

    name: str
    kept: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of all tests.

    Attributes:
        capabilities: The promises that the endpoint keeps.
        tests: One result for each promise.
    """

    capabilities: Capabilities
    tests: tuple[Finding, ...]


def probe(objects: ObjectTier) -> Findings:
    """Test an endpoint. Sends about a hundred small requests below ``.tierfs/probe/``, and leaves no object there.

    Args:
        objects: The tier at the root of a store that exists or is yet to be created. Only the abilities in its
            ``capabilities`` are tested. It should not retry by itself: the probe retries transient failures, except
            for requests that the endpoint is expected to refuse.

    Raises:
        StoreError, ReadOnlyError, CapacityError: A request failed, and the probe has no result.
    """
    return _Probe(objects).run()


class _Probe:
    def __init__(self, objects: ObjectTier) -> None:
        self._once = objects  # without retries: the expected refusal of a checksum is a transient error
        self._objects = RetryingObjects(objects)
        self._prefix = f"{keys.PROBE}{os.urandom(8).hex()}/"
        self._count = 0
        self._tests: list[Finding] = []

    def run(self) -> Findings:
        can = self._objects.capabilities
        try:
            self._put(self._key(), [_CONTENT])  # if a plain put fails, the probe fails
            kept = replace(
                can,
                conditional_create=self._try("conditional create", can.conditional_create, self._create),
                conditional_update=self._try("conditional update", can.conditional_update, self._update),
                list_after_write=self._try("list-after-write", can.list_after_write, self._list),
                checksums=tuple(
                    name
                    for name in can.checksums
                    if self._try(f"checksum {name}", True, lambda: self._checksum(name))  # noqa: B023, FBT003 - called at once
                ),
            )
            if not can.checksums:
                self._try("checksums", False, str)  # noqa: FBT003 - no checksum is requested
            self._try("ranged reads", True, self._ranges)  # noqa: FBT003 - always tested
            self._try("reads pinned to a version", True, self._pinned)  # noqa: FBT003
        finally:
            self._tidy()
        if not can.atomic_put:
            self._tests.append(
                Finding("atomic puts", kept=False, detail="not tried: readers may see part of a file on this kind")
            )
        return Findings(kept, tuple(self._tests))

    def _try(self, name: str, asked: bool, test: Callable[[], str]) -> bool:
        if not asked:
            detail = "not tried: this kind of filesystem cannot request it"
        else:
            try:
                detail = test()
                # A client that sends a request twice may be refused because of its own first request.
                if detail == _REFUSED:
                    detail = test()
            except StoreError as error:
                if error.transient:
                    raise
                detail = f"the endpoint does not support it: {error}"
        self._tests.append(Finding(name, not detail, detail))
        return not detail

    def _key(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def _put(self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE) -> ObjectInfo:
        # A bucket with a retention policy accepts no put without a checksum. Every server knows MD5.
        checksum = compute("md5", data) if "md5" in self._objects.capabilities.checksums else None
        return self._objects.put(key, data, mode=mode, checksum=checksum)

    # Each test returns how the endpoint behaves instead, or "" if it keeps the promise.

    def _create(self) -> str:
        key = self._key()
        try:
            self._put(key, [_CONTENT], mode=CREATE)
        except AlreadyExistsError:
            return _REFUSED
        if not self._is_refused(key, CREATE, AlreadyExistsError):
            return "an existing object was replaced"
        return self._race(lambda _: CREATE)

    def _update(self) -> str:
        key = self._key()
        first = self._put(key, [_CONTENT])
        try:
            second = self._put(key, [_CONTENT, b"2"], mode=Update(first.version))
        except ConflictError:
            return _REFUSED
        if second.version == first.version:
            return "two different contents have the same version"
        if not self._is_refused(key, Update(first.version), ConflictError):
            return "a changed object was replaced"
        if not self._is_refused(self._key(), Update(second.version), ConflictError):
            return "a missing object was created"
        return self._race(lambda key: Update(self._put(key, [_CONTENT]).version))

    def _race(self, condition: Callable[[str], PutMode]) -> str:
        for _ in range(_ROUNDS):
            key = self._key()
            put = partial(self._put, key, mode=condition(key))
            if len(race(put)) > 1:
                return _SEVERAL
        return ""

    def _is_refused(self, key: str, mode: PutMode, refusal: type[TierfsError]) -> bool:
        try:
            self._put(key, [b"to be refused"], mode=mode)
        except refusal:
            return True
        return False

    def _list(self) -> str:
        key = self._key()
        for _ in range(3):
            info = self._put(key, [_CONTENT, os.urandom(4)])
            if info not in list(self._objects.list(self._prefix)):
                return "a listing lacked an object that had been written"
            self._objects.delete([key])
            if any(listed.key == key for listed in self._objects.list(self._prefix)):
                return "a listing showed a deleted object"
        return ""

    def _checksum(self, algorithm: str) -> str:
        right = compute(algorithm, [_CONTENT])
        # Twice: a server that happens to fail for another reason must not pass for one that verifies the checksum.
        for number in range(2):
            try:
                self._objects.put(self._key(), [_CONTENT], checksum=right)
            except StoreError as error:
                if error.transient:
                    raise
                return f"a correct checksum was refused: {error}"
            wrong = Checksum(algorithm, bytes([right.value[0] ^ 1 << number]) + right.value[1:])
            key = self._key()
            try:
                self._once.put(key, [_CONTENT], checksum=wrong)
            except StoreError:
                with contextlib.suppress(NotFoundError):
                    self._objects.head(key)
                    return "bytes with a wrong checksum were refused, but stored"
            else:
                return "bytes with a wrong checksum were stored"
        return ""

    def _ranges(self) -> str:
        content = bytes(range(256))
        key = self._key()
        self._put(key, [content])
        out = memoryview(bytearray(20))
        try:
            self._objects.get(key, [(100, out)])
        except CorruptionError as error:
            return f"too few bytes arrived: {error}"
        return "" if out == content[100:120] else "other bytes arrived than were requested"

    def _pinned(self) -> str:
        key = self._key()
        first = self._put(key, [_CONTENT])
        second = self._put(key, [_CONTENT, b"2"])
        ranges = [(0, memoryview(bytearray(4)))]
        try:
            self._objects.get(key, ranges, version=second.version)
        except ConflictError:
            return "the current version was refused"
        try:
            self._objects.get(key, ranges, version=first.version)
        except ConflictError:
            return ""
        return "another version was read"

    def _tidy(self) -> None:
        try:
            self._objects.delete([f"{self._prefix}{number}" for number in range(1, self._count + 1)])
        except TierfsError as error:
            _logger.warning("the probe's objects below %s could not be deleted: %s", self._prefix, error)
