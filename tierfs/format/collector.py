"""The collector's record: who collects garbage, under which number, and what it has come to.

FORMAT.md, "Collector". One object per store, replaced by conditional puts alone, so it is the lease of the one gc that may be at
work, and what the next one goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierfs.digest import Buffer
from tierfs.errors import FormatError, InvalidInputError
from tierfs.format.header import Kind, check_writable, header, open_plain, seal

__all__ = ["COLLECTOR_BYTES_MAX", "NOBODY", "Collector", "EpochState"]

NOTES_BYTES_MAX = 1 << 20
COLLECTOR_BYTES_MAX = NOTES_BYTES_MAX + 256
DURATION_S_MAX = 3600
FENCE_MAX = (1 << 48) - 1
NOBODY = bytes(16)


@dataclass(frozen=True, slots=True)
class EpochState:
    """The state of one condemned list. Times are the object tier's own, in nanoseconds.

    Attributes:
        seen_ns: When the list was known to be there for everybody to see.
        swept_ns: When the last deletions of what it names had been answered; ``None`` if none was begun.
    """

    seen_ns: int
    swept_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Collector:
    """See the module.

    Attributes:
        holder: 16 random bytes, drawn by each gc; `NOBODY` if none is at work.
        fence: Grows with each gc that takes over; the upper 48 bits of the epochs that it publishes.
        sequence: Counts puts.
        duration_s: How long the holder's turn lasts from the object tier's time of this put.
        epochs: The condemned lists.
        last: The result of the last gc, for people; JSON values.
    """

    holder: bytes = NOBODY
    fence: int = 0
    sequence: int = 0
    duration_s: int = 0
    epochs: Mapping[int, EpochState] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of the record.

        Raises:
            InvalidInputError: More lists or notes than fit.
        """
        epochs = {
            f"{epoch:016x}": {"seen_ns": state.seen_ns, "swept_ns": state.swept_ns}
            for epoch, state in sorted(self.epochs.items())
        }
        document = {"epochs": epochs, "last": dict(self.last)}
        notes = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        check_writable(len(notes), NOTES_BYTES_MAX, "length of the collector's notes")
        check_writable(self.fence, FENCE_MAX, "number of the gc")
        out = header(Kind.COLLECTOR, 0) + self.holder + self.fence.to_bytes(8, "little")
        out += self.sequence.to_bytes(8, "little") + self.duration_s.to_bytes(4, "little")
        return seal(out + len(notes).to_bytes(4, "little") + notes)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Collector:
        """Read the record.

        Raises:
            CorruptionError: Damaged, cut short, or something else.
            FormatError: Another version, or a field over its limit.
        """
        cursor = open_plain(data, Kind.COLLECTOR, "the collector's record", where)
        holder = cursor.bytes(16)
        fence = cursor.bounded(8, FENCE_MAX, "number of the gc")
        sequence = cursor.unsigned(8)
        duration_s = cursor.bounded(4, DURATION_S_MAX, "duration")
        notes = cursor.bytes(cursor.bounded(4, NOTES_BYTES_MAX, "length of the notes"))
        cursor.finish()
        try:
            document = json.loads(notes)
            epochs = {int(epoch, 16): _state(state) for epoch, state in document["epochs"].items()}
            last = dict(document["last"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FormatError(f"{where}: its notes are not those of a collector", path=where) from None
        return cls(holder, fence, sequence, duration_s, epochs, last)


def _state(value: Mapping[str, Any]) -> EpochState:
    seen_ns, swept_ns = value["seen_ns"], value["swept_ns"]
    if type(seen_ns) is not int or not (swept_ns is None or type(swept_ns) is int):
        raise InvalidInputError("no times")
    return EpochState(seen_ns, swept_ns)
