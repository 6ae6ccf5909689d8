"""How the tensors of a checkpoint are encoded in the object tier, as the envelopes of their chunks say."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierfs.checkpoint.placement import Placement
from tierfs.codec import Codec, Reason
from tierfs.dcp.checkpoint import Checkpoint
from tierfs.dcp.metadata import BytesPlace
from tierfs.digest import BLOCK_BYTES
from tierfs.format.envelope import Envelope
from tierfs.format.manifest import Row
from tierfs.host.pending.levels import Level
from tierfs.store.read.fetch import read_envelope

__all__ = ["Coded", "Codings"]


@dataclass(slots=True)
class Coded:
    """How some bytes are encoded.

    Attributes:
        stored_bytes: Their bytes in the object tier; a part of a block counts as that part.
        codecs: By name, how many blocks each has.
        reasons: By name, how many blocks have their codec why.
    """

    stored_bytes: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


class Codings:
    """Reads the envelope of each chunk once: a request for each. For one thread at a time.

    Args:
        checkpoint: Which one.
        placement: Where its files are.
    """

    def __init__(self, checkpoint: Checkpoint, placement: Placement) -> None:
        self._checkpoint = checkpoint
        self._placement = placement
        self._envelopes: dict[Row, Envelope] = {}

    def __repr__(self) -> str:
        return f"Codings({self._checkpoint.where!r})"

    def of(self, places: Iterable[BytesPlace]) -> Coded:
        """How these bytes are encoded; what is not in the object tier yet counts nothing.

        Raises:
            CorruptionError, FormatError: A record or envelope is damaged, or of another version.
            StoreError, ReadOnlyError: The object tier failed.
        """
        coded = Coded()
        for place in places:
            rows, starts = self._placement.rows(place.file)
            if not place.length or self._placement.level(place) is not Level.OBJECT:
                continue
            end = place.at + place.length
            for number in range(max(0, bisect.bisect_right(starts, place.at) - 1), bisect.bisect_left(starts, end)):
                self._add(coded, rows[number], place.at - starts[number], end - starts[number])
        return coded

    def _add(self, coded: Coded, row: Row, start: int, end: int) -> None:
        """Count what lies between two offsets of a chunk, which may be outside of it."""
        if row not in self._envelopes:
            self._envelopes[row] = read_envelope(self._checkpoint.store, row, self._checkpoint.where)
        for number, block in enumerate(self._envelopes[row].blocks):
            begin = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, row.raw_length - begin)
            shared = min(end, begin + length) - max(start, begin)
            if shared > 0:
                coded.stored_bytes += block.encoded_length * shared // length
                coded.codecs[_name(Codec, block.codec)] += 1
                coded.reasons[_name(Reason, block.reason)] += 1


def _name(kind: type[Codec | Reason], number: int) -> str:
    """The name of an envelope's number; the number itself where a newer tierfs wrote it."""
    return kind(number).name.lower().replace("_", " ") if number in set(kind) else str(number)
