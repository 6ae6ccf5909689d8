"""Read access to the nvme tier for any process: look a chunk up, read it, look it up again.

Readers take no lock, pin nothing, and do not communicate with the writer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierfs.clock import Clock, SystemClock
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, StoreError, TierfsError
from tierfs.host.filesystems import filesystem_of, is_durable
from tierfs.host.ground import PAGE_BYTES
from tierfs.host.nvme.arena.arena import Arena
from tierfs.host.nvme.arena.extent_page import ExtentKind
from tierfs.host.nvme.index.index import IndexReader
from tierfs.host.nvme.index.last_used import LastUsed
from tierfs.host.nvme.index.path_counts import PathCounts
from tierfs.host.nvme.stored import (
    ARENA_FILE,
    DRAFT_COLUMNS,
    INDEX_FILE,
    PATHS_FILE,
    USED_FILE,
    NvmeUsage,
    StoredDraft,
)

BUSY_S = 2.0
DRAFT_BUSY_S = 30.0
ATTEMPTS_MAX = 3
_FIND = "SELECT meta, length, offset, serial FROM chunks WHERE name = ? AND bad = 0"
_NAMES = "SELECT name, length FROM chunks WHERE bad = 0 AND name > ? ORDER BY name LIMIT ?"
_STILL = "SELECT 1 FROM chunks WHERE name = ? AND serial = ? AND bad = 0"
_OPEN_STATES = "state != 'conflict'"
_USAGE = """
SELECT (SELECT COALESCE(SUM(extent_bytes), 0) FROM chunks), (SELECT COALESCE(SUM(extent_bytes), 0) FROM drafts),
    (SELECT COALESCE(SUM(extent_bytes), 0) FROM chunks WHERE name IN (SELECT name FROM refs)), (SELECT COUNT(*) FROM chunks),
    (SELECT COUNT(*) FROM drafts WHERE state != 'conflict'), (SELECT COUNT(*) FROM drafts WHERE state = 'conflict'),
    (SELECT COUNT(*) FROM drafts WHERE state = 'damaged'),
    (SELECT COALESCE(MAX(value), 0) FROM meta WHERE key = 'budget_bytes')
"""
_logger = logging.getLogger("tierfs.local")


class FoundChunk(NamedTuple):
    """The index entry of a chunk: its metadata, length in bytes, and extent."""

    meta: bytes
    length: int
    offset: int
    serial: int


class ChunkPlace(NamedTuple):
    """The location of a chunk's raw bytes in a file. Valid only until the chunk is evicted."""

    path: Path
    offset: int
    length: int


class NvmeReader:
    """Reads committed chunks and drafts. Thread-safe.

    Look-ups of chunks treat a tier that is missing, damaged or busy as empty. Each such case is counted, and logged
    once per reason. Treating drafts like that could return an old file, so look-ups of drafts wait longer and then
    raise an error.

    Args:
        directory: The tier's directory. It need not exist.
        clock: Gives the time of use of chunks.
        busy_s: Longest wait of a chunk look-up for the writer's commit, in seconds.
        draft_busy_s: Longest wait of a draft look-up for the writer's commit, in seconds.

    Attributes:
        fallbacks: Counts of fallbacks, by reason.
    """

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock | None = None,
        busy_s: float = BUSY_S,
        draft_busy_s: float = DRAFT_BUSY_S,
    ) -> None:
        self.directory = directory
        self.fallbacks: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        self._chunks = IndexReader(directory / INDEX_FILE, busy_s=busy_s)
        self._drafts = IndexReader(directory / INDEX_FILE, busy_s=draft_busy_s)
        self._counts = PathCounts(directory / PATHS_FILE, directory / INDEX_FILE)
        self._arena: Arena | None = None
        self._used: LastUsed | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"NvmeReader({str(self.directory)!r}, fallbacks={dict(self.fallbacks)})"

    def find(self, name: bytes) -> FoundChunk | None:
        """Return the index entry of a chunk, or None if the tier does not have the chunk."""
        found = self._find(name)
        return found[1] if found is not None else None

    def place_of(self, name: bytes) -> ChunkPlace | None:
        """Return where a chunk's bytes lie in the arena, or None if the tier does not have the chunk.

        The caller verifies the bytes: the writer may reuse the extent for another chunk at any time.
        """
        found = self.find(name)
        if found is None:
            return None
        return ChunkPlace(self.directory / ARENA_FILE, found.offset + PAGE_BYTES, found.length)

    def read(self, name: bytes, start: int, out: memoryview) -> bytes | None:
        """Copy a part of a chunk. The caller verifies the bytes with the returned metadata.

        The bytes are those written under this name and metadata, unless the disk changed them. This method looks the
        chunk up again after reading, and the writer does not reuse an extent before it has removed the chunk's row.

        Args:
            name: The chunk's name.
            start: Offset of the part in the chunk.
            out: Filled completely; undefined if None is returned. Page-aligned memory saves a copy.

        Returns:
            The chunk's metadata, or None if the tier does not have the chunk, or the writer evicted it meanwhile.

        Raises:
            InvalidInputError: The part exceeds the chunk.
        """
        for _ in range(ATTEMPTS_MAX):
            found = self._find(name)
            if found is None:
                return None
            epoch, chunk = found
            if not 0 <= start <= start + len(out) <= chunk.length:
                raise InvalidInputError(f"bytes {start} to {start + len(out)} exceed a chunk of {chunk.length} bytes")
            try:
                arena = self._arena_of(epoch)
                page = arena.read_into(chunk.offset, start, out) if arena is not None else None
            except (TierfsError, OSError) as error:
                self._note("unreadable", error)
                return None
            expected = (ExtentKind.CHUNK, epoch, chunk.serial, name)
            sound = page is not None and (page.kind, page.epoch, page.serial, page.name) == expected
            still = self._select(self._chunks, _STILL, [name, chunk.serial])
            if still is not None and still[0] == epoch and still[1]:
                if not sound:
                    self.fallbacks["page_damaged"] += 1
                    return None
                if self._used is not None:
                    self._used.touch(chunk.offset, self._clock.now_ns() // 1_000_000_000)
                return chunk.meta
            self.fallbacks["moved"] += 1
        return None

    def chunks_after(self, name: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Return up to ``limit`` names and lengths of chunks whose names come after ``name``, sorted by name."""
        found = self._select(self._chunks, _NAMES, [name, limit])
        return [(bytes(each), length) for each, length in found[1]] if found is not None else []

    def draft(self, path: str) -> StoredDraft | None:
        """Return the newest pending or damaged draft of a file. If it is damaged, do not show an older file instead.

        Raises:
            StoreError: The writer kept the index busy for too long, or the index cannot be read now.
            CorruptionError: The index is damaged or missing. The next flusher rebuilds it from the arena.
        """
        if self._counts.is_clear(path):
            return None
        query = f"SELECT {DRAFT_COLUMNS} FROM drafts WHERE path = ? AND {_OPEN_STATES} ORDER BY seq DESC LIMIT 1"  # noqa: S608
        drafts = self._select_drafts(query, [path])
        return drafts[0] if drafts else None

    def drafts_below(self, prefix: str, *, conflicts: bool = False) -> list[StoredDraft]:
        """Return the pending and damaged drafts at or below the path ``prefix``, sorted by seq.

        Args:
            prefix: Has no trailing slash. Empty for all drafts.
            conflicts: Whether to return drafts that are kept because of a conflict, too.

        Raises:
            StoreError: The writer kept the index busy for too long, or the index cannot be read now.
            CorruptionError: The index is damaged or missing. The next flusher rebuilds it from the arena.
        """
        if self._counts.is_clear(prefix):
            return []
        query = f"SELECT {DRAFT_COLUMNS} FROM drafts WHERE {'1' if conflicts else _OPEN_STATES}"  # noqa: S608 - constants only
        if not prefix:
            return self._select_drafts(f"{query} ORDER BY seq", [])
        # "0" is the character after "/", so this range is every path that begins with the prefix and a slash.
        values = [prefix, f"{prefix}/", f"{prefix}0"]
        return self._select_drafts(f"{query} AND (path = ? OR (path >= ? AND path < ?)) ORDER BY seq", values)

    def usage(self) -> NvmeUsage:
        """Return the usage by committed data. ``evicted_bytes`` is 0: only the writer knows it."""
        durable = is_durable(filesystem_of(self.directory))
        found = self._select(self._chunks, _USAGE, [])
        chunk_bytes, draft_bytes, needed, chunks, drafts, conflicts, damaged, budget = (
            found[1][0] if found else (0,) * 8
        )
        dirty = needed + draft_bytes
        used = chunk_bytes + draft_bytes
        counts = (chunks, drafts, conflicts, damaged, 0)
        return NvmeUsage(budget, used, dirty, used - dirty, *counts, durable, dict(self.fallbacks))

    def close(self) -> None:
        """Close the files. The next look-up opens them again."""
        self._chunks.close()
        self._drafts.close()
        self._counts.close()
        with self._lock:
            self._arena = self._used = None

    def _find(self, name: bytes) -> tuple[bytes, FoundChunk] | None:
        found = self._select(self._chunks, _FIND, [name])
        return (found[0], FoundChunk(*found[1][0])) if found is not None and found[1] else None

    def _select(self, reader: IndexReader, query: str, values: Sequence[Any]) -> tuple[bytes, list[Any]] | None:
        try:
            return reader.select(query, values)
        except StoreError as error:
            self._note("busy" if error.transient else "unreadable", error)
        except (CorruptionError, FormatError) as error:
            self._note("index_damaged" if isinstance(error, CorruptionError) else "other_version", error)
        except TierfsError as error:
            self._note("unreadable", error)
        return None

    def _select_drafts(self, query: str, values: Sequence[Any]) -> list[StoredDraft]:
        try:
            found = self._drafts.select(query, values)
        except CorruptionError as error:
            self._note("index_damaged", error)
            raise
        if found is None:
            if (self.directory / ARENA_FILE).exists():
                raise CorruptionError(f"{self.directory / INDEX_FILE} is missing beside its arena", tier="nvme")
            return []
        return [StoredDraft(*row) for row in found[1]]

    def _arena_of(self, epoch: bytes) -> Arena | None:
        with self._lock:
            if self._arena is None or self._arena.epoch != epoch:
                path = self.directory / ARENA_FILE
                self._arena = Arena.open_to_read(path) if os.path.exists(path) else None
                self._used = LastUsed(self.directory / USED_FILE)
            return self._arena if self._arena is not None and self._arena.epoch == epoch else None

    def _note(self, reason: str, error: Exception) -> None:
        if not self.fallbacks[reason]:
            _logger.warning("%s: the nvme tier is not read: %s", self.directory, error)
        self.fallbacks[reason] += 1
