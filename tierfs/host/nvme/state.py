"""The shared state of the nvme tier's writer: arena, index, tables, locks, and the order in which they change.

Locks, always taken in this order: commits one at a time; the index; the tables in memory. None is held while chunks are
written, and the tables' never while anything waits for the disk, except to load them.
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

__all__ = ["NvmeState"]

_logger = logging.getLogger("tierfs.local")
_PUT_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_HURT = """
UPDATE drafts SET state = 'damaged', note = ? WHERE state = 'pending' AND seq IN (
    SELECT CAST(substr(holder, 2) AS INTEGER) FROM refs WHERE name = ? AND holder GLOB 'd[0-9]*')
"""


class NvmeState:
    """See `tierfs.host.nvme.tier.NvmeTier` for the arguments.

    Attributes:
        commit_lock: Held by the one commit under way.
        index_lock: Held for each use of the index.
        tables: Held for each use of the ledger; told when a chunk is not busy any more.
        flushes_failed: How often; what was written before and not committed is gone then.
        evicted_bytes: Since it was opened.
        used: When extents were used last.
        paths: Counts drafts for readers.
        released: Serials of drafts whose pages were released; not flushed yet, so the index still lists them.
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
            _logger.exception("the index of the nvme tier contradicts itself")
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
            # Said before it is done, or a crash would look as if it had been cut short.
            with self.index.transaction() as database:
                database.execute(_PUT_META, ["arena_bytes", max(wanted, tail)])
        fit(self.arena, tail, wanted, self.fallbacks)
        self.ledger.resize(max(self.arena.size, tail))
        self.ledger.load(self.index)
        # Serials of a session that ended without a commit are never used again.
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
        """Seconds of the wall clock."""
        return self.clock.now_ns() // 1_000_000_000

    def refresh(self) -> None:
        """Load the tables anew if the outcome of a change is not known. The index is locked; call it first then."""
        if self._stale:
            self.index.close()
            self.index = Index(self.index.path)
            with self.tables:
                self.ledger.load(self.index)
            self._stale = False

    @property
    def is_stale(self) -> bool:
        """Whether the tables may lag behind the index; what they say is free is free all the same."""
        return self._stale

    @contextlib.contextmanager
    def changing(self, step: str) -> Iterator[sqlite3.Connection]:
        """One durable change of the index, which is locked. After a failure the tables are loaded anew."""
        try:
            self._faults(f"before {step}")
            with self.index.transaction() as database:
                yield database
            self._faults(f"after {step}")
        except BaseException:
            self._stale = True
            raise

    def take(self, length: int) -> Extent:
        """Room for ``length`` bytes, for which clean chunks are evicted. No lock is held.

        Raises:
            CapacityError: There is none, and nothing that may go.
        """
        while extent_bytes(length) <= self.ledger.capacity:
            serial = next(self._serials)
            with self.tables:
                extent = self.ledger.take(length, serial)
            if extent is not None:
                return extent
            # One thread at a time: what it frees, the next one finds.
            with self.index_lock:
                self.refresh()
                with self.tables:
                    extent = self.ledger.take(length, serial)
                    size = extent_bytes(length)  # at least: there may be enough, but not in one piece
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
        """Evict what these chunks have no room beside, as far as it may go. No lock is held.

        At once: evicting is a commit, and whoever finds no room while others write waits for it behind what they have given to the disk.
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
        """Clean chunks to evict, which take so many bytes, if there are so many. The index is locked, the tables are not.

        All chunks are put in order at once, without the tables' lock, and one after the other is taken from there, as long as
        there are any: what was used or written since is newer than they are.
        """
        with self.tables:
            found = self.ledger.victims(wanted, self._candidates, self.used.at, self.clock.monotonic())
            if sum(self.ledger.chunks[name].size for name in found) >= wanted:
                return found
            rows = list(self.ledger.chunks.items())
        # Those that were found are put in order, too: a draft may ask for one meanwhile.
        now = self.clock.monotonic()
        clean = [(name, row) for name, row in rows if self.ledger.is_clean(name, now)]
        self._candidates = candidates(clean, self.used.read(self.ledger.size))
        with self.tables:
            return self.ledger.victims(wanted, self._candidates, self.used.at, now)

    def evict(self, names: list[bytes], *, release: bool = False) -> int:
        """Drop committed chunks that nobody needs. The index is locked. Returns bytes freed.

        Args:
            names: The chunks'; none is busy.
            release: Whether a rebuild must not find them.
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
        """Keep a rebuild from finding an extent that the index does not name any more, before it is free."""
        if not extent.size:
            return True
        try:
            self.arena.release(
                ExtentPage(ExtentKind.RELEASED, self.arena.epoch, extent.serial, extent.offset, extent.length, name)
            )
        except TierfsError as error:
            self.fallbacks["not_released"] += 1
            _logger.warning("a rebuild of the index would find again what was discarded: %s", error)
            return False
        return True

    def mark_bad(self, names: list[bytes], why: str) -> None:
        """Note that chunks which somebody needs are damaged, and say whose files that concerns. The index is locked."""
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
            _logger.error("%s was saved on this host and is not whole any more: %s", path, why)

    def _look_after_needed(self) -> None:
        """See whether the extents that drafts need still say that they are what the index says."""
        bad = []
        for name in self.ledger.needs:
            extent = self.ledger.chunks.get(name)
            if extent is None:
                continue
            page = self.arena.page_at(extent.offset)
            if page is None or (page.epoch, page.serial, page.name) != (self.arena.epoch, extent.serial, name):
                bad.append(name)
        if bad:
            self.mark_bad(bad, f"{len(bad)} chunks are not in the arena any more")
