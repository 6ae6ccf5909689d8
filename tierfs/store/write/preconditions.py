"""Checks before a record is published: its chunks are durable, and no foreign object is at its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import NotFoundError, ReadOnlyError, StoreError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row, encode_rows
from tierfs.store.chunks import rescue, store_chunk
from tierfs.store.offline import ask_briefly
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed

if TYPE_CHECKING:
    from tierfs.host.cache.sources import ChunkSources

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
