"""What the object tiers of all clouds have in common, over one asynchronous client per cloud.

A client speaks one cloud's protocol, one request per call. Here are the rest: the synchronous face, ranges gathered into
few requests and pinned to one version, errors.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from tierfs.buffers import block_buffers, buffers
from tierfs.digest import BLOCK_BYTES, Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreError,
)
from tierfs.format.descriptor import Capabilities
from tierfs.objects.backends.block_stream import taking, taking_from
from tierfs.objects.backends.locations import plain
from tierfs.objects.backends.spans import Span, spans_of
from tierfs.objects.checksums import computable
from tierfs.objects.http_errors import translated_client
from tierfs.objects.protocol import (
    OVERWRITE,
    Checksum,
    Create,
    Listed,
    ObjectInfo,
    PutMode,
    Range,
    Update,
    Use,
    Version,
)

__all__ = ["CloudClient", "CloudObjects", "Content", "Sessions", "open_cloud"]

Answer = TypeVar("Answer")
_ACCOUNT = re.compile(r"(?<=://)([^/@]+)@[^/]*")  # which the endpoint names as well


class Content(NamedTuple):
    """The answer to a fetch.

    Attributes:
        info: The whole object.
        start: Where in it the bytes begin.
        pieces: The bytes, as they come.
        read_into: Fills a buffer, or its beginning, with the bytes that come next, and says how many; 0 at the end. Where the
            client can, as all that wait themselves: instead of ``pieces``.
    """

    info: ObjectInfo
    start: int
    pieces: AsyncIterator[bytes]
    read_into: Callable[[memoryview], int] | None = None


class CloudClient(Protocol):
    """One cloud's requests, below one base. Used on the loop of its session alone; raises what the cloud's SDK raises."""

    deletes_max: int
    """Keys that one deletion takes."""

    async def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        """Store pieces as an object in a single request, with its condition and its checksum for the server to check."""

    def fetch(
        self, key: str, start: int, end: int | None, version: Version | None
    ) -> AbstractAsyncContextManager[Content]:
        """Open the bytes from ``start`` to ``end``, or all of them, of this version or of the current one."""

    async def head(self, key: str) -> ObjectInfo:
        """Describe an object."""

    async def list_page(self, prefix: str, delimiter: bool, after: str | None) -> tuple[list[Listed], str | None]:
        """One page of a listing, and what asks for the next one."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most ``deletes_max`` objects. Those that are not there are passed over."""

    async def delete_version(self, key: str, version: Version) -> None:
        """Delete an object if this is its version."""


class Sessions(Protocol):
    """Runs calls on sessions: `Lanes` on loops, `Direct` on the threads that want them."""

    @property
    def waits(self) -> bool:
        """Whether calls run on the thread that wants them, which may take its time in them. Then clients fill buffers."""

    def run(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """Wait for ``call(session)``. Whatever it raises, the call has ended then."""

    async def together(self, calls: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer | BaseException]:
        """What each comes to, or its error, when all have ended. To be awaited in `run`."""


class CloudObjects:
    """Objects in a cloud. Safe for use by many threads.

    Args:
        sessions: Those of the cloud, which may be shared with other bases of the same cloud.
        client: Makes this base's client from a session; costs nothing.
        capabilities: What the cloud is known to promise. What an endpoint keeps of it is found out by trying.
        name: The base, for `repr`.
        bucket: What the cloud calls the bucket or container, for messages.
    """

    def __init__(
        self,
        sessions: Sessions,
        client: Callable[[Any], CloudClient],
        capabilities: Capabilities,
        *,
        name: str,
        bucket: str,
    ) -> None:
        self._sessions = sessions
        self._client = client
        self._capabilities = capabilities
        self._name = name
        self._bucket = bucket
        self._places: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"CloudObjects({self._name!r}, {self._sessions!r})"

    def _translated(self, key: str) -> AbstractContextManager[None]:
        return translated_client(key or self._name, bucket=self._bucket)

    def _no_bucket(self, key: str) -> StoreError:
        return StoreError(f"{key or self._name}: there is no {self._name}: make the bucket first", path=key)

    @property
    def capabilities(self) -> Capabilities:
        """See `ObjectTier.capabilities`."""
        return self._capabilities

    @property
    def streams(self) -> bool:
        """See `ObjectTier.streams`."""
        return self._sessions.waits

    def places(self) -> tuple[str, ...]:
        """See `ObjectTier.places`."""

        async def endpoint(session: Any) -> str:
            return str(session.endpoint)

        if self._places is None:  # asked for with each chunk, and not to wait for the threads that send them
            with self._translated(""):
                self._places = (" ".join([plain(self._sessions.run(endpoint)), _ACCOUNT.sub(r"\1", self._name)]),)
        return self._places

    def put(
        self, key: str, data: Sequence[Buffer], *, mode: PutMode = OVERWRITE, checksum: Checksum | None = None
    ) -> ObjectInfo:
        """See `ObjectTier.put`."""
        if checksum is not None and checksum.algorithm not in self._capabilities.checksums:
            raise InvalidInputError(f"{key}: {self._name} verifies no {checksum.algorithm}", path=key)
        body = [piece for piece in (memoryview(each).cast("B") for each in data) if len(piece)]
        try:
            with self._translated(key):
                return self._sessions.run(lambda session: self._client(session).put(key, body, mode, checksum))
        except ConflictError as error:
            if isinstance(mode, Create):
                raise AlreadyExistsError(f"{key} exists", path=key) from error
            raise
        except NotFoundError as error:
            if isinstance(mode, Update):
                raise ConflictError(f"{key} is not there any more", path=key) from error
            raise self._no_bucket(key) from error

    def get(self, key: str, ranges: Sequence[Range], *, version: Version | None = None) -> ObjectInfo:
        """See `ObjectTier.get`."""
        spans = spans_of(ranges)
        if not spans:
            info = self.head(key)
            _expect(info, version)
            return info

        async def fill(client: CloudClient) -> list[ObjectInfo | BaseException]:
            # All of them end before this does: they write into buffers that are only lent.
            filling = [self._fill(client, key, span, version) for span in spans]
            return await self._sessions.together(filling)

        with self._translated(key):
            infos = _all_well(self._sessions.run(lambda session: fill(self._client(session))))
        if any(info.version != infos[0].version for info in infos):
            raise StoreError(f"{key} changed while it was read", transient=True, path=key)
        return infos[0]

    def stream(self, key: str, length: int, use: Use) -> None:
        """See `ObjectTier.stream`."""
        if not self._sessions.waits or not length:  # for no bytes there is no range to ask for
            with buffers().lend(length) as whole:
                use(self.get(key, [(0, whole)]), taking(whole))
            return

        async def receive(client: CloudClient, memory: memoryview) -> None:
            async with client.fetch(key, 0, length, None) as content:
                _check(key, content, Span(0, length), None)
                assert content.read_into is not None, "a client that waits fills buffers"
                use(content.info, taking_from(content.read_into, length, memory, key))

        with self._translated(key), block_buffers().lend(min(length, BLOCK_BYTES)) as memory:
            self._sessions.run(lambda session: receive(self._client(session), memory))

    async def _fill(self, client: CloudClient, key: str, span: Span, version: Version | None) -> ObjectInfo:
        async with client.fetch(key, span.start, span.end, version) as content:
            _check(key, content, span, version)
            at = content.start
            if content.read_into is not None and span.is_disjoint():
                at = span.fill(at, content.read_into)
            else:
                async for piece in content.pieces:
                    span.take(at, piece)
                    at += len(piece)
        if at < span.end:
            raise StoreError(f"{key}: the answer broke off at byte {at} of {span.end}", transient=True, path=key)
        return content.info

    def read(self, key: str, limit: int) -> tuple[bytes, ObjectInfo]:
        """See `ObjectTier.read`."""

        async def fetch(client: CloudClient) -> tuple[bytes, ObjectInfo]:
            async with client.fetch(key, 0, None, None) as (info, _, pieces, _):
                if info.size > limit:
                    raise CorruptionError(f"{key} has {info.size} bytes, over the limit of {limit}", path=key)
                content = b"".join([piece async for piece in pieces])
            if len(content) != info.size:
                raise StoreError(
                    f"{key}: the answer broke off at byte {len(content)} of {info.size}", transient=True, path=key
                )
            return content, info

        with self._translated(key):
            return self._sessions.run(lambda session: fetch(self._client(session)))

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectTier.head`."""
        with self._translated(key):
            return self._sessions.run(lambda session: self._client(session).head(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listed]:
        """See `ObjectTier.list`."""
        after: str | None = None
        while True:
            try:
                with self._translated(prefix):
                    page, after = self._sessions.run(
                        lambda session, after=after: self._client(session).list_page(prefix, delimiter, after)  # type: ignore[misc]
                    )
            except NotFoundError as error:  # whose answer did not come far enough to say what is not there
                raise self._no_bucket(prefix) from error
            yield from page
            if after is None:
                return

    def delete(self, keys: Iterable[str]) -> None:
        """See `ObjectTier.delete`."""
        left = iter(dict.fromkeys(keys))

        async def delete(session: Any) -> bool:
            client = self._client(session)
            some = list(islice(left, client.deletes_max))
            if some:
                await client.delete(some)
            return bool(some)

        with self._translated(""):
            while self._sessions.run(delete):
                pass

    def delete_version(self, key: str, version: Version) -> None:
        """See `ObjectTier.delete_version`."""
        with self._translated(key):
            self._sessions.run(lambda session: self._client(session).delete_version(key, version))


def open_cloud(
    sessions: Sessions, client: Callable[..., CloudClient], path: str, *, scheme: str, checksums: Iterable[str]
) -> CloudObjects:
    """The object tier at ``bucket/prefix`` of a cloud that promises all there is to promise.

    Args:
        sessions: Of the cloud.
        client: Makes a base's client from a session, ``bucket`` and ``base``.
        path: The bucket, and the prefix in it.
        scheme: Of URLs there.
        checksums: That the cloud knows; those that cannot be computed here are not asked for.

    Raises:
        InvalidInputError: The URL has credentials in it, which messages would repeat.
    """
    bucket, _, base = path.strip("/").partition("/")
    # A secret may have a slash in it, behind which the rest looks like a key; no bucket's name has a colon.
    if ":" in bucket and ("@" in bucket or not bucket.startswith("arn:")):
        raise InvalidInputError(
            f"{scheme}:// takes no credentials in its URL: give them as options or in the environment"
        )
    capabilities = Capabilities(
        conditional_create=True,
        conditional_update=True,
        list_after_write=True,
        atomic_put=True,
        checksums=tuple(name for name in checksums if computable(name)),
    )
    made = partial(client, bucket=bucket, base=f"{base}/" if base else "")
    return CloudObjects(sessions, made, capabilities, name=f"{scheme}://{bucket}/{base}", bucket=bucket)


def _all_well(outcomes: list[ObjectInfo | BaseException]) -> list[ObjectInfo]:
    """The outcomes, or the first error among them."""
    infos = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    try:
        if errors:
            raise errors[0]
        return infos
    finally:
        del errors, outcomes  # an error holds this frame: it would hold itself, and all that was lent, until collected


def _check(key: str, content: Content, span: Span, version: Version | None) -> None:
    """That an answer has all that was asked for."""
    _expect(content.info, version)
    if span.end > content.info.size:
        raise CorruptionError(f"{key} ends at byte {content.info.size}, before byte {span.end}: cut short", path=key)
    if content.start > span.start:
        raise StoreError(
            f"{key}: the answer begins at byte {content.start}, behind byte {span.start} that was asked for", path=key
        )


def _expect(info: ObjectInfo, version: Version | None) -> None:
    """Some servers ignore conditions on reads."""
    if version is not None and info.version != version:
        raise ConflictError(f"{info.key} is at version {info.version}, not at {version}", path=info.key)
