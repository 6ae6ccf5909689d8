"""The part of an object tier that is the same for all clouds.

A `CloudClient` speaks one cloud's protocol and sends one request per call. This module gathers ranges into few
requests, pins them to one version, and translates errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

from tierfs.buffers import block_buffers
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError, NotFoundError, StoreError
from tierfs.format.descriptor import Capabilities
from tierfs.objects.backends.shared_session import SharedSession, plain
from tierfs.objects.backends.spans import RequestRange, spans_of, taking_from
from tierfs.objects.checksums import computable
from tierfs.objects.http_errors import translated_client
from tierfs.objects.protocol import (
    OVERWRITE,
    Checksum,
    Create,
    Listed,
    ObjectInfo,
    ObjectTier,
    PutMode,
    Range,
    Update,
    Use,
    Version,
    check_end,
    check_limit,
    check_version,
)

_ACCOUNT = re.compile(r"(?<=://)([^/@]+)@[^/]*")  # an account: the endpoint names it, too


class Content(NamedTuple):
    """The answer to a fetch.

    Attributes:
        info: Describes the whole object.
        start: Offset in the object at which the bytes begin.
        read_into: Fills a buffer, or only its beginning, with the next bytes, and returns how many; 0 at the end.
    """

    info: ObjectInfo
    start: int
    read_into: Callable[[memoryview], int]


class CloudClient(Protocol):
    """Sends one cloud's requests below one base. Raises the exceptions of the cloud's SDK.

    Many threads use it at once.
    """

    deletes_max: int
    """The largest number of keys that one deletion takes."""

    def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        """Store joined pieces in a single request, with a condition and a checksum that the server verifies."""

    def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> AbstractContextManager[Content]:
        """Open the bytes from ``start`` to ``end`` (None: all bytes) of this version (None: of the current version)."""

    def head(self, key: str) -> ObjectInfo:
        """Describe an object."""

    def list_page(
        self, prefix: str, delimiter: bool, after: str | None, start: str = ""
    ) -> tuple[list[Listed], str | None]:
        """Return one page of a listing, and the token that requests the next page; None on the last page.

        Args:
            after: The token of the previous page; None for the first page.
            start: The first page begins at this key or behind it, unless the endpoint cannot do that.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete at most ``deletes_max`` objects. Keys without an object are ignored."""

    def delete_version(self, key: str, version: Version) -> None:
        """Delete an object if it has this version."""


class CloudObjects(ObjectTier):
    """Objects in a cloud. Safe for use by many threads.

    A call waits for its requests on the calling thread.

    Args:
        session: May be shared with other bases of the same cloud.
        make_client: Makes this base's client from a session; sends no request.
        capabilities: The promises of the cloud. A probe finds which of them an endpoint keeps.
        name: The URL of the base, for `repr` and messages.
        bucket: The bucket or container, for messages.
    """

    streams = True

    def __init__(
        self,
        session: SharedSession[Any],
        make_client: Callable[[Any], CloudClient],
        capabilities: Capabilities,
        *,
        name: str,
        bucket: str,
    ) -> None:
        self._session = session
        self._make_client = make_client
        self._capabilities = capabilities
        self._name = name
        self._bucket = bucket
        self._places: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"CloudObjects({self._name!r}, {self._session!r})"

    def _client(self) -> CloudClient:
        return self._make_client(self._session.get())

    def _translated(self, key: str) -> AbstractContextManager[None]:
        return translated_client(key or self._name, bucket=self._bucket)

    def _no_bucket(self, key: str) -> StoreError:
        return StoreError(f"{key or self._name}: {self._name} does not exist: create the bucket first", path=key)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def places(self) -> tuple[str, ...]:
        if self._places is None:  # cached, since every chunk asks for it
            with self._translated(""):
                self._places = (" ".join([plain(str(self._session.get().endpoint)), _ACCOUNT.sub(r"\1", self._name)]),)
        return self._places

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        if checksum is not None and checksum.algorithm not in self._capabilities.checksums:
            raise InvalidInputError(f"{key}: {self._name} does not verify {checksum.algorithm} checksums", path=key)
        body = [piece for piece in (memoryview(each).cast("B") for each in data) if len(piece)]
        try:
            with self._translated(key):
                return self._client().put(key, body, mode, checksum)
        except ConflictError as error:
            if isinstance(mode, Create):
                raise AlreadyExistsError(f"{key} exists", path=key) from error
            raise
        except NotFoundError as error:
            if isinstance(mode, Update):
                raise ConflictError(f"{key} no longer exists", path=key) from error
            raise self._no_bucket(key) from error

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        spans = spans_of(ranges)
        if not spans:
            info = self.head(key)
            check_version(key, info.version, version)
            return info

        with self._translated(key):
            client = self._client()
            infos = [_fill(client, key, span, version) for span in spans]
        if any(info.version != infos[0].version for info in infos):
            raise StoreError(f"{key} changed while it was read", transient=True, path=key)
        return infos[0]

    def stream(self, key: str, length: int, use: Use) -> None:
        if not length:  # no range stands for zero bytes
            use(self.head(key), taking_from(lambda _: 0, 0, memoryview(b""), key))
            return
        with (
            self._translated(key),
            block_buffers().lend(min(length, BLOCK_BYTES)) as memory,
            self._client().fetch(key, 0, length, None) as content,
        ):
            _check(key, content, RequestRange(0, length), None)
            use(content.info, taking_from(content.read_into, length, memory, key))

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        with self._translated(key), self._client().fetch(key, 0, None, None) as (info, _, read_into):
            check_limit(key, info.size, limit)
            # One byte more than stated, to detect a longer answer.
            memory = bytearray(info.size + 1)
            at = 0
            while at < len(memory) and (count := read_into(memoryview(memory)[at:])):
                at += count
            if at != info.size:
                raise StoreError(f"{key}: the answer broke off at byte {at} of {info.size}", transient=True, path=key)
            return bytes(memoryview(memory)[:at]), info

    def head(self, key: str) -> ObjectInfo:
        with self._translated(key):
            return self._client().head(key)

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        after: str | None = None
        while True:
            try:
                with self._translated(prefix):
                    page, after = self._client().list_page(prefix, delimiter, after)
            except NotFoundError as error:  # the answer was cut off before it said what is missing
                raise self._no_bucket(prefix) from error
            yield from page
            if after is None:
                return

    def list_after(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        with self._translated(prefix):
            page, _ = self._client().list_page(prefix, delimiter=False, after=None, start=after)
        return [item for item in page if isinstance(item, ObjectInfo) and item.key > after]

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(dict.fromkeys(keys))
        with self._translated(""):
            client = self._client()
            while some := list(islice(left, client.deletes_max)):
                client.delete(some)

    def delete_version(self, key: str, version: Version) -> None:
        with self._translated(key):
            self._client().delete_version(key, version)


def open_cloud(
    session: SharedSession[Any], client: Callable[..., CloudClient], path: str, *, scheme: str, checksums: Iterable[str]
) -> CloudObjects:
    """Return the object tier at ``bucket/prefix`` of a cloud that makes every promise.

    ``client`` makes a base's client from a session, ``bucket`` and ``base``. ``checksums`` are the algorithms that
    the cloud verifies, preferred ones first. Those that cannot be computed here are left out.

    Raises:
        InvalidInputError: The URL holds credentials, which messages would repeat.
    """
    bucket, _, base = path.strip("/").partition("/")
    # A secret may contain a slash, and the rest of it then looks like a key. No bucket's name has a colon.
    if ":" in bucket and ("@" in bucket or not bucket.startswith("arn:")):
        raise InvalidInputError(
            f"{scheme}:// does not accept credentials in its URL: give them as options or in the environment"
        )
    capabilities = Capabilities(
        conditional_create=True,
        conditional_update=True,
        list_after_write=True,
        atomic_put=True,
        checksums=tuple(name for name in checksums if computable(name)),
    )
    make_client = partial(client, bucket=bucket, base=f"{base}/" if base else "")
    return CloudObjects(session, make_client, capabilities, name=f"{scheme}://{bucket}/{base}", bucket=bucket)


def _fill(client: CloudClient, key: str, span: RequestRange, version: Version | None) -> ObjectInfo:
    with client.fetch(key, span.start, span.end, version) as content:
        _check(key, content, span, version)
        at = span.fill(content.start, content.read_into)
        if at < span.end:
            raise StoreError(f"{key}: the answer broke off at byte {at} of {span.end}", transient=True, path=key)
        return content.info


def _check(key: str, content: Content, span: RequestRange, version: Version | None) -> None:
    """Check that an answer has the wanted version and all requested bytes."""
    check_version(key, content.info.version, version)  # some servers ignore conditions on reads
    check_end(key, content.info.size, span.end)
    if content.start > span.start:
        raise StoreError(
            f"{key}: the answer begins at byte {content.start}, after the requested byte {span.start}", path=key
        )


def nanoseconds(time: datetime | None) -> int:
    """Return a time in nanoseconds since the epoch; 0 if it is unknown."""
    return int(time.timestamp() * 1_000_000_000) if time else 0
