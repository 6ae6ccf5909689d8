"""Object tier on Google Cloud Storage. gcsfs makes the session, from its options and credentials.

gcsfs's own operations are not used: they retry by themselves, cache listings, send no checksum for the server to
verify, and end an upload where their fixed boundary occurs in the content. Every object is one request (chunks have at
most 16 MiB). So a crash leaves no resumable upload that would have to be cleaned up.

API: https://cloud.google.com/storage/docs/json_api/v1 (objects: insert, get, list, delete).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tierfs.checked_json import parse_object
from tierfs.errors import FormatError, StoreError
from tierfs.objects.backends.cloud import CloudObjects, Content, nanoseconds, open_cloud
from tierfs.objects.backends.loop_thread import LoopThread, body_reader
from tierfs.objects.backends.shared_session import SharedSession
from tierfs.objects.http_errors import cause_of, refused_options
from tierfs.objects.protocol import (
    Checksum,
    Create,
    Listed,
    ObjectInfo,
    Prefix,
    PutMode,
    Update,
    Version,
    check_version,
)

if TYPE_CHECKING:
    import aiohttp
    import gcsfs.core

# Fastest first.
_CHECKSUMS = {"crc32c": "crc32c", "md5": "md5Hash"}
# The requested fields of an object's resource, which has twenty more.
_FIELDS = "name,size,generation,updated"
# gcsfs has no timeouts: a request to a silent server would never end.
_CONNECT_S_MAX = 30
_SILENT_S_MAX = 60
# Size of the pieces of a body: without pieces, the HTTP client or the loop copies the unsent rest of a large body.
_PIECE_BYTES = 1 << 18


class GCSSession:
    """A connection pool with its credentials.

    Attributes:
        loop: Runs gcsfs and its connections.
    """

    def __init__(self, fs: gcsfs.core.GCSFileSystem, loop: LoopThread) -> None:
        self.loop = loop
        self.endpoint: str = fs._location
        self._fs = fs

    async def send(
        self,
        method: str,
        path: str,
        *names: str,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: AsyncIterator[memoryview] | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one request with gcsfs's credentials and billing project; once, where gcsfs sends it up to six times.

        Args:
            method: The HTTP method.
            path: A URL, or a path below the API's URL.
            *names: Quoted, they replace each ``{}`` in ``path``.
            params: The query.
            headers: Besides the credentials.
            data: The body.

        Raises:
            gcsfs.retry.HttpError: The server refuses the request. Its ``headers`` are those of the answer.
        """
        asked = params or {}
        answer: aiohttp.ClientResponse = await self._fs.session.request(
            method,
            self._fs._format_path(path, names),
            params=self._fs._get_params(asked),
            headers=self._fs._get_headers(headers),  # renews a token that is about to expire
            data=data,
            auto_decompress=asked.get("alt") != "media",
        )
        if answer.status >= HTTPStatus.BAD_REQUEST:
            async with answer:
                raise _refusal(answer, await answer.read())
        return answer

    async def ask(self, *arguments: Any, **options: Any) -> bytes:
        """Send one request, as `send` does, and return the body of the answer."""
        async with await self.send(*arguments, **options) as answer:
            content: bytes = await answer.read()
            return content

    def close(self) -> None:
        self.loop.close(self._fs.session.close())


def connect(options: Mapping[str, object]) -> GCSSession:
    """Make a session from the options of `gcsfs.GCSFileSystem`.

    Raises:
        InvalidInputError: gcsfs refuses an option.
    """
    import aiohttp  # noqa: PLC0415 - gcsfs is built on it
    from gcsfs.core import GCSFileSystem  # noqa: PLC0415 - an extra, and slow to import

    # Not the class that `gcsfs` exports, which may be one that asks for every bucket's kind by gRPC.
    given = dict(options)
    timeout = aiohttp.ClientTimeout(
        total=given.pop("requests_timeout", None), sock_connect=_CONNECT_S_MAX, sock_read=_SILENT_S_MAX
    )
    given["session_kwargs"] = {"timeout": timeout, **dict(given.get("session_kwargs") or {})}  # type: ignore[call-overload]
    try:  # looks for credentials, and waits for servers that may have some
        fs = GCSFileSystem(**given, asynchronous=True, skip_instance_cache=True, use_listings_cache=False)
    except (TypeError, ValueError, KeyError) as error:
        raise refused_options(error, "gs") from cause_of(error)
    # gcsfs would call it when a forked child ends, and close the parent's connections.
    fs.close_session = lambda *_: None
    loop = LoopThread("gs")
    try:
        loop.run(fs._set_session())
    except BaseException:
        loop.close()
        raise
    return GCSSession(fs, loop)


def open_tier(session: SharedSession[GCSSession], path: str) -> CloudObjects:
    """Return the object tier at ``bucket/prefix``."""
    return open_cloud(session, _GCSClient, path, scheme="gs", checksums=_CHECKSUMS)


class _GCSClient:
    """Implements `CloudClient`. An object's version is its generation."""

    deletes_max = 64  # one request each, all in flight at once

    def __init__(self, session: GCSSession, *, bucket: str, base: str) -> None:
        self._session = session
        self._bucket = bucket
        self._base = base

    def _ask(self, method: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        return _document(self._session.loop.run(self._session.ask(method, *arguments, **options)))

    def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        size = sum(map(len, body))
        # The name is in the query. The checksum does not cover it, so a flipped bit in a body that has the name could
        # store the object under another key.
        params = {"uploadType": "multipart", "name": self._base + key, "fields": f"{_FIELDS},crc32c,md5Hash"}
        if isinstance(mode, Create):
            params["ifGenerationMatch"] = "0"
        elif isinstance(mode, Update):
            params["ifGenerationMatch"] = mode.version
        resource = {}
        if checksum is not None:
            resource[_CHECKSUMS[checksum.algorithm]] = base64.b64encode(checksum.value).decode()
        # Drawn after the content exists, so the content cannot contain it.
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(resource)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = {
            "Content-Type": f"multipart/related; boundary={boundary}",
            "Content-Length": str(len(head) + size + len(tail)),
        }
        told = self._ask(
            "POST",
            f"{self._session.endpoint}/upload/storage/v1/b/{{}}/o",
            self._bucket,
            params=params,
            headers=headers,
            data=_pieces(memoryview(head), *body, memoryview(tail)),
        )
        info = self._info(told)
        # A server ignores fields that it does not understand.
        if (info.key, info.size) != (key, size) or any(told.get(name) != value for name, value in resource.items()):
            raise StoreError(f"{key}: the stored object differs from the one that was sent", transient=True, path=key)
        return info

    @contextmanager
    def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> Iterator[Content]:
        # GCS sends an object that was stored compressed as it is only to a client that accepts gzip. For other clients
        # it decompresses the object and ignores the range.
        headers = {"Accept-Encoding": "gzip"}
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        params = {"alt": "media"}
        if version is not None:
            params["ifGenerationMatch"] = version
        session, path = self._session, self._path(key)
        answer = session.loop.run(session.send("GET", *path, params=params, headers=headers))
        try:
            told = answer.headers
            is_part = answer.status == HTTPStatus.PARTIAL_CONTENT
            spans = told["Content-Range"] if is_part else ""  # "bytes 0-9/100"
            size = spans.rpartition("/")[2] or told.get("X-Goog-Stored-Content-Length") or told.get("Content-Length")
            read_into: Callable[[memoryview], int] = body_reader(session.loop, answer.content.iter_any())
            if size and "X-Goog-Generation" in told:
                stamp = told.get("Last-Modified")
                modified = nanoseconds(parsedate_to_datetime(stamp) if stamp else None)
                info = ObjectInfo(key, int(size), Version(told["X-Goog-Generation"]), modified)
            else:  # an emulator, which may answer only one request at a time
                read_into = io.BytesIO(session.loop.run(answer.read())).readinto
                info = self.head(key)
            yield Content(info, start if spans else 0, read_into)
        finally:
            session.loop.run(_end(answer))

    def head(self, key: str) -> ObjectInfo:
        return self._info(self._ask("GET", *self._path(key), params={"fields": _FIELDS}))

    def list_page(
        self, prefix: str, delimiter: bool, after: str | None, start: str = ""
    ) -> tuple[list[Listed], str | None]:
        params = {
            "prefix": self._base + prefix,
            "maxResults": "1000",
            "fields": f"items({_FIELDS}),prefixes,nextPageToken",
        }
        if delimiter:
            params["delimiter"] = "/"
        if after is not None:
            params["pageToken"] = after
        if start:
            params["startOffset"] = self._base + start
        page = self._ask("GET", "b/{}/o", self._bucket, params=params)
        listed: list[Listed] = [
            self._info(each)
            for each in page.get("items", [])
            if not each["name"].endswith("/")  # some tools put a placeholder for a directory
        ]
        listed += [Prefix(each[len(self._base) :]) for each in page.get("prefixes", [])]
        return listed, page.get("nextPageToken")

    def delete(self, keys: Sequence[str]) -> None:
        async def delete() -> list[Any]:
            asking = (self._session.ask("DELETE", *self._path(key)) for key in keys)
            return await asyncio.gather(*asking, return_exceptions=True)

        for outcome in self._session.loop.run(delete()):
            if isinstance(outcome, BaseException) and getattr(outcome, "code", None) != HTTPStatus.NOT_FOUND:
                raise outcome

    def delete_version(self, key: str, version: Version) -> None:
        # Compare the version first, since some servers ignore the condition.
        check_version(key, self.head(key).version, version)
        asking = self._session.ask("DELETE", *self._path(key), params={"ifGenerationMatch": version})
        self._session.loop.run(asking)

    def _path(self, key: str) -> tuple[str, str, str]:
        return "b/{}/o/{}", self._bucket, self._base + key

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        # To the second, as in the header of a fetch.
        modified = datetime.strptime(resource["updated"][:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
        return ObjectInfo(
            resource["name"][len(self._base) :],
            int(resource["size"]),
            Version(resource["generation"]),
            nanoseconds(modified),
        )


async def _pieces(*parts: memoryview) -> AsyncIterator[memoryview]:
    for view in parts:
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


async def _end(answer: aiohttp.ClientResponse) -> None:
    async with answer:  # releases the connection, or closes it if bytes are left
        pass


def _document(content: bytes) -> dict[str, Any]:
    try:
        return parse_object(content, "an answer")
    except FormatError as error:
        raise StoreError(f"the answer is invalid: {error}", transient=True, tier="object") from error


def _refusal(answer: aiohttp.ClientResponse, content: bytes) -> Exception:
    """Return the error that gcsfs raises for most refusals. gcsfs itself loses the status of some."""
    from gcsfs.retry import HttpError  # noqa: PLC0415 - an extra

    text = content.decode(errors="replace")
    try:
        error = dict(parse_object(text, "a refusal")["error"])
    except (ValueError, TypeError, KeyError):
        error = {"message": text or answer.reason}
    refusal: Exception = HttpError({**error, "code": answer.status})
    refusal.headers = answer.headers  # type: ignore[attr-defined]
    return refusal
