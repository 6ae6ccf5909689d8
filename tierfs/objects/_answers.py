"""Known answers of S3, Azure and GCS, and of their clients: the error of tierfs for each, and the next step.

Codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html,
https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes,
https://cloud.google.com/storage/docs/json_api/v1/status-codes.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tierfs.errors import AlreadyExistsError, CapacityError, ReadOnlyError, StoreError, TierfsError


class Meaning(NamedTuple):
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


THROTTLED = Meaning("the endpoint asks for fewer requests", transient=True, throttled=True)
DENIED = Meaning(
    "access was denied: ask for the right to read, write, list and delete there, and check the credentials and this "
    "machine's clock",
    ReadOnlyError,
    refused=True,
)
NOT_ACCEPTED = Meaning(
    "the endpoint does not accept the credentials: check that they are correct, have not expired, and belong to this "
    "endpoint",
    refused=True,
)
NO_BUCKET_GCS = Meaning(
    "the bucket is not there: correct the URL, or create it: gcloud storage buckets create gs://{bucket}", refused=True
)
NO_CREDENTIALS = Meaning(
    "no credentials were found: give them as options, in the environment, or in the provider's own file (for AWS, check "
    "the profile, AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE)",
    refused=True,
)
_NO_BUCKET_S3 = Meaning(
    "the bucket is not there: correct the URL or endpoint_url, or create it: aws s3 mb s3://{bucket}", refused=True
)
_NO_CONTAINER = Meaning(
    "the container is not there: correct the URL, or create it: az storage container create --name {bucket}",
    refused=True,
)
_BAD_HEADER = Meaning(
    "the client cannot send the credentials: check whether one of them ends in a newline, as one read from a file may",
    refused=True,
)
_NOT_TRUSTED = Meaning(
    "the endpoint's certificate is not trusted: check the endpoint; if an authority of your own signed the certificate, "
    "name the authority's file in AWS_CA_BUNDLE for S3, in SSL_CERT_FILE for others",
    refused=True,
)
_EXPIRED = Meaning("the credentials have expired: renew them", refused=True)
_CLOCK = Meaning("this machine's clock and the endpoint's differ too much: set this machine's clock, as by NTP")
_REGION = Meaning(
    "the bucket is in {region}: give its region, in AWS_DEFAULT_REGION or as region_name in the option client_kwargs",
    refused=True,
)
_UNSAID = Meaning(
    "the endpoint refuses the request and does not say why: usually the credentials have expired, or the bucket is in "
    "another region",
    refused=True,
)
_AGAIN = Meaning("the endpoint asks for the same request again", transient=True)
_CHECKSUM = Meaning("the bytes that arrived do not have the checksum sent with them", transient=True)
_EXISTS = Meaning("the object exists", AlreadyExistsError)
_HELD = Meaning(
    "a retention policy or a hold forbids changing or deleting the object: lift it for the store's objects",
    ReadOnlyError,
)
_NO_ROOM = Meaning("the bucket or its owner has reached a quota: free some room, or raise the quota", CapacityError)
_NOT_OURS = Meaning(
    "the endpoint keeps the object from a client like tierfs (archived, leased, a snapshot, another kind): undo that, "
    "and exempt the store's objects from the rule that does it"
)

BY_NAME = {
    name: meaning
    for meaning, names in (
        # S3 and compatible servers
        (THROTTLED, "SlowDown ServiceUnavailable Throttling ThrottlingException RequestThrottled RequestLimitExceeded"),
        (THROTTLED, "TooManyRequests TooManyRequestsException BandwidthLimitExceeded"),
        # With status 400; for a new bucket; for one key of a batch deletion; while another write is in flight.
        (_AGAIN, "RequestTimeout IncompleteBody TemporaryRedirect InternalError"),
        (_AGAIN, "ConditionalRequestConflict OperationAborted"),
        (_CHECKSUM, "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch"),
        (_EXPIRED, "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired"),
        (NOT_ACCEPTED, "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidClientTokenId"),
        (_NO_BUCKET_S3, "NoSuchBucket"),
        (_CLOCK, "RequestTimeTooSkewed"),
        (_REGION, "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException"),
        (DENIED, "AccessDenied AllAccessDisabled"),
        (_NOT_OURS, "InvalidObjectState"),
        (_NO_ROOM, "QuotaExceeded XMinioAdminBucketQuotaExceeded"),  # Ceph's with status 403, MinIO's with 400
        # botocore's code for an answer without a body, such as the answer to a HEAD
        (_REGION, "301"),
        (_UNSAID, "400"),
        (DENIED, "403"),
        # Azure, whose answers with 409 and 412 do not all concern a condition of tierfs
        (THROTTLED, "ServerBusy OperationTimedOut"),
        (_CHECKSUM, "Md5Mismatch Crc64Mismatch"),
        (_EXISTS, "BlobAlreadyExists"),
        (Meaning("the endpoint does not support the request"), "FeatureNotSupported"),  # azurite's has status 500
        (NOT_ACCEPTED, "NoAuthenticationInformation"),
        (_NO_CONTAINER, "ContainerNotFound"),
        (DENIED, "AuthorizationFailure AuthorizationPermissionMismatch InsufficientAccountPermissions"),
        (_HELD, "BlobImmutableDueToPolicy"),
        (_NOT_OURS, "BlobArchived BlobBeingRehydrated SnapshotsPresent InvalidBlobType ResourceTypeMismatch"),
        (_NOT_OURS, "BlobUsesCustomerSpecifiedEncryption PathConflict DirectoryNotEmpty DirectoryIsNotEmpty"),
        (_NOT_OURS, "LeaseIdMissing LeaseLost LeaseIdMismatchWithBlobOperation LeaseIdMismatchWithContainerOperation"),
        (_NOT_OURS, "LeaseNotPresentWithBlobOperation LeaseNotPresentWithContainerOperation"),
        # GCS, which sends reasons with status 403, too
        (THROTTLED, "rateLimitExceeded userRateLimitExceeded"),
        (DENIED, "insufficientPermissions"),
        (_HELD, "retentionPolicyNotMet objectUnderActiveHold"),
        # Classes of botocore, google.auth, azure.identity, azure.core and paramiko
        (NO_CREDENTIALS, "NoCredentialsError PartialCredentialsError CredentialRetrievalError NoAuthTokenError"),
        (NO_CREDENTIALS, "ProfileNotFound ConfigNotFound ConfigParseError InvalidConfigError UnknownCredentialError"),
        (NO_CREDENTIALS, "InfiniteLoopConfigError RefreshWithMFAUnsupportedError"),
        (NO_CREDENTIALS, "DefaultCredentialsError CredentialUnavailableError"),
        (_EXPIRED, "TokenRetrievalError UnauthorizedSSOTokenError SSOTokenLoadError LoginRefreshRequired RefreshError"),
        (NOT_ACCEPTED, "ClientAuthenticationError AuthenticationException"),
    )
    for name in names.split()
}
"""By the code of the answer, or by the class name of a client's error or of a base class."""

BY_TEXT = tuple(
    (re.compile(pattern, re.IGNORECASE), meaning)
    for pattern, meaning in (
        (r"reduce your request rate|slow down|rate limit exceeded|exceeded the rate limit", THROTTLED),
        (r"the specified bucket does not exist", NO_BUCKET_GCS),
        (r"the difference between the request time|request date header", _CLOCK),
        (r"not valid in the specified time frame|the token is expired", _EXPIRED),
        (r"doesn't match calculated|malformed multipart", _CHECKSUM),
        (r"^forbidden: ", DENIED),  # gcsfs
        (r"(?:invalid|illegal|\) in) header value(?=:? b?['\"])", _BAD_HEADER),  # http.client, httpx, requests
        # ssl: botocore's errors do not always have the ssl error as their cause
        (r"certificate verify failed: [\w ]*\w", _NOT_TRUSTED),
        (r"header injection|newline or carriage return character detected", _BAD_HEADER),  # aiohttp
    )
)
"""By the text of an error, for clients that keep no code, and for codes with several meanings."""
