"""Probe the endpoint of a store again, and save the promises that it keeps in the store."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace

from tierfs.errors import ConflictError, NotFoundError, StoreNotFoundError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Capabilities, Descriptor
from tierfs.objects import Update, as_promised, connect, probe
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.os_errors import translated
from tierfs.objects.probe import Finding, Findings
from tierfs.session.open import open_store
from tierfs.session.url import LOCAL, Location, target_url


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of a probe.

    Attributes:
        url: Root of the store; without a store, the URL that was probed.
        tests: One finding per promise.
        before: The promises in the store's descriptor; ``None`` without a store.
        endpoint: The promises that the endpoint keeps.
    """

    url: str
    tests: tuple[Finding, ...]
    before: Capabilities | None
    endpoint: Capabilities


def probe_store(location: Location) -> ProbeReport:
    """Probe the endpoint at ``location``, and save the result in the descriptor of the store there, if there is one.

    Processes that have the store open use the promises from when they opened it, until they open it again.

    Args:
        location: A store's root, or a path in it. Without a store, the place for one; on this host, that must be an
            existing directory. The probe leaves nothing in it.

    Raises:
        NotFoundError: The place is no directory of this host.
        ConflictError: Another process changed the descriptor meanwhile.
        CorruptionError, FormatError: The descriptor is damaged, or of another version.
        StoreError, ReadOnlyError, CapacityError: The probe failed.
    """
    try:
        _, relative = open_store(location)
    except StoreNotFoundError:
        relative = None
    root = location.path[: len(location.path) - len(relative or "")].rstrip("/")
    url = target_url(location.protocol, root)
    if relative is None:
        found = _probe_bare(location, root, url)
        return ProbeReport(url, found.tests, None, found.capabilities)
    found = probe(connect(location.protocol, root, location.options, attempts=1))
    objects = as_promised(connect(location.protocol, root, location.options), found.capabilities)
    where = f"{url}/{keys.DESCRIPTOR}"
    descriptor, info, _ = read_decoded(objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)
    # Making the store decided whether the objects are lost with this host; a probe cannot tell.
    endpoint = replace(found.capabilities, host_local=descriptor.endpoint.host_local)
    if endpoint != descriptor.endpoint:
        data = replace(descriptor, endpoint=endpoint).encode()
        try:
            put_idempotent(objects, keys.DESCRIPTOR, data, mode=Update(info.version))
        except ConflictError as error:
            raise ConflictError(f"{url}: the store's descriptor changed meanwhile: probe it again", path=url) from error
    return ProbeReport(url, found.tests, descriptor.endpoint, endpoint)


def _probe_bare(location: Location, root: str, url: str) -> Findings:
    """Probe a place without a store."""
    if location.protocol not in LOCAL:
        return probe(connect(location.protocol, root, location.options, attempts=1))
    if not os.path.isdir(root):
        raise NotFoundError(f"{url} is not a directory: create it, or probe the directory that will hold it", path=url)
    # A put makes directories and locks. In a temporary directory, they can be removed, because no other process uses
    # them.
    with translated(url), tempfile.TemporaryDirectory(prefix=".tierfs-probe-", dir=root) as directory:
        return probe(connect(location.protocol, directory, location.options, attempts=1))
