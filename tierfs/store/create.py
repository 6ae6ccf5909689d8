"""Make a store: one conditional create, so that any number of hosts that do it at once make one."""

from __future__ import annotations

import logging

from tierfs.clock import Clock, SystemClock
from tierfs.digest import DigestKind
from tierfs.errors import AlreadyExistsError, InvalidInputError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Descriptor
from tierfs.objects.checksums import put_checked
from tierfs.objects.protocol import CREATE, ObjectTier

__all__ = ["check_digests", "check_times", "create_store", "read_descriptor"]

LEASE_S, LEASE_S_MAX = 60, 3600
GRACE_S, GRACE_S_MAX = 3600, 365 * 86400
GRACE_LEASES, GRACE_LEASES_MIN = 6, 2
_logger = logging.getLogger("tierfs.store")


def read_descriptor(objects: ObjectTier, url: str) -> Descriptor:
    """Read the descriptor of the store whose root ``objects`` is based at.

    Raises:
        NotFoundError: There is no store.
        CorruptionError, FormatError: The descriptor is damaged, or of another version.
        StoreError, ReadOnlyError: It failed.
    """
    data, _ = objects.read(keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX)
    return Descriptor.decode(data, f"{url}/{keys.DESCRIPTOR}")


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
    """Make a store at the base of ``objects``, or find the one that is there.

    Args:
        objects: Based at the root.
        url: How to name the root to a person.
        digest: How contents are named.
        random_bytes: 16 of them, for the store's id.
        clock: Where time comes from.
        lease_s: How long a lease of a writer lasts.
        grace_s: How long what was replaced, deleted or condemned stays readable; by default an hour, or six leases.

    Returns:
        The descriptor that stands, and whether this call made it.

    Raises:
        InvalidInputError: There is a store, with another kind of digest; or a lease and a grace that do not go together.
        CorruptionError, FormatError: There is one, damaged or of another version.
        StoreError, CapacityError, ReadOnlyError: It failed.
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
            consequences.append("what is written is read back (verify_writes)")
        _logger.warning(
            "%s: this endpoint cannot promise %s%s",
            url,
            ", ".join(found.endpoint.missing),
            f", so {' and '.join(consequences)}" if consequences else "",
        )
    return found, found == made


def check_times(lease_s: int, grace_s: int | None) -> int:
    """The grace that goes with a lease.

    Raises:
        InvalidInputError: They do not go together.
    """
    if not 1 <= lease_s <= LEASE_S_MAX:
        raise InvalidInputError(f"a lease of {lease_s} s: it lasts from 1 to {LEASE_S_MAX} s")
    grace_s = max(GRACE_S, GRACE_LEASES * lease_s) if grace_s is None else grace_s
    if not GRACE_LEASES_MIN * lease_s <= grace_s <= GRACE_S_MAX:
        raise InvalidInputError(
            f"a grace of {grace_s} s for a lease of {lease_s} s: a request has what is between them to take effect, so the grace is "
            f"at least {GRACE_LEASES_MIN} leases, and at most {GRACE_S_MAX} s"
        )
    return grace_s


def check_digests(found: Descriptor, digest: DigestKind, url: str) -> None:
    """Check that a store has the kind of digests that is asked for.

    Raises:
        InvalidInputError: It has another one.
    """
    if found.digest_kind is not digest:
        raise InvalidInputError(
            f"{url} is a store with {found.digest_kind.label} digests already: that cannot be changed", path=url
        )


def _put(objects: ObjectTier, url: str, made: Descriptor) -> Descriptor:
    try:
        put_checked(objects, keys.DESCRIPTOR, [made.encode()], mode=CREATE)
    except (AlreadyExistsError, StoreError) as error:
        if isinstance(error, StoreError) and not error.transient:
            raise
        # Another host was faster, or the answer to our own put was lost: what stands is the store.
        try:
            return read_descriptor(objects, url)
        except NotFoundError:
            raise error from None
    return made
