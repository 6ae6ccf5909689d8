"""The flusher's side of the journals: clears what reached a lower tier, and takes to the nvme tier what lost its slab.

An entry counts only if its slab is gone, after a crash of the host or the end of the container that had the shared memory. While a slab
is there, it says whether the draft was sealed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tierfs.clock import Clock, boot_id
from tierfs.errors import StoreError, TierfsError
from tierfs.format.manifest import Manifest
from tierfs.host.nvme.stored import StoredDraft
from tierfs.host.nvme.writer import NvmeTier
from tierfs.host.pending.journal import JournalEntry, clear_entry, journals_in, read_entries
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.segment import Segment, SlotState

__all__ = ["Journals"]

# In one commit, which takes 200 drafts, and in memory.
BATCH_MAX = 100
# From one look at a journal that is still needed to the next, twice as long each time: a conflict may keep it for days.
LOOK_S_MIN, LOOK_S_MAX = 1.0, 60.0
_logger = logging.getLogger("tierfs.flush")


class Journals:
    """The journals of a store on this host. Safe for use by many threads.

    Args:
        ram: The ram tier.
        nvme: The nvme tier, or ``None`` where there is none.
        clock: Where time comes from.
        fault: Called before and after each ordered step.
        counters: Events, by name.
    """

    def __init__(
        self, ram: RamTier, nvme: NvmeTier | None, clock: Clock, fault: Callable[[str], None], counters: Counter[str]
    ) -> None:
        self._ram = ram
        self._nvme = nvme
        self._clock = clock
        self._fault = fault
        self._counters = counters
        self._directory = ram.host.store_directory(ram.store)
        self._boot = boot_id()
        self._lock = threading.Lock()  # of `recover`: what one thread took is published before another one looks
        self._uncleared: set[tuple[Path, int, bytes]] = (
            set()
        )  # entries that are not needed, each with its offset and write id
        self._next_looks: dict[Path, tuple[float, float]] = {}  # when, and how long after the one before

    def __repr__(self) -> str:
        return f"Journals({str(self._directory)!r})"

    def clear(self, drafts: Iterable[Draft]) -> None:
        """A lower tier has these drafts: clear their entries, before that tier may give them up again.

        Where it fails it is tried again at each sweep. If the flusher ends before that, the draft may be published once more, and be
        kept as a conflict if the path changed meanwhile.
        """
        found: dict[str, list[tuple[int, bytes]]] = {}
        for draft in drafts:
            if draft.journal is not None:
                owner, offset = draft.journal
                found.setdefault(owner, []).append((offset, draft.write_id))
        paths = dict(journals_in(self._directory)) if found else {}
        for owner, entries in found.items():
            if owner in paths:
                self._fault("before journal.clear")
                self._clear(paths[owner], entries)
                self._fault("after journal.clear")

    def _clear(self, path: Path, entries: Sequence[tuple[int, bytes]]) -> None:
        named = {(path, *entry) for entry in entries}
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                for offset, write_id in entries:
                    clear_entry(fd, offset, write_id)
                # Also what was cleared before: a flusher that died right after may not have flushed it.
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:  # its process needed it no more, nor does anybody else
            pass
        except OSError as error:
            self._counters["journal_failures"] += 1
            if not self._uncleared.issuperset(named):
                _logger.warning("%s: entries that are not needed cannot be cleared: %s", path, error)
            self._uncleared |= named
            return
        self._uncleared -= named

    def recover(self, taken: Callable[[int, Draft], None], *, at_once: bool) -> None:
        """Take to the nvme tier what is in journals of processes that are gone and in no slab any more.

        Args:
            taken: Told of each draft that is in the nvme tier now, and of its number there.
            at_once: Whether to look again at journals that were looked at a moment ago.

        Raises:
            TierfsError, OSError: The rest cannot be stored; it stays in the journal.
        """
        with self._lock:
            self._recover(taken, at_once=at_once)

    def _recover(self, taken: Callable[[int, Draft], None], *, at_once: bool) -> None:
        for path, offset, write_id in list(self._uncleared):
            self._clear(path, [(offset, write_id)])
        now, is_alive = self._clock.monotonic(), self._ram.host.is_alive
        gone = [path for owner, path in journals_in(self._directory) if not is_alive(owner)]
        gone = [path for path in gone if at_once or now >= self._next_looks.get(path, (now, 0.0))[0]]
        if not gone:
            return
        for path in gone:
            pause_s = min(2 * self._next_looks.get(path, (0.0, LOOK_S_MIN / 2))[1], LOOK_S_MAX)
            self._next_looks[path] = (now + pause_s, pause_s)
        # Whoever died may have sealed something right before.
        segments = {segment.id: segment for segment in self._ram.segments()}
        is_blind = self._ram.is_blind()
        stored = self._stored()
        lost: list[JournalEntry] = []
        for path in gone:
            kept = self._sort(path, segments, stored, lost, is_blind=is_blind)
            if not kept:
                path.unlink(missing_ok=True)
        if not lost:
            return
        if self._nvme is None:
            raise StoreError(
                f"{lost[0].draft.path}: it is in a journal of this host, and there is no nvme tier to take it"
            )
        self._store(self._nvme, _in_order(lost, self._boot), stored, taken)
        for path in gone:
            if path.exists() and not any(True for _ in read_entries(path)):
                path.unlink(missing_ok=True)

    def _stored(self) -> dict[bytes, Draft | None]:
        """The drafts in the nvme tier, by write id; ``None`` for one that cannot be read, and one in conflict, which no later write saw."""
        drafts = self._nvme.drafts() if self._nvme is not None else []
        return {each.write_id: None if each.state == "conflict" else _readable(each) for each in drafts}

    def _sort(
        self,
        path: Path,
        segments: dict[str, Segment],
        stored: dict[bytes, Draft | None],
        lost: list[JournalEntry],
        *,
        is_blind: bool,
    ) -> bool:
        """Clear the entries of a journal that are not needed, and add those whose slab is gone to ``lost``.

        Returns:
            Whether an entry is left.
        """
        cleared, left = [], False
        for entry in read_entries(path):
            segment = segments.get(entry.slot.segment)
            if entry.draft.write_id in stored or (path, entry.offset, entry.draft.write_id) in self._uncleared:
                cleared.append((entry.offset, entry.draft.write_id))
            elif segment is not None:
                slot = segment.slot(entry.slot.index)
                if slot is None or slot.serial != entry.slot.serial or slot.state not in _PENDING:
                    # It was never sealed, or it is done with.
                    cleared.append((entry.offset, entry.draft.write_id))
                else:
                    left = True
            else:
                left = True
                if not is_blind:
                    lost.append(entry)
        if cleared:
            self._clear(path, cleared)
        return left

    def _store(
        self,
        nvme: NvmeTier,
        entries: Sequence[JournalEntry],
        stored: dict[bytes, Draft | None],
        taken: Callable[[int, Draft], None],
    ) -> None:
        bases = {(draft.path, draft.base) for draft in stored.values() if draft is not None}
        needed: list[JournalEntry] = []
        useless: list[JournalEntry] = []
        for entry in reversed(entries):
            # A later write that did not see this one says that it was never sealed: its process died right before.
            key: tuple[str, ObservedBase] = (entry.draft.path, entry.draft.base)
            (useless if key in bases else needed).append(entry)
            bases.add(key)
        needed.reverse()
        for at in range(0, len(needed), BATCH_MAX):
            batch = needed[at : at + BATCH_MAX]
            for entry in batch:
                for name, chunk in zip(entry.draft.names, entry.chunks, strict=True):
                    nvme.write(name, chunk.meta, chunk.data)
            self._fault("before journal.commit")
            drafts = [(one.draft.write_id, one.draft.path, one.data, one.draft.names) for one in batch]
            numbers = nvme.commit(drafts=drafts)
            self._fault("after journal.commit")
            self._counters["journal_files"] += len(batch)
            self.clear(entry.draft for entry in batch)
            for number, entry in zip(numbers, batch, strict=True):
                taken(number, entry.draft)
        self.clear(entry.draft for entry in useless)
        if needed:
            _logger.info("%d files were found in journals of processes that are gone", len(needed))


def _readable(stored: StoredDraft) -> Draft | None:
    try:
        return Draft.decode(stored.data, stored.path)
    except TierfsError:  # which is said when it is taken up
        return None


_PENDING = (SlotState.SEALED, SlotState.CONFLICT)


def _in_order(entries: Sequence[JournalEntry], boot: str) -> list[JournalEntry]:
    """As they were closed: those of earlier runs of the kernel first, each run by its own clock."""
    begun: dict[str, int] = {}
    for entry in entries:
        record = entry.draft.record
        at_ns = record.modified_ns if isinstance(record, Manifest) else 0
        begun[entry.draft.boot] = min(at_ns, begun.get(entry.draft.boot, at_ns))
    return sorted(
        entries, key=lambda one: (one.draft.boot == boot, begun[one.draft.boot], one.draft.boot, one.draft.stamp_ns)
    )
