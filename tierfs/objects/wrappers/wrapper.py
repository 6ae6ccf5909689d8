"""The base of every wrapper of an object tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierfs.digest import Buffer
from tierfs.format.descriptor import Capabilities
from tierfs.objects.protocol import OVERWRITE, Checksum, Listed, ObjectInfo, ObjectTier, PutMode, Range, Use, Version

Answer = TypeVar("Answer")

# A listing is passed on in batches that double up to this many, so its first object comes at once.
BATCH_MAX = 1024

METHODS = ("put", "get", "read", "head", "list", "delete", "delete_version")
"""The methods of an object tier that send requests. ``get`` also stands for ``stream``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call to the object tier.

    Attributes:
        method: One of `METHODS`.
        key: The object's key; the prefix of a listing; the first key of a deletion.
        size: Bytes of the call's buffers or of its stream, else 0.
    """

    method: str
    key: str
    size: int = 0


def batch_sizes() -> Iterator[int]:
    """Yield how many objects of a listing to take next."""
    size = 1
    while True:
        yield size
        size = min(2 * size, BATCH_MAX)


class WrappedObjects(ObjectTier):
    """An object tier that passes every request on, through two methods that a wrapper overrides."""

    def __init__(self, inner: ObjectTier) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def _around(self, request: Request, send: Callable[[], Answer]) -> Answer:
        """Send one request and return its answer. ``send`` may be called again."""
        return send()

    def _around_list(self, request: Request, send: Callable[[], Iterator[Listed]]) -> Iterator[Listed]:
        """Start one listing and yield its entries."""
        return send()

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def streams(self) -> bool:
        return self.inner.streams

    def places(self) -> tuple[str, ...]:
        return self.inner.places()

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        request = Request("put", key, sum(memoryview(piece).nbytes for piece in data))
        return self._around(request, lambda: self.inner.put(key, data, mode=mode, checksum=checksum))

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        request = Request("get", key, sum(out.nbytes for _, out in ranges))
        return self._around(request, lambda: self.inner.get(key, ranges, version=version))

    def stream(self, key: str, length: int, use: Use) -> None:
        self._around(Request("get", key, length), lambda: self.inner.stream(key, length, use))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        return self._around(Request("read", key), lambda: self.inner.read(key, limit))

    def head(self, key: str) -> ObjectInfo:
        return self._around(Request("head", key), lambda: self.inner.head(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        return self._around_list(Request("list", prefix), lambda: self.inner.list(prefix, delimiter=delimiter))

    def list_after(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        return self._around(Request("list", prefix), lambda: self.inner.list_after(prefix, after))

    def delete(self, keys: Iterable[str]) -> None:
        several = list(keys)
        self._around(Request("delete", several[0] if several else ""), lambda: self.inner.delete(several))

    def delete_version(self, key: str, version: Version) -> None:
        self._around(Request("delete_version", key), lambda: self.inner.delete_version(key, version))
