"""Create a store with one conditional put, so that hosts that create it at the same time get the same store."""

from __future__ import annotations

import logging

from tierfs.clock import Clock, SystemClock
from tierfs.digest import DigestKind
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from tierfs.objects.checksums import put_checked, read_decoded
from tierfs.objects.protocol import CREATE, ObjectTier

LEASE_S, LEASE_S_MAX = 60, 3600
GRACE_S, GRACE_S_MAX = 3600, 365 * 86400
GRACE_LEASES, GRACE_LEASES_MIN = 6, 2
_logger = logging.getLogger("tierfs.store")


def read_descriptor(objects: ObjectTier, url: str) -> Descriptor:
    """Return the descriptor of the store at the base of ``objects``.

    Raises:
        NotFoundError: There is no store.
        CorruptionError, FormatError: The descriptor is damaged, or of another version.
        StoreError, ReadOnlyError: The object tier failed.
    """
    where = f"{url}/{keys.DESCRIPTOR}"
    return read_decoded(objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)[0]


def create_store(
    objects: ObjectTier,
    url: str,
    *,
    digest: DigestKind = DigestKind.XXH3_128,
    random_bytes: bytes,
    clock: Clock | None = None,
    lease_s: int = LEASE_S,
    grace_s: int | None = None,
) -> tuple[Descriptor, bool]:
    """Create a store at the base of ``objects``, or find the existing one.

    Args:
        objects: Based at the root.
        url: The root's name in messages.
        digest: Kind of digest that names contents.
        random_bytes: 16 random bytes, for the store's id.
        clock: Source of the creation time. By default the system's clock.
        lease_s: Duration of a writer's lease, in seconds.
        grace_s: Seconds for which replaced, deleted or condemned bytes stay readable. By default an hour, or six leases
            if that is longer.

    Returns:
        The descriptor in the object tier, and whether this call created it.

    Raises:
        InvalidInputError: The store exists with another kind of digest, or the lease and the grace do not fit together.
        CorruptionError, FormatError: The existing descriptor is damaged, or of another version.
        StoreError, CapacityError, ReadOnlyError: The object tier failed.
    """
    made = Descriptor(
        uuid=random_bytes.hex(),
        created_ns=(clock or SystemClock()).now_ns(),
        digest_kind=digest,
        endpoint=objects.capabilities,
        lease_s=lease_s,
        grace_s=check_times(lease_s, grace_s),
    )
    try:
        found = read_descriptor(objects, url)
    except NotFoundError:
        found = _put(objects, url, made)
    check_digests(found, digest, url)
    if found == made and found.endpoint.missing:
        consequences = ["only one process may write to the store at a time"] if found.single_writer else []
        if not found.endpoint.checksums and not found.endpoint.host_local:
            consequences.append("every write is read back (verify_writes)")
        _logger.warning(
            "%s: this endpoint cannot promise %s%s",
            url,
            ", ".join(found.endpoint.missing),
            f", so {' and '.join(consequences)}" if consequences else "",
        )
    return found, found == made


def check_times(lease_s: int, grace_s: int | None) -> int:
    """Return the grace to use with a lease, in seconds.

    Raises:
        InvalidInputError: The lease is out of range, or the grace does not fit it.
    """
    if not 1 <= lease_s <= LEASE_S_MAX:
        raise InvalidInputError(f"a lease of {lease_s} s is out of range: choose 1 to {LEASE_S_MAX} s")
    grace_s = max(GRACE_S, GRACE_LEASES * lease_s) if grace_s is None else grace_s
    if not GRACE_LEASES_MIN * lease_s <= grace_s <= GRACE_S_MAX:
        raise InvalidInputError(
            f"a grace of {grace_s} s does not fit a lease of {lease_s} s: choose at least {GRACE_LEASES_MIN} leases, "
            f"because a request has the difference to take effect, and at most {GRACE_S_MAX} s"
        )
    return grace_s


def check_digests(found: Descriptor, digest: DigestKind, url: str) -> None:
    """Check that a store has the requested kind of digest.

    Raises:
        InvalidInputError: The store has another kind.
    """
    if found.digest_kind is not digest:
        raise InvalidInputError(
            f"{url} is already a store with {found.digest_kind.label} digests: this cannot be changed", path=url
        )


def _put(objects: ObjectTier, url: str, made: Descriptor) -> Descriptor:
    try:
        put_checked(objects, keys.DESCRIPTOR, [made.encode()], mode=CREATE)
    except (AlreadyExistsError, StoreError) as error:
        if isinstance(error, StoreError) and not error.transient:
            raise
        # Another host was faster, or the answer to our own put was lost: the stored descriptor counts.
        try:
            return read_descriptor(objects, url)
        except NotFoundError:
            raise error from None
    return made
