"""Object tier on Azure Blob Storage. adlfs makes the client, from its options and credentials.

adlfs's own operations are not used: they cache listings, split large objects, and cannot send a condition on a version.
Every object is one block blob, put by one request (chunks have at most 16 MiB). So a crash leaves no blocks that would
have to be cleaned up.

API: https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api (Put Blob, Get Blob, List Blobs).
"""

from __future__ import annotations

import asyncio
import base64
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tierfs.errors import NotFoundError
from tierfs.objects.backends.cloud import CloudObjects, Content, nanoseconds, open_cloud
from tierfs.objects.backends.loop_thread import LoopThread, body_reader
from tierfs.objects.backends.shared_session import SharedSession
from tierfs.objects.http_errors import cause_of, refused_options
from tierfs.objects.protocol import Checksum, Create, Listed, ObjectInfo, Prefix, PutMode, Update, Version

if TYPE_CHECKING:
    import adlfs

PAGE_MAX = 5000
DELETES_MAX = 64

# Fastest first. Azure's CRC-64 is CRC-64/NVME, sent in little-endian order.
_CHECKSUMS = {"crc64nvme": "x-ms-content-crc64", "md5": "Content-MD5"}


class AzureSession:
    """A connection pool with its credentials.

    Attributes:
        loop: Runs adlfs and its connections.
        client: The service client of azure.storage.
        options: Keyword arguments of each request.
    """

    def __init__(self, fs: adlfs.AzureBlobFileSystem, loop: LoopThread, *, owns_credential: bool) -> None:
        self.loop = loop
        self.client = fs.service_client
        self.endpoint: str = self.client.url
        # `RetryingObjects` retries: it counts retries and waits as the endpoint asks. The SDK's would be hidden.
        self.options: Mapping[str, Any] = {**fs._timeout_kwargs, "retry_total": 0}
        self._fs = fs
        self._owns_credential = owns_credential

    def close(self) -> None:
        self.loop.close(self._close())

    async def _close(self) -> None:
        await self.client.close()
        if self._owns_credential and self._fs.credential is not None:
            await self._fs.credential.close()


def connect(options: Mapping[str, object]) -> AzureSession:
    """Make a session from the options of `adlfs.AzureBlobFileSystem`.

    Raises:
        InvalidInputError: adlfs refuses an option.
    """
    loop = LoopThread("azure")
    try:
        return loop.run(_connect(options, loop))
    except BaseException:
        loop.close()
        raise


async def _connect(options: Mapping[str, object], loop: LoopThread) -> AzureSession:
    import adlfs  # noqa: PLC0415 - an extra, and slow to import

    ours = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
    try:
        fs = adlfs.AzureBlobFileSystem(**{**options, **ours, "loop": asyncio.get_running_loop()})
    except (TypeError, ValueError) as error:
        raise refused_options(error, "abfs") from cause_of(error)
    # adlfs's finalizers would keep the client until this process or a forked child ends. Then they would close it on an
    # event loop that an asynchronous filesystem does not have.
    for reference in weakref.getweakrefs(fs):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__.detach()
    return AzureSession(fs, loop, owns_credential=options.get("credential") is None)


def open_tier(session: SharedSession[AzureSession], path: str) -> CloudObjects:
    """Return the object tier at ``container/prefix``."""
    return open_cloud(session, _AzureClient, path, scheme="abfs", checksums=_CHECKSUMS)


class _AzureClient:
    """Implements `CloudClient`. An object's version is its ETag, which on Azure differs for each write."""

    deletes_max = DELETES_MAX

    def __init__(self, session: AzureSession, *, bucket: str, base: str) -> None:
        self._session = session
        self._container = bucket
        self._base = base

    def _run(self, request: Coroutine[Any, Any, Any]) -> Any:
        return self._session.loop.run(request)

    def _blob(self, key: str) -> Any:
        return self._session.client.get_blob_client(self._container, self._base + key)

    def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        content = b"".join(body)
        headers = {}
        if isinstance(mode, Create):
            headers["If-None-Match"] = "*"
        elif isinstance(mode, Update):
            headers |= _if_match(mode.version)
        if checksum is not None:
            value = checksum.value[::-1] if checksum.algorithm == "crc64nvme" else checksum.value
            headers[_CHECKSUMS[checksum.algorithm]] = base64.b64encode(value).decode()
        # `overwrite=True` adds no condition to those in the headers.
        answer = self._run(
            self._blob(key).upload_blob(content, overwrite=True, headers=headers, **self._session.options)
        )
        return ObjectInfo(key, len(content), _version(_told(answer, "etag")), nanoseconds(answer["last_modified"]))

    @contextmanager
    def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> Iterator[Content]:
        headers = {} if version is None else _if_match(version)
        if end is not None:
            headers["x-ms-range"] = f"bytes={start}-{end - 1}"
        # Not `download_blob`, which buffers the first 32 MiB, retries, and splits the rest.
        with self._conditional(key):
            asking = self._blob(key)._client.blob.download(
                headers=headers, cls=lambda answer, *_: answer.http_response, **self._session.options
            )
            response = self._run(asking)
        try:
            answer = response.headers
            if answer.get("x-ms-meta-hdi_isfolder") == "true":
                raise NotFoundError(f"{key} is a directory", path=key)
            is_part = response.status_code == HTTPStatus.PARTIAL_CONTENT
            size = _told(answer, "Content-Range" if is_part else "Content-Length").rpartition("/")[2]  # "bytes 0-9/100"
            modified_ns = nanoseconds(parsedate_to_datetime(_told(answer, "Last-Modified")))
            info = ObjectInfo(key, int(size), _version(_told(answer, "ETag")), modified_ns)
            yield Content(info, start if is_part else 0, body_reader(self._session.loop, response.iter_raw()))
        finally:
            self._run(response.close())

    def head(self, key: str) -> ObjectInfo:
        blob = self._run(self._blob(key).get_blob_properties(**self._session.options))
        if _is_directory(blob):
            raise NotFoundError(f"{key} is a directory", path=key)
        return _info(key, blob)

    def list_page(
        self, prefix: str, delimiter: bool, after: str | None, start: str = ""
    ) -> tuple[list[Listed], str | None]:
        from azure.storage.blob.aio import BlobPrefix  # noqa: PLC0415 - an extra

        container = self._session.client.get_container_client(self._container)
        pages = (container.walk_blobs if delimiter else container.list_blobs)(
            name_starts_with=self._base + prefix,
            include=["metadata"],  # marks directories
            results_per_page=PAGE_MAX,
            params={"startFrom": self._base + start} if start else {},  # an endpoint before 2025 passes over it
            **self._session.options,
        ).by_page(after)
        listed: list[Listed] = []

        async def page() -> list[Any]:
            return [entry async for entry in await anext(pages)]

        for entry in self._run(page()):
            key = entry.name[len(self._base) :]
            if isinstance(entry, BlobPrefix):
                listed.append(Prefix(key))
            elif not (key.endswith("/") or _is_directory(entry)):
                listed.append(_info(key, entry))
        return listed, pages.continuation_token or None

    def delete(self, keys: Sequence[str]) -> None:
        # No batch request: an account with directories, or a credential with narrow rights, may be refused one.
        async def delete() -> list[Any]:
            deleting = (self._blob(key).delete_blob(**self._session.options) for key in keys)
            return await asyncio.gather(*deleting, return_exceptions=True)

        for outcome in self._run(delete()):
            if isinstance(outcome, BaseException) and getattr(outcome, "error_code", "") != "BlobNotFound":
                raise outcome

    def delete_version(self, key: str, version: Version) -> None:
        with self._conditional(key):
            self._run(self._blob(key).delete_blob(headers=_if_match(version), **self._session.options))

    @contextmanager
    def _conditional(self, key: str) -> Iterator[None]:
        """If a condition fails because no object is there, raise that error."""
        from azure.core.exceptions import HttpResponseError  # noqa: PLC0415 - an extra

        try:
            yield
        except HttpResponseError as error:
            if error.status_code == HTTPStatus.PRECONDITION_FAILED:
                self.head(key)
            raise


def _if_match(version: Version) -> dict[str, str]:
    return {"If-Match": f'"{version}"'}


def _told(answer: Mapping[str, Any], name: str) -> str:
    """Return a property of an answer. Raises KeyError if the answer lacks it, where Azure's client may return None."""
    value: str | None = answer[name]
    if not value:
        raise KeyError(name)
    return value


def _is_directory(blob: Any) -> bool:
    """Return whether a blob only marks a directory.

    Accounts with hierarchical namespaces, and Hadoop's tools, write such blobs.
    """
    return (blob.metadata or {}).get("hdi_isfolder") == "true"


def _info(key: str, blob: Any) -> ObjectInfo:
    return ObjectInfo(key, int(blob.size), _version(blob.etag), nanoseconds(blob.last_modified))


def _version(etag: str) -> Version:
    return Version(etag.strip('"'))
