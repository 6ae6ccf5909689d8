"""Object tier on Google Cloud Storage, through gcsfs: its options, its credentials, its connections.

gcsfs is used for the session, and not for its verbs: those retry by themselves, remember listings, send no checksum for
the server to verify, and end an upload where its fixed boundary occurs in the content. Every object is one request
(chunks have at most 16 MiB), so no resumable upload is ever begun that would have to be cleaned up.

API: https://cloud.google.com/storage/docs/json_api/v1 (objects: insert, get, list, delete).
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tierfs.errors import ConflictError, StoreError
from tierfs.objects.backends.cloud import CloudObjects, Content, open_cloud
from tierfs.objects.backends.lanes import Lanes
from tierfs.objects.http_errors import cause_of, refused_options
from tierfs.objects.protocol import Checksum, Create, Listed, ObjectInfo, Prefix, PutMode, Update, Version

if TYPE_CHECKING:
    import aiohttp
    import gcsfs.core

__all__ = ["connect_gcs", "open_gcs"]

# In the order in which they are preferred, by speed.
_CHECKSUMS = {"crc32c": "crc32c", "md5": "md5Hash"}
# What is asked for of an object's resource, which has twenty fields more.
_FIELDS = "name,size,generation,updated"
# gcsfs has no limit: a server that has gone silent would be waited for without end.
_CONNECT_S_MAX = 30
_SILENT_S_MAX = 60
# Written piece by piece, so that neither the HTTP client nor the loop copies the rest of a large body.
_PIECE_BYTES = 1 << 18


class GCSSession:
    """A connection pool with its credentials, on one event loop."""

    def __init__(self, fs: gcsfs.core.GCSFileSystem) -> None:
        self.fs = fs
        self.endpoint: str = fs._location

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *names: str,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        data: AsyncIterator[memoryview] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request as gcsfs does, with its credentials and who pays; once, where gcsfs sends it up to six times.

        Args:
            method: Of HTTP.
            path: A URL, or one below that of the API.
            *names: What takes, quoted, the place of each ``{}`` in it.
            params: The query.
            headers: Besides the credentials.
            data: The body.

        Raises:
            gcsfs.retry.HttpError: The server refuses it. Has the answer's headers, as ``headers``.
        """
        asked = params or {}
        async with self.fs.session.request(
            method,
            self.fs._format_path(path, names),
            params=self.fs._get_params(asked),
            headers=self.fs._get_headers(headers),  # renews a token that is about to expire
            data=data,
            auto_decompress=asked.get("alt") != "media",
        ) as answer:
            if answer.status >= HTTPStatus.BAD_REQUEST:
                raise _refusal(answer, await answer.read())
            yield answer

    async def close(self) -> None:
        """See `tierfs.objects.backends.lanes.Session`."""
        await self.fs.session.close()


async def connect_gcs(options: Mapping[str, object]) -> GCSSession:
    """Make a session from the options of `gcsfs.GCSFileSystem`.

    Raises:
        InvalidInputError: It refuses one of them.
    """
    import aiohttp  # noqa: PLC0415 - what gcsfs is made of
    from gcsfs.core import GCSFileSystem  # noqa: PLC0415 - an extra, and slow to import

    # The class in `gcsfs` itself may be another, which asks by gRPC for the kind of every bucket.
    given = dict(options)
    timeout = aiohttp.ClientTimeout(
        total=given.pop("requests_timeout", None), sock_connect=_CONNECT_S_MAX, sock_read=_SILENT_S_MAX
    )
    given["session_kwargs"] = {"timeout": timeout, **dict(given.get("session_kwargs") or {})}  # type: ignore[call-overload]
    make = partial(GCSFileSystem, **given, asynchronous=True, skip_instance_cache=True, use_listings_cache=False)
    try:
        fs = await asyncio.to_thread(make)  # asks around for credentials, and waits for the answers
    except (TypeError, ValueError, KeyError) as error:
        raise refused_options(error, "gs") from cause_of(error)
    # It would be called when a forked child ends, and cut the connections of the parent.
    fs.close_session = lambda *_: None
    await fs._set_session()
    return GCSSession(fs)


def open_gcs(lanes: Lanes[GCSSession], path: str) -> CloudObjects:
    """The object tier at ``bucket/prefix``."""
    return open_cloud(lanes, _GCSClient, path, scheme="gs", checksums=_CHECKSUMS)


class _GCSClient:
    """See `CloudClient`. The version of an object is its generation."""

    deletes_max = 64  # each is a request of its own, and all are sent at once

    def __init__(self, session: GCSSession, *, bucket: str, base: str) -> None:
        self._session = session
        self._bucket = bucket
        self._base = base

    def _request(self, method: str, key: str, **arguments: Any) -> Any:
        return self._session.request(method, "b/{}/o/{}", self._bucket, self._base + key, **arguments)

    async def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        size = sum(map(len, body))
        # The name is not part of what the checksum covers, so it does not stand in the body, where a flipped bit would have
        # the object stored elsewhere.
        params = {"uploadType": "multipart", "name": self._base + key, "fields": f"{_FIELDS},crc32c,md5Hash"}
        if isinstance(mode, Create):
            params["ifGenerationMatch"] = "0"
        elif isinstance(mode, Update):
            params["ifGenerationMatch"] = mode.version
        resource = {}
        if checksum is not None:
            resource[_CHECKSUMS[checksum.algorithm]] = base64.b64encode(checksum.value).decode()
        # Drawn when the content is there already, so the content cannot have it.
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
        url = f"{self._session.fs._location}/upload/storage/v1/b/{{}}/o"
        async with self._session.request(
            "POST",
            url,
            self._bucket,
            params=params,
            headers=headers,
            data=_pieces(memoryview(head), *body, memoryview(tail)),
        ) as answer:
            told = await _document(answer)
        info = self._info(told)
        # What the server did not understand it would pass over.
        if (info.key, info.size) != (key, size) or any(told.get(name) != value for name, value in resource.items()):
            raise StoreError(f"{key}: something else was stored than was sent", transient=True, path=key)
        return info

    @asynccontextmanager
    async def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> AsyncIterator[Content]:
        # An object that somebody stored compressed comes as it is stored only to who takes it so; else it comes whole.
        headers = {"Accept-Encoding": "gzip"}
        if end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        params = {"alt": "media"}
        if version is not None:
            params["ifGenerationMatch"] = version
        async with self._request("GET", key, params=params, headers=headers) as answer:
            told, pieces = answer.headers, answer.content.iter_any()
            is_part = answer.status == HTTPStatus.PARTIAL_CONTENT
            spans = told["Content-Range"] if is_part else ""  # bytes 0-9/100
            size = spans.rpartition("/")[2] or told.get("X-Goog-Stored-Content-Length") or told.get("Content-Length")
            if size and "X-Goog-Generation" in told:
                stamp = told.get("Last-Modified")
                modified = _nanoseconds(parsedate_to_datetime(stamp)) if stamp else 0
                info = ObjectInfo(key, int(size), Version(told["X-Goog-Generation"]), modified)
            else:  # an emulator, and one that may answer one request at a time
                pieces = _once(await answer.read())
                info = await self.head(key)
            yield Content(info, start if spans else 0, pieces)

    async def head(self, key: str) -> ObjectInfo:
        async with self._request("GET", key, params={"fields": _FIELDS}) as answer:
            return self._info(await _document(answer))

    async def list_page(self, prefix: str, delimiter: bool, after: str | None) -> tuple[list[Listed], str | None]:
        params = {
            "prefix": self._base + prefix,
            "maxResults": "1000",
            "fields": f"items({_FIELDS}),prefixes,nextPageToken",
        }
        if delimiter:
            params["delimiter"] = "/"
        if after is not None:
            params["pageToken"] = after
        async with self._session.request("GET", "b/{}/o", self._bucket, params=params) as answer:
            page = await _document(answer)
        listed: list[Listed] = [
            self._info(each)
            for each in page.get("items", [])
            if not each["name"].endswith("/")  # a placeholder that some tools put where a directory would be
        ]
        listed += [Prefix(each[len(self._base) :]) for each in page.get("prefixes", [])]
        return listed, page.get("nextPageToken")

    async def delete(self, keys: Sequence[str]) -> None:
        outcomes = await asyncio.gather(*(self._delete(key) for key in keys), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None and getattr(outcome, "code", None) != HTTPStatus.NOT_FOUND:
                raise outcome

    async def _delete(self, key: str, params: Mapping[str, str] | None = None) -> None:
        async with self._request("DELETE", key, params=params):
            pass

    async def delete_version(self, key: str, version: Version) -> None:
        # Looked at first, because not every server heeds the condition.
        found = await self.head(key)
        if found.version != version:
            raise ConflictError(f"{key} is at version {found.version}, not at {version}", path=key)
        await self._delete(key, {"ifGenerationMatch": version})

    def _info(self, resource: Mapping[str, Any]) -> ObjectInfo:
        # To the second, as the header of a fetch has it.
        modified = datetime.strptime(resource["updated"][:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
        return ObjectInfo(
            resource["name"][len(self._base) :],
            int(resource["size"]),
            Version(resource["generation"]),
            _nanoseconds(modified),
        )


async def _pieces(*parts: memoryview) -> AsyncIterator[memoryview]:
    for view in parts:
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _document(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        return {**json.loads(await answer.read())}
    except (ValueError, TypeError) as error:  # no JSON, or no object of it
        raise StoreError(f"the answer makes no sense: {error}", transient=True, tier="object") from error


def _refusal(answer: aiohttp.ClientResponse, content: bytes) -> Exception:
    """What gcsfs raises for most of them; not for all, since it loses the status of some."""
    from gcsfs.retry import HttpError  # noqa: PLC0415 - an extra

    text = content.decode(errors="replace")
    try:
        error = dict(json.loads(text)["error"])
    except (ValueError, TypeError, KeyError):
        error = {"message": text or answer.reason}
    refusal: Exception = HttpError({**error, "code": answer.status})
    refusal.headers = answer.headers  # type: ignore[attr-defined]
    return refusal


def _nanoseconds(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000_000
