"""Repair a store's descriptor, without which no store opens; probe the endpoint again, and save its promises there."""

from __future__ import annotations

import itertools
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from tierfs.errors import ConflictError, CorruptionError, NotFoundError, StoreNotFoundError
from tierfs.format import keys
from tierfs.format.descriptor import DESCRIPTOR_BYTES_MAX, Capabilities, Descriptor
from tierfs.objects import as_promised, connect, probe
from tierfs.objects.checksums import put_idempotent, read_decoded
from tierfs.objects.os_errors import translated
from tierfs.objects.probe import Findings
from tierfs.objects.protocol import CREATE, ObjectTier, Update
from tierfs.session.open import has_records, known_stores, open_store
from tierfs.session.url import LOCAL, Location, target_url
from tierfs.store.store import Store
from tierfs.store.tree.records import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from tierfs.objects.protocol import PutMode

COMPARED_MAX = 100


def mend_descriptor(location: Location, replicas: Sequence[Store] = (), *, dry_run: bool = False) -> str:
    """Repair the descriptor of the store whose root is here, if it is damaged, or missing beside the store's records.

    The descriptor of a copy of this store, one of ``replicas``, is its descriptor.

    Returns:
        The source of the right bytes; empty if there is nothing to repair.

    Raises:
        CorruptionError: The descriptor is damaged or missing, and cannot be repaired.
        ConflictError: Another process changed it meanwhile.
        StoreError, ReadOnlyError: The object tier failed.
    """
    objects = connect(location.protocol, location.path, location.options)
    url = target_url(location.protocol, location.path)
    where = f"{url}/{keys.DESCRIPTOR}"
    mode = cast("PutMode", CREATE)
    try:
        read_decoded(objects, keys.DESCRIPTOR, DESCRIPTOR_BYTES_MAX, Descriptor.decode, where)
    except NotFoundError:
        if not has_records(objects):
            return ""
    except CorruptionError:
        mode = Update(objects.head(keys.DESCRIPTOR).version)
    else:
        return ""
    for found, source in _sources(location, url, objects, replicas):
        if not dry_run:
            try:
                put_idempotent(objects, keys.DESCRIPTOR, found, mode=mode)
            except ConflictError as error:
                raise ConflictError(f"{where} was changed in the meantime: try again", path=where) from error
        return source
    raise CorruptionError(
        f"{where} is damaged or missing, and no copy of this store was given: name one with `tierfs repair {shlex.quote(url)} --from COPY`",
        path=where,
    )


def _sources(
    location: Location, url: str, objects: ObjectTier, replicas: Sequence[Store]
) -> Iterator[tuple[bytes, str]]:
    """Yield the right bytes of the descriptor, with their source."""
    for replica in replicas:
        if _is_copy(objects, replica.objects):
            yield replica.descriptor.encode(), replica.url
    known = known_stores(location).find(url)
    if known is not None:
        yield known[0].encode(), "what this host knows of the store"


def _is_copy(objects: ObjectTier, other: ObjectTier) -> bool:
    """Return whether two stores have a record in common. Each write has a random id, so other stores have none."""

    def is_in_both(key: str) -> bool:
        try:
            return objects.read(key, RECORD_BYTES_MAX)[0] == other.read(key, RECORD_BYTES_MAX)[0]
        except (NotFoundError, CorruptionError):  # deleted, or too large
            return False

    return any(is_in_both(item.key) for item in itertools.islice(objects.list(keys.TREE), COMPARED_MAX))


def probe_store(location: Location) -> tuple[str, Findings, Capabilities | None]:
    """Probe the endpoint at ``location``, and save the result in the descriptor of the store there, if there is one.

    Processes that have the store open use the promises from when they opened it, until they open it again.

    Args:
        location: A store's root, or a path in it. Without a store, the place for one; on this host, that must be an
            existing directory. The probe leaves nothing in it.

    Returns:
        The root of the store, or without a store, the URL that was probed; the findings; and the promises in the store's
        descriptor before, ``None`` without a store.

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
        return url, _probe_bare(location, root, url), None
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
    return url, replace(found, capabilities=endpoint), descriptor.endpoint


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
