"""Delete a file: its record becomes a tombstone, on condition that it is still the one that was observed."""

from __future__ import annotations

from tierfs.errors import NotFoundError
from tierfs.format.manifest import Tombstone
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, observe_to_replace
from tierfs.store.write.preconditions import refuse_foreign
from tierfs.store.write.staging import replace

__all__ = ["bury", "delete"]


def delete(store: Store, path: str) -> None:
    """Delete the file ``path``. Its chunks are left for garbage collection, one grace later at the earliest.

    Raises:
        NotFoundError: There is no file.
        ReadOnlyError: tierfs did not write it.
        ConflictError: Somebody else changed it since this call looked at it; theirs stands.
        StoreError: It failed; if it is transient, the file may be gone or not.
    """
    observed = observe_to_replace(store, path)
    if observed.manifest is None and (observed.version is None or observed.record is not None):
        refuse_foreign(store, path)
        raise NotFoundError(f"{store.where(path)} is not there", path=path)
    bury(store, observed)


def bury(store: Store, observed: Observed, *, after: bytes | None = None) -> None:
    """Replace what was observed by a tombstone. Raises as `replace` does.

    Args:
        store: The store.
        observed: The version to delete.
        after: Write id of a pending draft that has to be published before: of the file that it was moved to.
    """
    assert observed.version is not None or observed.draft is not None
    tombstone = Tombstone(store.random_bytes(16), store.clock.now_ns(), Tombstone.check_of(observed.version or ""))
    replace(store, observed, tombstone, staged=after is not None, after=after)
