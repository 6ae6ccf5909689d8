"""The shared state of the nvme tier's writer: arena, index, tables in memory, and their locks.

Threads acquire the locks in this order: `commit_lock`, `index_lock`, `tables`. No lock is held while chunks are
written. A thread that holds `tables` does not wait for the disk, except to load the tables.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from tierfs.clock import Clock
from tierfs.errors import CapacityError, CorruptionError, TierfsError
from tierfs.host.ground import Faults
from tierfs.host.nvme.arena.extent_page import GRANULE, SESSION_BITS, ExtentKind, ExtentPage, extent_bytes
from tierfs.host.nvme.index.index import Index
from tierfs.host.nvme.index.last_used import LastUsed
from tierfs.host.nvme.index.path_counts import PathCounter
from tierfs.host.nvme.ledger import EvictionCandidate, Extent, Ledger, candidates
from tierfs.host.nvme.opening import fit, open_tier
from tierfs.host.nvme.stored import PATHS_FILE, USED_FILE

_logger = logging.getLogger("tierfs.local")
_PUT_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_HURT = """
UPDATE drafts SET state = 'damaged', note = ? WHERE state = 'pending' AND seq IN (
    SELECT CAST(substr(holder, 2) AS INTEGER) FROM refs WHERE name = ? AND holder GLOB 'd[0-9]*')
"""


class NvmeState:
    """The shared state of the nvme tier's writer. `tierfs.host.nvme.tier.NvmeTier` describes the arguments.

    Attributes:
        commit_lock: Held during a commit.
        index_lock: Held for each use of the index.
        tables: Held for each use of the ledger. Notified when a chunk is no longer busy.
        flushes_failed: Number of failed flushes of the arena. Each one loses all uncommitted chunks.
        evicted_bytes: Bytes evicted since the tier was opened.
        used: Time of last use of each extent.
        paths: Counts drafts by path, for readers.
        released: Serials of drafts whose pages are marked as released but not flushed yet. The index still lists them
            in ``releases``.
    """

    def __init__(self, directory: Path, budget_bytes: int, *, clock: Clock, faults: Faults) -> None:
        self.directory = directory
        self.clock = clock
        self.budget_bytes = budget_bytes
        self.commit_lock = threading.Lock()
        self.index_lock = threading.Lock()
        self.tables = threading.Condition()
        self.flushes_failed = 0
        self.evicted_bytes = 0
        self.released: list[int] = []
        self._candidates: deque[EvictionCandidate] = deque()
        self._faults = faults
        self._stale = False
        self._open(trust_index=True)

    def _open(self, *, trust_index: bool) -> None:
        self.arena, self.index, self.fallbacks = open_tier(
            self.directory, self.budget_bytes, faults=self._faults, clock=self.clock, trust_index=trust_index
        )
        self.paths = PathCounter(self.directory / PATHS_FILE, self.index.path)
        try:
            self._load()
        except CorruptionError:
            self.close()
            if not trust_index:
                raise
            _logger.exception("the index of the nvme tier is inconsistent: rebuilding it")
            self._open(trust_index=False)
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        expected = self.index.meta("arena_bytes", self.arena.size)
        suspicious = self.fallbacks["arena_page_damaged"] or self.arena.size < expected
        if self.arena.size < expected:
            self.fallbacks["arena_cut"] += 1
            _logger.error("%s: was cut short from %d to %d bytes", self.arena.path, expected, self.arena.size)
            fit(self.arena, 0, expected, self.fallbacks)
        self.ledger = Ledger(max(expected, self.arena.size), self.budget_bytes)
        self.ledger.load(self.index)
        wanted, tail = self.budget_bytes // GRANULE * GRANULE, self.ledger.tail()
        if wanted < self.arena.size:
            # Record the new size before shrinking. After a crash the arena would otherwise look truncated.
            with self.index.transaction() as database:
                database.execute(_PUT_META, ["arena_bytes", max(wanted, tail)])
        fit(self.arena, tail, wanted, self.fallbacks)
        self.ledger.resize(max(self.arena.size, tail))
        self.ledger.load(self.index)
        # A new session number, so that serials of a session that ended without a commit are never reused.
        session = self.index.meta("session", 0) + 1
        with self.index.transaction() as database:
            numbers = {"session": session, "arena_bytes": self.arena.size, "budget_bytes": self.budget_bytes}
            database.executemany(_PUT_META, list(numbers.items()))
        self._serials = itertools.count((session << SESSION_BITS) + 1)
        self.used = LastUsed(self.directory / USED_FILE, create=True)
        self.paths.renew(path for (path,) in self.index.select("SELECT path FROM drafts"))
        if suspicious:
            self._look_after_needed()

    def close(self) -> None:
        """Close the files."""
        self.index.close()
        self.arena.close()
        self.paths.close()

    def now_s(self) -> int:
        """Return the wall-clock time in seconds."""
        return self.clock.now_ns() // 1_000_000_000

    def refresh(self) -> None:
        """Reload the tables if the outcome of an index change is unknown.

        The caller holds `index_lock`, and calls this method before any other use of the index.
        """
        if self._stale:
            self.index.close()
            self.index = Index(self.index.path)
            with self.tables:
                self.ledger.load(self.index)
            self._stale = False

    @property
    def is_stale(self) -> bool:
        """Whether the tables may lag behind the index. Space that they report as free is free even then."""
        return self._stale

    @contextlib.contextmanager
    def changing(self, step: str) -> Iterator[sqlite3.Connection]:
        """Change the index in one durable transaction. The caller holds `index_lock`.

        After a failure the next `refresh` reloads the tables.
        """
        try:
            self._faults(f"before {step}")
            with self.index.transaction() as database:
                yield database
            self._faults(f"after {step}")
        except BaseException:
            self._stale = True
            raise

    def take(self, length: int) -> Extent:
        """Reserve an extent for ``length`` bytes, and evict clean chunks for it if needed. The caller holds no lock.

        Raises:
            CapacityError: There is no room, and no chunk can be evicted.
        """
        while extent_bytes(length) <= self.ledger.capacity:
            serial = next(self._serials)
            with self.tables:
                extent = self.ledger.take(length, serial)
            if extent is not None:
                return extent
            # One thread evicts at a time, so that the next one finds the room that it freed.
            with self.index_lock:
                self.refresh()
                with self.tables:
                    extent = self.ledger.take(length, serial)
                    size = extent_bytes(length)  # evict at least this: the free bytes may not be contiguous
                    wanted = max(size, self.ledger.missing(size))
                if extent is not None:
                    return extent
                victims = self._victims(wanted)
                if not victims:
                    with self.tables:
                        extent = self.ledger.take(length, serial) or self.ledger.take(length, serial, share=1.0)
                    if extent is not None:
                        return extent
                    break
                self.evict(victims)
        raise CapacityError(
            f"{self.directory}: no room for {length} bytes: {self.ledger.used} of {self.ledger.capacity} are taken, and "
            "nothing may be evicted: wait for the flush, or raise nvme= or TIERFS_NVME",
            tier="nvme",
        )

    def make_room(self, lengths: Mapping[bytes, int]) -> None:
        """Evict clean chunks until these chunks fit, as far as possible. The caller holds no lock.

        Eviction is a commit. A commit during the writes would wait for the writes that other threads have queued at the
        disk, so this method evicts for all chunks at once beforehand.
        """
        with self.tables:
            here = [name for name in lengths if self.ledger.has(name)]
            self.ledger.fresh.update(dict.fromkeys(here, self.clock.monotonic()))
            size = sum(extent_bytes(length) for name, length in lengths.items() if not self.ledger.has(name))
            if not self.ledger.missing(size):
                return
        with self.index_lock:
            self.refresh()
            with self.tables:
                wanted = self.ledger.missing(size)
            victims = self._victims(wanted)
            if victims:
                self.evict(victims)

    def _victims(self, wanted: int) -> list[bytes]:
        """Return clean chunks that take ``wanted`` bytes or more together, or all clean chunks if they take less.

        The caller holds `index_lock` but not `tables`. This method sorts all clean chunks at once without `tables`.
        Later calls take victims from that list until it runs out. A chunk that was used or written since the sort is
        newer than the chunks on the list, so it is skipped.
        """
        with self.tables:
            found = self.ledger.victims(wanted, self._candidates, self.used.at, self.clock.monotonic())
            if sum(self.ledger.chunks[name].size for name in found) >= wanted:
                return found
            rows = list(self.ledger.chunks.items())
        # Sort the chunks in `found` again, too: a draft may need one of them meanwhile.
        now = self.clock.monotonic()
        clean = [(name, row) for name, row in rows if self.ledger.is_clean(name, now)]
        self._candidates = candidates(clean, self.used.read(self.ledger.size))
        with self.tables:
            return self.ledger.victims(wanted, self._candidates, self.used.at, now)

    def evict(self, names: list[bytes], *, release: bool = False) -> int:
        """Evict committed, clean chunks. The caller holds `index_lock`.

        Args:
            names: The chunks' names. No chunk is busy.
            release: Whether to mark their extents as released, so that a rebuild does not find the chunks.

        Returns:
            Bytes of the arena that were freed.
        """
        with self.tables:
            self.ledger.busy.update(names)
            rows = [(name, self.ledger.chunks[name]) for name in names]
        try:
            with self.changing("index.release") as database:
                keys = [(name, extent.serial) for name, extent in rows]
                database.executemany("DELETE FROM chunks WHERE name = ? AND serial = ?", keys)
            for name, extent in rows if release else ():
                self.release(extent, name)
            with self.tables:
                freed = sum(self.ledger.drop(name) for name in names)
                self.evicted_bytes += freed
        finally:
            with self.tables:
                self.ledger.busy.difference_update(names)
                self.tables.notify_all()
        return freed

    def release(self, extent: Extent, name: bytes) -> bool:
        """Mark an extent as released, so that a rebuild does not find it. Return whether that succeeded.

        The index no longer names the extent. Call this before the extent is freed.
        """
        if not extent.size:
            return True
        try:
            self.arena.release(
                ExtentPage(ExtentKind.RELEASED, self.arena.epoch, extent.serial, extent.offset, extent.length, name)
            )
        except TierfsError as error:
            self.fallbacks["not_released"] += 1
            _logger.warning(
                "a discarded extent could not be marked, so a rebuild of the index would restore it: %s", error
            )
            return False
        return True

    def mark_bad(self, names: list[bytes], why: str) -> None:
        """Mark chunks as damaged, and mark and log the drafts that need them. The caller holds `index_lock`."""
        with self.changing("index.commit") as database:
            for name in names:
                database.execute("UPDATE chunks SET bad = 1 WHERE name = ?", [name])
                database.execute(_HURT, [why, name])
        with self.tables:
            for name in names:
                if name in self.ledger.chunks:
                    self.ledger.chunks[name] = self.ledger.chunks[name]._replace(bad=True)
        for (path,) in self.index.select("SELECT DISTINCT path FROM drafts WHERE state = 'damaged'"):
            self.fallbacks["drafts_damaged"] += 1
            _logger.error("%s was saved on this host and is no longer complete: %s", path, why)

    def _look_after_needed(self) -> None:
        """Check that the page of each needed extent matches the index. Mark the chunks of all others as damaged."""
        bad = []
        for name in self.ledger.needs:
            extent = self.ledger.chunks.get(name)
            if extent is None:
                continue
            page = self.arena.page_at(extent.offset)
            if page is None or (page.epoch, page.serial, page.name) != (self.arena.epoch, extent.serial, name):
                bad.append(name)
        if bad:
            self.mark_bad(bad, f"{len(bad)} chunks are no longer in the arena")
