"""The one narrow interface to the object tier, and the values that cross it.

Keys are ``/``-separated text below a base that the backend was made with. Objects are replaced or created whole.
Every method is synchronous and may be called from many threads at once. Behaviour such as retries or limits is added by
wrapping: a wrapper takes an `ObjectTier` and is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, TypeAlias

from tierfs.digest import Buffer
from tierfs.format.descriptor import Capabilities

__all__ = [
    "CREATE",
    "OVERWRITE",
    "Checksum",
    "Create",
    "Listed",
    "ObjectInfo",
    "ObjectTier",
    "Overwrite",
    "Prefix",
    "PutMode",
    "Range",
    "Take",
    "Update",
    "Use",
    "Version",
    "objects_below",
]

Version = NewType("Version", str)
"""An object tier's name for one content of a key. Two writes never get the same one."""

Range: TypeAlias = tuple[int, memoryview]
"""An offset into an object, and the writable buffer that the bytes from there are to fill entirely."""


@dataclass(frozen=True, slots=True)
class Create:
    """Put only where nothing is."""


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Put whatever is there."""


@dataclass(frozen=True, slots=True)
class Update:
    """Put only where this version is."""

    version: Version


PutMode: TypeAlias = Create | Overwrite | Update
CREATE = Create()
OVERWRITE = Overwrite()


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum for the endpoint to verify before it stores.

    Attributes:
        algorithm: One of `Capabilities.checksums`.
        value: The digest, in the algorithm's canonical byte order.
    """

    algorithm: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the tier sees it.

    Attributes:
        key: Its key.
        size: Bytes.
        version: Its content's.
        modified_ns: When it was stored, by the tier's clock, to the second; 0 where unknown. The answer of a put may differ
            from what is told later, so it does not count when two are compared.
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
"""Gives the next so many bytes of an object, at most 1 MiB (`BLOCK_BYTES`). They are only read, and only until the next call."""

Use: TypeAlias = Callable[[ObjectInfo, Take], object]
"""Makes something of an object whose bytes are on their way."""


class ObjectTier(Protocol):
    """Where objects live. Conformance: `tierfs.testing.ObjectTierTests`."""

    @property
    def capabilities(self) -> Capabilities:
        """The promises of this endpoint. Costs nothing."""

    @property
    def streams(self) -> bool:
        """Whether `stream` gives bytes while others come. Otherwise all of them are in memory before it gives the first."""

    def places(self) -> tuple[str, ...]:
        """Names of where this is: two tiers of one host that have one in common are the same. No secrets, no request.

        Raises:
            StoreError, ReadOnlyError, InvalidInputError: It cannot be told, because no connection can be set up.
        """

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        """Store ``data``, laid end to end, durably, all or nothing.

        Args:
            key: Where.
            data: Borrowed for the call only.
            mode: Condition on what is there. Where the endpoint cannot promise it, it is checked as well as can be.
            checksum: Refuse the bytes unless they have this one.

        Returns:
            The object as stored.

        Raises:
            AlreadyExistsError: ``Create``, and something is there.
            ConflictError: ``Update``, and another version or nothing is there.
            StoreError: Among others, the bytes that arrived do not have the checksum; nothing was stored then.
            CapacityError, ReadOnlyError: It failed. After a transient `StoreError` the object may be stored or not.
        """

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        """Fill each range's buffer from the object. All ranges come from one version.

        Raises:
            NotFoundError: Nothing is there.
            ConflictError: ``version`` is given, and another one is there.
            CorruptionError: The object is too short for a range.
            StoreError, ReadOnlyError: It failed; the buffers' content is undefined.
        """

    def stream(self, key: str, length: int, use: Use) -> None:
        """Have the first ``length`` bytes of an object used piece by piece, from one version.

        Args:
            key: Its key.
            length: How many may be taken.
            use: Called on this thread; again, and from the first byte on, where the request is sent again. While it runs a
                request may be under way, so it must ask nothing of the tier. The time that it takes counts as the request's.

        Raises:
            NotFoundError: Nothing is there.
            CorruptionError: The object is too short.
            ConflictError: It was changed meanwhile.
            StoreError, ReadOnlyError: It failed, perhaps after some were used.
            TierfsError: Raised by ``use``. The tier may turn other errors of ``use`` into one of its own.
        """

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """Return a whole small object.

        Raises:
            NotFoundError: Nothing is there.
            CorruptionError: It is larger than ``limit`` bytes, which are never allocated.
            StoreError, ReadOnlyError: It failed.
        """

    def head(self, key: str) -> ObjectInfo:
        """Describe the object without its bytes.

        Raises:
            NotFoundError: Nothing is there.
            StoreError, ReadOnlyError: It failed.
        """

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        """Go through the objects whose key starts with ``prefix``, in no promised order, page by page.

        Args:
            prefix: Empty, or ends with ``/``.
            delimiter: Fold everything behind the next ``/`` into one `Prefix`. Where prefixes are directories, one may
                be listed that holds nothing.

        Raises:
            StoreError, ReadOnlyError: It failed, also part of the way through.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, whatever their version. Keys that hold nothing are passed over.

        Raises:
            StoreError, ReadOnlyError: It failed; some may be gone.
        """

    def delete_version(self, key: str, version: Version) -> None:
        """Delete one object if this is its version.

        Raises:
            NotFoundError: Nothing is there.
            ConflictError: Another version is there.
            StoreError, ReadOnlyError: It failed; after a transient one the object may be gone.
        """


def objects_below(objects: ObjectTier, prefix: str) -> Iterator[ObjectInfo]:
    """Every object whose key starts with ``prefix``: a listing without a delimiter. Raises as `ObjectTier.list`."""
    return (item for item in objects.list(prefix) if isinstance(item, ObjectInfo))
