"""Checks before a record is published: its chunks are there to stay, and nobody else's object lies at its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierfs.digest import CHUNK_BYTES
from tierfs.errors import NotFoundError, ReadOnlyError, StoreError
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row, encode_rows
from tierfs.store.chunks import rescue, store_chunk
from tierfs.store.encode.contexts import ReadRow
from tierfs.store.offline import ask_briefly
from tierfs.store.read.reader import expand_rows
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed

__all__ = ["DurableChunks", "ensure_chunks_durable", "fold_rows", "listed_rows", "refuse_foreign"]

ATTEMPTS_MAX = 4
DIRECT_ROW_BYTES_MAX = 8 << 20


def listed_rows(store: Store, observed: Observed) -> list[Row]:
    """The chunks of a manifest that was observed, which may be referred to because it names them. None is looked at.

    Where the lease began after the manifest was observed they may not: `ensure_chunks_durable` looks at each of them then.
    """
    manifest, path = observed.manifest, observed.path
    assert manifest is not None
    term = store.lease_cache.ensure() if manifest.rows else 0
    rows = list(expand_rows(store, manifest, path))
    store.lease_cache.add_listed(term, rows, since=observed.seen_s)
    return rows


class DurableChunks(NamedTuple):
    """Chunks that a manifest may name.

    Attributes:
        rows: The manifest's own table.
        indirect: Whether it is that of the chunks that hold the table.
        term: The lease in which they are known to be in the store; ``None`` where there are none.
    """

    rows: tuple[Row, ...]
    indirect: bool
    term: int | None


def ensure_chunks_durable(store: Store, path: str, rows: Sequence[Row], read: ReadRow | None = None) -> DurableChunks:
    """A writer's last step before it publishes: make sure that every chunk it will name is there to stay.

    Args:
        store: The store.
        path: The file's, for errors.
        rows: Its chunks.
        read: Gets at those that lie on this host, should one of them have to be stored anew.

    Returns:
        What to put into the manifest, and the term that `publish` is to be given.

    Raises:
        StoreError: A chunk is gone for good, or the object tier is too slow to tell within a lease.
    """
    current = list(rows)
    checked: dict[ChunkName, int] = {}  # in which term each one was looked up here
    for _ in range(ATTEMPTS_MAX):
        table, indirect = fold_rows(store, current)
        if not current:
            return DurableChunks(table, indirect, None)
        term = store.lease_cache.ensure()
        named = [*table, *current] if indirect else current
        unverified = [row for row in store.lease_cache.unverified(named) if checked.get(row.name) != term]
        if not unverified:
            return DurableChunks(table, indirect, term)
        saved = {}
        for row in unverified:
            saved[row.name] = rescue(store, row, store.where(path), read)
            checked[saved[row.name].name] = store.lease_cache.ensure()
        current = [saved.get(row.name, row) for row in current]
    raise StoreError(
        f"{store.where(path)}: looking its chunks up takes longer than a lease lasts "
        f"({store.descriptor.lease_s} s): the object tier is too slow; nothing was published",
        transient=True,
        path=path,
        tier="object",
    )


def refuse_foreign(store: Store, path: str, *, staged: bool = False) -> None:
    """Check that nobody else's object lies at ``path``.

    Args:
        store: The store.
        path: Where something is to be written, or removed.
        staged: Whether the flusher is to do that. Then an object tier that is unreachable is not waited for: the record is
            published on condition, and nobody else's object is ever replaced.

    Raises:
        ReadOnlyError: One does.
        StoreError: It cannot be told.
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
    """The manifest's own table: the chunks, or where they are too many for one object, the chunks of that table."""
    table = memoryview(encode_rows(tuple(rows)))
    if len(table) <= DIRECT_ROW_BYTES_MAX:
        return tuple(rows), False
    pieces = [table[at : at + CHUNK_BYTES] for at in range(0, len(table), CHUNK_BYTES)]
    return tuple(store_chunk(store, piece) for piece in pieces), True
