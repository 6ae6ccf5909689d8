"""Translate the errors of network clients by their attributes and class names, so that no client is imported for it.

fsspec filesystems wrap a client's error in one of Python's, so an error is judged together with its causes. First comes
the answer's code, its text, and the client's class: a missing bucket must not read as a missing key. Python's precise
classes follow, then the HTTP status, then signs of a lost connection. No message repeats text that may hold a credential.

Codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html,
https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes,
https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)
from tierfs.gc_pause import untied
from tierfs.objects.os_errors import translate_os_error


class _Meaning(NamedTuple):
    """The cause of an answer.

    Attributes:
        text: The cause and what to do about it. ``{bucket}`` and ``{region}`` are filled in.
        kind: The class of tierfs's error.
        transient: Whether the same request may succeed if it is sent again.
        throttled: Whether the endpoint asks for fewer requests.
        refused: Whether other credentials or options may be accepted: the answer is about them, not about one object.
    """

    text: str
    kind: type[TierfsError] = StoreError
    transient: bool = False
    throttled: bool = False
    refused: bool = False

    def error(
        self, key: str, said: str, *, bucket: str = "", region: str = "", retry_after_s: float | None = None
    ) -> TierfsError:
        """Return the error of tierfs. ``said`` has the words of the endpoint or client; unknown texts are empty."""
        text = self.text.format(bucket=bucket or "NAME", region=region or "another region")
        options: dict[str, Any] = {"refused": self.refused} if issubclass(self.kind, StoreError | ReadOnlyError) else {}
        if self.kind is StoreError:
            options |= {"transient": self.transient, "throttled": self.throttled, "retry_after_s": retry_after_s}
        return self.kind(f"{key}: {text} ({said})", path=key, **options)


def _no_bucket(command: str) -> _Meaning:
    return _Meaning(f"the bucket is not there: correct the URL, or create it: {command}", refused=True)


_THROTTLED = _Meaning("the endpoint asks for fewer requests", transient=True, throttled=True)
_AGAIN = _Meaning("the endpoint asks for the same request again", transient=True)
_CHECKSUM = _Meaning("the bytes that arrived do not have the checksum sent with them", transient=True)
_EXISTS = _Meaning("the object exists", AlreadyExistsError)
_NO_ROOM = _Meaning("the bucket or its owner has reached a quota: free some room, or raise the quota", CapacityError)
_DENIED = _Meaning(
    "access was denied: ask for the right to read, write, list and delete there, and check the credentials and this "
    "machine's clock",
    ReadOnlyError,
    refused=True,
)
_CREDENTIALS = _Meaning(
    "the credentials are missing, expired or not accepted: give or renew them; check also the profile, a newline at their "
    "end, and this machine's clock",
    refused=True,
)
_NOT_TRUSTED = _Meaning(
    "the endpoint's certificate is not trusted: check the endpoint; if an authority of your own signed the certificate, "
    "name the authority's file in AWS_CA_BUNDLE for S3, in SSL_CERT_FILE for others",
    refused=True,
)
_REGION = _Meaning(
    "the bucket is in {region}: give its region, in AWS_DEFAULT_REGION or as region_name in the option client_kwargs",
    refused=True,
)
_UNSAID = _Meaning(
    "the endpoint refuses the request and does not say why: usually the credentials have expired, or the bucket is in "
    "another region",
    refused=True,
)
_HELD = _Meaning(
    "a retention policy or a hold forbids changing or deleting the object: lift it for the store's objects",
    ReadOnlyError,
)
_NOT_OURS = _Meaning(
    "the endpoint keeps the object from a client like tierfs (archived, leased, a snapshot, another kind): undo that, "
    "and exempt the store's objects from the rule that does it"
)
_NO_BUCKET_GCS = _no_bucket("gcloud storage buckets create gs://{bucket}")

_BY_CODE = {
    code: meaning
    for meaning, codes in (
        # S3 and compatible servers. The codes that are numbers are botocore's, for an answer without a body.
        (
            _THROTTLED,
            "SlowDown ServiceUnavailable Throttling ThrottlingException RequestThrottled RequestLimitExceeded",
        ),
        (_THROTTLED, "TooManyRequests TooManyRequestsException BandwidthLimitExceeded"),
        (_AGAIN, "RequestTimeout IncompleteBody TemporaryRedirect InternalError"),
        (_AGAIN, "ConditionalRequestConflict OperationAborted"),
        (_CHECKSUM, "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch"),
        (_CREDENTIALS, "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired RequestTimeTooSkewed"),
        (_CREDENTIALS, "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidClientTokenId"),
        (_no_bucket("aws s3 mb s3://{bucket}"), "NoSuchBucket"),
        (_REGION, "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301"),
        (_UNSAID, "400"),
        (_DENIED, "AccessDenied AllAccessDisabled 403"),
        (_NOT_OURS, "InvalidObjectState"),
        (_NO_ROOM, "QuotaExceeded XMinioAdminBucketQuotaExceeded"),
        # Azure, whose answers with 409 and 412 do not all concern a condition of tierfs
        (_THROTTLED, "ServerBusy OperationTimedOut"),
        (_CHECKSUM, "Md5Mismatch Crc64Mismatch"),
        (_EXISTS, "BlobAlreadyExists"),
        (_Meaning("the endpoint does not support the request"), "FeatureNotSupported"),  # azurite's has status 500
        (_CREDENTIALS, "NoAuthenticationInformation AuthenticationFailed"),
        (_no_bucket("az storage container create --name {bucket}"), "ContainerNotFound"),
        (_DENIED, "AuthorizationFailure AuthorizationPermissionMismatch InsufficientAccountPermissions"),
        (_HELD, "BlobImmutableDueToPolicy"),
        (_NOT_OURS, "BlobArchived BlobBeingRehydrated SnapshotsPresent InvalidBlobType ResourceTypeMismatch"),
        (_NOT_OURS, "BlobUsesCustomerSpecifiedEncryption PathConflict DirectoryNotEmpty DirectoryIsNotEmpty"),
        (_NOT_OURS, "LeaseIdMissing LeaseLost LeaseIdMismatchWithBlobOperation LeaseIdMismatchWithContainerOperation"),
        (_NOT_OURS, "LeaseNotPresentWithBlobOperation LeaseNotPresentWithContainerOperation"),
        # GCS, which sends reasons with status 403, too
        (_THROTTLED, "rateLimitExceeded userRateLimitExceeded"),
        (_DENIED, "insufficientPermissions"),
        (_HELD, "retentionPolicyNotMet objectUnderActiveHold"),
    )
    for code in codes.split()
}

_BY_TEXT = tuple(
    (re.compile(pattern, re.IGNORECASE), meaning)
    for pattern, meaning in (
        (r"the specified bucket does not exist", _NO_BUCKET_GCS),
        (r"doesn't match calculated|malformed multipart", _CHECKSUM),  # GCS
        # Of http.client, httpx, requests and aiohttp: a credential that is read from a file may end in a newline.
        (r"(?:invalid|illegal|\) in) header value(?=:? b?['\"])|header injection", _CREDENTIALS),
        (r"newline or carriage return character detected", _CREDENTIALS),
        # ssl: botocore's errors do not always have the ssl error as their cause
        (r"certificate verify failed: [\w ]*\w", _NOT_TRUSTED),
    )
)
"""By the text of an error, for clients that keep no code, and for codes with several meanings."""

_BY_CLASS: dict[str, _Meaning | None] = {
    name: meaning
    for meaning, names in (
        # Of botocore; of google.auth, azure.core, azure.identity, paramiko
        (_CREDENTIALS, "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound"),
        (_CREDENTIALS, "ConfigNotFound ConfigParseError NoAuthTokenError SSOTokenLoadError TokenRetrievalError"),
        (_CREDENTIALS, "UnauthorizedSSOTokenError DefaultCredentialsError RefreshError"),
        (_CREDENTIALS, "ClientAuthenticationError CredentialUnavailableError AuthenticationException"),
        # A connection that cannot be made, breaks, or goes silent. Of aiohttp; botocore; azure.core; others
        (None, "ClientConnectionError ClientPayloadError HttpProcessingError ServerTimeoutError"),
        (None, "ChecksumError ConnectTimeoutError ConnectionClosedError EndpointConnectionError FlexibleChecksumError"),
        (None, "HTTPClientError IncompleteReadError ReadTimeoutError"),
        (None, "DecodeError ServiceRequestError ServiceResponseError"),
        (None, "ChunkedEncodingError ConnectionError EOFError IncompleteRead NoValidConnectionsError"),
        (None, "RemoteDisconnected SSHException SSLError Timeout TransportError"),
    )
    for name in names.split()
}
"""By the class name of a client's error, or of a base class. ``None`` stands for a lost connection."""

_CAUSES_MAX = 8
_PRECISE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)

_REASON_CHARS_MAX = 300
_SEARCHED_CHARS_MAX = 4096
_RETRY_AFTER_S_MAX = 3600.0
_SECRETS = (
    (re.compile(r"(header value:?)\s.*", re.IGNORECASE), r"\1 ..."),
    # Matches only from the beginning of a word: tried from each letter, it takes quadratic time on a long word.
    (
        re.compile(
            r"(?:(?<=://)(?:[^/\s'\"]+|[^/\s@:'\"]*:(?!\d+/)[^\s'\"]+)|(?<![^/\s@'\"])[^/\s@:'\"]*:[^/\s@'\"]+)@"
        ),
        "",
    ),
    (re.compile(r"(://[^\s?'\"<>]*)\?[^\s'\"<>)]*"), r"\1"),
    (
        re.compile(r"\b(AccountKey|SharedAccessSignature|sig|access_token|Authorization)\b\s*[=:].*", re.IGNORECASE),
        r"\1=...",
    ),
)


@contextlib.contextmanager
def translated_client(key: str, *, bucket: str = "") -> Iterator[None]:
    """Translate every exception of a client into an error of tierfs, with the key and what to do next."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again as an error of tierfs
        translation = translate_client_error(error, key, bucket=bucket)
        try:
            if translation is error:
                raise
            raise translation from cause_of(untied(error))
        finally:
            # It refers to this frame: the cycle would keep all lent buffers until the garbage collector runs.
            del translation


def refused_options(error: Exception, protocol: str) -> InvalidInputError:
    """Return the error for options that a client refused when it was made."""
    return InvalidInputError(f"{protocol}:// refuses its options: {_reason(error)}")


def cause_of(error: BaseException) -> BaseException | None:
    """Return ``error`` if a traceback may show it as a cause, or None if its text may hold a credential.

    Also None if the text is longer than the part that is searched for credentials.
    """
    texts = [_line(str(cause)) for cause in _with_causes(error)]
    return error if all(_without_secrets(text) == text for text in texts) else None


def translate_client_error(error: BaseException, key: str, *, bucket: str = "") -> TierfsError:
    """Return the error of tierfs for a client's error.

    ``bucket`` is the requested one, for answers that do not name it.
    """
    if isinstance(error, TierfsError):
        return error
    reason = _reason(error)
    if isinstance(error, NotImplementedError):
        return ReadOnlyError(f"{key}: this filesystem does not support the operation: {reason}", path=key)
    causes = list(_with_causes(error))
    if isinstance(error, KeyError) or any(isinstance(cause, RecursionError) for cause in causes):
        # HTTP clients raise KeyError for an answer that is cut off in its headers, or that another server sends. botocore
        # follows a redirect that names no region until Python stops it.
        return StoreError(
            f"{key}: the answer is incomplete, or not of this kind of endpoint: check endpoint_url, and whether a proxy "
            f"or a login page answers ({reason})",
            transient=isinstance(error, KeyError),
            path=key,
        )
    statuses = [status for cause in causes if (status := _http_status(cause)) is not None]
    retry_after_s = next((wait_s for cause in causes if (wait_s := _retry_after_s(cause)) is not None), None)
    telling = next(_meanings(causes), None)
    if telling is not None:
        cause, meaning, said = telling
        answer = _answer(cause)
        return meaning.error(
            key,
            said,
            bucket=bucket,
            region=str(_headers(cause).get("x-amz-bucket-region") or answer.get("Region") or ""),
            retry_after_s=retry_after_s,
        )
    if isinstance(error, PermissionError) and statuses:
        return _DENIED.error(key, f"{reason}, HTTP status {statuses[0]}")
    # s3fs turns a 412 or 500 into a plain OSError. The answer in its cause is more precise.
    if isinstance(error, _PRECISE) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return translate_os_error(error, key, reason)
    if statuses:
        return _translate_status(statuses[0], reason, key, retry_after_s)
    if any(_is_lost_connection(cause) for cause in causes):
        return StoreError(f"{key}: {reason}", transient=True, path=key)
    if isinstance(error, OSError):
        return translate_os_error(error, key, reason)
    return StoreError(f"{key}: {type(error).__name__}: {reason}", path=key)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, up to a `TierfsError`, which is from an earlier request."""
    cause: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if cause is None or isinstance(cause, TierfsError):
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _reason(error: BaseException) -> str:
    """Return the text of an error as one line, without anything that may hold a credential."""
    message = getattr(error, "message", None)  # str() of an azure.core error repeats the whole answer
    text = getattr(error, "strerror", None) or (message if isinstance(message, str) and message else str(error))
    text = _without_secrets(_line(text)) or type(error).__name__
    return text if len(text) <= _REASON_CHARS_MAX else f"{text[:_REASON_CHARS_MAX]}..."


def _line(text: str) -> str:
    return " ".join(text.split())


def _without_secrets(line: str) -> str:
    """Return the part of a line that is searched, its beginning, without anything that may be a credential."""
    if len(line) > _SEARCHED_CHARS_MAX:
        line = line[:_SEARCHED_CHARS_MAX].rpartition(" ")[0]  # the word that is cut off may be part of a credential
    for pattern, replacement in _SECRETS:
        line = pattern.sub(replacement, line)
    return line


def _meanings(causes: Sequence[BaseException]) -> Iterator[tuple[BaseException, _Meaning, str]]:
    """Yield the meanings of an error and its causes, most precise first, as (error, meaning, what was said)."""
    for cause in causes:
        code = _code(cause)
        if code in _BY_CODE:
            meaning = _BY_CODE[code]
            yield cause, meaning, _reason(cause) if meaning is _DENIED else code
    for cause in causes:
        if not isinstance(cause, _PRECISE):  # their text may name a key, and a key may contain any words
            for pattern, meaning in _BY_TEXT:
                if found := pattern.search(str(cause)):
                    yield cause, meaning, _code(cause) or found[0]
    for cause in causes:
        for base in type(cause).__mro__:
            if by_class := _BY_CLASS.get(base.__name__):
                yield cause, by_class, _reason(cause)


def _answer(error: BaseException) -> Mapping[str, Any]:
    """Return the endpoint's description of the error, as kept by botocore or gcsfs; empty if there is none."""
    response = getattr(error, "response", None)
    answer = response.get("Error") if isinstance(response, dict) else getattr(error, "_error_response", None)
    return answer if isinstance(answer, dict) else {}


def _code(error: BaseException) -> str:
    """Return the code that botocore, azure.storage or gcsfs keeps with its error; empty if there is none."""
    code = getattr(error, "error_code", None)
    if code is not None:
        return str(getattr(code, "value", code))
    answer = _answer(error)
    details = answer.get("errors")
    if isinstance(details, list) and details and isinstance(details[0], dict):
        return str(details[0].get("reason") or "")
    # azure.storage reads this header itself, but not for a streamed answer.
    return str(answer.get("Code") or _headers(error).get("x-ms-error-code") or "")


def _headers(error: BaseException) -> Mapping[str, Any]:
    """Return the answer's headers, in lower case, as kept by botocore, azure.core or aiohttp."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata")
        headers = metadata.get("HTTPHeaders") if isinstance(metadata, dict) else None
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    return {str(name).lower(): value for name, value in headers.items()} if isinstance(headers, Mapping) else {}


def _retry_after_s(error: BaseException) -> float | None:
    text = str(_headers(error).get("retry-after") or "")
    return min(float(text), _RETRY_AFTER_S_MAX) if text.isdecimal() else None  # otherwise a date, by another clock


def _http_status(error: BaseException) -> int | None:
    """Return the error status that aiohttp, azure.core, gcsfs or botocore keeps with its error."""
    if "HttpProcessingError" in {base.__name__ for each in (error, error.__cause__) for base in type(each).__mro__}:
        return None  # aiohttp's own 400, for an answer that is cut off or is not HTTP
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata")
        candidates = [metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None]
    else:
        candidates = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    for candidate in candidates:
        text = str(candidate)
        if text.isdecimal() and 400 <= int(text) < 600:  # noqa: PLR2004 - the error statuses
            return int(text)
    return None


def _translate_status(status: int, reason: str, key: str, retry_after_s: float | None) -> TierfsError:
    message = f"{key}: {reason} (HTTP status {status})"
    match status:
        case 401:
            return _CREDENTIALS.error(key, "HTTP status 401")
        case 403:
            return _DENIED.error(key, f"{reason}, HTTP status 403")
        case 405:
            return ReadOnlyError(f"{message}: check the credentials and their rights", refused=True, path=key)
        case 404 | 410:
            return NotFoundError(f"{key} is not there", path=key)
        case 412:
            return ConflictError(message, path=key)
        case 416:
            return CorruptionError(f"{message}: the object is cut short", path=key)
        case 507:
            return CapacityError(message, path=key)
        case 408 | 409 | 425:  # 409: another write of the key is in flight
            return StoreError(message, transient=True, retry_after_s=retry_after_s, path=key)
        case 429 | 503:
            return _THROTTLED.error(key, f"{reason}, HTTP status {status}", retry_after_s=retry_after_s)
        case 501 | 505:
            return StoreError(message, path=key)
        case _:
            transient = status >= 500  # noqa: PLR2004 - the server's own fault
            return StoreError(message, transient=transient, retry_after_s=retry_after_s, path=key)


def _is_lost_connection(error: BaseException) -> bool:
    # Two different classes until Python 3.11.
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError):
        return True
    if type(error) is OSError and error.errno is None and str(error) == "Socket is closed":  # raised by paramiko
        return True
    return any(_BY_CLASS.get(base.__name__, _AGAIN) is None for base in type(error).__mro__)
