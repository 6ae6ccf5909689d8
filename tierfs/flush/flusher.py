"""The flusher: takes sealed drafts down, from the ram tier to the nvme tier to the object tier.

One per host and store, and the only writer of the nvme tier. A draft goes through these steps, each of which may be
the last thing that ever happens; whoever comes next finds in slabs, ``nvme.db`` and the object tier how far it got:

1. its chunks and itself to the arena, one ``fdatasync``, one commit: level ``local``;
2. its slots marked clean, the chunks first, the draft last;
3. its chunks to the object tier;
4. its record, in closing order and on condition of its base: level ``object``;
5. its row in ``nvme.db`` removed, or where there is no nvme tier its slots marked clean.

The next draft of a directory is not published before step 5, so a draft whose record stands already is known by its
write id alone. Everything runs on a few threads; the lock is never held while bytes move.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tierfs.clock import Clock
from tierfs.digest import CHUNK_BYTES
from tierfs.errors import CapacityError, ConflictError, CorruptionError, StoreError, TierfsError
from tierfs.flush.draft import Draft, SlotRef, local_name
from tierfs.flush.entries import Entries, Entry
from tierfs.flush.levels import Level
from tierfs.flush.publisher import Publisher
from tierfs.format.manifest import Manifest, Row
from tierfs.local.nvme import ChunksGoneError, NvmeTier
from tierfs.local.ram import RamTier
from tierfs.local.segmentfile import boot_id
from tierfs.local.slab import Segment, Slot, SlotKind, SlotState

__all__ = ["Flusher"]

UPLOADS_MAX = 4
DRAFTS_AT_ONCE_MAX = 4
# At once to the arena: measured, one writer leaves a fifth of what the disk takes, three leave nothing.
LOCAL_WRITES_MAX = 3
SWEEP_S = 1.0
RETRY_S_MIN = 0.25
RETRY_S_MAX = 30.0
SETTLING_FIRST_S = 10.0
FULL_ATTEMPTS_MAX = 40
# In a report, which has to fit into a message.
NAMED_MAX = 20
RATE_S = 10  # what "now" means for the rate of uploads
_logger = logging.getLogger("tierfs.flush")


class Flusher:
    """Moves one store's drafts down. Safe for use by many threads.

    Args:
        ram: The host's ram tier for the store.
        nvme: The nvme tier, or ``None`` where there is none.
        clock: Where time comes from.
        random: Uniform in [0, 1); spreads retries out.
        uploads: Chunks on their way to the object tier at once; each takes two chunks' memory.
        bandwidth: Bytes of chunks per second that go there at most, before they are encoded; 0 for no bound.
        faults: Called with the name of each ordered step before and after it, for tests to fail there.
    """

    def __init__(
        self,
        ram: RamTier,
        nvme: NvmeTier | None,
        *,
        clock: Clock,
        random: Callable[[], float],
        uploads: int = UPLOADS_MAX,
        bandwidth: int = 0,
        faults: Callable[[str], None] | None = None,
    ) -> None:
        self.ram = ram
        self.nvme = nvme
        self._clock = clock
        self._random = random
        self._fault = faults or (lambda _point: None)
        self._changed = threading.Condition()
        self._entries = Entries()
        self._publisher: Publisher | None = None
        self._stopping = False
        self._nudged = True
        self._chunks = ThreadPoolExecutor(uploads, thread_name_prefix="tierfs-upload")
        self._writes = ThreadPoolExecutor(LOCAL_WRITES_MAX, thread_name_prefix="tierfs-write")
        self._drafts = ThreadPoolExecutor(DRAFTS_AT_ONCE_MAX, thread_name_prefix="tierfs-draft")
        self._bandwidth = bandwidth
        self._paced_until = 0.0
        self._settling_since: float | None = None
        self._buffers: list[bytearray] = []
        self._boot = boot_id()
        self._unreadable: set[bytes] = set()  # write ids
        self._lost: dict[int, str] = {}  # paths of those in the nvme tier, by number
        self._holders: set[str] = set()  # files that are being written and have chunks in the nvme tier already
        usage = nvme.usage() if nvme is not None else None
        self._local_level = Level.LOCAL if usage is not None and usage.gives_local else Level.STAGED
        self._nvme_bytes = usage.budget_bytes if usage is not None else 0
        self._threads: list[threading.Thread] = []
        self.counters: Counter[str] = Counter()
        self._uploaded: Counter[int] = Counter()  # bytes, by the second in which they arrived, of the last RATE_S

    def __repr__(self) -> str:
        return f"Flusher({len(self._entries)} pending, ram={self.ram!r}, nvme={self.nvme!r})"

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take up what the tiers hold, and begin."""
        self._resume()
        for target in (self._settle_all, self._upload_all):
            thread = threading.Thread(target=self._guard, args=(target,), name=f"tierfs{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End after the steps that are under way; what is left is for the next flusher."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._drafts.shutdown()
        self._chunks.shutdown()
        self._writes.shutdown()
        self.ram.close()
        if self.nvme is not None:
            self.nvme.close()

    def connect(self, publisher: Publisher) -> None:
        """Use this way to the object tier from now on."""
        with self._changed:
            self._publisher = publisher
            for entry in self._entries:
                entry.retry_at = 0.0
            self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether nothing is on its way but what is kept for a person to decide about."""
        self._discover()
        with self._changed:
            return all(entry.conflict and entry.settled for entry in self._entries)

    def nudge(self) -> None:
        """Say that there is something new in a slab."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            _logger.exception("the flusher cannot go on: what is pending stays where it is")
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            raise

    # -- what there is -------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Find what an earlier flusher left in the nvme tier, before anything is published."""
        if self.nvme is not None:
            for stored in self.nvme.drafts():
                try:
                    draft = Draft.decode(stored.data, f"draft {stored.seq} in the nvme tier")
                except TierfsError as error:
                    self._unreadable.add(stored.write_id)
                    self._lost[stored.seq] = stored.path
                    lost = stored.path or "a file"
                    _logger.error("%s is lost: %s (%s)", lost, stored.note, error)  # noqa: TRY400 - says it all
                    continue
                entry = Entry(
                    draft,
                    draft.turn(self._boot, stored.seq),
                    self._clock.monotonic(),
                    number=stored.seq,
                    settled=True,
                )
                entry.level = self._local_level
                if stored.state == "conflict":
                    entry.fail(ConflictError(stored.note, path=draft.path), float("inf"))
                self._entries.add(entry)
            self._holders = set(self.nvme.holders())
        self._discover()

    def _discover(self) -> None:
        """Find drafts that were sealed since, and after a start those that were kept as conflicts."""
        found = self.ram.drafts((SlotState.SEALED, SlotState.CONFLICT))
        for slot in found:
            self._take(slot)

    def _take(self, slot: Slot) -> None:
        segment = slot.segment
        with self._changed:
            known = self._entries.get(slot.name)
            if known is not None and known.slot is not None:
                return
        data = bytearray(slot.length)
        segment.read(slot, 0, memoryview(data))
        if not segment.is_still(slot):
            return
        try:
            draft = Draft.decode(bytes(data), f"draft in slab {segment.id}")
        except TierfsError as error:
            if slot.name not in self._unreadable:
                self._unreadable.add(slot.name)
                _logger.error("a draft cannot be read and stays where it is: %s", error)  # noqa: TRY400 - says it all
            return
        with self._changed:
            known = self._entries.get(draft.write_id)
            if known is None:
                # Looked at again, because it is marked clean before it is forgotten here: it may be done with already.
                now = segment.slot(slot.index)
                if now is None or now.serial != slot.serial or now.state not in (SlotState.SEALED, SlotState.CONFLICT):
                    return
                turn = draft.turn(self._boot)
                entry = Entry(draft, turn, self._clock.monotonic(), slot=slot, settled=now.state is SlotState.CONFLICT)
                if now.state is SlotState.CONFLICT:
                    entry.fail(ConflictError(self._kept(draft.path), path=draft.path), float("inf"))
                self._entries.add(entry)
                self._changed.notify_all()
                return
        if known.number is not None and slot.state is SlotState.SEALED:
            # An earlier flusher committed it and ended before it said so here.
            self._release(known.draft, slot)

    # -- step 1 and 2: ram to nvme -------------------------------------------------------------------------------------

    def _settle_all(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                if not self._nudged:
                    self._changed.wait(SWEEP_S)
                self._nudged = False
            self._discover()
            self._sweep()
            with self._changed:
                waiting = [entry for entry in self._entries if not entry.settled and not entry.conflict]
                self._settling_since = self._clock.monotonic() if waiting else None
            for entry in waiting:
                if self._stopping or not self._settle(entry):
                    break
            with self._changed:
                self._settling_since = None
                self._changed.notify_all()

    def _settle(self, entry: Entry) -> bool:
        """Bring one draft to the nvme tier. False if those behind it have to wait as well."""
        if self._clock.monotonic() < entry.retry_at:
            return False
        if self.nvme is None or self._passes_by(entry):
            with self._changed:
                entry.settled = True
                self._changed.notify_all()
            return True
        try:
            self._store_locally(self.nvme, entry)
        except CapacityError as error:
            if self._may_get_room(entry):
                # Full of what is dirty: room comes as that reaches the object tier, which the other threads go on with.
                self.counters["nvme_full_waits"] += 1
                self._failed(entry, error, wait_s=RETRY_S_MIN)
                return False
            _logger.warning(
                "the nvme tier is full for good, so %s goes to the object tier from memory: %s", entry.path, error
            )
            self.counters["nvme_passed_by"] += 1
            with self._changed:
                entry.clear()
                entry.settled = True
                self._changed.notify_all()
        except TierfsError as error:
            _logger.warning("the nvme tier failed, so %s goes to the object tier from memory: %s", entry.path, error)
            self.counters["nvme_failures"] += 1
            with self._changed:
                entry.error, entry.settled = error, True
                self._changed.notify_all()
        return True

    def _may_get_room(self, entry: Entry) -> bool:
        """Whether something in the nvme tier can still leave it, so that it is worth waiting for."""
        if entry.failures >= FULL_ATTEMPTS_MAX:
            return False
        with self._changed:
            inside = [other for other in self._entries if other.number is not None]
            return any(not other.conflict and self._entries.blocker(other) is None for other in inside)

    def _passes_by(self, entry: Entry) -> bool:
        """Whether the draft goes straight to the object tier, because it would never fit into the nvme tier.

        Or because one does that has to be published before: if the host crashed, this one would be there without it.
        """
        with self._changed:
            if any(other.slot is not None and not other.conflict for other in self._entries.before(entry)):
                return True
        if entry.draft.length <= self._nvme_bytes // 2:
            return False
        self.counters["nvme_passed_by"] += 1
        _logger.warning("%s is too large for the nvme tier and goes to the object tier from memory", entry.path)
        return True

    def _store_locally(self, nvme: NvmeTier, entry: Entry) -> None:
        draft, slot = entry.draft, entry.slot
        assert slot is not None
        data = draft.encode()
        for last in (False, False, True):
            elsewhere = [name for name in self._copy_chunks(nvme, draft) if not nvme.has(name)]
            self._fault("before settle.commit")
            try:
                (number,) = nvme.commit(drafts=[(draft.write_id, draft.path, data, draft.names)], elsewhere=elsewhere)
            except ChunksGoneError:
                # Evicted since, to make room for others: it was not needed by any draft yet.
                if last:
                    raise
            else:
                break
        self._fault("after settle.commit")
        with self._changed:
            entry.number, entry.level, entry.settled = number, self._local_level, True
            entry.slot = None
            entry.clear()
            self._changed.notify_all()
        self._release(draft, slot)
        self._drop_holds(draft)

    def _drop_holds(self, draft: Draft) -> None:
        """What went ahead of a draft is held for it no longer: it is in the nvme tier itself, or not pending any more."""
        for holder in [holder for holder in self._holders if holder.endswith(f":{draft.write_id.hex()}")]:
            assert self.nvme is not None
            self.nvme.drop_hold(holder)
            self._holders.discard(holder)

    def _copy_chunks(self, nvme: NvmeTier, draft: Draft) -> list[bytes]:
        """Write a draft's chunks to the arena. Returns the names of those that the object tier has."""
        others, tasks = [], []
        rows = draft.record.rows if isinstance(draft.record, Manifest) else ()
        for name, reference, row in zip(draft.names, draft.slots, rows, strict=True):
            chunk = None if reference is None else self._chunk(reference)
            if chunk is None and not nvme.has(name):
                chunk = self.ram.find(name)
            if chunk is not None:
                tasks.append(self._writes.submit(self._copy_down, nvme, chunk))
            elif row.stored_length or self._is_published(draft, row):
                others.append(name)
            elif not nvme.has(name):
                raise CorruptionError(f"{draft.path}: a chunk of it is in no local tier", path=draft.path, tier="ram")
        errors = [error for error in (task.exception() for task in tasks) if error is not None]
        if errors:
            raise errors[0]
        return others

    def _is_published(self, draft: Draft, row: Row) -> bool:
        """Whether the object tier has a chunk that this draft took over from another one, published meanwhile."""
        publisher = self._publisher
        if publisher is None:
            raise StoreError("the flusher has no way to the object tier yet", transient=True)
        try:
            publisher.find_chunk(row)
        except CorruptionError:
            return False
        return True

    def _copy_down(self, nvme: NvmeTier, chunk: Slot, *, keep: bool = True) -> None:
        """Write one slot's chunk to the arena; it is not durable before the next commit."""
        segment = chunk.segment
        meta, view = segment.meta(chunk), segment.view(chunk)
        nvme.write(chunk.name, meta, view, keep=keep, is_sound=lambda: segment.is_still(chunk))

    def _release(self, draft: Draft, slot: Slot, *, discarded: bool = False) -> None:
        """Mark a draft's slots clean: a lower tier has it. The draft itself last, so that no chunk is left behind.

        Nobody else has a chunk of one that is discarded: if a copy of the file is pending, its slot stays dirty.
        """
        self._fault("before release.chunks")
        for name, reference in zip(draft.names, draft.slots, strict=True):
            chunk = None if reference is None else self._chunk(reference)
            if chunk is not None and not (discarded and self._is_lent(draft, name, reference)):
                chunk.segment.mark(chunk, SlotState.CLEAN)
        self._fault("before release.draft")
        slot.segment.mark(slot, SlotState.CLEAN)
        self._fault("after release.draft")

    def _chunk(self, reference: SlotRef) -> Slot | None:
        """The slot that a draft refers to, unless it has got another life."""
        segment = self.ram.segment(reference.segment)
        slot = None if segment is None else segment.slot(reference.index)
        return slot if slot is not None and slot.serial == reference.serial else None

    def _is_lent(self, draft: Draft, name: bytes, reference: SlotRef | None) -> bool:
        """Whether another draft in a slab relies on this one's slot: a copy of a file that was not published yet."""
        with self._changed:
            return any(
                name == other and theirs in {None, reference}
                for entry in self._entries
                if entry.draft is not draft and entry.slot is not None
                for other, theirs in zip(entry.draft.names, entry.draft.slots, strict=True)
            )

    # -- step 3 to 5: to the object tier -------------------------------------------------------------------------------

    def _upload_all(self) -> None:
        while True:
            with self._changed:
                entry = None
                while not self._stopping and (entry := self._next()) is None:
                    self._changed.wait(SWEEP_S)
                if self._stopping or entry is None:
                    return
                entry.busy = True
            self._drafts.submit(self._advance, entry)

    def _next(self) -> Entry | None:
        """A draft that something can be done for now."""
        if self._publisher is None:
            return None
        now = self._clock.monotonic()
        if self._settling_since is not None and now - self._settling_since < SETTLING_FIRST_S:
            # Somebody may be waiting for that, and it is over soon; this takes as long as it takes.
            return None
        busy = 0
        for entry in self._entries:
            busy += entry.busy
            if busy >= DRAFTS_AT_ONCE_MAX:
                return None
            if entry.busy or entry.conflict or not entry.settled or now < entry.retry_at:
                continue
            if not entry.uploaded or self._entries.is_first(entry):
                return entry
        return None

    def _advance(self, entry: Entry) -> None:
        """Put what is missing of a draft into the object tier, and publish it if it is its turn."""
        publisher = self._publisher
        assert publisher is not None
        try:
            if not entry.uploaded:
                self._upload(publisher, entry)
            with self._changed:
                turn = self._entries.is_first(entry)
            if turn:
                self._fault("before publish.record")
                publisher.publish(entry.draft, [row for row in entry.rows if row is not None])
                self._fault("after publish.record")
                self._finish(entry)
                return
        except ConflictError as error:
            self._keep(entry, error)
        except TierfsError as error:
            self._failed(entry, error)
        except Exception as error:  # the thread must go on with the other drafts
            _logger.exception("%s cannot be flushed", entry.path)
            self._failed(entry, StoreError(f"{entry.path}: {error!r}", path=entry.path))
        with self._changed:
            entry.busy = False
            self._changed.notify_all()

    def _upload(self, publisher: Publisher, entry: Entry) -> None:
        record = entry.draft.record
        rows = record.rows if isinstance(record, Manifest) else ()
        entry.rows = entry.rows or [None] * len(rows)
        missing = [index for index, row in enumerate(entry.rows) if row is None]
        tasks = [self._chunks.submit(self._upload_chunk, publisher, entry, rows[index], index) for index in missing]
        errors = [error for error in (task.exception() for task in tasks) if error is not None]
        if errors:
            raise errors[0]
        with self._changed:
            entry.uploaded = True
            entry.clear()

    def _upload_chunk(self, publisher: Publisher, entry: Entry, row: Row, index: int) -> None:
        if self._stopping:
            raise StoreError("the flusher is ending", transient=True)
        if row.stored_length:
            entry.rows[index] = row
            return
        assert isinstance(entry.draft.record, Manifest)
        name = local_name(entry.draft.record.digest_kind, row.name.digest)
        reference = entry.draft.slots[index]
        buffer = self._take_buffer()
        try:
            raw = memoryview(buffer)[: row.raw_length]
            for read in self._sources(entry, name, reference):
                if not read(raw):
                    continue
                self._pace(row.raw_length)
                self._fault("before upload.chunk")
                stored = publisher.put_chunk(raw)
                self._fault("after upload.chunk")
                if stored.name.digest == row.name.digest:
                    entry.rows[index] = stored
                    self._count_upload(row.raw_length)
                    return
                self.counters["bad_local_copies"] += 1
                _logger.error("%s: a local copy of one of its chunks is damaged and not used", entry.path)
        finally:
            self._give_buffer(buffer)
        try:
            entry.rows[index] = publisher.find_chunk(row)
        except CorruptionError as error:
            raise CorruptionError(
                f"{entry.path}: no tier has a sound copy of one of its chunks, ram and nvme were tried, too: {error}",
                path=entry.path,
            ) from error

    def _count_upload(self, count: int) -> None:
        now = self._clock.monotonic()
        with self._changed:
            self.counters["uploaded_bytes"] += count
            self._uploaded[int(now)] += count
            for second in [second for second in self._uploaded if second < int(now) - RATE_S]:
                del self._uploaded[second]

    def _pace(self, count: int) -> None:
        """Wait until so many bytes more may be sent."""
        if not self._bandwidth:
            return
        with self._changed:
            start = max(self._clock.monotonic(), self._paced_until)
            self._paced_until = start + count / self._bandwidth
        while not self._stopping and (left := start - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, SWEEP_S))

    def _sources(self, entry: Entry, name: bytes, reference: SlotRef | None) -> Iterable[Callable[[memoryview], bool]]:
        """Where a chunk may be read from, the nearest first. What is read is checked by whoever stores it."""
        chunk = None if entry.slot is None or reference is None else self._chunk(reference)
        if chunk is not None:
            yield lambda raw: _read_slot(chunk, raw)
        found = self.ram.find(name)
        if found is not None:
            yield lambda raw: _read_slot(found, raw)
        nvme = self.nvme
        if nvme is not None:
            yield lambda raw: nvme.read_into(name, 0, raw)

    def _finish(self, entry: Entry) -> None:
        self._fault("before finish.release")
        if entry.number is not None:
            assert self.nvme is not None
            self.nvme.publish(entry.number)
        elif entry.slot is not None:
            self._drop_holds(entry.draft)
            self._release(entry.draft, entry.slot)
        self._fault("after finish.release")
        with self._changed:
            self._entries.remove(entry)
            entry.level, entry.busy = Level.OBJECT, False
            self.counters["published_files"] += 1
            self.counters["published_bytes"] += entry.draft.length
            self._nudged = True
            self._changed.notify_all()
        _logger.info("published %s", entry.path, extra={"path": entry.path, "bytes": entry.draft.length})

    def _keep(self, entry: Entry, error: ConflictError) -> None:
        """Somebody else changed the path: theirs stands. This one, and what was built on it, is kept until a person decides."""
        _logger.error("%s is kept as a conflict: %s", entry.path, error)
        with self._changed:
            kept = [entry, *self._entries.dependents(entry)]
        for each in kept:
            if each.number is not None:
                assert self.nvme is not None
                self.nvme.set_state(each.number, "conflict", str(error))
            elif each.slot is not None:
                each.slot.segment.mark(each.slot, SlotState.CONFLICT)
            with self._changed:
                each.fail(error, float("inf"))
                self.counters["conflicts"] += 1
                self._changed.notify_all()

    def _kept(self, path: str) -> str:
        return f"{path} was changed by somebody else before it was flushed: theirs stands, this one is kept"

    def _failed(self, entry: Entry, error: TierfsError, wait_s: float | None = None) -> None:
        if wait_s is None:
            wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2**entry.failures) * (0.5 + self._random() / 2)
            self.counters["failures"] += 1
            _logger.warning("%s: attempt %d failed, next in %.1f s: %s", entry.path, entry.failures + 1, wait_s, error)
        with self._changed:
            entry.fail(error, self._clock.monotonic() + wait_s)

    def _take_buffer(self) -> bytearray:
        with self._changed:
            return self._buffers.pop() if self._buffers else bytearray(CHUNK_BYTES)

    def _give_buffer(self, buffer: bytearray) -> None:
        with self._changed:
            self._buffers.append(buffer)

    # -- dead owners ---------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Free what dead processes left unsealed; what they sealed is on its way like everything else."""
        freed = self.ram.reclaim(self._needed_slots)
        if freed:
            self.counters["reclaimed_bytes"] += freed
            _logger.info("freed %d bytes of slabs whose processes are gone", freed)
        for holder in list(self._holders):
            _, owner, write_id = holder.split(":")
            with self._changed:
                pending = bytes.fromhex(write_id) in self._entries
            if self.nvme is not None and not pending and not self.ram.host.is_alive(owner):
                self.nvme.drop_hold(holder)
                self._holders.discard(holder)

    def _needed_slots(self, segment: Segment) -> set[int]:
        """The chunk slots of a segment that drafts still need."""
        # Its owner is dead by now, and may have sealed something right before.
        self._discover()
        chunks = segment.slots(kind=SlotKind.CHUNK)
        with self._changed:
            if self._unreadable:
                # A draft that cannot be read may need any of them.
                return {chunk.index for chunk in chunks}
            named = {
                reference
                for entry in self._entries
                if entry.slot is not None
                for reference in entry.draft.slots
                if reference is not None and reference.segment == segment.id
            }
            return {
                chunk.index
                for chunk in chunks
                if SlotRef(segment.id, chunk.index, chunk.serial) in named or self._entries.is_needed(chunk.name)
            }

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(
        self,
        selects: Callable[[Entry], bool],
        level: Level,
        timeout_s: float | None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the drafts that are pending now and selected have reached ``level``.

        Raises:
            TimeoutError: They have not, in time; names what is pending and the last error.
            TierfsError: One of them cannot get there without somebody doing something.
        """
        self._discover()
        self.nudge()
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        with self._changed:
            waiting = [entry for entry in self._entries if selects(entry)]
            for entry in waiting:
                if not entry.conflict:
                    entry.retry_at = 0.0  # somebody waits for it now
            self._changed.notify_all()
            while True:
                waiting = [entry for entry in waiting if entry.level < level and entry.draft.write_id in self._entries]
                for entry in waiting:
                    self._raise_hopeless(entry)
                if not waiting or is_gone():
                    return
                left = None if deadline is None else deadline - self._clock.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(self._describe(waiting, level))
                if self._stopping:
                    raise StoreError("the flusher is ending", transient=True)
                self._changed.wait(SWEEP_S if left is None else min(left, SWEEP_S))

    def _raise_hopeless(self, entry: Entry) -> None:
        if entry.conflict and entry.error is not None:
            raise entry.error
        blocker = self._entries.blocker(entry)
        if blocker is not None:
            raise ConflictError(
                f"{entry.path} waits for {blocker.path}, which was closed before it and is kept as a conflict: "
                f"{blocker.error}",
                path=entry.path,
            )
        if entry.error is not None and not getattr(entry.error, "transient", False) and entry.failures:
            if isinstance(entry.error, CapacityError) and not entry.settled:
                return
            raise entry.error

    def _describe(self, waiting: list[Entry], level: Level) -> str:
        size = sum(entry.draft.length for entry in waiting)
        text = f"{len(waiting)} files ({size} bytes) have not reached {level.label!r} yet, {waiting[0].path} among them"
        errors = [entry.error for entry in waiting if entry.error is not None]
        return f"{text}; the last error: {errors[0]}" if errors else f"{text}; they are still on their way"

    def discard(self, path: str) -> int:
        """Give up what cannot be flushed of a path, conflicts and damage, and what was built on it. Returns how many drafts."""
        lost = [number for number, where in self._lost.items() if where == path]
        for number in lost:
            assert self.nvme is not None
            self.nvme.discard(number)
            del self._lost[number]
        with self._changed:
            given_up = [
                entry
                for entry in self._entries
                if entry.path == path and (entry.conflict or isinstance(entry.error, CorruptionError))
            ]
            # Of two that were built on each other, the second is a dependent of the first as well.
            found = {entry: None for first in given_up for entry in (first, *self._entries.dependents(first))}
            kept = sorted((entry for entry in found if not entry.busy), key=lambda entry: entry.turn)
        for entry in reversed(kept):
            if entry.number is not None:
                assert self.nvme is not None
                self.nvme.discard(entry.number)
            elif entry.slot is not None:
                self._drop_holds(entry.draft)
                self._release(entry.draft, entry.slot, discarded=True)
            with self._changed:
                self._entries.remove(entry)
                self._changed.notify_all()
        return len(kept) + len(lost)

    def check_lost(self, path: str) -> None:
        """See that no draft at or below ``path`` was found unreadable.

        Raises:
            CorruptionError: One was: what this host wrote there last is lost.
        """
        for where in self._lost.values():
            if not path or not where or where == path or where.startswith(f"{path}/"):
                raise CorruptionError(
                    f"{where or 'a file'}: what this host wrote last is damaged beyond use: write it again, or give it up "
                    "with `tierfs flusher discard`",
                    path=where,
                    tier="nvme",
                )

    # -- caching -------------------------------------------------------------------------------------------------------

    def keep(self, slots: Iterable[Slot]) -> int:
        """Copy clean chunks from slabs to the nvme tier, for reading. Returns the bytes that it holds now."""
        if self.nvme is None:
            return 0
        kept = 0
        for slot in slots:
            if not self.nvme.has(slot.name):
                self._copy_down(self.nvme, slot, keep=False)
            kept += slot.length
        self.nvme.commit()
        return kept

    def spill(self, holder: str, slots: Iterable[Slot]) -> None:
        """Take chunks of a file that is still being written out of its slab, because the file is larger than the ram tier.

        Without an nvme tier they go to the object tier, where the record that will name them makes sure of them again.
        """
        chunks = list(slots)
        if self.nvme is not None:
            for task in [self._writes.submit(self._copy_down, self.nvme, chunk) for chunk in chunks]:
                task.result()
            self.nvme.commit(holds={holder: [chunk.name for chunk in chunks]})
            self._holders.add(holder)
        else:
            publisher = self._publisher
            if publisher is None:
                raise StoreError("the flusher has no way to the object tier yet", transient=True)
            for task in [self._chunks.submit(self._put_slot, publisher, chunk) for chunk in chunks]:
                task.result()
        for chunk in chunks:
            chunk.segment.mark(chunk, SlotState.CLEAN)
        self.counters["spilled_bytes"] += sum(chunk.length for chunk in chunks)

    def _put_slot(self, publisher: Publisher, chunk: Slot) -> None:
        buffer = self._take_buffer()
        try:
            raw = memoryview(buffer)[: chunk.length]
            chunk.segment.read(chunk, 0, raw)
            publisher.put_chunk(raw)
        finally:
            self._give_buffer(buffer)

    # -- seen by a person ----------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The queue, the conflicts, the errors and the counters, as plain values."""
        usage = self.nvme.usage() if self.nvme is not None else None
        now = self._clock.monotonic()
        with self._changed:
            moving = [entry for entry in self._entries if not entry.conflict]
            kept = [entry for entry in self._entries if entry.conflict]
            return {
                "queue_files": len(moving),
                "queue_bytes": sum(entry.draft.length for entry in moving),
                "oldest_age_s": round(max((now - entry.since_s for entry in moving), default=0.0), 3),
                "conflict_files": len(kept),
                "conflicts": [{"path": entry.path, "message": str(entry.error)} for entry in kept[:NAMED_MAX]],
                "failing_files": sum(entry.error is not None for entry in moving),
                "errors": [
                    {"path": entry.path, "message": str(entry.error), "attempts": entry.failures}
                    for entry in moving
                    if entry.error is not None
                ][:NAMED_MAX],
                "rate_bytes_per_s": sum(self._uploaded[second] for second in range(int(now) - RATE_S, int(now)))
                / RATE_S,
                "unreadable_drafts": len(self._unreadable),
                "nvme_fallbacks": dict(usage.fallbacks) if usage is not None else {},
                "counters": dict(self.counters),
            }


def _read_slot(slot: Slot, raw: memoryview) -> bool:
    if slot.length != len(raw):
        return False
    slot.segment.read(slot, 0, raw)
    return slot.segment.is_still(slot)
