"""The interface of the object tier, and the values that cross it.

Keys are ``/``-separated text below a base that the backend was made with. A put creates or replaces a whole object.
Every method is synchronous, and many threads may call it at once. Wrappers add behaviour such as retries or limits:
a wrapper takes an `ObjectTier` and is one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, TypeAlias

from tierfs.digest import Buffer
from tierfs.errors import ConflictError, CorruptionError
from tierfs.format.descriptor import Capabilities

Version = NewType("Version", str)
"""The object tier's name for one content of a key.

A put that changes the content changes the version. Equal contents may have equal versions, as with S3's ETags.
"""

Range: TypeAlias = tuple[int, memoryview]
"""An offset into an object, and a writable buffer to fill entirely with the bytes from there."""


@dataclass(frozen=True, slots=True)
class Create:
    """Put only if no object is there."""


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Put whether or not an object is there."""


@dataclass(frozen=True, slots=True)
class Update:
    """Put only if this version is there."""

    version: Version


PutMode: TypeAlias = Create | Overwrite | Update
CREATE = Create()
OVERWRITE = Overwrite()


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that the endpoint verifies before it stores.

    Attributes:
        algorithm: One of `Capabilities.checksums`.
        value: The digest, in the algorithm's canonical byte order.
    """

    algorithm: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, as the tier describes it.

    Attributes:
        size: In bytes.
        version: The version of its content.
        modified_ns: When the tier stored it, by the tier's clock, accurate to the second; 0 if unknown. Comparisons
            ignore it, since the answer of a put may differ from later ones.
    """

    key: str
    size: int
    version: Version
    modified_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A "directory" in a listing with a delimiter. ``key`` ends with ``/``."""

    key: str


Listed: TypeAlias = ObjectInfo | Prefix

Take: TypeAlias = Callable[[int], memoryview]
"""Returns the next bytes of an object, as many as requested, at most 1 MiB (`BLOCK_BYTES`).

The caller must not write to them, and may read them only until its next call.
"""

Use: TypeAlias = Callable[[ObjectInfo, Take], object]
"""Consumes an object while its bytes arrive."""


class ObjectTier(Protocol):
    """A place to store objects. Conformance suite: `ObjectTierTests`."""

    @property
    def capabilities(self) -> Capabilities:
        """The promises of this endpoint. Sends no request."""

    @property
    def streams(self) -> bool:
        """Whether `stream` passes bytes on while others arrive.

        If not, all bytes are in memory before `stream` passes on the first.
        """

    def places(self) -> tuple[str, ...]:
        """Return names of this tier's place. Two tiers of one host with a name in common are the same place.

        The names hold no secrets. Sends no request, but may set up a connection.

        Raises:
            StoreError, ReadOnlyError, InvalidInputError: No connection can be set up, so the place is unknown.
        """

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        """Store the joined pieces of ``data``, durably and atomically.

        Args:
            data: Borrowed for the call only.
            mode: Condition on the current object. If the endpoint cannot promise it, the tier checks it as well as it
                can.
            checksum: The endpoint refuses the bytes unless they have it.

        Returns:
            The object as stored.

        Raises:
            AlreadyExistsError: ``mode`` is `Create`, and an object is there.
            ConflictError: ``mode`` is `Update`, and another version or no object is there.
            StoreError, CapacityError, ReadOnlyError: The request failed. After a transient `StoreError` the object may
                or may not be stored. If the bytes that arrived do not have ``checksum``, nothing is stored.
        """

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        """Fill each range's buffer from the object. All ranges come from one version.

        Raises:
            NotFoundError: No object is there.
            ConflictError: ``version`` is given, and another version is there.
            CorruptionError: The object is too short for a range.
            StoreError, ReadOnlyError: The request failed. The content of the buffers is undefined.
        """

    def stream(self, key: str, length: int, use: Use) -> None:
        """Pass the first ``length`` bytes of an object, all of one version, to ``use`` piece by piece.

        Args:
            length: How many bytes ``use`` may take.
            use: Called on this thread. If the request is retried, it is called again and takes the bytes from the first
                one on. A request may be in flight while it runs, so it must not call the tier. The time it takes counts
                as the request's.

        Raises:
            NotFoundError: No object is there.
            CorruptionError: The object is too short.
            ConflictError: The object changed during the call.
            StoreError, ReadOnlyError: The request failed, perhaps after ``use`` took some bytes.
            TierfsError: ``use`` raised it. The tier may translate other exceptions of ``use`` into its own.
        """

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """Return a whole small object.

        Raises:
            NotFoundError: No object is there.
            CorruptionError: The object is larger than ``limit`` bytes. No memory is allocated for it.
            StoreError, ReadOnlyError: The request failed.
        """

    def head(self, key: str) -> ObjectInfo:
        """Describe an object without fetching its bytes.

        Raises:
            NotFoundError: No object is there.
            StoreError, ReadOnlyError: The request failed.
        """

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        """List the objects whose key starts with ``prefix``, page by page, in any order.

        Args:
            prefix: Empty, or ends with ``/``.
            delimiter: Fold all keys with a further ``/`` into one `Prefix` that ends there. If the tier's prefixes are
                directories, it may list an empty one.

        Raises:
            StoreError, ReadOnlyError: A request failed, perhaps after some objects were listed.
        """

    def list_after(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        """Return the first objects whose key starts with ``prefix`` and sorts after ``after``; none if there are none.

        It tells whether the endpoint ended a listing early. It takes one request, or a few on a tier of directories.

        Args:
            after: A key that starts with ``prefix``, or ``prefix`` itself.

        Raises:
            StoreError, ReadOnlyError: The request failed.
        """
        found: list[ObjectInfo] = []
        for item in self.list(prefix, delimiter=True):
            if isinstance(item, Prefix):
                if item.key > after or after.startswith(item.key):
                    found += self.list_after(item.key, after)
            elif item.key > after:
                found.append(item)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, whatever their version. Keys without an object are ignored.

        Raises:
            StoreError, ReadOnlyError: A request failed. Some objects may be deleted.
        """

    def delete_version(self, key: str, version: Version) -> None:
        """Delete one object if it has this version.

        Raises:
            NotFoundError: No object is there.
            ConflictError: Another version is there.
            StoreError, ReadOnlyError: The request failed. After a transient error the object may be deleted.
        """


def objects_below(objects: ObjectTier, prefix: str) -> Iterator[ObjectInfo]:
    """List every object whose key starts with ``prefix``, without a delimiter. Raises as `ObjectTier.list`."""
    return (item for item in objects.list(prefix) if isinstance(item, ObjectInfo))


def check_version(key: str, found: Version | None, wanted: Version | None) -> None:
    """Check that an object has the wanted version, if one is given.

    Raises:
        ConflictError: The object has another version, or ``found`` is None: no object is there.
    """
    if wanted is None or found == wanted:
        return
    if found is None:
        raise ConflictError(f"{key} no longer exists", path=key)
    raise ConflictError(f"{key} is at version {found}, not at {wanted}", path=key)


def check_end(key: str, size: int, end: int) -> None:
    """Check that an object of ``size`` bytes reaches offset ``end``.

    Raises:
        CorruptionError: The object is too short.
    """
    if size < end:
        raise CorruptionError(f"{key} ends at byte {size}, before byte {end}: cut short", path=key)


def check_limit(key: str, size: int, limit: int) -> None:
    """Check that an object of ``size`` bytes may be read whole.

    Raises:
        CorruptionError: The object is larger than ``limit`` bytes.
    """
    if size > limit:
        raise CorruptionError(f"{key} has {size} bytes, over the limit of {limit}", path=key)


_STRIPES = 1024  # a few dozen concurrent writes rarely share a lock by chance

_locks: dict[type, tuple[threading.RLock, ...]] = {}
os.register_at_fork(after_in_child=_locks.clear)  # a thread that the child lacks may hold one


@contextlib.contextmanager
def locked(kind: type, paths: Iterable[str]) -> Iterator[None]:
    """Hold ``paths`` exclusively within this process.

    Args:
        kind: The filesystem's class. Not the instance, since fsspec makes several for the same filesystem.
        paths: Whole paths there.
    """
    stripes = _locks.get(kind) or _locks.setdefault(kind, tuple(threading.RLock() for _ in range(_STRIPES)))
    # Sorted, so that two callers with several paths cannot deadlock.
    chosen = sorted({zlib.crc32(os.fsencode(path)) % _STRIPES for path in paths})
    with contextlib.ExitStack() as stack:
        for index in chosen:
            stack.enter_context(stripes[index])
        yield
