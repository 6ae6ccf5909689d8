"""The tables of the nvme tier's writer: which chunk lies where, who needs it, what may go. In memory; no I/O but loading.

Whatever the ledger says is free is free in the committed index, too; the other way round it may be behind, after a
commit whose outcome is not known. So an extent is never used for two things.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierfs.errors import CorruptionError
from tierfs.host.extents import Extents
from tierfs.host.nvme.arena.extent_page import GRANULE, extent_bytes
from tierfs.host.nvme.index.index import Index

__all__ = ["EvictionCandidate", "Extent", "Ledger", "Written", "candidates"]

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.85
FRESH_S = 60.0
"""How long a chunk waits for the draft that it was written for, before it counts as clean."""


class Extent(NamedTuple):
    """A part of the arena.

    Attributes:
        offset: Where it begins, with its page.
        size: Bytes of the arena.
        length: Bytes of data.
        serial: Its page's.
        used_s: When it was used last as far as the index knows, seconds of the wall clock.
        bad: Whether its data was found damaged.
    """

    offset: int
    size: int
    length: int
    serial: int
    used_s: int = 0
    bad: bool = False


class Written(NamedTuple):
    """A chunk in the arena that is not in the index yet."""

    extent: Extent
    meta: bytes


@dataclass(frozen=True, slots=True)
class DraftExtent:
    """Where a draft's record lies."""

    extent: Extent
    write_id: bytes


class EvictionCandidate(NamedTuple):
    """A chunk that may be evicted, as of some time ago.

    Attributes:
        used_s: When it was used last, by then.
        name: Its name.
        extent: Where it was.
    """

    used_s: int
    name: bytes
    extent: Extent


def candidates(rows: Iterable[tuple[bytes, Extent]], used: npt.NDArray[np.uint32]) -> deque[EvictionCandidate]:
    """All of these chunks, the least recently used first. Needs no lock.

    Args:
        rows: By name.
        used: When each granule of the arena was used last.
    """
    found = [EvictionCandidate(max(row.used_s, int(used[row.offset // GRANULE])), name, row) for name, row in rows]
    return deque(sorted(found, key=lambda each: each.used_s))


class Ledger:
    """The tables. Not safe for use by many threads.

    Attributes:
        chunks: Committed, by name.
        drafts: Committed, by seq.
        needs: How many drafts and open files need a chunk.
        written: Chunks in the arena that are not committed.
        busy: Chunks that are being written or evicted right now.
        guards: How many commits under way name a chunk.
        fresh: When a chunk was written, or asked to be, by a caller who has not committed a draft that names it.
        seq: The last one given to a draft.
    """

    def __init__(self, arena_bytes: int, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken: dict[int, int] = {}  # parts of the arena that no row of the index names
        self.chunks: dict[bytes, Extent] = {}
        self.drafts: dict[int, DraftExtent] = {}
        self.needs: Counter[bytes] = Counter()
        self.written: dict[bytes, Written] = {}
        self.busy: set[bytes] = set()
        self.guards: Counter[bytes] = Counter()
        self.fresh: dict[bytes, float] = {}
        self.seq = 0
        self._extents = Extents(arena_bytes, align=GRANULE)

    @property
    def capacity(self) -> int:
        """Bytes that extents may take in all."""
        return min(self._limit_bytes, self._extents.size) // GRANULE * GRANULE - GRANULE

    @property
    def size(self) -> int:
        """Bytes of the arena."""
        return self._extents.size

    @property
    def used(self) -> int:
        """Bytes that extents take."""
        return self._extents.used_bytes - GRANULE

    def load(self, index: Index) -> None:
        """Read the index anew. Uncommitted changes stay as they are.

        Raises:
            CorruptionError: Two rows claim the same part of the arena, or one lies behind its end.
        """
        extents = Extents(self._extents.size, align=GRANULE)
        rows = index.select(
            "SELECT name, offset, extent_bytes, length, serial, used_s, bad FROM chunks ORDER BY offset"
        )
        chunks = {row[0]: Extent(row[1], row[2], row[3], row[4], row[5], bool(row[6])) for row in rows}
        columns = "seq, write_id, offset, extent_bytes, length(data), serial"
        drafts = {
            seq: DraftExtent(Extent(*where), write_id)
            for seq, write_id, *where in index.select(f"SELECT {columns} FROM drafts")  # noqa: S608 - columns only
        }
        places = [(extent.offset, extent.size) for extent in chunks.values()]
        places += [(draft.extent.offset, draft.extent.size) for draft in drafts.values() if draft.extent.size]
        for offset, size in sorted([(0, GRANULE), *places]):
            if not extents.take_at(offset, size):
                raise CorruptionError(
                    f"{index.path}: an extent at {offset} cannot be", path=str(index.path), tier="nvme"
                )
        # A chunk that does not fit beside the rows was committed after all.
        self._taken = {offset: size for offset, size in self._taken.items() if extents.take_at(offset, size)}
        self._extents, self.chunks, self.drafts = extents, chunks, drafts
        self.written = {name: written for name, written in self.written.items() if written.extent.offset in self._taken}
        self.needs = Counter(dict(index.select("SELECT name, COUNT(*) FROM refs GROUP BY name")))
        (row,) = index.select(
            "SELECT MAX(COALESCE((SELECT MAX(seq) FROM sqlite_sequence WHERE name = 'drafts'), 0), ?)", [self.seq]
        )
        self.seq = row[0]

    def has(self, name: bytes) -> bool:
        """Whether a sound copy is there, committed or not."""
        return name in self.written or self.is_committed(name)

    def is_committed(self, name: bytes) -> bool:
        """Whether the index names a copy, and it is not known to be bad."""
        row = self.chunks.get(name)
        return row is not None and not row.bad

    def find(self, name: bytes) -> Extent | None:
        """Where a chunk lies that is committed and not known to be bad, or was written."""
        if name in self.written:
            return self.written[name].extent
        row = self.chunks.get(name)
        return row if row is not None and not row.bad else None

    def take(self, length: int, serial: int, *, share: float = HIGH_WATERMARK) -> Extent | None:
        """Take room for ``length`` bytes, unless more than ``share`` of the capacity would be taken then."""
        size = extent_bytes(length)
        if self.used + size > self.capacity * share:
            return None
        offset = self._extents.take(size)
        if offset is None:
            return None
        self._taken[offset] = size
        return Extent(offset, size, length, serial)

    def note_committed(self, extent: Extent) -> None:
        """The index names this extent now."""
        self._taken.pop(extent.offset, None)

    def give(self, extent: Extent) -> None:
        """Free an extent that the index does not name (any more)."""
        if extent.size:
            self._taken.pop(extent.offset, None)
            self._extents.give(extent.offset, extent.size)

    def is_clean(self, name: bytes, now: float) -> bool:
        """Whether a committed chunk may be evicted."""
        return not (
            self.needs[name]
            or self.guards[name]
            or name in self.busy
            or name in self.written
            or now < self.fresh.get(name, float("-inf")) + FRESH_S
        )

    def missing(self, size: int) -> int:
        """How many bytes to evict, so that ``size`` more leave the arena at the low watermark; 0 while they keep below the high one."""
        taken = self.used + size
        return taken - int(self.capacity * LOW_WATERMARK) if taken > self.capacity * HIGH_WATERMARK else 0

    def victims(
        self, wanted: int, candidates: deque[EvictionCandidate], last_used: Callable[[int], int], now: float
    ) -> list[bytes]:
        """Clean chunks to evict, which take so many bytes of the arena, if there are so many.

        Args:
            wanted: The bytes.
            candidates: Chunks, the least recently used first; those that were looked at are taken out.
            last_used: When what lies at an offset was used last, as far as `nvme.used` knows.
            now: Monotonic seconds.
        """
        chosen = []
        while wanted > 0 and candidates:
            used_s, name, extent = candidates.popleft()
            if self.chunks.get(name) is extent and self.is_clean(name, now) and last_used(extent.offset) <= used_s:
                chosen.append(name)
                wanted -= extent.size
        return chosen

    def drop(self, name: bytes) -> int:
        """Forget a committed chunk whose row is gone, and free its extent. Returns bytes freed."""
        row = self.chunks.pop(name)
        self.fresh.pop(name, None)
        self.give(row)
        return row.size

    def need(self, names: Iterable[bytes]) -> None:
        """Somebody's need of these chunks is in the index now."""
        for name in names:
            self.needs[name] += 1

    def unneed(self, names: Iterable[bytes]) -> None:
        """Somebody's need of these chunks is not in the index any more."""
        for name in names:
            self.needs[name] -= 1
            if self.needs[name] <= 0:
                del self.needs[name]

    def guard(self, names: Iterable[bytes], by: int) -> None:
        """Keep these chunks from being evicted, or not any more (``by`` = 1, -1)."""
        for name in names:
            self.guards[name] += by
            if self.guards[name] <= 0:
                del self.guards[name]

    def tail(self) -> int:
        """Where the last extent that is in use ends."""
        known = [row.offset + row.size for row in self.chunks.values()]
        known += [draft.extent.offset + draft.extent.size for draft in self.drafts.values()]
        known += [offset + size for offset, size in self._taken.items()]
        return max(known, default=GRANULE)

    def resize(self, arena_bytes: int) -> None:
        """The arena has another size; nothing lies behind it. Load the index afterwards."""
        self._extents = Extents(arena_bytes, align=GRANULE)

    def dirty_bytes(self) -> int:
        """Bytes that may not be evicted because they are needed, or not committed."""
        needed = sum(self.chunks[name].size for name in self.needs if name in self.chunks)
        return needed + sum(draft.extent.size for draft in self.drafts.values()) + sum(self._taken.values())
