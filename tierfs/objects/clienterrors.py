"""The errors of network clients as ours, told by what they carry: no client is imported for it.

A client's error is judged with its causes, since fsspec filesystems put one of Python's errors around the client's own:
first Python's precise classes, then the HTTP status of the answer, then signs of a lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterator

from tierfs.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)
from tierfs.objects.oserrors import translate_os_error

__all__ = ["translate_client_error", "translated_client"]

_CAUSES_MAX = 8
_PRECISE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)

# Base classes, by name, that clients raise when a connection could not be made, broke, or went silent.
_LOST_CONNECTION = frozenset({
    # aiohttp
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerTimeoutError",
    # botocore
    "ChecksumError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ReadTimeoutError",
    # azure.core
    "ServiceRequestError",
    "ServiceResponseError",
    # google.auth, requests, http.client, paramiko
    "ChunkedEncodingError",
    "ConnectionError",
    "IncompleteRead",
    "RemoteDisconnected",
    "SSHException",
    "Timeout",
    "TransportError",
})  # fmt: skip


@contextlib.contextmanager
def translated_client(key: str) -> Iterator[None]:
    """Turn whatever a client raises into ours, with the key and what to do next."""
    try:
        yield
    except Exception as error:
        translation = translate_client_error(error, key)
        if translation is error:
            raise
        raise translation from error


def translate_client_error(error: BaseException, key: str) -> TierfsError:
    """Our error for one that a client raised."""
    if isinstance(error, TierfsError):
        return error
    if isinstance(error, NotImplementedError):
        return ReadOnlyError(f"{key}: this filesystem cannot do that: {error}".rstrip(": "), path=key)
    # What s3fs makes of a 412 or 500 is an OSError like any other; the answer in its cause is more precise.
    if isinstance(error, _PRECISE) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return translate_os_error(error, key)
    causes = list(_with_causes(error))
    reason = " ".join(str(error).split()) or type(error).__name__
    for cause in causes:
        status = _http_status(cause)
        if status is not None:
            return _translate_status(status, reason, key)
    if any(_is_lost_connection(cause) for cause in causes):
        return StoreError(f"{key}: {reason}", transient=True, path=key)
    if isinstance(error, OSError):
        return translate_os_error(error, key)
    return StoreError(f"{key}: {type(error).__name__}: {reason}", path=key)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _http_status(error: BaseException) -> int | None:
    """The status that aiohttp, azure.core, gcsfs or botocore keeps with its error."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata")
        candidates = [metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None]
    else:
        candidates = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    for candidate in candidates:
        text = str(candidate)
        if text.isdecimal() and 400 <= int(text) < 600:  # noqa: PLR2004 - the statuses that tell of errors
            return int(text)
    return None


def _translate_status(status: int, reason: str, key: str) -> TierfsError:
    message = f"{key}: {reason} (HTTP status {status})"
    match status:
        case 401 | 403 | 405:
            return ReadOnlyError(f"{message}: check the credentials and their rights", path=key)
        case 404 | 410:
            return NotFoundError(f"{key} is not there", path=key)
        case 412:
            return ConflictError(message, path=key)
        case 416:
            return CorruptionError(f"{message}: the object is cut short", path=key)
        case 507:
            return CapacityError(message, path=key)
        case 408 | 409 | 425 | 429:  # a 409 is a write that met another one under way
            return StoreError(message, transient=True, path=key)
        case 501 | 505:
            return StoreError(message, path=key)
        case _:
            return StoreError(message, transient=status >= 500, path=key)  # noqa: PLR2004 - the server's own fault


def _is_lost_connection(error: BaseException) -> bool:
    # Two classes of timeouts until Python 3.11.
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError):
        return True
    return any(base.__name__ in _LOST_CONNECTION for base in type(error).__mro__)
