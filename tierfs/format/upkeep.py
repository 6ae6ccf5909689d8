"""The records of upkeep: the collector's, that of scrubbing, and the reference list of a checkpoint.

FORMAT.md, "Collector": which gc is running, its number, and the state of the condemned lists. There is one such object
per store, replaced only by conditional puts. So it is the lease of the one gc that may run, and the state from which
the next gc continues.

FORMAT.md, "Scrub record": when the chunk objects of each prefix were last verified, and which are damaged. The record
is advisory: without it, scrubbing starts from the beginning.

FORMAT.md, "Reference list": every chunk object that a checkpoint's files need, so that a mark reads one object. The list
names the versions of the records that it covers. If the directory now has others, the mark reads the records instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierfs import digest
from tierfs.checked_json import parse_object
from tierfs.digest import Buffer, DigestKind
from tierfs.errors import FormatError, InvalidInputError
from tierfs.format.header import Kind, check_writable, header, open_plain, seal
from tierfs.format.keys import name_bytes

NOTES_BYTES_MAX = 1 << 20
COLLECTOR_BYTES_MAX = NOTES_BYTES_MAX + 256
SCRUB_NOTES_BYTES_MAX = 4 << 20
SCRUB_BYTES_MAX = SCRUB_NOTES_BYTES_MAX + 256
DURATION_S_MAX = 3600
FENCE_MAX = (1 << 48) - 1
NOBODY = bytes(16)
_COMPUTED = ("ended_ns", "looked_ns", "missing", "records", "succeeded_ns", "vanished")
RECORDS_MAX = 1_000_000
REFERENCED_MAX = 1_000_000
CHECK_BYTES = 16
PATH_BYTES_MAX = 4096
REFERENCES_BYTES_MAX = RECORDS_MAX * CHECK_BYTES + REFERENCED_MAX * 44 + PATH_BYTES_MAX + 256


@dataclass(frozen=True, slots=True)
class EpochState:
    """The state of one condemned list. Times are the object tier's own, in nanoseconds.

    Attributes:
        seen_ns: When the list was known to be visible to everyone.
        swept_ns: When the last deletions of the chunks that it names were acknowledged; ``None`` if none was begun.
    """

    seen_ns: int
    swept_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Collector:
    """The content of the collector's record.

    Attributes:
        holder: 16 random bytes, new for each gc; `NOBODY` if no gc runs.
        fence: Grows with each gc that takes over; the upper 48 bits of the epochs that it publishes.
        sequence: Counts puts.
        duration_s: How long the holder's turn lasts, from the object tier's time of this put.
        epochs: The condemned lists, by epoch.
        last: The result of the last gc: JSON values for people, and ``records``, how many records are left at least.
        unnamed: When a gc first saw each shard file that no save names, by the hex digits of its `record_check`.
    """

    holder: bytes = NOBODY
    fence: int = 0
    sequence: int = 0
    duration_s: int = 0
    epochs: Mapping[int, EpochState] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    unnamed: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of the record.

        Raises:
            InvalidInputError: The lists and notes exceed the size limit.
        """
        epochs = {
            f"{epoch:016x}": {"seen_ns": state.seen_ns, "swept_ns": state.swept_ns}
            for epoch, state in sorted(self.epochs.items())
        }
        document = {
            "epochs": epochs,
            "last": dict(self.last),
            **({"unnamed": {**self.unnamed}} if self.unnamed else {}),
        }
        notes = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        check_writable(len(notes), NOTES_BYTES_MAX, "length of the collector's notes")
        check_writable(self.fence, FENCE_MAX, "number of the gc")
        out = header(Kind.COLLECTOR, 0) + self.holder + self.fence.to_bytes(8, "little")
        out += self.sequence.to_bytes(8, "little") + self.duration_s.to_bytes(4, "little")
        return seal(out + len(notes).to_bytes(4, "little") + notes)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> Collector:
        """Decode the record.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.COLLECTOR, "the collector's record", where)
        holder = cursor.bytes(16)
        fence = cursor.bounded(8, FENCE_MAX, "number of the gc")
        sequence = cursor.unsigned(8)
        duration_s = cursor.bounded(4, DURATION_S_MAX, "duration")
        notes = cursor.bytes(cursor.bounded(4, NOTES_BYTES_MAX, "length of the notes"))
        cursor.finish()
        try:
            document = parse_object(notes, where)
            epochs = {int(epoch, 16): _state(state) for epoch, state in document["epochs"].items()}
            last, unnamed = dict(document["last"]), dict(document.get("unnamed", {}))
            _check_integers(last, _COMPUTED)
            _check_integers(unnamed, unnamed)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FormatError(f"{where}: the notes of the collector's record are invalid", path=where) from None
        return cls(holder, fence, sequence, duration_s, epochs, last, unnamed)


def _check_integers(value: Mapping[str, Any], names: Iterable[str]) -> None:
    if any(type(value[name]) is not int for name in names if name in value):
        raise InvalidInputError("a number is not an integer")


def _state(value: Mapping[str, Any]) -> EpochState:
    seen_ns, swept_ns = value["seen_ns"], value["swept_ns"]
    if type(seen_ns) is not int or not (swept_ns is None or type(swept_ns) is int):
        raise InvalidInputError("the times of an epoch are not integers")
    return EpochState(seen_ns, swept_ns)


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
        check_writable(len(notes), SCRUB_NOTES_BYTES_MAX, "length of the notes of scrubbing")
        return seal(header(Kind.SCRUB, 0) + len(notes).to_bytes(4, "little") + notes)

    @classmethod
    def decode(cls, data: Buffer, where: str) -> ScrubRecord:
        """Decode the record.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.SCRUB, "the record of scrubbing", where)
        notes = cursor.bytes(cursor.bounded(4, SCRUB_NOTES_BYTES_MAX, "length of the notes"))
        cursor.finish()
        try:
            document = parse_object(notes, where)
            prefixes = {
                str(name): PrefixState(int(state["verified_ns"]), str(state["after"]))
                for name, state in document["prefixes"].items()
            }
            damaged = {str(key): str(problem) for key, problem in document["damaged"].items()}
            last = dict(document["last"])
            _check_integers(last, _COMPUTED)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FormatError(f"{where}: the notes of the scrub record are invalid", path=where) from None
        return cls(prefixes, damaged, last)


def record_check(key: str, version: str) -> bytes:
    """Return a list's entry for one version of one record."""
    return digest.checksum(f"{key}\0{version}".encode())


@dataclass(frozen=True, slots=True)
class ReferenceList:
    """The content of a reference list.

    Attributes:
        path: The checkpoint's directory.
        digest_kind: Kind of the digests.
        records: Checks of the records that the list covers, sorted, laid end to end.
        names: The chunk objects that these records need, encoded as in condemned lists. Sorted, without duplicates,
            laid end to end.
    """

    path: str
    digest_kind: DigestKind
    records: bytes
    names: bytes

    @classmethod
    def of(cls, path: str, kind: DigestKind, checks: Iterable[bytes], names: Iterable[bytes]) -> ReferenceList:
        """Return the list for these record checks and these encoded names, each in any order."""
        return cls(path, kind, b"".join(sorted(checks)), b"".join(sorted(set(names))))

    def encode(self) -> bytes:
        """Return the bytes of the object.

        Raises:
            InvalidInputError: There are more records or names than fit. Such a checkpoint has no list.
        """
        width, path = name_bytes(self.digest_kind), self.path.encode()
        records, names = len(self.records) // CHECK_BYTES, len(self.names) // width
        check_writable(len(path), PATH_BYTES_MAX, "length of the path")
        check_writable(records, RECORDS_MAX, "records in a reference list")
        check_writable(names, REFERENCED_MAX, "chunks in a reference list")
        out = header(Kind.REFERENCES, 0) + bytes((self.digest_kind, 0)) + len(path).to_bytes(2, "little")
        out += records.to_bytes(4, "little") + names.to_bytes(4, "little")
        return seal(b"".join((out, path, self.records, self.names)))

    @classmethod
    def decode(cls, data: Buffer, where: str) -> ReferenceList:
        """Decode a reference list.

        Raises:
            CorruptionError: The data is damaged, cut short, or of another kind.
            FormatError: The data is of another version, or a field is over its limit.
        """
        cursor = open_plain(data, Kind.REFERENCES, "a reference list", where)
        digest_kind = cursor.digest_kind()
        cursor.zeros(1)
        path_length = cursor.bounded(2, PATH_BYTES_MAX, "length of the path")
        records = cursor.bounded(4, RECORDS_MAX, "number of records")
        names = cursor.bounded(4, REFERENCED_MAX, "number of chunks")
        path = cursor.text(path_length, "path")
        checks = cursor.bytes(records * CHECK_BYTES)
        found = cls(path, digest_kind, checks, cursor.bytes(names * name_bytes(digest_kind)))
        cursor.finish()
        return found
