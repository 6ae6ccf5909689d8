"""The in-memory tables of the nvme tier's writer: where chunks lie, how many holders need them, what may be evicted.

The tables do no I/O except to load the index. Space that the ledger reports as free is free in the committed index,
too. The reverse does not hold after a commit whose outcome is unknown. So no extent ever has two uses.
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

HIGH_WATERMARK = 0.95
LOW_WATERMARK = 0.85
FRESH_S = 60.0
"""Seconds for which a chunk is protected from eviction while its draft is not committed."""


class Extent(NamedTuple):
    """A part of the arena.

    Attributes:
        offset: Offset of its page, with which it begins.
        size: Bytes of the arena that it takes.
        length: Bytes of data.
        serial: The serial in its page.
        used_s: Time of last use according to the index, seconds of the wall clock.
        bad: Whether its data is known to be damaged.
    """

    offset: int
    size: int
    length: int
    serial: int
    used_s: int = 0
    bad: bool = False


class Written(NamedTuple):
    """A chunk that is in the arena but not in the index yet."""

    extent: Extent
    meta: bytes


@dataclass(frozen=True, slots=True)
class DraftExtent:
    """The extent of a draft's record."""

    extent: Extent
    write_id: bytes


class EvictionCandidate(NamedTuple):
    """A chunk that was clean when the candidates were sorted.

    Attributes:
        used_s: Time of last use at that moment, seconds of the wall clock.
        name: The chunk's name.
        extent: The chunk's extent at that moment.
    """

    used_s: int
    name: bytes
    extent: Extent


def candidates(rows: Iterable[tuple[bytes, Extent]], used: npt.NDArray[np.uint32]) -> deque[EvictionCandidate]:
    """Return all of these chunks, least recently used first. Needs no lock.

    Args:
        rows: Names and extents of chunks.
        used: Time of last use of each granule of the arena, seconds of the wall clock.
    """
    found = [EvictionCandidate(max(row.used_s, int(used[row.offset // GRANULE])), name, row) for name, row in rows]
    return deque(sorted(found, key=lambda each: each.used_s))


class Ledger:
    """The in-memory tables of the nvme tier's writer. Not thread-safe.

    Attributes:
        chunks: Committed chunks, by name.
        drafts: Committed drafts, by seq.
        needs: Number of drafts and open files that need a chunk, by name.
        written: Chunks in the arena that are not committed, by name.
        busy: Names of chunks that a thread is writing or evicting.
        guards: Number of running commits that name a chunk, by name.
        fresh: Monotonic time at which a caller last wrote a chunk, or asked for room for it, by name. Entries stay
            until a draft or hold that needs the chunk is committed.
        seq: The seq assigned last.
    """

    def __init__(self, arena_bytes: int, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken: dict[int, int] = {}  # reserved extents without a row in the index: size by offset
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
        """Bytes that all extents together may take."""
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
        """Load the tables from the index. Uncommitted changes stay as they are.

        Raises:
            CorruptionError: The extents of two rows overlap, or an extent exceeds the arena.
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
                    f"{index.path}: the extent at {offset} overlaps another or lies outside the arena",
                    path=str(index.path),
                    tier="nvme",
                )
        # An extent that overlaps a row was committed after all.
        self._taken = {offset: size for offset, size in self._taken.items() if extents.take_at(offset, size)}
        self._extents, self.chunks, self.drafts = extents, chunks, drafts
        self.written = {name: written for name, written in self.written.items() if written.extent.offset in self._taken}
        self.needs = Counter(dict(index.select("SELECT name, COUNT(*) FROM refs GROUP BY name")))
        (row,) = index.select(
            "SELECT MAX(COALESCE((SELECT MAX(seq) FROM sqlite_sequence WHERE name = 'drafts'), 0), ?)", [self.seq]
        )
        self.seq = row[0]

    def has(self, name: bytes) -> bool:
        """Return whether the arena has a copy, committed or not, that is not known to be damaged."""
        return name in self.written or self.is_committed(name)

    def is_committed(self, name: bytes) -> bool:
        """Return whether the index names a copy that is not known to be damaged."""
        row = self.chunks.get(name)
        return row is not None and not row.bad

    def find(self, name: bytes) -> Extent | None:
        """Return the extent of a chunk that was written, or is committed and not known to be damaged."""
        if name in self.written:
            return self.written[name].extent
        row = self.chunks.get(name)
        return row if row is not None and not row.bad else None

    def take(self, length: int, serial: int, *, share: float = HIGH_WATERMARK) -> Extent | None:
        """Reserve an extent for ``length`` bytes. Return None if usage would exceed ``share`` of the capacity."""
        size = extent_bytes(length)
        if self.used + size > self.capacity * share:
            return None
        offset = self._extents.take(size)
        if offset is None:
            return None
        self._taken[offset] = size
        return Extent(offset, size, length, serial)

    def note_committed(self, extent: Extent) -> None:
        """Note that the index names this extent now."""
        self._taken.pop(extent.offset, None)

    def give(self, extent: Extent) -> None:
        """Free an extent that the index does not name."""
        if extent.size:
            self._taken.pop(extent.offset, None)
            self._extents.give(extent.offset, extent.size)

    def is_clean(self, name: bytes, now: float) -> bool:
        """Return whether a committed chunk may be evicted. ``now`` is in monotonic seconds."""
        return not (
            self.needs[name]
            or self.guards[name]
            or name in self.busy
            or name in self.written
            or now < self.fresh.get(name, float("-inf")) + FRESH_S
        )

    def missing(self, size: int) -> int:
        """Return how many bytes to evict before ``size`` bytes are added.

        That is 0 if usage would not exceed the high watermark, else enough to end at the low one.
        """
        taken = self.used + size
        return taken - int(self.capacity * LOW_WATERMARK) if taken > self.capacity * HIGH_WATERMARK else 0

    def victims(
        self, wanted: int, candidates: deque[EvictionCandidate], last_used: Callable[[int], int], now: float
    ) -> list[bytes]:
        """Return clean chunks that take ``wanted`` bytes or more together, or fewer if the candidates run out.

        Args:
            wanted: Bytes of the arena.
            candidates: Chunks, least recently used first. This method removes all that it considers.
            last_used: Returns when the extent at an offset was last used, according to `nvme.used`.
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
        """Forget a committed chunk whose row was removed, and free its extent. Return the bytes freed."""
        row = self.chunks.pop(name)
        self.fresh.pop(name, None)
        self.give(row)
        return row.size

    def need(self, names: Iterable[bytes]) -> None:
        """Note that the index has one more reference to each of these chunks."""
        for name in names:
            self.needs[name] += 1

    def unneed(self, names: Iterable[bytes]) -> None:
        """Note that the index has one reference less to each of these chunks."""
        for name in names:
            self.needs[name] -= 1
            if self.needs[name] <= 0:
                del self.needs[name]

    def guard(self, names: Iterable[bytes], by: int) -> None:
        """Prevent the eviction of these chunks (``by`` = 1), or allow it again (``by`` = -1)."""
        for name in names:
            self.guards[name] += by
            if self.guards[name] <= 0:
                del self.guards[name]

    def tail(self) -> int:
        """Return the offset at which the last extent in use ends."""
        known = [row.offset + row.size for row in self.chunks.values()]
        known += [draft.extent.offset + draft.extent.size for draft in self.drafts.values()]
        known += [offset + size for offset, size in self._taken.items()]
        return max(known, default=GRANULE)

    def resize(self, arena_bytes: int) -> None:
        """Set the size of the arena, beyond which nothing lies. Call `load` afterwards."""
        self._extents = Extents(arena_bytes, align=GRANULE)

    def dirty_bytes(self) -> int:
        """Return the bytes that cannot be evicted, because they are needed or not committed."""
        needed = sum(self.chunks[name].size for name in self.needs if name in self.chunks)
        return needed + sum(draft.extent.size for draft in self.drafts.values()) + sum(self._taken.values())
