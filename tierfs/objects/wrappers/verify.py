"""Limit an object tier to the promises that its endpoint keeps, and read back writes that no checksum protects."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from tierfs import digest
from tierfs.digest import Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.format import keys
from tierfs.format.descriptor import Capabilities
from tierfs.objects.checksums import checksum_for, computable
from tierfs.objects.protocol import (
    CREATE,
    OVERWRITE,
    Checksum,
    Create,
    ObjectInfo,
    ObjectTier,
    PutMode,
    Update,
    check_version,
    locked,
)
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.threads import Transfers

VERIFY_WRITES = ("auto", "always", "never")
STORED_WRONG_MAX = 3
RACERS = 8
_RACERS_WAIT_S = 1.0
_logger = logging.getLogger("tierfs.objects")


def as_promised(
    objects: ObjectTier, endpoint: Capabilities, verify_writes: str = "auto", *, checks_conditions: bool = False
) -> ObjectTier:
    """Return a tier that makes only the promises that both ``objects`` can ask for and its endpoint keeps.

    Args:
        endpoint: The promises that the endpoint keeps.
        verify_writes: Whether to read back each write: ``always``, ``never``, or ``auto``: if the endpoint verifies no
            checksum and is not on this host.
        checks_conditions: Whether to test, before the first conditional put, that the endpoint still heeds conditions.

    Returns:
        ``objects`` itself if nothing has to be added.

    Raises:
        InvalidInputError: ``verify_writes`` is none of these.
    """
    if verify_writes not in VERIFY_WRITES:
        raise InvalidInputError(f"verify_writes is {verify_writes!r}: choose one of {', '.join(VERIFY_WRITES)}")
    can = objects.capabilities
    kept = tuple(name for name in endpoint.checksums if name in can.checksums and computable(name))
    flags = {
        item.name: getattr(can, item.name) and getattr(endpoint, item.name)
        for item in fields(Capabilities)
        if item.name not in ("checksums", "host_local")
    }
    promised = replace(endpoint, **flags, checksums=kept)
    # Objects on this host cross no network that could change them.
    reads_back = verify_writes == "always" or (verify_writes == "auto" and not kept and not can.host_local)
    checks_conditions = checks_conditions and not can.host_local and promised.conditional_create
    if promised == can and not reads_back and not checks_conditions:
        return objects
    return PromisedObjects(objects, promised, reads_back=reads_back, checks_conditions=checks_conditions)


def race(put: Callable[[Sequence[Buffer]], ObjectInfo]) -> list[ObjectInfo]:
    """Send `RACERS` puts of different contents at once, and return those that were accepted.

    An endpoint that checks a condition and stores later may accept several.

    Args:
        put: Puts one key on one condition, which holds until a put is accepted.

    Raises:
        StoreError, CapacityError, ReadOnlyError: A put failed otherwise than by its condition.
    """
    start = threading.Barrier(RACERS)

    def run(_: int) -> ObjectInfo | None:
        with contextlib.suppress(threading.BrokenBarrierError):  # an exiting interpreter starts no threads
            start.wait(_RACERS_WAIT_S)
        try:
            return put([b"tierfs: one of several puts at once", os.urandom(16)])  # equal contents have equal versions
        except (AlreadyExistsError, ConflictError):
            return None

    return [info for info in Transfers(RACERS, name="tierfs-race").map(run, range(RACERS)) if info is not None]


class PromisedObjects(WrappedObjects):
    """Makes the given promises, and reads back each put if asked to.

    A condition that is not promised is not sent: some servers ignore it, others refuse puts that meet it. It is
    checked before the put, under a lock of this process, which other processes do not see.

    If the stored bytes are wrong, the tier stores them again, on condition that the wrong version is still there.
    So it replaces no other writer's object. It deletes a new object that stays wrong.

    Args:
        reads_back: Whether to compare the digest of each stored object with that of the bytes that were sent.
        checks_conditions: Whether to `race` creates and updates of one object before the first conditional put. That
            put raises `StoreError` if several of them are accepted.

    Attributes:
        stored_wrong: How often the stored bytes differed from those that were sent.
    """

    def __init__(
        self, inner: ObjectTier, capabilities: Capabilities, *, reads_back: bool, checks_conditions: bool = False
    ) -> None:
        super().__init__(inner)
        self._unchecked = checks_conditions
        self._lock = threading.Lock()
        self._capabilities = capabilities
        self.reads_back = reads_back
        self.stored_wrong = 0

    def __repr__(self) -> str:
        return f"PromisedObjects({self.inner!r}, reads_back={self.reads_back})"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        info = self._put(key, data, mode, checksum)
        if not self.reads_back:
            return info
        sent = digest.checksum(*data)
        wrong = 0
        while True:
            try:
                if self._checksum(info) == sent:
                    return info
            except ConflictError:
                # Another writer replaced the object: it verified its own base, or it overwrites any object.
                return info
            except NotFoundError as error:
                raise StoreError(
                    f"{key} was acknowledged, but does not exist: it was lost or deleted", transient=True, path=key
                ) from error
            self.stored_wrong += 1
            wrong += 1
            if wrong == STORED_WRONG_MAX:
                break
            _logger.warning("the endpoint stored other bytes of %s than were sent: storing it again", key)
            try:
                info = self._put(key, data, Update(info.version), checksum)
            except ConflictError as error:
                # Another writer changed it, or this put, if it was sent twice because its answer was lost.
                raise StoreError(
                    f"{key} was stored wrong, and changed before it was stored again", transient=True, path=key
                ) from error
        if isinstance(mode, Create):
            with contextlib.suppress(ConflictError, NotFoundError):  # then the wrong object is gone
                self.inner.delete_version(key, info.version)
        raise StoreError(
            f"{key} was stored wrong {STORED_WRONG_MAX} times in a row: something between this process and the "
            "endpoint changes bytes; check the proxies and the memory of this host",
            path=key,
            tier="object",
        )

    def _put(self, key: str, data: Sequence[Buffer], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        can = self.inner.capabilities
        match mode:
            case Create() if can.conditional_create and not self._capabilities.conditional_create:
                version = None
            case Update(version) if can.conditional_update and not self._capabilities.conditional_update:
                pass
            case _:
                if self._unchecked and mode != OVERWRITE:
                    with self._lock:
                        self._check_conditions()
                return super().put(key, data, mode=mode, checksum=checksum)
        with locked(type(self), [key]):
            try:
                found = self.inner.head(key).version
            except NotFoundError:
                found = None
            if found is not None and version is None:
                raise AlreadyExistsError(f"{key} exists", path=key)
            check_version(key, found, version)
            return super().put(key, data, checksum=checksum)

    def _check_conditions(self) -> None:
        """Race puts of a new object, once. Another server, or a proxy, may be there since the probe."""
        if not self._unchecked:
            return
        key = f"{keys.PROBE}conditions-{os.urandom(8).hex()}"

        def accepted(mode: PutMode) -> list[ObjectInfo]:
            return race(
                lambda data: self.inner.put(key, data, mode=mode, checksum=checksum_for(self._capabilities, data))
            )

        try:
            found = accepted(CREATE)
            # None: the answer to the create was lost, or every create is refused, as the coming one will be.
            if len(found) == 1 and self._capabilities.conditional_update:
                found = accepted(Update(found[0].version))
        finally:
            with contextlib.suppress(StoreError, ReadOnlyError):  # then gc removes the object
                self.inner.delete([key])
        if len(found) > 1:
            raise StoreError(
                f"of {RACERS} puts at once on a condition that one may meet, the endpoint accepted several, so two "
                "writers could replace each other's files: nothing was written. Repair the endpoint, or run "
                "`tierfs probe URL`, which makes this a store for one writer at a time",
                path=key,
                tier="object",
            )
        self._unchecked = False

    def _checksum(self, info: ObjectInfo) -> bytes:
        """Return the XXH3-128 of the stored object, fetched in one request; empty if its length differs."""
        out = memoryview(bytearray(info.size))
        try:
            found = self.inner.get(info.key, [(0, out)], version=info.version)
        except CorruptionError:  # cut short
            return b""
        return digest.checksum(out) if found.size == info.size else b""
