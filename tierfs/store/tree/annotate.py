"""Change the metadata of a file or directory without moving its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierfs.errors import ConflictError, NotFoundError
from tierfs.format.manifest import Manifest
from tierfs.store.store import Store
from tierfs.store.tree.copy import place
from tierfs.store.tree.directory import make_directory
from tierfs.store.tree.records import observe, observe_marker, publish
from tierfs.store.write.preconditions import refuse_foreign


def annotate(store: Store, path: str, metadata: Mapping[str, object], *, write_id: bytes) -> Manifest:
    """Replace all of a file's metadata by writing one manifest.

    ``metadata`` holds JSON values. ``write_id`` is that of the version that the caller saw.

    Raises:
        NotFoundError: There is no file.
        ReadOnlyError: tierfs did not write the file.
        ConflictError: The path holds another version now. That version stands.
        StoreError: The object tier failed. If the error is transient, the metadata may or may not be changed.
    """
    observed = observe(store, path)
    manifest = observed.manifest
    if manifest is None:
        refuse_foreign(store, path)
        raise NotFoundError(f"{store.where(path)} is not there", path=path)
    if manifest.write_id != write_id:
        raise ConflictError(
            f"{store.where(path)} was changed by another writer since it was opened: their version is kept", path=path
        )
    changed, _ = place(store, observed, observed, metadata=dict(metadata))
    return changed


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
    record = replace(observed.manifest, write_id=store.random_bytes(16), previous=observed.previous, metadata=merged)
    publish(store, observed, record)
