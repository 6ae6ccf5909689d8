"""Find the tiers that hold the bytes of a checkpoint, as this host sees it, and their encoding in the object tier."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tierfs.codec import Codec, Reason
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.columns import BytesPlace
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import NotFoundError
from tierfs.format.envelope import Envelope
from tierfs.format.keys import inside
from tierfs.format.manifest import Row
from tierfs.host.pending.levels import Level
from tierfs.host.pending.record import local_name
from tierfs.store import level_of, stat
from tierfs.store.read.lookup import read_envelope
from tierfs.store.read.reader import expand_rows

LOCAL_TIERS = ("ram", "nvme")


@dataclass(slots=True)
class Coded:
    """The encoding of some bytes.

    Attributes:
        stored_bytes: Their encoded bytes in the object tier. A part of a block counts in proportion.
        codecs: The number of blocks by the name of their codec.
        reasons: The number of blocks by the reason for their codec.
    """

    stored_bytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


class Placement:
    """Finds the tiers and the encoding of a checkpoint's bytes. Not thread-safe.

    It looks up each file once, and reads each chunk's envelope at most once, in one request.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._store = checkpoint.store
        # By name, None for a missing file: its level, its chunks, and the offset of each chunk.
        self._files: dict[str, tuple[Level, Sequence[Row], Sequence[int]] | None] = {}
        self._envelopes: dict[Row, Envelope] = {}

    def __repr__(self) -> str:
        return f"Placement({self._checkpoint.where!r})"

    def level(self, place: BytesPlace) -> Level | None:
        """Return the level that the file of a place has reached; ``None`` if the file is missing."""
        file = self._file(place.file)
        return None if file is None else file[0]

    def tiers(self, place: BytesPlace) -> list[str]:
        """Return the tiers that hold all bytes of a place, the nearest first.

        Raises:
            CorruptionError, FormatError: The file's record is damaged, or written by an unsupported version.
            StoreError, ReadOnlyError: The object tier failed.
        """
        if self._file(place.file) is None or not place.length:
            return []
        kind, tiers = self._store.descriptor.digest_kind, self._store.tiers
        names = [local_name(kind, row.name.digest) for row, _ in self._chunks(place)]
        near = LOCAL_TIERS if tiers is not None and names else ()
        found = [tier for tier in near if tiers is not None and all(tiers.reader.holds(name, tier) for name in names)]
        return [*found, *(["object"] if self.level(place) is Level.OBJECT else [])]

    def coded(self, places: Iterable[BytesPlace]) -> Coded:
        """Return the encoding of the bytes at these places. Files that are not in the object tier yet do not count.

        Raises:
            CorruptionError, FormatError: A record or envelope is damaged, or written by an unsupported version.
            StoreError, ReadOnlyError: The object tier failed.
        """
        coded = Coded()
        for place in places:
            if place.length and self.level(place) is Level.OBJECT:
                for row, begin in self._chunks(place):
                    self._add(coded, row, place.at - begin, place.at + place.length - begin)
        return coded

    def _add(self, coded: Coded, row: Row, start: int, end: int) -> None:
        """Count the bytes between two offsets of a chunk. The offsets may lie outside the chunk."""
        if row not in self._envelopes:
            self._envelopes[row] = read_envelope(self._store, row, self._checkpoint.where)
        for number, block in enumerate(self._envelopes[row].blocks):
            begin = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, row.raw_length - begin)
            shared = min(end, begin + length) - max(start, begin)
            if shared > 0:
                coded.stored_bytes += block.encoded_length * shared // length
                coded.codecs[_name(Codec, block.codec)] += 1
                coded.reasons[_name(Reason, block.reason)] += 1

    def _chunks(self, place: BytesPlace) -> Iterable[tuple[Row, int]]:
        """Return the chunks that hold a place, each with its offset in the file."""
        _, rows, starts = self._file(place.file) or (None, (), ())
        first = max(0, bisect.bisect_right(starts, place.at) - 1)
        last = bisect.bisect_left(starts, place.at + place.length)
        return zip(rows[first:last], starts[first:last], strict=True)

    def _file(self, name: str) -> tuple[Level, Sequence[Row], Sequence[int]] | None:
        if name not in self._files:
            self._files[name] = self._look(inside(self._checkpoint.directory, name))
        return self._files[name]

    def _look(self, path: str) -> tuple[Level, Sequence[Row], Sequence[int]] | None:
        try:
            level, entry = level_of(self._store, path), stat(self._store, path)
        except NotFoundError:
            return None
        rows: Sequence[Row] = ()
        if entry.manifest is not None and entry.manifest.inline is None:
            rows = expand_rows(self._store, entry.manifest, path)
        return level, rows, [0, *itertools.accumulate(row.raw_length for row in rows)][: len(rows)]


def _name(kind: type[Codec | Reason], number: int) -> str:
    """Return the name of a number in an envelope; the number itself if only a newer tierfs knows it."""
    return kind(number).name.lower().replace("_", " ") if number in set(kind) else str(number)
