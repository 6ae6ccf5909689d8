"""Delete a file: replace its record by a tombstone, if it is still the observed record."""

from __future__ import annotations

from tierfs.errors import NotFoundError
from tierfs.format.manifest import Tombstone
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, observe_to_replace
from tierfs.store.write.preconditions import refuse_foreign
from tierfs.store.write.staging import replace


def delete(store: Store, path: str) -> int:
    """Delete the file ``path``. Garbage collection deletes its chunks, one grace later at the earliest.

    Returns:
        The file's length in bytes; 0 if its record was damaged.

    Raises:
        NotFoundError: There is no file.
        ReadOnlyError: tierfs did not write the file.
        ConflictError: Another writer changed the file after this call observed it. That version stands.
        StoreError: The object tier failed. If the error is transient, the file may or may not be deleted.
    """
    observed = observe_to_replace(store, path)
    if observed.manifest is None and (observed.version is None or observed.record is not None):
        refuse_foreign(store, path)
        raise NotFoundError(f"{store.where(path)} is not there", path=path)
    bury(store, observed)
    return 0 if observed.manifest is None else observed.manifest.length


def bury(store: Store, observed: Observed, *, after: bytes | None = None) -> None:
    """Replace an observed record by a tombstone. Raises as `replace` does.

    ``after`` is the write id of a pending draft to publish first: the draft at the target of a rename.
    """
    assert observed.version is not None or observed.draft is not None
    tombstone = Tombstone(store.random_bytes(16), store.clock.now_ns(), Tombstone.check_of(observed.version or ""))
    replace(store, observed, tombstone, staged=after is not None, after=after)
