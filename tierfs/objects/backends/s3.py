"""Object tier on S3 and compatible servers. s3fs interprets the options and credentials.

s3fs's own operations are not used: they retry by themselves, cache listings, and cannot send a condition on a version.
Every object is one request (chunks have at most 16 MiB). So a crash leaves no multipart upload that would have to be
cleaned up.

botocore sends the requests, on the calling threads. Its asynchronous counterpart, which s3fs uses, copies every body
twice more on the loop's thread and sends it in small pieces. Measured, it takes twice the processor time for half the
throughput (docs/decisions/0018-s3-by-botocore.md).

API: https://docs.aws.amazon.com/AmazonS3/latest/API/ (PutObject, GetObject, ListObjectsV2, DeleteObjects).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tierfs.errors import InvalidInputError, StoreError
from tierfs.gc_pause import Uncollected
from tierfs.objects.backends.cloud import CloudObjects, Content, nanoseconds, open_cloud
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
    import s3fs
    from botocore.exceptions import ClientError

# In order of preference: by speed, then by strength.
_CHECKSUMS = {
    "crc64nvme": "ChecksumCRC64NVME",
    "xxh3-128": "ChecksumXXHASH128",
    "crc32c": "ChecksumCRC32C",
    "sha256": "ChecksumSHA256",
    "md5": "ContentMD5",
}
_AMAZON = re.compile(r"amazonaws\.com(\.cn)?")
_NO_BATCH = frozenset({"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "501", "405"})
_CONFIG: Mapping[str, object] = {
    # `RetryingObjects` retries: it counts retries and waits as the endpoint asks. botocore's would be hidden.
    "retries": {"total_max_attempts": 1, "mode": "standard"},
    "max_pool_connections": 64,
    # tierfs sends a checksum with every put that needs one, and readers hash every byte that they read.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
# The checksum in the signed headers covers the payload. Hashing it once more would halve the speed.
_S3_CONFIG: Mapping[str, object] = {"payload_signing_enabled": False}


class S3Session:
    """A connection pool with its credentials. Safe for use by many threads."""

    def __init__(self, fs: s3fs.S3FileSystem, client: Any) -> None:
        self._fs = fs
        self._client = client

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        """Send one request, with the arguments that the user wants in each request (encryption, who pays)."""
        send = getattr(self._client, method)
        given = self._fs._get_s3_method_kwargs(send, **arguments)
        with _understood():
            answer: dict[str, Any] = send(**given)
            return answer

    @property
    def endpoint(self) -> str:
        """The place that requests go to. Amazon's endpoints are one place, where a bucket's name is unique."""
        url = str(self._client.meta.endpoint_url)
        amazon = _AMAZON.search(url)
        return url if amazon is None else amazon[0]

    def close(self) -> None:
        self._client.close()


def connect(options: Mapping[str, object]) -> S3Session:
    """Make a session from the options of `s3fs.S3FileSystem`.

    Raises:
        InvalidInputError: s3fs or botocore refuses an option.
    """
    import botocore.session  # noqa: PLC0415 - an extra, and slow to import
    import s3fs  # noqa: PLC0415
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.exceptions import NoCredentialsError  # noqa: PLC0415
    from s3fs.core import ParamKwargsHelper  # noqa: PLC0415

    given = dict(options)
    if given.pop("session", None) is not None:
        raise InvalidInputError(
            "s3:// cannot use the given session, which is for an event loop: give its profile or its keys instead"
        )
    given_config: Any = copy.deepcopy(given.pop("config_kwargs", None) or {})  # botocore changes it
    config: dict[str, Any] = {**_CONFIG, **given_config}
    config["s3"] = {**_S3_CONFIG, **(config.get("s3") or {})}
    try:
        fs = s3fs.S3FileSystem(
            **given, config_kwargs=config, asynchronous=True, skip_instance_cache=True, use_listings_cache=False
        )
        # As in `S3FileSystem.set_session`, which makes an asynchronous client.
        keys = (
            {}
            if fs.anon
            else {"aws_access_key_id": fs.key, "aws_secret_access_key": fs.secret, "aws_session_token": fs.token}
        )
        config = fs._prepare_config_kwargs() | ({"signature_version": UNSIGNED} if fs.anon else {})
        session = botocore.session.Session(**fs.kwargs)
        is_signed = config.get("signature_version") is not UNSIGNED
        if is_signed and not (fs.key or fs.client_kwargs.get("aws_access_key_id") or session.get_credentials()):
            # A client that is made without credentials never looks for them again, and they may appear later.
            raise NoCredentialsError
        with Uncollected():  # botocore loads its description of S3: tens of thousands of lasting objects
            client = session.create_client(
                "s3",
                config=Config(**config),
                **{"endpoint_url": fs.endpoint_url, "use_ssl": fs.use_ssl, **keys, **fs.client_kwargs},
            )
    except (TypeError, ValueError, KeyError) as error:
        raise refused_options(error, "s3") from cause_of(error)
    client.meta.events.register_last("before-call.s3", _send_at_once)
    fs._kwargs_helper = ParamKwargsHelper(client)
    return S3Session(fs, client)


def open_tier(session: SharedSession[S3Session], path: str) -> CloudObjects:
    """Return the object tier at ``bucket/prefix``."""
    return open_cloud(session, _S3Client, path, scheme="s3", checksums=_CHECKSUMS)


class _S3Client:
    """Implements `CloudClient`. An object's version is its ETag, which is equal for equal contents on S3."""

    deletes_max = 1000

    def __init__(self, session: S3Session, *, bucket: str, base: str) -> None:
        self._session = session
        self._bucket = bucket
        self._base = base

    def _call(self, method: str, key: str, **arguments: object) -> dict[str, Any]:
        return self._session.call(method, Bucket=self._bucket, Key=self._base + key, **arguments)

    def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        arguments: dict[str, object] = {"Body": _Body(body) if body else b""}
        if isinstance(mode, Create):
            arguments["IfNoneMatch"] = "*"
        elif isinstance(mode, Update):
            arguments["IfMatch"] = f'"{mode.version}"'
        if checksum is not None:
            arguments[_CHECKSUMS[checksum.algorithm]] = base64.b64encode(checksum.value).decode()
        answer = self._call("put_object", key, **arguments)
        date = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        with _understood():
            stored_ns = nanoseconds(date and parsedate_to_datetime(date))
        return ObjectInfo(key, sum(map(len, body)), _version(answer), stored_ns)

    @contextlib.contextmanager
    def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> Iterator[Content]:
        arguments: dict[str, object] = {}
        if end is not None:
            arguments["Range"] = f"bytes={start}-{end - 1}"
        if version is not None:
            arguments["IfMatch"] = f'"{version}"'
        answer = self._call("get_object", key, **arguments)
        with answer["Body"] as body:
            is_part = answer["ResponseMetadata"].get("HTTPStatusCode") == HTTPStatus.PARTIAL_CONTENT
            span = answer["ContentRange"] if is_part else f"bytes 0-/{answer['ContentLength']}"
            sent, _, size = str(span).partition("/")
            with _understood():
                first, _, last = sent.removeprefix("bytes ").partition("-")
                begins, info = int(first), _info(key, int(size), answer)  # a server may send the whole object
                if int(last or 0) > info.size:
                    raise ValueError(f"{span} exceeds the object")
            # `_error_catcher` is private to urllib3. Without it, bytes are copied once more: slower, but as correct.
            read_into = partial(_read_into if hasattr(body, "_error_catcher") else _copy_into, body)
            yield Content(info, begins, read_into)
            if is_part:
                read_into(memoryview(bytearray(1)))  # reads the end of a chunked body, which follows its last byte

    def head(self, key: str) -> ObjectInfo:
        answer = self._call("head_object", key)
        return _info(key, int(answer["ContentLength"]), answer)

    def list_page(
        self, prefix: str, delimiter: bool, after: str | None, start: str = ""
    ) -> tuple[list[Listed], str | None]:
        arguments: dict[str, object] = {"Delimiter": "/"} if delimiter else {}
        if after is not None:
            arguments["ContinuationToken"] = after
        if start:
            arguments["StartAfter"] = self._base + start
        answer = self._session.call("list_objects_v2", Bucket=self._bucket, Prefix=self._base + prefix, **arguments)
        skip = len(self._base)
        listed: list[Listed] = [
            _info(each["Key"][skip:], int(each["Size"]), each)
            for each in answer.get("Contents", [])
            if not each["Key"].endswith("/")  # some tools put a placeholder for a directory
        ]
        listed += [Prefix(each["Prefix"][skip:]) for each in answer.get("CommonPrefixes", [])]
        # Not `get`: botocore makes an empty listing of an answer without a body, and a KeyError gets the request
        # retried.
        return listed, answer["NextContinuationToken"] if answer["IsTruncated"] else None

    def delete(self, keys: Sequence[str]) -> None:
        from botocore.exceptions import ClientError  # noqa: PLC0415 - an extra

        objects = [{"Key": self._base + key} for key in keys]
        try:
            answer = self._session.call("delete_objects", Bucket=self._bucket, Delete={"Objects": objects})
        except ClientError as error:
            if not _is_no_batch(error):
                raise
            for key in keys:
                self._delete_one(key)
            return
        for failed in answer.get("Errors", []):
            if failed.get("Code") != "NoSuchKey":
                raise ClientError({"Error": failed}, "DeleteObjects")
        # No quiet mode: in it, an answer to a successful deletion is as empty as an answer that lost its body.
        if not answer.get("Deleted") and not answer.get("Errors"):
            raise StoreError(
                "the answer to a deletion does not name the deleted objects", transient=True, tier="object"
            )

    def _delete_one(self, key: str) -> None:
        from botocore.exceptions import ClientError  # noqa: PLC0415 - an extra

        try:
            self._call("delete_object", key)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") not in {"NoSuchKey", "404"}:
                raise

    def delete_version(self, key: str, version: Version) -> None:
        # Compare the version first, since some servers ignore the condition of a deletion.
        check_version(key, self.head(key).version, version)
        self._call("delete_object", key, IfMatch=f'"{version}"')


class _Body:
    """A file for botocore that consists of pieces, and sends them without copying.

    botocore sends all bytes of one `read` at once, within one timeout of the connection. So `read` returns at most the
    bytes that were asked for.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._next = self._at = 0

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def read(self, size: int) -> memoryview | bytes:
        if self._next == len(self._pieces):
            return b""
        piece = self._pieces[self._next]
        read = piece[self._at : self._at + size]
        self._at += len(read)
        if self._at == len(piece):
            self._next, self._at = self._next + 1, 0
        return read

    def tell(self) -> int:
        return 0

    def seek(self, to: int, _: int = 0) -> None:
        """Rewind, so that the body can be sent again if the bucket is in another region."""
        assert to == 0
        self._next = self._at = 0


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Turn a ValueError into a transient error, so that the request is retried.

    The answer was cut off within a header, and Python's HTTP client took it for whole.
    """
    try:
        yield
    except ValueError as error:
        raise StoreError(f"the answer is invalid: {error}", transient=True, tier="object") from cause_of(error)


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """Remove the ``Expect`` header, so that a body goes with its request.

    Waiting for "100 Continue" costs a round trip, and botocore waits without end if that answer is cut off.
    """
    params["headers"].pop("Expect", None)


def _is_no_batch(error: ClientError) -> bool:
    """Return whether a server refuses to delete many keys at once, or the digest that botocore sends with them."""
    said = error.response.get("Error", {})
    return said.get("Code") in _NO_BATCH or "content-md5" in str(said.get("Message")).lower()


def _read_into(body: Any, out: memoryview) -> int:
    """Read as `urllib3.HTTPResponse.readinto` does, but without its copy, which it makes while it holds the GIL."""
    with body._error_catcher():
        count: int = body._fp.readinto(out)
    return count


def _copy_into(body: Any, out: memoryview) -> int:
    piece = body.read(len(out))
    out[: len(piece)] = piece
    return len(piece)


def _info(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, size, _version(answer), nanoseconds(answer.get("LastModified")))


def _version(answer: Mapping[str, Any]) -> Version:
    tag = str(answer["ETag"])
    if not tag or (tag.startswith('"') and not tag.endswith('"', 1)):
        raise StoreError(f"the answer broke off within its ETag, {tag}", transient=True, tier="object")
    return Version(tag.strip('"'))
