"""The store as the flusher sees it: chunks first, then the record that names them, on condition of what it replaces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from tierfs.errors import ConflictError
from tierfs.flush.draft import Draft
from tierfs.format import keys
from tierfs.format.manifest import Manifest, Row, Tombstone
from tierfs.objects.protocol import Version
from tierfs.store.chunks import find_chunk, store_chunk
from tierfs.store.records import Observed, observe, publish
from tierfs.store.save import settle
from tierfs.store.store import Store

__all__ = ["StorePublisher"]


class StorePublisher:
    """See `tierfs.flush.publisher.Publisher`.

    Args:
        connect: Opens the store without local tiers, at first use and again after that failed.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._store: Store | None = None

    def __repr__(self) -> str:
        return f"StorePublisher({self._store!r})"

    def put_chunk(self, raw: memoryview) -> Row:
        """See `Publisher.put_chunk`."""
        return store_chunk(self._open(), raw)

    def find_chunk(self, row: Row) -> Row:
        """See `Publisher.find_chunk`."""
        store = self._open()
        return find_chunk(store, row, store.url)

    def publish(self, draft: Draft, rows: Sequence[Row]) -> None:
        """See `Publisher.publish`."""
        store = self._open()
        observed = self._base(store, draft)
        if observed is None:
            return
        record = draft.record
        if isinstance(record, Manifest):
            table, indirect = settle(store, draft.path, rows)
            record = replace(record, rows=table, indirect=indirect, previous=observed.previous)
        else:
            record = Tombstone(record.write_id, record.deleted_ns, Tombstone.check_of(observed.previous))
        publish(store, observed, record)

    def _base(self, store: Store, draft: Draft) -> Observed | None:
        """What the draft replaces; ``None`` if it is published already."""
        if draft.base.write_id is None:
            version = None if draft.base.version is None else Version(draft.base.version)
            return Observed(draft.path, keys.record_key(draft.path), None, version)
        # It was made on top of another draft of this host, which is published by now: whatever version that became.
        there = observe(store, draft.path)
        found = there.record.write_id if there.record is not None else None
        if found == draft.write_id:
            return None
        if found != draft.base.write_id:
            raise ConflictError(
                f"{store.where(draft.path)} was changed by somebody else before this host's changes were flushed: "
                "theirs stands, this one is kept",
                path=draft.path,
            )
        return there

    def _open(self) -> Store:
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store
