"""Move drafts to the object tier: steps 3 to 5 of `tierfs.flusher.flusher`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tierfs.buffers import buffers
from tierfs.clock import Pace
from tierfs.errors import ConflictError, CorruptionError, StoreError
from tierfs.flusher.queue import FlushItem
from tierfs.flusher.state import FlushState
from tierfs.format.manifest import Manifest, Row
from tierfs.host.chunk_sources import ChunkSources, slot_at
from tierfs.host.pending.levels import Level
from tierfs.host.slab.table import SlotState

if TYPE_CHECKING:
    from tierfs.flusher.publish import StorePublisher
    from tierfs.store.encode.tensors import ChunkContext

# A connection to a cloud carries some tens of MB/s, however fast the host is. Each upload takes two chunks' memory.
UPLOADS_MIN = 4
UPLOADS_MAX = 16
DRAFTS_AT_ONCE_MAX = 4
RATE_S = 10  # seconds over which `Uploader.rate` averages
_logger = logging.getLogger("tierfs.flush")


def uploads_at_once() -> int:
    """Return how many chunks to upload at once: one per processor of this process, 4 to 16. See docs/decisions/0026."""
    return min(max(UPLOADS_MIN, len(os.sched_getaffinity(0))), UPLOADS_MAX)


class Uploader:
    """Uploads chunks of several drafts at once, and publishes their records in closing order.

    After a draft's record is published, the next draft follows at once, unless it changes the same path. The draft is
    removed from the nvme tier a little later, together with drafts that were published meanwhile.
    A flusher that restarts before that recognizes the record by its write id.

    Args:
        state: Shared by the flusher's parts.
        bandwidth: See `tierfs.flusher.flusher.Flusher`.

    Attributes:
        pace: Limits the bytes that are sent per second.
    """

    def __init__(self, state: FlushState, *, bandwidth: int) -> None:
        self._state = state
        self.pace = Pace(state.clock, bandwidth)
        # Each by whether it works for urgent drafts. Its threads are started by one that does, too.
        self._chunks, self._drafts = (
            {
                urgent: ThreadPoolExecutor(count, name, initializer=None if urgent else state.priority.lower_thread)
                for urgent in (False, True)
            }
            for count, name in ((uploads_at_once(), "tierfs-upload"), (DRAFTS_AT_ONCE_MAX, "tierfs-draft"))
        )
        self._releases = ThreadPoolExecutor(1, thread_name_prefix="tierfs-release")
        self._published: list[FlushItem] = []  # published drafts that the local tiers have not released yet
        self._uploaded: Counter[int] = Counter()  # bytes by the second of their arrival, for the last RATE_S seconds

    def stop(self) -> None:
        """Finish the running work, then end the threads."""
        for pool in (*self._drafts.values(), *self._chunks.values()):
            pool.shutdown()
        self._releases.shutdown()

    def begin(self, entry: FlushItem) -> None:
        """Submit a draft to a thread that runs `advance`. The caller holds the lock."""
        self._state.entries.begin(entry)
        self._drafts[entry.is_urgent].submit(self.advance, entry, ahead=not entry.past_nvme)

    def next(self) -> FlushItem | None:
        """Return a draft that can be advanced now, or None. The caller holds the lock."""
        state = self._state
        if not state.access.is_known:
            return None
        entries = state.entries
        if entries.busy >= DRAFTS_AT_ONCE_MAX:
            return None
        now = state.clock.monotonic()
        found = None if state.persists_first() else entries.next_ready(now)
        # The chunks of a large draft are uploaded before it is in the nvme tier.
        for entry in () if state.persists_alone() else entries.large.values():
            if now >= entry.retry_at and (not found or entry.turn < found.turn):
                found = entry
        return found

    def advance(self, entry: FlushItem, *, ahead: bool = False) -> None:
        """Upload the missing chunks of a draft, and publish it if it is its turn.

        If ``ahead`` is set, the draft was not past the nvme tier at `begin`. It is only uploaded, in a single attempt.
        """
        state = self._state
        try:
            if ahead:
                self._go_ahead(entry)
            else:
                self._go_on(entry)
        except Exception as error:  # noqa: BLE001 - the thread must go on with the other drafts
            if self._is_forgotten(entry):
                with state.changed:
                    state.entries.remove(entry)
            else:
                state.fail(entry, state.known(error, entry.path))
        finally:
            with state.changed:
                state.entries.end(entry)
                state.changed.notify_all()

    def _go_on(self, entry: FlushItem) -> None:
        state = self._state
        with state.changed:
            base = state.entries.kept_base(entry)
        try:
            if base is not None:  # this draft was found after its base became a conflict
                raise ConflictError(str(base.error), path=base.path)
            state.access.call(lambda publisher: self._upload_and_publish(publisher, entry))
        except ConflictError as error:
            if self._is_forgotten(entry):
                raise
            self._keep(entry, error)

    def _is_forgotten(self, entry: FlushItem) -> bool:
        """Return whether a draft is of another host, and that host publishes it, or has done so."""
        exchange = self._state.exchange
        return entry.is_foreign and exchange is not None and not exchange.may_publish(entry)

    def _upload_and_publish(self, publisher: StorePublisher, entry: FlushItem) -> None:
        state = self._state
        if not entry.uploaded:
            self._upload(publisher, entry)
            with state.changed:
                state.entries.clear(entry)
        with state.changed:
            turn = state.entries.is_first(entry)
        if turn:
            self._publish(publisher, entry)

    def _go_ahead(self, entry: FlushItem) -> None:
        """Upload a draft while another thread writes it to the nvme tier. An error ends the upload, not the draft."""
        state = self._state
        references = [reference for reference in entry.draft.slots if reference is not None]
        try:
            if any(state.chunk(reference) is None for reference in references):
                return  # a segment cannot be opened yet, or a slot was reused
            state.access.call(lambda publisher: self._upload(publisher, entry))
        except Exception as error:  # noqa: BLE001 - retried when the draft is in the nvme tier
            state.counters["ahead_stops"] += 1
            _logger.info(
                "%s could not be uploaded early; it is uploaded once it is in the nvme tier: %s",
                entry.path,
                state.known(error, entry.path),
            )

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _upload(self, publisher: StorePublisher, entry: FlushItem) -> None:
        record = entry.draft.record
        rows = record.rows if isinstance(record, Manifest) else ()
        entry.rows = entry.rows or [None] * len(rows)
        local = self._state.sources_of(entry.draft)
        if entry.plan is None:
            entry.plan = publisher.plan(entry.draft, local)
        missing = [index for index, row in enumerate(entry.rows) if row is None]
        contexts = dict(enumerate(entry.plan.contexts))
        sources = {part.chunk for context in contexts.values() for part in context.sources}

        chunks = self._chunks[entry.is_urgent]

        def submit(indexes: Iterable[int]) -> list[Future[None]]:
            return [
                chunks.submit(self._upload_chunk, publisher, entry, rows[index], index, contexts.get(index), local)
                for index in indexes
            ]

        # Upload the sources of derived chunks first. Mix the derived chunks with the rest: deriving a chunk takes
        # processor time, and the other chunks take the network.
        derived = [index for index in missing if index in contexts and contexts[index].sources]
        rest = [index for index in missing if index not in sources and index not in derived]
        before = submit(index for index in missing if index in sources)
        # Half of the rest does not wait for the sources, because the sources may need many retries.
        first = max(uploads_at_once(), len(rest) // 2) if derived else len(rest)
        tasks = [*before, *submit(rest[:first])]
        wait(before)
        tasks += submit(_spread(derived, rest[first:]))
        errors = [error for error in (task.exception() for task in tasks) if error is not None]
        if errors:
            raise errors[0]
        with self._state.changed:
            entry.note("uploaded")

    def _upload_chunk(
        self,
        publisher: StorePublisher,
        entry: FlushItem,
        row: Row,
        index: int,
        context: ChunkContext | None,
        local: ChunkSources,
    ) -> None:
        state = self._state
        if state.stopping:
            raise StoreError("the flusher is ending", transient=True)
        if not entry.past_nvme and state.persists_alone():
            raise StoreError("a client waits for the nvme tier", transient=True)
        if row.stored_length:
            self._note(entry, index, row)
            return
        reference = entry.draft.slots[index]
        seen = reference is not None and slot_at(state.ram, reference) is not None
        stored = self._put(publisher, row, local, context, entry.rows)
        try:
            self._note(entry, index, stored or publisher.find_chunk(row))
        except CorruptionError as error:
            lost = CorruptionError(
                f"{entry.path}: no tier has a sound copy of one of its chunks, ram and nvme were tried, too: {error}",
                path=entry.path,
            )
            raise (lost if seen else state.missing(entry, reference, lost)) from error

    def _note(self, entry: FlushItem, index: int, row: Row) -> None:
        entry.rows[index] = row
        with self._state.changed:
            self._state.entries.note_sent(entry, row.raw_length)

    def _put(
        self,
        publisher: StorePublisher,
        row: Row,
        local: ChunkSources,
        context: ChunkContext | None = None,
        rows: Sequence[Row | None] = (),
    ) -> Row | None:
        """Put a chunk into the object tier. Return ``None`` if this host has no sound copy of it."""
        state = self._state
        with buffers().lend(row.raw_length) as raw:
            digests = local.read_whole(row, raw)
            if digests is None:
                return None
            state.fault("before upload.chunk")
            with state.changed:
                pressure = state.pressure()
            stored, is_sent = publisher.put_chunk(
                raw, digests, context, rows=rows, local=local, pace=self.pace, pressure=pressure
            )
        state.moved_at = state.clock.monotonic()
        state.fault("after upload.chunk")
        if is_sent:
            self._count(row.raw_length)
        return stored

    def rate(self) -> float:
        """Return the recent upload rate in bytes of chunks, before encoding, per second. The caller holds the lock."""
        now = int(self._state.clock.monotonic())
        return sum(self._uploaded[second] for second in range(now - RATE_S, now)) / RATE_S

    def _count(self, count: int) -> None:
        now = int(self._state.clock.monotonic())
        with self._state.changed:
            self._state.counters["uploaded_bytes"] += count
            self._uploaded[now] += count
            for second in [second for second in self._uploaded if second < now - RATE_S]:
                del self._uploaded[second]

    # -- records -------------------------------------------------------------------------------------------------------

    def _publish(self, publisher: StorePublisher, entry: FlushItem) -> None:
        state = self._state
        state.fault("before publish.record")
        rows = [row for row in entry.rows if row is not None]
        assert entry.plan is not None, "uploaded without a plan"
        try:
            publisher.publish(entry.draft, entry.plan, rows, state.sources_of(entry.draft))
        except ConflictError:
            # This draft may have been published on another host, and the next one of its path, too.
            with state.changed:
                others = [each for each in state.entries.dependents(entry) if each.path == entry.path]
            later = {each.draft.write_id for each in (entry, *others)}
            if state.exchange is None or not publisher.is_replaced(entry.draft, later, is_held=entry.is_foreign):
                raise
        finally:
            publisher.tell_host()
        state.moved_at = state.clock.monotonic()
        state.fault("after publish.record")
        with state.changed:
            state.entries.pass_on(entry)
            self._published.append(entry)
        self._releases.submit(self._release)

    def _release(self) -> None:
        """Release the rows and slots of published drafts in the local tiers."""
        state = self._state
        with state.changed:
            done, self._published = self._published, []
        if not done:
            return  # an earlier call released them, too
        try:
            state.fault("before finish.release")
            if state.exchange is not None:
                # First, so that no host still holds a draft when the next one of its path is published.
                state.exchange.tell_gone(done)
            if state.nvme is not None:
                state.nvme.forget_drafts(*[entry.number for entry in done if entry.number is not None])
            if state.exchange is not None:
                state.exchange.room.finish([entry.draft.write_id for entry in done if entry.is_foreign])
            for entry in done:
                if not entry.is_foreign and entry.slot is not None:
                    state.release(entry.draft, entry.slot)
            state.fault("after finish.release")
        except Exception as error:  # noqa: BLE001 - publishing it again finds the records, then releases it
            for entry in done:
                state.fail(entry, state.known(error, entry.path))
            with state.changed:
                for entry in done:
                    state.entries.take_back(entry)
            return
        with state.changed:
            for entry in done:
                state.entries.remove(entry)
                entry.level = Level.OBJECT
                state.counters["published_files"] += 1
                state.counters["published_bytes"] += entry.draft.length
            state.nudged = True
            state.changed.notify_all()
        for entry in done:
            _logger.info("published %s", entry.path, extra={"path": entry.path, "bytes": entry.draft.length})

    def _keep(self, entry: FlushItem, error: ConflictError) -> None:
        """Keep a draft, and all drafts that build on it, as conflicts: another writer changed the path.

        Raises:
            TierfsError: Not all drafts could be marked. The caller retries.
        """
        state = self._state
        with state.placing:
            with state.changed:
                kept = [entry, *state.entries.dependents(entry)]
            # The last draft first: after a crash in between, no pending draft builds on a conflict.
            for each in reversed(kept):
                if each.is_foreign:
                    assert state.exchange is not None
                    state.exchange.room.keep_as_conflict(each.draft.write_id, str(error))
                elif each.number is not None:
                    assert state.nvme is not None
                    state.nvme.keep_as_conflict(each.number, str(error))
                elif each.slot is not None:
                    each.slot.segment.mark(each.slot, SlotState.CONFLICT)
            with state.changed:
                for each in kept:
                    state.counters["conflicts"] += not each.conflict
                    state.entries.fail(each, error, float("inf"))
                state.changed.notify_all()
        _logger.error("%s is kept as a conflict: %s", entry.path, error)


def _spread(few: Sequence[int], many: Sequence[int]) -> list[int]:
    """Merge both sequences, each in its order, with ``few`` spread evenly among ``many``."""
    placed = [((number + 1) / (len(few) + 1), each) for number, each in enumerate(few)]
    placed += [((number + 0.5) / len(many), each) for number, each in enumerate(many)]
    return [each for _, each in sorted(placed)]
