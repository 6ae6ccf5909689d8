"""Errors of network clients become tierfs' errors, without importing a client."""

from __future__ import annotations

import asyncio
import errno
import os
import traceback
from types import SimpleNamespace
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
from tierfs.objects.http_errors import cause_of, translate_client_error, translated_client


class BotoError(Exception):
    """Shaped like botocore.exceptions.ClientError."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(f"An error occurred ({code or status}) when calling the PutObject operation: {message}")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response: dict[str, Any] = {
            "Error": {"Code": code, "Message": message} if code else {},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": named},
        }


class GcsError(Exception):
    """Shaped like gcsfs.retry.HttpError."""

    def __init__(self, status: int, reason: str = "", message: str = "") -> None:
        super().__init__(f"{message}, {status}")
        self.code = status
        self._error_response = {"code": status, "message": message, "errors": [{"reason": reason}]}


class AzureError(Exception):
    """Shaped like azure.core.exceptions.HttpResponseError, whose text repeats the answer."""

    def __init__(self, status: int, code: str | None = None, message: str = "", **headers: str) -> None:
        self.message = f"{message}\nErrorCode:{code}"
        super().__init__(f"{self.message}\nContent: <xml>")
        self.status_code = status
        self.error_code = code
        self.response = SimpleNamespace(headers={name.replace("_", "-"): value for name, value in headers.items()})


class ClientAuthenticationError(AzureError):
    """Named like azure.core.exceptions.ClientAuthenticationError."""


class AiohttpError(Exception):
    """Shaped like aiohttp.ClientResponseError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ClientConnectionError(Exception):
    """Named like the base class of aiohttp's errors for lost connections."""


class SSLError(Exception):
    """Named like urllib3's error for an answer whose bytes were altered on the way."""


class ServerDisconnectedError(ClientConnectionError):
    """Derived from that base class, as in aiohttp."""


class NoValidConnectionsError(OSError):
    """Named like paramiko's error, which has no errno."""


class HttpProcessingError(Exception):
    """Named like the base class of aiohttp's errors for an answer that is not HTTP, which aiohttp gives status 400."""


class DecodeError(AzureError):
    """Named like azure.core.exceptions.DecodeError."""


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def _named(name: str, base: type[Exception] = Exception, text: str = "said") -> Exception:
    return type(name, (base,), {})(text)


def _with(error: BotoError, **fields: str) -> BotoError:
    error.response["Error"].update(fields)
    return error


@pytest.mark.parametrize(
    ("status", "expected", "transient"),
    [
        (400, StoreError, False),
        (401, StoreError, False),
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
def test_the_status_of_the_answer_decides(status: int, expected: type[TierfsError], transient: bool | None) -> None:
    translation = translate_client_error(BotoError(status), "run/a")
    assert type(translation) is expected
    assert getattr(translation, "transient", None) is transient
    assert translation.path == "run/a"


TRANSIENT = [
    TimeoutError(),
    asyncio.TimeoutError(),
    ConnectionResetError("gone"),
    ServerDisconnectedError("gone"),
    _caused(OSError(errno.EIO, "failed"), ServerDisconnectedError("gone")),
    NoValidConnectionsError(None, "unable to connect to port 22"),
    OSError("Socket is closed"),
    EOFError(),
    SSLError("decryption failed or bad record mac"),
    OSError(errno.EBUSY, "slow down"),
    # bytes that changed on their way
    BotoError(400, "BadDigest"),
    GcsError(400, "invalid", 'Provided CRC32C "AAAA" doesn\'t match calculated CRC32C "BBBB".'),
    # another write, or a server that asks for the same again
    BotoError(307, "TemporaryRedirect"),
    _caused(TimeoutError("Your socket"), BotoError(400, "RequestTimeout")),
    AzureError(409, "LeaseAlreadyPresent"),
    # an answer that is cut off, or makes no sense
    _caused(AiohttpError(400), type("BadStatusLine", (HttpProcessingError,), {})()),
    DecodeError(200),
    KeyError("ContentLength"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_a_request_that_failed_for_the_moment_is_transient(error: Exception) -> None:
    translation = translate_client_error(error, "a")
    assert type(translation) is StoreError
    assert (translation.transient, translation.throttled) == (True, False)


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


THROTTLED = [
    _caused(OSError(errno.EBUSY, "Please reduce your request rate."), BotoError(503, "SlowDown")),
    BotoError(400, "ThrottlingException"),
    BotoError(503, "503", "Slow Down"),  # for a HEAD
    AzureError(500, "OperationTimedOut"),
    GcsError(403, "userRateLimitExceeded"),
    AiohttpError(429),
]


@pytest.mark.parametrize("error", THROTTLED, ids=repr)
def test_the_endpoint_s_wish_for_fewer_requests_is_known(error: Exception) -> None:
    translation = translate_client_error(error, "run/a")
    assert isinstance(translation, StoreError)
    assert translation.throttled
    assert translation.transient
    assert translation.retry_after_s is None
    assert str(translation).startswith("run/a: the endpoint asks for fewer requests (")


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (_caused(OSError(errno.EBUSY, "slow down"), BotoError(503, "SlowDown", retry_after="7")), 7),
        (AzureError(503, "ServerBusy", Retry_After="30"), 30),
        (BotoError(500, "InternalError", retry_after="2"), 2),
        (BotoError(503, "SlowDown", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), None),
        (BotoError(503, "SlowDown", retry_after="-1"), None),
        (BotoError(503, "SlowDown", retry_after="9" * 400), 3600),
    ],
    ids=repr,
)
def test_the_wait_that_the_endpoint_asks_for_is_kept(error: Exception, seconds: float | None) -> None:
    translation = translate_client_error(error, "a")
    assert isinstance(translation, StoreError)
    assert translation.retry_after_s == seconds


FINAL = [
    (_caused(PermissionError("expired"), BotoError(400, "ExpiredToken")), StoreError, "renew them"),
    (_caused(PermissionError("skew"), BotoError(403, "RequestTimeTooSkewed")), StoreError, "clock"),
    (GcsError(401, "authError", "Invalid Credentials"), StoreError, "not accepted"),
    (AzureError(403, "AuthenticationFailed", "Request date header too old: 'Fri'"), StoreError, "clock"),
    (ClientAuthenticationError(403, "Unknown", "Server failed."), StoreError, "not accepted"),
    (_named("MetadataError", type("CredentialRetrievalError", (Exception,), {})), StoreError, "are missing"),
    (_caused(ValueError("unable"), _named("CredentialUnavailableError")), StoreError, "are missing"),
    (
        SSLError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: expired (_ssl.c:1)"),
        StoreError,
        "in AWS_CA_BUNDLE for S3, in SSL_CERT_FILE for others (certificate verify failed: expired)",
    ),
    (_caused(PermissionError("Forbidden"), BotoError(403, "403")), ReadOnlyError, "and this machine's clock"),
    (GcsError(403, "insufficientPermissions", "me may not create"), ReadOnlyError, "ask for the right"),
    (_caused(OSError("Quota"), BotoError(403, "QuotaExceeded")), CapacityError, "raise the quota"),
    (BotoError(400, "400", "Bad Request"), StoreError, "credentials have expired, or"),
    (FileExistsError("a"), AlreadyExistsError, "exists"),
    (AzureError(409, "BlobAlreadyExists"), AlreadyExistsError, "the object exists"),
    (GcsError(403, "retentionPolicyNotMet"), ReadOnlyError, "lift it"),
    (_caused(PermissionError("no"), BotoError(403, "InvalidObjectState")), StoreError, "archived"),
    (AzureError(412, "LeaseIdMissing"), StoreError, "leased"),
    (AzureError(409, "SnapshotsPresent"), StoreError, "a snapshot"),
    (_caused(FileNotFoundError("gone"), BotoError(404, "NoSuchBucket")), StoreError, "create it: aws s3 mb s3://bkt"),
    (AzureError(404, x_ms_error_code="ContainerNotFound"), StoreError, "az storage container create --name bkt"),
    (GcsError(404, "notFound", "The specified bucket does not exist."), StoreError, "buckets create gs://bkt"),
    (BotoError(301, "301", "Moved", x_amz_bucket_region="eu-west-3"), StoreError, "the bucket is in eu-west-3: "),
    (_with(BotoError(400, "AuthorizationHeaderMalformed"), Region="eu-west-3"), StoreError, "is in eu-west-3: "),
    (BotoError(400, "IllegalLocationConstraintException"), StoreError, "the bucket is in another region: "),
    (OSError(errno.ENOSPC, "full"), CapacityError, "free some room"),
    (NotImplementedError(), ReadOnlyError, "does not support the operation"),
    (ZeroDivisionError("division by zero"), StoreError, "ZeroDivisionError"),
    (_caused(PermissionError("the token has expired"), BotoError(400)), ReadOnlyError, "ask for the right"),
    (_caused(FileExistsError("a"), BotoError(412)), AlreadyExistsError, "exists"),
    (AzureError(412), ConflictError, "412"),
    (GcsError(412), ConflictError, "412"),
    (AiohttpError(412), ConflictError, "412"),
    (AzureError(500, "FeatureNotSupported"), StoreError, "does not support the request"),
    (_caused(FileNotFoundError("a"), BotoError(404, "NoSuchKey")), NotFoundError, "is not there"),
    (FileNotFoundError("bkt/b/the specified bucket does not exist/o"), NotFoundError, "is not there"),
    (_caused(OSError(errno.EINVAL, "PreconditionFailed"), BotoError(412, "PreconditionFailed")), ConflictError, "412"),
]


@pytest.mark.parametrize(("error", "expected", "remedy"), FINAL, ids=lambda value: repr(value)[:60])
def test_a_permanent_client_error_names_the_fix(error: Exception, expected: type[TierfsError], remedy: str) -> None:
    translation = translate_client_error(error, "run/a", bucket="bkt")
    assert type(translation) is expected
    assert not getattr(translation, "transient", False)
    assert "run/a" in str(translation)
    assert remedy in str(translation)
    assert translation.path == "run/a"


def test_a_missing_profile_calls_for_other_options() -> None:
    translation = translate_client_error(_named("ProfileNotFound"), "a")
    assert isinstance(translation, StoreError)
    assert translation.refused
    assert "(said)" in str(translation)


def test_an_earlier_requests_error_does_not_count() -> None:
    try:
        with translated_client("a"):
            raise BotoError(503, "SlowDown")
    except StoreError:
        with pytest.raises(NotFoundError), translated_client("a"):
            os.stat("/proc/no/such/file")
        with pytest.raises(StoreError) as caught, translated_client("a"):
            divmod(1, 0)
    assert not caught.value.transient


@pytest.mark.parametrize(
    "error",
    [
        # botocore's.
        type("HTTPClientError", (Exception,), {})(
            "An HTTP Client raised an unhandled exception: Invalid header value b't0ken\\n'"
        ),
        ValueError("Forbidden control character detected in headers. Potential header injection attack."),
        ValueError("Newline or carriage return character detected in HTTP status message or header."),
        ValueError("Invalid leading whitespace or return character(s) in header value: 't0ken\\n'"),
    ],
    ids=["botocore", "aiohttp", "older aiohttp", "requests"],
)
def test_a_credential_that_ends_in_a_newline_is_not_shown_and_not_sent_again(error: Exception) -> None:
    translation = translate_client_error(error, "a")
    assert isinstance(translation, StoreError)
    assert not translation.transient
    assert "a newline at their end" in str(translation)
    assert "t0ken" not in str(translation)


MIB = 1 << 20
SECRETS = ["AKIAKEY", "s3cr3t", "t0ken"]
LEAKS = [
    "Cannot connect to https://AKIAKEY:s3cr3t@127.0.0.1:9000/bucket",
    "Cannot connect to http://AKIAKEY:s3@s3cr3t@127.0.0.1:9000/bucket",
    "Cannot connect to http://AKIAKEY:t0/s3cr3t@127.0.0.1:9000/bucket",
    "403, message='Forbidden', url=URL('https://a.blob.core.windows.net/c/b?sv=2026&sig=s3cr3t&se=t0ken')",
    "Max retries exceeded with url: /c/b?sv=2026&sig=s3cr3t (Caused by t0ken)",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=s3cr3t==;EndpointSuffix=t0ken",
    "the header Authorization: Bearer t0ken is refused",
    "Invalid endpoint: AKIAKEY:s3cr3t@127.0.0.1",
    f"Invalid endpoint: AKIAKEY:{'s3cr3t' * 100}@127.0.0.1",
    "Invalid endpoint:AKIAKEY:s3cr3t:t0ken@127.0.0.1",
    "Invalid endpoint: :s3cr3t@127.0.0.1",
    f"https://a/b?{'a' * 4000} {'b' * 60} AKIAKEY:s3cr3t{'c' * 60}@127.0.0.1",
    "Invalid header value b'Bearer t0ken s3cr3t'",
    "https://bucket/a?X-Amz-Credential=AKIAKEY%2F2026&X-Amz-Signature=s3cr3t\nand more",
]


@pytest.mark.parametrize("text", LEAKS)
def test_no_message_holds_a_credential(text: str) -> None:
    for error in (
        ValueError(text),
        OSError(errno.EBUSY, text),
        NotImplementedError(text),
        ClientConnectionError(text),
        _caused(PermissionError(text), BotoError(403, "403", text)),
        BotoError(409, "Unknown", text),
        BotoError(403, "SignatureDoesNotMatch", text),
        GcsError(401, "authError", text),
        ClientAuthenticationError(403, "Unknown", text),
    ):
        message = str(translate_client_error(error, "run/a"))
        assert message.startswith("run/a")
        assert not [secret for secret in SECRETS if secret in message], message


@pytest.mark.parametrize("text", LEAKS)
def test_no_traceback_holds_a_credential(text: str) -> None:
    with pytest.raises(TierfsError) as caught, translated_client("run/a"):
        raise _caused(OSError("it failed"), ValueError(text))
    shown = "".join(traceback.format_exception(caught.value))
    assert not [secret for secret in SECRETS if secret in shown], shown


@pytest.mark.parametrize("text", ["a" * MIB, "a b " * (MIB // 4)], ids=["one word", "words"])
def test_only_the_beginning_of_a_long_text_is_searched_and_shown(text: str) -> None:
    assert cause_of(_caused(OSError("it failed"), ValueError(text))) is None
    message = str(translate_client_error(ValueError(f"{text}\nmore"), "a"))
    assert len(message) < 500
    assert "\n" not in message
