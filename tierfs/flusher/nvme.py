"""Move drafts from memory to the nvme tier: steps 1 and 2 of `tierfs.flusher.flusher`. Copy other chunks there, too."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tierfs.errors import CapacityError, CorruptionError, StoreError, TierfsError
from tierfs.flusher.queue import FlushItem
from tierfs.flusher.state import RETRY_S_MIN, SMALL_BYTES_MAX, FlushState, NotYetError
from tierfs.format.manifest import Manifest, Row
from tierfs.host.chunk_sources import ChunkRequest, FileChunks, check_copies
from tierfs.host.nvme.batch import EncodedDraft
from tierfs.host.nvme.chunks import ChunksGoneError
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.record import SlotRef
from tierfs.host.slab.segment import Slot

# Chunks written at once. Each has one request at the disk at a time. Measured, docs/decisions/0046.
WRITES_MAX = 6
# The bounds of one commit. A commit costs as much for one small file as for many.
BATCH_DRAFTS_MAX = 100
BATCH_BYTES_MAX = 64 << 20
# Retries of a draft that waits for room, for a segment that cannot be opened yet, or for an answer of the object tier.
# About ten seconds.
WAITS_MAX = 40
_logger = logging.getLogger("tierfs.flush")


class NvmePersister:
    """Persists drafts: moves them to the nvme tier, in closing order.

    Args:
        state: Shared by the flusher's parts.
    """

    def __init__(self, state: FlushState) -> None:
        self._state = state
        lower = state.priority.lower_thread
        self._writes = ThreadPoolExecutor(WRITES_MAX, thread_name_prefix="tierfs-write", initializer=lower)
        self._small_writes = ThreadPoolExecutor(WRITES_MAX, thread_name_prefix="tierfs-write-small")
        self._turn = threading.Lock()  # held by the thread that persists drafts
        self._looking_after = threading.Lock()  # so that a copy that another thread has just repaired is not dropped

    def stop(self) -> None:
        """Finish the running work, then end the threads."""
        self._writes.shutdown()
        self._small_writes.shutdown()

    # -- drafts --------------------------------------------------------------------------------------------------------

    def persist_all(self, *, if_small: bool = False) -> bool:
        """Persist queued drafts in order, on this thread and at its priority. Stop at the first that has to wait.

        ``if_small`` is for a client's thread, which need not wait for another one then: do nothing and return false if
        the drafts are many or large, or another thread persists drafts.
        """
        state = self._state
        if not self._turn.acquire(blocking=not if_small):
            return False
        try:
            with state.changed:
                # Drafts that are queued later are for the next call.
                last, waiting = state.entries.last_waiting(), self.waiting()
                if if_small and not BATCH_DRAFTS_MAX > len(list(_small(waiting, SMALL_BYTES_MAX))) == len(waiting):
                    return False
                state.persisting_since = state.clock.monotonic() if waiting else None
            while waiting and not state.stopping:
                batch = self.batch(waiting)
                if not batch or not self.persist(batch):
                    break
                with state.changed:
                    waiting = [entry for entry in self.waiting() if last is not None and entry.turn <= last]
        finally:
            with state.changed:
                state.persisting_since = None
                state.changed.notify_all()
            self._turn.release()
        return True

    def waiting(self) -> list[FlushItem]:
        """Return the first drafts to persist, in closing order, at most one commit's. The caller holds the lock."""
        return self._state.entries.waiting(BATCH_DRAFTS_MAX)

    def batch(self, waiting: Sequence[FlushItem]) -> list[FlushItem]:
        """Return the drafts of the next commit: at least one, unless the first one's next attempt is not due."""
        now = self._state.clock.monotonic()
        ready = list(itertools.takewhile(lambda entry: now >= entry.retry_at, waiting))
        return list(_small(ready, BATCH_BYTES_MAX)) or ready[:1]

    def persist(self, batch: Sequence[FlushItem]) -> bool:
        """Persist consecutive drafts in one commit. Return false if the drafts behind them have to wait."""
        nvme = self._state.nvme
        if nvme is None:
            self._pass_by(batch)
            return True
        if any(map(self._passes_by, batch)):
            if len(batch) > 1:
                return self._persist_each(batch)
            if self._is_too_large(batch[0].draft.length):
                self._state.counters["nvme_passed_by"] += 1
                _logger.warning(
                    "%s is too large for the nvme tier and goes to the object tier from memory", batch[0].path
                )
            self._pass_by(batch)
            return True
        try:
            self._store(nvme, batch)
        except Exception as error:  # noqa: BLE001 - the thread must go on with the other drafts
            if len(batch) > 1:
                return self._persist_each(batch)  # finds the draft that fails
            return self._give_up(batch[0], self._state.known(error, batch[0].path))
        return True

    def _persist_each(self, batch: Sequence[FlushItem]) -> bool:
        return all(self.persist([entry]) for entry in batch)

    def _pass_by(self, batch: Sequence[FlushItem], error: TierfsError | None = None) -> None:
        """Leave drafts in memory, from where they go to the object tier."""
        with self._state.changed:
            for entry in batch:
                entry.clear(error)
                self._state.entries.pass_nvme(entry)
            self._state.changed.notify_all()

    def _give_up(self, entry: FlushItem, error: TierfsError) -> bool:
        """Handle a draft that could not be persisted: let it wait, or let it go to the object tier from memory.

        Return false if it has to wait, and all drafts behind it.
        """
        state = self._state
        is_hopeful = entry.failures < WAITS_MAX or (error.tier == "object" and not state.access.is_known)
        if isinstance(error, NotYetError) and is_hopeful:
            state.fail(entry, error, wait_s=RETRY_S_MIN)
            return False
        if not isinstance(error, CapacityError):
            _logger.warning(
                "%s cannot be put into the nvme tier, and goes to the object tier from memory: %s", entry.path, error
            )
            state.counters["nvme_failures"] += 1
            self._pass_by([entry], error)
            return True
        if entry.failures < WAITS_MAX and self._may_get_room():
            # The tier is full of dirty data. The other threads free room by moving it to the object tier.
            state.counters["nvme_full_waits"] += 1
            with state.changed:
                state.end_burst()
            state.fail(entry, error, wait_s=RETRY_S_MIN)
            return False
        _logger.warning("the nvme tier stays full, so %s goes to the object tier from memory: %s", entry.path, error)
        state.counters["nvme_passed_by"] += 1
        self._pass_by([entry])
        return True

    def _may_get_room(self) -> bool:
        """Return whether a draft in the nvme tier can be published, which frees room."""
        entries = self._state.entries
        with self._state.changed:
            inside = (other for other in entries if other.number is not None and not other.conflict)
            return any(entries.blocker(other) is None for other in inside)

    def _is_too_large(self, length: int) -> bool:
        return length > self._state.nvme_bytes // 2

    def _passes_by(self, entry: FlushItem) -> bool:
        """Return whether the draft bypasses the nvme tier.

        It does if it would never fit. It also does if it waits for a draft that bypasses the tier: a crash of the host
        would otherwise keep this draft and lose the earlier one.
        """
        if self._is_too_large(entry.draft.length):
            return True
        with self._state.changed:
            return self._state.entries.follows_passed(entry)

    def _store(self, nvme: NvmeTier, batch: Sequence[FlushItem]) -> None:
        state = self._state
        for last in (False, False, True):
            elsewhere = self._copy_chunks(nvme, batch)
            state.fault("before settle.commit")
            try:
                left = self._commit(nvme, batch, elsewhere)
            except ChunksGoneError:
                # Chunks were evicted to make room for others before the commit made them needed.
                if last:
                    raise
            else:
                break
        try:
            for entry, slot in left:
                state.release(entry.draft, slot)
        finally:
            # Only now may they be published: a draft has left the slab before the nvme tier forgets it.
            with state.changed:
                for entry, _ in left:
                    state.entries.pass_nvme(entry)
                state.changed.notify_all()

    def _commit(
        self, nvme: NvmeTier, batch: Sequence[FlushItem], elsewhere: Sequence[bytes]
    ) -> list[tuple[FlushItem, Slot]]:
        """Commit drafts, except those that became conflicts. These stay in their slots, where they are marked.

        Returns:
            The committed drafts, each with the slot that held it.
        """
        state = self._state
        with state.placing:
            with state.changed:
                moved = [(entry, entry.slot) for entry in batch if entry.slot is not None and not entry.conflict]
            drafts = [entry.draft for entry, _ in moved]
            encoded = [EncodedDraft(each.write_id, each.path, each.encode(), each.names) for each in drafts]
            numbers = nvme.commit(encoded, elsewhere=elsewhere)
            state.fault("after settle.commit")
            with state.changed:
                for (entry, _), number in zip(moved, numbers, strict=True):
                    entry.number, entry.level, entry.slot = number, state.local_level, None
                    entry.clear()
                state.changed.notify_all()
        return moved

    def _copy_chunks(self, nvme: NvmeTier, batch: Sequence[FlushItem]) -> list[bytes]:
        """Write the drafts' chunks. Return the names of those that the object tier has and no slab holds."""
        others: list[bytes] = []
        found: dict[bytes, Slot] = {}
        for entry in batch:
            nvme.protect(entry.draft.names)
            self._find_chunks(nvme, entry, found, others)
        self._copy_all(nvme, list(found.values()))
        return others

    def _find_chunks(self, nvme: NvmeTier, entry: FlushItem, found: dict[bytes, Slot], others: list[bytes]) -> None:
        """Find a draft's chunks: those in slabs, and the names of those in the object tier."""
        draft = entry.draft
        rows = draft.record.rows if isinstance(draft.record, Manifest) else ()
        for name, reference, row in zip(draft.names, draft.slots, rows, strict=True):
            chunk = None if reference is None else self._state.chunk(reference)
            if chunk is None and not nvme.holds(name):
                chunk = self._state.ram.find(name)
            if chunk is not None:
                found[name] = chunk
            elif row.stored_length or self._is_published(row):
                others.append(name)
            elif not nvme.holds(name):
                lost = CorruptionError(
                    f"{draft.path}: one of its chunks is in no local tier", path=draft.path, tier="ram"
                )
                raise self._state.missing(entry, reference, lost)

    def _is_published(self, row: Row) -> bool:
        """Return whether the object tier has a chunk that this draft took over from a draft published meanwhile.

        Raises:
            NotYetError: The object tier cannot be asked now.
        """
        try:
            self._state.access.call(lambda publisher: publisher.find_chunk(row))
        except CorruptionError:
            return False
        except StoreError as error:
            if not error.transient:
                raise
            raise NotYetError(str(error), transient=True, tier="object") from error
        return True

    # -- chunks --------------------------------------------------------------------------------------------------------

    def _copy_all(self, nvme: NvmeTier, chunks: Sequence[Slot], *, keep: bool = True) -> None:
        if len(chunks) == 1 and chunks[0].length <= SMALL_BYTES_MAX:
            self._copy(nvme, chunks[0], keep=keep)  # a thread costs more than a small file
            return
        is_small = sum(chunk.length for chunk in chunks) <= SMALL_BYTES_MAX
        writes = self._small_writes if is_small else self._writes
        tasks = [writes.submit(self._copy, nvme, chunk, keep=keep) for chunk in chunks]
        for error in [error for task in tasks if (error := task.exception()) is not None]:  # waits for all
            raise error

    def _copy(self, nvme: NvmeTier, chunk: Slot, *, keep: bool = True) -> None:
        meta, view = chunk.segment.meta(chunk), chunk.segment.view(chunk)
        nvme.write(chunk.name, meta, view, keep=keep, source=chunk)

    def write_ahead(self, references: Sequence[SlotRef], length: int) -> None:
        """Write chunks of an unfinished file before it has a draft.

        If the file never gets a draft, the chunks can be evicted. Errors are logged and counted, and do not affect the
        file.

        Args:
            length: Present length of the file in bytes.
        """
        state = self._state
        if state.nvme is None or self._is_too_large(length):
            return
        try:
            self._copy_all(state.nvme, state.chunks(references), keep=False)
        except TierfsError as error:
            state.counters["ahead_write_stops"] += 1
            _logger.info("chunks are not written to the nvme tier early, but when their file is complete: %s", error)

    def backfill(self, references: Sequence[SlotRef]) -> None:
        """Copy clean chunks from slabs to the nvme tier, for later reads. None of them makes room for another one."""
        nvme = self._state.nvme
        if nvme is None:
            return
        names: list[bytes] = []
        try:
            for slot in self._state.chunks(references):
                self._copy(nvme, slot, keep=False)
                names += nvme.pin(slot.name)
        finally:
            nvme.unpin(names)

    def look_after(self, name: bytes, raw_length: int) -> None:
        """Check a chunk in the nvme tier that a reader reported as damaged. If it is, quarantine the copy.

        If the ram tier has a sound copy, write it to the nvme tier.
        """
        nvme, wanted = self._state.nvme, ChunkRequest(name, raw_length)
        if nvme is None:
            return
        tier = FileChunks(nvme, nvme.quarantine, Counter())  # the reader has counted it
        with self._looking_after:
            if not check_copies(tier, wanted):
                return
            slot = self._state.ram.find(name)
            if slot is None:
                return
            self._copy(nvme, slot, keep=False)
            if not check_copies(tier, wanted) and nvme.holds(name):  # else the slot was reused during the copy
                nvme.commit([])
                self._state.counters["nvme_repaired"] += 1


def _small(entries: Sequence[FlushItem], bytes_max: int) -> Iterator[FlushItem]:
    """Yield the first drafts that have at most ``bytes_max`` bytes together."""
    for entry in entries:
        bytes_max -= entry.draft.length
        if bytes_max < 0:
            break
        yield entry
