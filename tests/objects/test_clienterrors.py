"""The errors of network clients become ours, without importing a client."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)
from tierfs.objects.clienterrors import translate_client_error, translated_client


class BotoError(Exception):
    """Shaped like botocore.exceptions.ClientError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response: dict[str, Any] = {"Error": {}, "ResponseMetadata": {"HTTPStatusCode": status}}


class GcsError(Exception):
    """Shaped like gcsfs.retry.HttpError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.code = status


class AzureError(Exception):
    """Shaped like azure.core.exceptions.HttpResponseError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.response = object()


class AiohttpError(Exception):
    """Shaped like aiohttp.ClientResponseError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ClientConnectionError(Exception):
    """Named like aiohttp's base of every lost connection."""


class ServerDisconnectedError(ClientConnectionError):
    """Derived from it."""


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", [BotoError, GcsError, AzureError, AiohttpError])
@pytest.mark.parametrize(
    ("status", "expected", "transient"),
    [
        (400, StoreError, False),
        (401, ReadOnlyError, None),
        (403, ReadOnlyError, None),
        (404, NotFoundError, None),
        (408, StoreError, True),
        (409, StoreError, True),
        (412, ConflictError, None),
        (416, CorruptionError, None),
        (429, StoreError, True),
        (500, StoreError, True),
        (501, StoreError, False),
        (503, StoreError, True),
        (507, CapacityError, None),
    ],
)
def test_the_status_of_the_answer_decides(
    kind: Any, status: int, expected: type[TierfsError], transient: bool | None
) -> None:
    translation = translate_client_error(kind(status), "run/a")
    assert type(translation) is expected
    assert getattr(translation, "transient", None) is transient
    assert translation.path == "run/a"


def test_the_answer_behind_an_error_of_python_is_found() -> None:
    refused = translate_client_error(_caused(OSError(errno.EINVAL, "PreconditionFailed"), BotoError(412)), "a")
    assert type(refused) is ConflictError
    busy = translate_client_error(_caused(OSError(errno.EIO, "reduce your rate"), BotoError(503)), "a")
    assert isinstance(busy, StoreError)
    assert busy.transient


def test_a_precise_class_goes_before_the_status() -> None:
    expired = _caused(PermissionError("the token has expired"), BotoError(400))
    assert type(translate_client_error(expired, "a")) is ReadOnlyError
    assert type(translate_client_error(_caused(FileExistsError("a"), BotoError(412)), "a")) is AlreadyExistsError


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        asyncio.TimeoutError(),
        ConnectionResetError("gone"),
        ServerDisconnectedError("gone"),
        _caused(OSError(errno.EIO, "failed"), ServerDisconnectedError("gone")),
        OSError(errno.EBUSY, "slow down"),
    ],
    ids=repr,
)
def test_lost_connections_are_transient(error: Exception) -> None:
    translation = translate_client_error(error, "a")
    assert isinstance(translation, StoreError)
    assert translation.transient


def test_a_full_disk_is_a_matter_of_capacity() -> None:
    assert type(translate_client_error(OSError(errno.ENOSPC, "full"), "a")) is CapacityError


def test_what_a_filesystem_cannot_do_makes_it_read_only() -> None:
    assert type(translate_client_error(NotImplementedError(), "a")) is ReadOnlyError


def test_what_nobody_knows_is_final_and_named() -> None:
    translation = translate_client_error(ZeroDivisionError("division by zero"), "a")
    assert isinstance(translation, StoreError)
    assert not translation.transient
    assert "ZeroDivisionError" in str(translation)


def test_our_own_errors_go_through_untouched() -> None:
    ours = CorruptionError("ours")
    with pytest.raises(CorruptionError) as caught, translated_client("a"):
        raise ours
    assert caught.value is ours


def test_the_client_s_error_stays_the_cause() -> None:
    theirs = GcsError(503)
    with pytest.raises(StoreError) as caught, translated_client("a"):
        raise theirs
    assert caught.value.__cause__ is theirs
