"""Publish drafts to the object tier: first the chunks, then the record that names them, on condition of its base."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tierfs.errors import ConflictError, StoreNotFoundError, TierfsError
from tierfs.format import keys
from tierfs.format.manifest import Manifest, Record, Row
from tierfs.host.pending.record import Draft
from tierfs.objects.protocol import Version
from tierfs.store.chunks import SendPlan, is_sound, replaced_chunks, send_chunk
from tierfs.store.commit import PART, Commits
from tierfs.store.encode.keyframes import FilePlan, KeyframeIndex
from tierfs.store.encode.pipeline import Codecs
from tierfs.store.encode.tensors import NO_CONTEXT, ChunkContext
from tierfs.store.offline import is_current
from tierfs.store.read.lookup import find_chunk
from tierfs.store.status import request_metrics
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, last_seen, observe, publish
from tierfs.store.tree.references import is_root, write_references
from tierfs.store.write.staging import ensure_chunks_durable

if TYPE_CHECKING:
    from tierfs.host.chunk_sources import ChunkSources

_logger = logging.getLogger("tierfs.store")


class _OpenedStore(NamedTuple):
    store: Store
    commits: Commits
    keyframes: KeyframeIndex


class StorePublisher:
    """Puts chunks into the object tier, then the records that name them. Thread-safe.

    Args:
        open_store: Opens the store without local tiers. Called at first use, after a failure, and when the store is no
            longer at its root.
        check: Called before each use. Raises if the opened store is not the one that this host's changes belong to.
    """

    def __init__(self, open_store: Callable[[], Store], check: Callable[[Store], object] = lambda _: None) -> None:
        self._open_store = open_store
        self._check = check
        self._lock = threading.Lock()
        self._codecs: Codecs | None = None
        self._opened: _OpenedStore | None = None

    def open(self) -> None:
        """Load the client of the object tier and open the store, so that the first request need not."""
        self._open()

    def use_codecs(self, codecs: str) -> None:
        """Encode with these codecs from now on: see `Codecs.parse`, also for the error."""
        self._codecs = Codecs.parse(codecs)
        if self._opened is not None:
            self._opened.store.encoder.use(self._codecs)

    def store(self) -> Store:
        """Return the opened store. Raises as `open`."""
        return self._open().store

    def close(self) -> None:
        """Release the lease of the store. Nothing is published afterwards."""
        if self._opened is not None:
            self._opened.store.lease_cache.release()

    def plan(self, draft: Draft, local: ChunkSources) -> FilePlan:
        """Return the facts about a file that guide its encoding. `publish` takes them back."""
        store, _, keyframes = self._open()
        plan = keyframes.plan(draft, local, derives=store.encoder.derives)
        unread = replaced_chunks(store, draft.path)
        if unread and isinstance(draft.record, Manifest):
            given = [*plan.contexts, *[NO_CONTEXT] * (len(draft.record.rows) - len(plan.contexts))]
            plan = plan._replace(contexts=[replace(context, unread=unread) for context in given])
        return plan

    def put_chunk(
        self, raw: memoryview, digests: Sequence[bytes], context: ChunkContext | None = None, **plan: Any
    ) -> tuple[Row, bool]:
        """Do the work of `send_chunk`. ``raw`` is borrowed, and overwritten. ``plan`` has the parts of a `SendPlan`."""
        return send_chunk(self._open().store, raw, digests, SendPlan(context or NO_CONTEXT, **plan), raw)

    def find_chunk(self, row: Row) -> Row:
        """Return the row of a chunk that no local tier holds, because it was published before.

        Raises:
            CorruptionError: The object tier does not hold a sound copy of the chunk either.
            StoreError, ReadOnlyError: The object tier failed.
        """
        store = self._open().store
        while True:
            # The next look-up skips a damaged object, because `is_sound` marks it. Chunks that this flusher put itself,
            # for a file larger than the local tiers, are not read back over the network.
            found = find_chunk(store, row, store.url)
            if is_sound(store, found, reread=not store.lease_cache.facts(found.name).is_own):
                return found

    def publish(self, draft: Draft, plan: FilePlan, rows: Sequence[Row], local: ChunkSources) -> None:
        """Publish the draft's record with these rows, on condition that its base is still current. Idempotent.

        Args:
            plan: The result of `plan` for it.
            rows: The rows of its chunks. A chunk that garbage collection may delete is stored again.
            local: Copies of the chunks on this host.

        Raises:
            ConflictError: Another writer changed the path after the draft's base was observed. That change stands.
            StoreError, CapacityError, ReadOnlyError: The object tier failed. If the error is transient, the record may
                have been published or not.
        """
        store, commits, keyframes = self._open()
        try:
            self._publish(store, draft, rows, local)
        except ConflictError:
            if not isinstance(draft.record, Manifest) or not commits.overtake(draft.path, draft.record, rows):
                raise
        keyframes.note(draft, plan, rows)
        directory = draft.path.rpartition("/")[0]
        if isinstance(draft.record, Manifest) and is_root(draft.path):
            write_references(store, directory)
        if isinstance(draft.record, Manifest) and draft.record.metadata.items() >= PART.items():
            _commit(store, commits, directory)

    def is_replaced(self, draft: Draft, later: AbstractSet[bytes], *, is_held: bool) -> bool:
        """Return whether the draft's host itself has published a later change of the path, here or on another host.

        ``later`` has write ids of such changes. The owner of a held draft has others: `Store.new_write_id` tells its
        changes, and their times tell the order. This host knows all of its own. Raises as `observe`.
        """
        record = observe(self._open().store, draft.path).record
        if record is None or record.write_id in later:
            return record is not None
        is_owners = is_held and record.write_id[8:] == draft.write_id[8:] and record.write_id != draft.base.write_id
        return is_owners and _written_ns(record) >= _written_ns(draft.record)

    def tell_host(self) -> None:
        """Write down the versions that this process published and found, for saves while the object tier is unreachable."""
        if self._opened is not None and self._opened.store.host_records is not None:
            self._opened.store.host_records.flush()

    def report_damage(self, key: str) -> None:
        """Mark the chunk object with this key as damaged or missing. A later save of the same bytes stores it again.

        Raises:
            FormatError: The key is not a chunk's key.
            StoreError, ReadOnlyError: The store cannot be opened.
        """
        store = self._open().store
        store.lease_cache.mark_damaged(keys.parse_chunk_key(key, store.descriptor.digest_kind))

    def asked(self) -> dict[str, Any]:
        """Return the metrics of requests and codecs, or an empty dict if the store is not open. Never blocks."""
        opened = self._opened  # without the lock: another thread holds it while it opens the store
        if opened is None:
            return {}
        codecs = {**opened.store.encoder.status(), **opened.keyframes.fallbacks}
        return {**request_metrics(opened.store.objects), "codecs": codecs}

    def _publish(self, store: Store, draft: Draft, rows: Sequence[Row], local: ChunkSources) -> None:
        observed = self._base(store, draft)
        if observed is None:
            return
        record, term = draft.record, None
        if isinstance(record, Manifest):
            table, indirect, term = ensure_chunks_durable(store, draft.path, rows, local)
            record = replace(record, rows=table, indirect=indirect)
        publish(store, observed, record, term=term, base=draft.base)

    def _base(self, store: Store, draft: Draft) -> Observed | None:
        """Return the version that the draft replaces, or ``None`` if the draft is published already."""
        if draft.base.version is not None or draft.base.write_id is None:
            version = None if draft.base.version is None else Version(draft.base.version)
            return Observed(draft.path, keys.record_key(draft.path), None, version)
        # The base was a draft of this host, which is published now. Usually this process did that, and knows its version.
        there = last_seen(store, draft.path)
        if there.write_id != draft.base.write_id:
            there = observe(store, draft.path)
        if there.write_id == draft.write_id:
            return None
        if there.record is None and draft.base.is_tombstone:
            return there  # garbage collection has removed the tombstone
        if there.write_id != draft.base.write_id:
            raise ConflictError(
                f"{store.where(draft.path)} was changed by another writer before this host's changes were flushed: "
                "their version is kept, and this one is kept as a conflict",
                path=draft.path,
            )
        return there

    def _open(self) -> _OpenedStore:
        """Return the opened store. Open it again if it is no longer at its root.

        Raises:
            StoreNotFoundError: Another store is at the root, or none. Changes of one store must never reach another.
            InvalidInputError: The store at the root is a copy of the store that the local tiers belong to.
        """
        with self._lock:
            opened = self._opened
            if opened is not None and is_current(opened.store):
                self._check(opened.store)
                return opened
            store = self._open_store()
            self._check(store)
            if opened is not None and (store is opened.store or store.descriptor.uuid != opened.store.descriptor.uuid):
                uuid, url = opened.store.descriptor.uuid, opened.store.url
                raise StoreNotFoundError(
                    f"the store {uuid} is no longer at {url}: put it back, and pending changes are flushed", path=url
                )
            if self._codecs is not None:
                store.encoder.use(self._codecs)
            self._opened = _OpenedStore(store, Commits(store), KeyframeIndex(store))
            return self._opened


def _written_ns(record: Record) -> int:
    return record.modified_ns if isinstance(record, Manifest) else record.deleted_ns


def _commit(store: Store, commits: Commits, directory: str) -> None:
    """Commit the checkpoint in a directory if all of its files are published.

    Raises:
        TierfsError: The object tier failed transiently. All other errors are logged.
    """
    try:
        commits.advance(directory)
    except TierfsError as error:
        if getattr(error, "transient", False):
            raise
        # The published file itself is fine.
        _logger.error("%s: the checkpoint cannot be committed: %s", store.where(directory), error)  # noqa: TRY400 - a trace adds nothing
