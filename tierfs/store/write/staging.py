"""Change records: publish the change, or leave it to the flusher by sealing it in the host's ram tier.

Before a record is published, its chunks are durable, and no foreign object is at its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import ConflictError, NotFoundError, ReadOnlyError, StoreError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest, Record, Row, Tombstone, encode_rows
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import Draft, ObservedBase, SlotRef
from tierfs.store.chunks import rescue, store_chunk
from tierfs.store.offline import ask_briefly
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, observe, observe_published, observe_to_replace, publish

if TYPE_CHECKING:
    from tierfs.host.chunk_sources import ChunkSources
    from tierfs.host.tiers import Tiers


ATTEMPTS_MAX = 4
DIRECT_ROW_BYTES_MAX = 8 << 20


def listed_rows(store: Store, observed: Observed) -> list[Row]:
    """Return the chunks of an observed manifest, which another manifest may refer to. No chunk is looked up.

    If the lease began after the manifest was observed, they may not be referred to yet:
    `ensure_chunks_durable` looks each of them up.
    """
    manifest, path = observed.manifest, observed.path
    assert manifest is not None
    term = store.lease_cache.ensure() if manifest.rows else 0
    rows = list(expand_rows(store, manifest, path))
    store.lease_cache.add_listed(term, rows, since=observed.seen_s)
    return rows


def ensure_chunks_durable(
    store: Store, path: str, rows: Sequence[Row], local: ChunkSources | None = None
) -> tuple[tuple[Row, ...], bool, int | None]:
    """Make sure that every chunk of a new manifest is in the store to stay: a writer's last step before publishing.

    ``local`` finds copies on this host, in case a chunk must be stored again. ``path`` is for errors.

    Returns:
        The table for the manifest; whether it names the chunks that hold the file's table; and the lease in which the
        chunks are known to be in the store, to pass to `publish`. The latter is None if there are no chunks.

    Raises:
        StoreError: The last copy of a chunk is gone, or the look-ups take longer than a lease.
    """
    current = list(rows)
    checked: dict[ChunkName, int] = {}  # the term in which each was looked up here
    for _ in range(ATTEMPTS_MAX):
        table, indirect = fold_rows(store, current)
        if not current:
            return table, indirect, None
        term = store.lease_cache.ensure()
        named = [*table, *current] if indirect else current
        unverified = [row for row in store.lease_cache.unverified(named) if checked.get(row.name) != term]
        if not unverified:
            return table, indirect, term
        saved = {}
        for row in unverified:
            saved[row.name] = rescue(store, row, store.where(path), local)
            checked[saved[row.name].name] = store.lease_cache.ensure()
        current = [saved.get(row.name, row) for row in current]
    raise StoreError(
        f"{store.where(path)}: looking up its chunks takes longer than a lease lasts "
        f"({store.descriptor.lease_s} s): the object tier is too slow; nothing was published",
        transient=True,
        path=path,
        tier="object",
    )


def refuse_foreign(store: Store, path: str, *, staged: bool = False) -> None:
    """Check that ``path``, which is to be written or deleted, holds no object that tierfs did not write.

    If the change is ``staged`` for the flusher, an unreachable object tier is not waited for, and is no error. The
    flusher puts records conditionally, so it never replaces a foreign object.

    Raises:
        ReadOnlyError: There is such an object.
        StoreError: The object tier failed.
    """
    try:
        if staged and store.tiers is not None:
            ask_briefly(store, lambda: store.objects.head(path))
        else:
            store.objects.head(path)
    except NotFoundError:
        return
    except StoreError as error:
        if staged and error.transient:
            return
        raise
    raise ReadOnlyError(
        f"{store.where(path)} was not written by tierfs and can only be read: choose another name, or remove it with the "
        "tool that wrote it",
        path=path,
    )


def fold_rows(store: Store, rows: list[Row]) -> tuple[tuple[Row, ...], bool]:
    """Return the table for a manifest, and whether it is indirect.

    A table that is too long for one object is stored in chunks. The rows of these chunks are then the manifest's table.
    """
    table = memoryview(encode_rows(tuple(rows)))
    if len(table) <= DIRECT_ROW_BYTES_MAX:
        return tuple(rows), False
    pieces = [table[at : at + CHUNK_BYTES] for at in range(0, len(table), CHUNK_BYTES)]
    return tuple(store_chunk(store, piece) for piece in pieces), True


def is_staged(store: Store, path: str, level: Level) -> bool:
    """Return whether a write that asks for ``level`` is left to the flusher. Otherwise the writer publishes it.

    The writer publishes if it must wait for the object tier anyway. It also publishes for `Level.LOCAL` if the object
    tier is a directory of this host and the next tier down, because the flusher would be a detour. Neither applies if
    the path's directory has pending changes: those are published first, so the write queues behind them.
    """
    if store.tiers is None:
        return False
    if level is not Level.OBJECT and not (level is Level.LOCAL and store.tiers.passes_by):
        return True
    return bool(store.tiers.drafts.pending_below(path.rpartition("/")[0]))


def after_pending(store: Store, observed: Observed) -> Observed:
    """Wait until the pending changes of a path's directory are published, and observe the path then.

    Raises:
        ConflictError: The path, or another one in the directory, was changed by another writer.
        TimeoutError, TierfsError: As `Tiers.wait` does.
    """
    assert store.tiers is not None
    store.tiers.wait(observed.path.rpartition("/")[0], Level.OBJECT, store.timeout_s)
    if observed.draft is None:
        return observed
    now = observe(store, observed.path)
    is_ours = observed.is_tombstone if now.record is None else now.record.write_id == observed.draft
    if not is_ours:
        raise _changed(store, observed, "by another writer")
    return now


def seal(
    store: Store,
    observed: Observed,
    record: Record,
    *,
    slots: Sequence[SlotRef | None] = (),
    after: bytes | None = None,
) -> None:
    """Seal a change of the observed version. From then on it is pending, and this host sees it.

    Args:
        observed: The version that the change replaces.
        slots: For each row of a manifest, the slot that holds the chunk for this change. None for a chunk elsewhere.
        after: Write id of a draft that must be published first. None if there is none.

    Raises:
        ConflictError: Another process or thread of this host changed the path since. Nothing is pending.
        CapacityError: The ram tier has no room, and none came in time. Nothing is pending.
        StoreError: A process that was stopped while sealing a change of the path blocks other changes of it.
            Nothing is pending.
    """
    tiers = store.tiers
    assert tiers is not None
    rows = record.rows if isinstance(record, Manifest) else ()
    version = observed.version if observed.draft is None else None
    base = ObservedBase(version, observed.draft or observed.write_id, observed.is_tombstone)
    draft = Draft(observed.path, record, base, tuple(slots) or (None,) * len(rows), after)
    store.hand_over(writes=True)
    store.before_change()
    with tiers.writer.sealing(draft, timeout_s=store.timeout_s):
        _check_unchanged(store, tiers, observed)


def expect_changes(store: Store) -> None:
    """Start a flusher in the background unless one runs, and let it open the object tier, before anything is sealed."""
    if store.tiers is not None:
        store.hand_over(writes=True)
        store.tiers.writer.expect()


def _check_unchanged(store: Store, tiers: Tiers, observed: Observed) -> None:
    """Check that the path has not changed, without a request over a network, while the caller still has the bytes.

    A change by another host is found when this change is published. This change is then kept as a conflict.
    """
    pending = tiers.drafts.pending(observed.path)
    if pending is not None:
        if pending.draft.write_id != observed.draft:
            raise _changed(store, observed, "on this host")
    elif store.descriptor.endpoint.host_local:
        check_stands(store, observed)


def check_stands(store: Store, observed: Observed) -> None:
    """Check that the object tier, if it answers now, still has the observed version.

    Raises:
        ConflictError: It has another version.
    """
    try:
        is_same = ask_briefly(store, lambda: _stands(store, observed))
    except StoreError:  # unreachable: a conflict is then found at publication
        return
    if not is_same:
        raise _changed(store, observed, "on this host" if store.descriptor.endpoint.host_local else "by another writer")


def _changed(store: Store, observed: Observed, who: str) -> ConflictError:
    return ConflictError(
        f"{store.where(observed.path)} was changed {who} since it was opened: that version is kept, "
        "this change was not made; reload and try again",
        path=observed.path,
    )


def _stands(store: Store, observed: Observed) -> bool:
    """Return whether the object tier still has the observed version."""
    try:
        if observed.draft is None and store.objects.head(observed.key).version == observed.version:
            return True
    except NotFoundError:  # garbage collection may have removed a tombstone
        return observed.version is None or observed.is_tombstone
    # The draft was published since, in an unknown version, or gc gave other names to the chunks of the record.
    now = observe_published(store, observed.path).write_id
    return now == observed.write_id if now is not None else observed.draft is not None


def follow(store: Store, record: Record, path: str, level: Level | None = None) -> None:
    """Tell the flusher of a sealed change, or wait until the change has reached ``level``, by default the store's.

    Raises:
        ConflictError: Another writer changed the path since. That version stands.
        TimeoutError: The level was not reached in time. The change stays pending.
        TierfsError: The reason why the change cannot reach the level. The change stays pending.
    """
    assert store.tiers is not None
    wanted = store.ack if level is None else level
    if wanted > Level.STAGED:
        store.tiers.wait(path, wanted, store.timeout_s, write_id=record.write_id)
    else:
        store.tiers.writer.announce(wait=False)


def replace(
    store: Store,
    observed: Observed,
    record: Record,
    *,
    staged: bool = False,
    slots: Sequence[SlotRef | None] = (),
    after: bytes | None = None,
    term: int | None = None,
) -> None:
    """Make a change whose chunks, if any, are in place: publish it now, or seal it if it depends on pending changes.

    Args:
        observed: The version that the change replaces.
        staged: Whether the change depends on a pending change other than the one that it replaces.
        after: Write id of a draft that must be published first. None if there is none.

    Raises:
        ConflictError, CapacityError, StoreError, ReadOnlyError: As `publish` and `seal` do.
    """
    if observed.draft is None and not staged:
        publish(store, observed, record, term=term)
        return
    seal(store, observed, record, slots=slots, after=after)
    follow(store, record, observed.path)


def delete(store: Store, path: str, *, after: bytes | None = None) -> int:
    """Delete the file ``path``. Garbage collection deletes its chunks, one grace later at the earliest.

    ``after`` is the write id of a pending draft to publish first; see `bury`.

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
    bury(store, observed, after=after)
    return 0 if observed.manifest is None else observed.manifest.length


def bury(store: Store, observed: Observed, *, after: bytes | None = None) -> bytes | None:
    """Replace an observed record by a tombstone. Raises as `replace` does.

    Args:
        observed: The version that the tombstone replaces.
        after: Write id of a pending draft to publish first: the draft at the target of a rename, or the tombstone of
            the metadata that names this file.

    Returns:
        The write id of the tombstone if it is pending; ``None`` if it is published.
    """
    assert observed.version is not None or observed.draft is not None
    tombstone = Tombstone(store.new_write_id(), store.clock.now_ns())
    replace(store, observed, tombstone, staged=after is not None, after=after)
    return None if observed.draft is None and after is None else tombstone.write_id
