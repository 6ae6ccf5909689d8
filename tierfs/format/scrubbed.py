"""The scrub record: when the chunk objects of each prefix were last verified, and which are damaged.

FORMAT.md, "Scrub record". The record is advisory: without it, scrubbing starts from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierfs.digest import Buffer
from tierfs.errors import FormatError
from tierfs.format.header import Kind, check_writable, header, open_plain, seal

NOTES_BYTES_MAX = 4 << 20
SCRUB_BYTES_MAX = NOTES_BYTES_MAX + 256


@dataclass(frozen=True, slots=True)
class PrefixState:
    """The scrubbing progress of one prefix.

    Attributes:
        verified_ns: When the last round over the whole prefix ended; 0 if none has.
        after: Key of the last object that the current round verified; empty if no round is in progress.
    """

    verified_ns: int = 0
    after: str = ""


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """The content of the scrub record.

    Attributes:
        prefixes: Progress by prefix, two hexadecimal digits.
        damaged: The problem of each damaged object, by key.
        last: The result of the last run, for people; JSON values.
    """

    prefixes: Mapping[str, PrefixState] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of the record.

        Raises:
            InvalidInputError: The damage notes exceed the size limit.
        """
        prefixes = {
            name: {"verified_ns": state.verified_ns, "after": state.after}
            for name, state in sorted(self.prefixes.items())
        }
        document = {"prefixes": prefixes, "damaged": dict(self.damaged), "last": dict(self.last)}
        notes = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        check_writable(len(notes), NOTES_BYTES_MAX, "length of the notes of scrubbing")
        return seal(header(Kind.SCRUB, 0) + len(notes).to_bytes(4, "little") + notes)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> ScrubRecord:
        """Decode the record.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.SCRUB, "the record of scrubbing", where)
        notes = cursor.bytes(cursor.bounded(4, NOTES_BYTES_MAX, "length of the notes"))
        cursor.finish()
        try:
            document = json.loads(notes)
            prefixes = {
                str(name): PrefixState(int(state["verified_ns"]), str(state["after"]))
                for name, state in document["prefixes"].items()
            }
            damaged = {str(key): str(problem) for key, problem in document["damaged"].items()}
            last = dict(document["last"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FormatError(f"{where}: the notes of the scrub record are invalid", path=where) from None
        return cls(prefixes, damaged, last)
