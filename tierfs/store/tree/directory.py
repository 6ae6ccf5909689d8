"""Directories that exist while they are empty."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from dataclasses import replace

from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.format.header import Kind
from tierfs.format.manifest import Manifest, inline_digest
from tierfs.store.offline import ask
from tierfs.store.store import Store
from tierfs.store.tree.listing import list_directory, stat
from tierfs.store.tree.records import observe_marker, publish
from tierfs.store.write.staging import bury


def make_directory(store: Store, path: str, *, exist_ok: bool = False, parents: bool = False) -> bool:
    """Create a directory that exists even while it is empty. Its parents are implied, or created with ``parents``.

    A parent that is only implied disappears with the last thing below it.

    If ``exist_ok`` is set and the object tier is unreachable, a store with local tiers creates no marker, and counts
    that.

    Returns:
        Whether the directory exists now even while it is empty.

    Raises:
        AlreadyExistsError: There is a file, or a directory and ``exist_ok`` is not set.
        ConflictError, StoreError, ReadOnlyError: As for any change of a record.
    """
    if not path:
        if exist_ok:
            return True
        raise AlreadyExistsError(f"{store.url} is the store's root", path=path)
    try:
        observed = ask(store, lambda: observe_marker(store, path))
    except StoreError as error:
        if not (exist_ok and error.transient) or store.tiers is None:
            raise
        # The first file in a directory creates it. Only a directory that stays empty needs its marker.
        store.tiers.counters.fall_back(
            "unmarked_directories",
            "the object tier is unreachable, so no marker of the directory was created: %s",
            error,
        )
        return False
    if observed.manifest is None:
        try:
            entry = stat(store, path)
        except NotFoundError:
            pass
        else:
            _refuse(store, path, exist_ok=exist_ok and entry.is_directory)
    else:
        _refuse(store, path, exist_ok=exist_ok)
        return True
    if parents and (parent := path.rpartition("/")[0]):
        with contextlib.suppress(AlreadyExistsError):  # a file may have the name of a directory
            make_directory(store, parent, exist_ok=True, parents=True)
    marker = new_marker(store)
    try:
        publish(store, observed, marker)
    except ConflictError:
        # All ranks of a job create the directory that they save into: any rank's marker will do.
        if observe_marker(store, path).manifest is None:
            raise
        _refuse(store, path, exist_ok=exist_ok)
    return True


def new_marker(store: Store) -> Manifest:
    """Return the marker record of a directory."""
    now_ns = store.clock.now_ns()
    kind_of_digest = store.descriptor.digest_kind
    return Manifest(
        kind=Kind.DIRECTORY,
        write_id=store.random_bytes(16),
        length=0,
        created_ns=now_ns,
        modified_ns=now_ns,
        digest_kind=kind_of_digest,
        digest=inline_digest(kind_of_digest, b""),
        inline=b"",
    )


def _refuse(store: Store, path: str, *, exist_ok: bool) -> None:
    if not exist_ok:
        raise AlreadyExistsError(f"{store.where(path)} exists", path=path)


def remove_directory(store: Store, path: str) -> None:
    """Remove an empty directory.

    Raises:
        NotFoundError: There is no directory.
        StoreError: The directory is not empty.
        ConflictError, ReadOnlyError: As for any change of a record.
    """
    entry = stat(store, path)
    if not entry.is_directory:
        raise NotFoundError(f"{store.where(path)} is a file", path=path)
    if list_directory(store, path, detail=False):
        error = StoreError(f"{store.where(path)} is not empty: delete its contents first", path=path)
        error.errno = errno.ENOTEMPTY
        raise error
    observed = observe_marker(store, path) if path else None
    if observed is not None and observed.manifest is not None:
        bury(store, observed)


def annotate_directory(store: Store, path: str, metadata: Mapping[str, object]) -> None:
    """Add to the metadata of a directory. From then on the directory exists even while it is empty.

    Raises:
        NotFoundError: The directory was removed meanwhile.
        ConflictError, StoreError, ReadOnlyError: As for any change of a record.
    """
    observed = observe_marker(store, path)
    if observed.manifest is None:
        make_directory(store, path, exist_ok=True)
        observed = observe_marker(store, path)
    if observed.manifest is None:
        raise NotFoundError(f"{store.where(path)} was removed in the meantime", path=path)
    merged = {**observed.manifest.metadata, **metadata}
    record = replace(observed.manifest, write_id=store.random_bytes(16), metadata=merged)
    publish(store, observed, record)
